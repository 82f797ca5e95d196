"""What a user of fedjax_lab writes, with every setting at its default."""

import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import fedjax_lab
from experiments.benchmarks.child import PEAK_SIZE, Unsupported, max_resident_bytes, peak_flops
from experiments.benchmarks.workloads import SEED, WORKLOADS
from fedjax_lab import algorithms, data, models
from fedjax_lab.simulation.evaluate import build_evaluation
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
        raise Unsupported("the model of one's own is for W1s (W5's always is)")
    return models.from_linen(OWN_MODELS[name]())


def build_algorithm(workload, model, method=None, **options):
    """``(algorithm, evaluation's counts)`` for the workload's model and data."""
    if workload.is_text:
        loss_fn, counts = models.language_model_loss(model.apply), models.token_counts(model.apply)
    else:
        scaled = data.preprocess()
        loss_fn = models.classification_loss(model.apply, scaled)
        counts = models.accuracy_counts(model.apply, scaled)
    factory = algorithms.ALGORITHMS[method or workload.algorithm]
    return factory(loss_fn, **{"client_lr": workload.client_lr, **options}), counts


def run(system, job):
    """One run of ``simulate``; the clock is read where it evaluates, with the device idle."""
    workload = WORKLOADS[job["workload"]]
    with np.load(job["data"]) as file:
        train = data.Examples(file["x"], file["y"])
        test = data.Examples(file["x_test"], file["y_test"])
    clients = data.partition(train, workload.partition, workload.num_clients, seed=SEED)
    model = build_model(system, job["workload"])
    algorithm, counts = build_algorithm(workload, model)
    example = train.x[:1] if workload.is_text else train.x[:1] / np.float32(255)
    params = model.init(jax.random.key(0), example)
    accuracy = build_evaluation(counts, test) if job["evaluate"] else lambda params: {}
    clock = []

    def evaluate(params):
        scores = jax.block_until_ready((params, accuracy(params)))[1]
        clock.append(time.perf_counter())
        return scores

    result = fedjax_lab.simulate(
        algorithm,
        params,
        clients,
        rounds=(job["samples"] + 1) * job["rounds"],
        cohort_size=workload.cohort_size,
        local_steps=workload.local_steps,
        batch_size=workload.batch_size,
        replace=True,
        evaluate=evaluate,
        eval_every=job["rounds"],
        client_map="auto",
    )
    if result.seconds < clock[-1] - clock[0]:
        raise RuntimeError(
            f"result.seconds is {result.seconds}, but {clock[-1] - clock[0]} passed between the "
            "first evaluation and the last one."
        )
    return {
        "milliseconds": (1e3 * np.diff(clock) / job["rounds"]).tolist(),
        "compile_seconds": result.compile_seconds,
        **about_device(),
        "versions": versions(),
    }


def about_device():
    """``peak_bytes`` (of an accelerator's memory, or of the process), ``device``, ``threads``."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        streams = jax.local_device_count()
        return {"peak_bytes": max_resident_bytes(), "device": "cpu", "threads": streams}
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {"peak_bytes": peak, "device": device.device_kind, "threads": None}


def peak():
    """The measured rate of a float32 matrix product, at the default precision."""
    a = jax.random.normal(jax.random.key(0), (PEAK_SIZE, PEAK_SIZE))
    product = jax.jit(jnp.dot)
    flops = peak_flops(lambda: product(a, a).block_until_ready())
    return {"flops": flops, "device": about_device()["device"]}
