"""What a user of fedjax_lab writes, with every setting at its default."""

import contextlib
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import fedjax_lab
from experiments.benchmarks import child
from experiments.benchmarks.plain_methods import plain_method
from experiments.benchmarks.workloads import SEED, WORKLOADS
from fedjax_lab import data, models
from fedjax_lab.storage.run_dir import versions


class OwnLeNet(nn.Module):
    """LeNet-5 of a user's own, in plain flax."""

    @nn.compact
    def __call__(self, x):
        """Logits [B, 10] of float [B, 32, 32, 3]."""
        for features in (6, 16):
            x = nn.max_pool(nn.relu(nn.Conv(features, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for features in (120, 84):
            x = nn.relu(nn.Dense(features)(x))
        return nn.Dense(10)(x)


class OwnTwoConvolutions(nn.Module):
    """The CNN of W5, likewise."""

    @nn.compact
    def __call__(self, x, train):
        """Logits [B, 10] of float [B, 32, 32, 3]."""
        x = nn.relu(nn.Conv(32, (3, 3), padding="VALID")(x))
        x = nn.relu(nn.Conv(64, (3, 3), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.Dropout(0.25, deterministic=not train)(x).reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=not train)(x))


OWN_MODELS = {"W1s": OwnLeNet, "W5": OwnTwoConvolutions}


def build_model(system, name):
    """The ``Model`` of a workload, the library's or the user's own."""
    workload = WORKLOADS[name]
    if system == "fedjax_lab" and workload.model is not None:
        factory, options = workload.model
        return models.build(factory, workload.num_classes, **options)
    if system == "fedjax_lab_own_cnn" and name != "W1s":
        raise child.Unsupported("the model of one's own is for W1s (W5's always is)")
    return models.from_linen(OWN_MODELS[name]())


def on_noise(name):
    """(clients, model, first params) of a workload of images, with noise for the images."""
    workload = WORKLOADS[name]
    noise = data.synthetic.noise_images(workload.num_examples, workload.input_shape, seed=SEED)
    clients = data.partition(noise, workload.partition, workload.num_clients, seed=SEED)
    model = build_model("fedjax_lab", name)
    return clients, model, model.init(jax.random.key(0), noise.x[:1])


def schedule_of(workload):
    """The arguments of ``simulate`` and ``Schedule`` that a workload decides."""
    return {
        "cohort_size": workload.cohort_size,
        "local_steps": workload.local_steps,
        "batch_size": workload.batch_size,
        "replace": True,
    }


def build_algorithm(workload, model, method="fedavg", **options):
    """A method of the catalogue for the workload's model and data, with plain hyperparameters."""
    preprocess = data.preprocess()
    if workload.is_text:
        loss_fn = models.language_model_loss(model.apply)
    else:
        loss_fn = models.classification_loss(model.apply, preprocess)
    options = {"memory_size": workload.num_clients, **options}
    return plain_method(method, loss_fn, model, preprocess, workload.client_lr, **options)


def run(system, job):
    """One run of ``simulate``; the clocks are read where it evaluates, with the device idle."""
    workload, precision = WORKLOADS[job["workload"]], job.get("precision", "tf32")
    with np.load(job["data"]) as file:
        train = data.Examples(file["x"], file["y"])
        test = [file[name][: child.CHECKED] for name in ("x_test", "y_test")]
    clients = data.partition(train, workload.partition, workload.num_clients, seed=SEED)
    dtype = "bfloat16" if precision == "bfloat16" else "float32"
    model = models.mixed_precision(build_model(system, job["workload"]), dtype)
    algorithm = build_algorithm(workload, model, job.get("method", "fedavg"))
    params = model.init(jax.random.key(0), train.x[:1])
    clock, processor = [], []

    def evaluate(params):
        jax.block_until_ready(params)
        clock.append(time.perf_counter())
        processor.append(time.process_time())
        return {}

    is_exact = precision == "float32"
    with jax.default_matmul_precision("highest") if is_exact else contextlib.nullcontext():
        result = fedjax_lab.simulate(
            algorithm,
            params,
            clients,
            rounds=(job["samples"] + 1) * job["rounds"],
            **schedule_of(workload),
            evaluate=evaluate,
            eval_every=job["rounds"],
        )
    if result.seconds < clock[-1] - clock[0]:
        raise RuntimeError(
            f"result.seconds is {result.seconds}, but {clock[-1] - clock[0]} passed between the "
            "first evaluation and the last one."
        )
    return {
        "milliseconds": (1e3 * np.diff(clock) / job["rounds"]).tolist(),
        "first_row_seconds": clock[0] - child.STARTED,
        "processor_milliseconds": (1e3 * np.diff(processor) / job["rounds"]).tolist(),
        "first_row_processor_seconds": processor[0],
        "compile_seconds": result.compile_seconds,
        **about_device(),
        "versions": versions(),
        "test_loss": test_loss(model, result.params, workload.is_text, *test),
    }


def test_loss(model, params, is_text, x, y):
    """Mean cross-entropy of a model on examples."""
    logits = model.apply(params, x if is_text else x / np.float32(255))
    likelihoods = jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)
    return -float(likelihoods.mean())


def about_device():
    """``peak_bytes`` (of an accelerator's memory, or of the process), ``device``, ``threads``."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        streams = jax.local_device_count()
        return {"peak_bytes": child.max_resident_bytes(), "device": "cpu", "threads": streams}
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {"peak_bytes": peak, "device": device.device_kind, "threads": None}


def peak():
    """The measured rate of a float32 matrix product, at the default precision."""
    a = jax.random.normal(jax.random.key(0), (child.PEAK_SIZE, child.PEAK_SIZE))
    product = jax.jit(jnp.dot)
    flops = child.peak_flops(lambda: product(a, a).block_until_ready())
    return {"flops": flops, "device": about_device()["device"]}
