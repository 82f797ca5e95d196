"""Convolutions and poolings of any model in the library's forms, against ``jax.lax``."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from fedjax_lab import (
    algorithms,
    build_evaluation,
    build_round,
    data,
    models,
    plan,
    simulate,
    sweep,
    tune,
    with_frozen,
    with_personal,
)
from fedjax_lab.machine.target import named, tracing_for, tracing_with
from fedjax_lab.models.lowering import lowered
from fedjax_lab.simulation.evaluate import build_client_evaluation
from fedjax_lab.simulation.evaluate_personal import build_personal_evaluation
from fedjax_lab.simulation.sweep_program import Program

SLOW = ("conv_general_dilated", "reduce_window", "select_and_scatter_add")


def names(function, *arguments):
    """The slow operations of a program."""
    program = str(jax.make_jaxpr(function)(*arguments))
    return [name for name in SLOW if f" {name}" in program]


def random_convolution(rng):
    """(function, images, kernels): any axes, strides, paddings, dilations and groups."""
    axes = rng.integers(1, 4)
    groups, channels, features, batch = (int(rng.integers(1, n)) for n in (4, 3, 3, 4))
    if rng.random() < 0.3:
        channels = 1  # each channel by itself
    pixels, weights = rng.integers(3, 8, axes), rng.integers(1, 4, axes)
    strides = [1] * axes if rng.random() < 0.4 else rng.integers(1, 4, axes).tolist()
    spread = rng.choice([1, 1, 2, 3], axes).tolist()
    dilation = rng.choice([1, 1, 2], axes).tolist()
    padding = rng.integers(-1, 3, (axes, 2)).tolist()
    letters = "DHW"[-axes:]
    orders = ("".join(rng.permutation([*kind, *letters])) for kind in ("NC", "IO", "NC"))
    of_images, of_kernels, of_results = orders
    sizes = {"N": batch, "C": channels * groups, "I": channels, "O": features * groups}
    batches = 1
    if groups > 1 and rng.random() < 0.4:  # of examples in place of channels
        groups, batches = 1, groups
        sizes = {"N": batch * batches, "C": channels, "I": channels, "O": features * batches}

    def values(order, lengths):
        lengths = {**sizes, **dict(zip(letters, lengths, strict=True))}
        return rng.normal(size=[lengths[letter] for letter in order])

    def run(x, kernel):
        return lax.conv_general_dilated(
            *(x, kernel, strides, padding, spread, dilation),
            (of_images, of_kernels, of_results),
            feature_group_count=groups,
            batch_group_count=batches,
        )

    return run, (values(of_images, pixels), values(of_kernels, weights))


def random_long_convolution(rng):
    """(function, x, kernel): kernels longer than their stride, or many results for each pixel."""
    axes = int(rng.integers(1, 3))
    weights, strides, spread = [], [], []
    for _ in range(axes):
        kind = rng.choice(["strided", "transposed", "plain"])
        weights.append(int(rng.integers(8, 20)) if kind != "plain" else int(rng.integers(1, 4)))
        strides.append(int(rng.integers(2, 9)) if kind == "strided" else 1)
        spread.append(int(rng.integers(5, 9)) if kind == "transposed" else 1)
    padding = rng.integers(-2, 12, (axes, 2)).tolist()
    channels, features = rng.integers(1, 4, 2)
    numbers = (("NWC", "WIO", "NWC"), ("NHWC", "HWIO", "NHWC"))[axes - 1]

    def run(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, strides, padding, spread, dimension_numbers=numbers
        )

    pixels = rng.integers(9, 24, axes)
    return run, (
        rng.normal(size=(2, *pixels, channels)),
        rng.normal(size=(*weights, channels, features)),
    )


def random_pooling(rng):
    """(function, x): a maximum, a sum, or the gradient of a maximum inside a function."""
    rank = int(rng.integers(3, 6))
    shape, window, strides, padding = rng.integers(4, 8, rank), [1] * rank, [1] * rank, []
    for axis in range(rank):
        if axis in rng.choice(rank, 2, replace=False):
            window[axis] = int(rng.integers(1, 4))
            strides[axis] = int(rng.choice([1, 2, window[axis]]))
        padding.append((0, 0) if window[axis] == 1 else tuple(rng.integers(0, 2, 2).tolist()))
    kind = rng.choice(["maximum", "sum", "gradient"])
    unit, operation = (0.0, lax.add) if kind == "sum" else (-jnp.inf, lax.max)

    def pool(x):
        return lax.reduce_window(x, unit, operation, window, strides, padding)

    def gradient(x):
        return jax.grad(lambda x: (pool(x) ** 2).sum())(x)

    return gradient if kind == "gradient" else pool, (rng.normal(size=shape),)


def derivatives(function, arguments, directions):
    """Value, gradients, gradients of a gradient along directions, and the forward derivative."""
    everything = tuple(range(len(arguments)))

    def loss(*arguments):
        y = function(*arguments)
        return (jnp.sin(y) * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

    def along(*arguments):
        return sum(map(jnp.vdot, jax.grad(loss, everything)(*arguments), directions))

    return (
        function(*arguments),
        jax.grad(loss, everything)(*arguments),
        jax.grad(along, everything)(*arguments),
        jax.jvp(function, arguments, directions)[1],
    )


def agree(make, seeds, tolerance=1e-10, dtype=np.float64):
    """Compare that many random operations, all in one program."""
    cases, arguments = [], []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        function, given = make(rng)
        given = tuple(x.astype(dtype) for x in given)
        try:
            shape = jax.eval_shape(function, *given).shape
        except (TypeError, ValueError):
            continue  # negative paddings left nothing
        if 0 not in shape:
            cases.append(function)
            arguments.append((given, tuple(rng.normal(size=x.shape).astype(dtype) for x in given)))
            assert names(function, *given)
            assert not names(lowered(function), *given), seed

    @jax.jit
    def run(arguments):
        pairs = zip(cases, arguments, strict=True)
        return [(derivatives(f, *a), derivatives(lowered(f), *a)) for f, a in pairs]

    assert cases
    for (expected, got), function in zip(run(arguments), cases, strict=True):
        for theirs, ours in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
            assert ours.dtype == theirs.dtype
            scale = max(float(abs(np.asarray(theirs, np.float64)).max()), 1e-3)
            np.testing.assert_allclose(ours, theirs, 0, tolerance * scale, err_msg=str(function))


@pytest.mark.parametrize(
    ("make", "seeds"), [(random_convolution, 10), (random_long_convolution, 8), (random_pooling, 8)]
)
def test_random_operations_agree_with_lax(x64, make, seeds):
    agree(make, range(seeds))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(30))
def test_many_random_operations_agree_with_lax(x64, part):
    make = (random_pooling, random_convolution, random_long_convolution)[part % 3]
    agree(make, range(100 + 10 * part, 110 + 10 * part))


def test_float32_and_bfloat16_agree_within_their_rounding():
    agree(random_convolution, range(4), 1e-5, np.float32)
    x = np.random.default_rng(0).normal(size=(8, 12, 12, 16)).astype(jnp.bfloat16)
    kernel = np.random.default_rng(1).normal(size=(3, 3, 16, 8)).astype(jnp.bfloat16)

    def convolve(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    def gradients(function, x, kernel):
        return jax.grad(lambda x, k: function(x, k).astype(jnp.float32).sum(), (0, 1))(x, kernel)

    exact = gradients(convolve, x.astype(np.float32), kernel.astype(np.float32))
    got = jax.jit(functools.partial(gradients, lowered(convolve)))(x, kernel)
    for ours, theirs in zip(got, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        scale = float(abs(theirs).max())
        np.testing.assert_allclose(ours.astype(np.float32), theirs, 0, 2**-7 * scale)


def convolve(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


def ruled(x, kernel):
    """A function with a derivative of its own: twice the kernel's."""

    @jax.custom_vjp
    def function(x, kernel):
        return convolve(x, kernel)

    def backward(residuals, g):
        of_x, of_kernel = jax.vjp(convolve, *residuals)[1](g)
        return of_x, 2 * of_kernel

    function.defvjp(lambda x, kernel: (convolve(x, kernel), (x, kernel)), backward)
    return function(x, kernel)


def forward_ruled(x, kernel):
    @jax.custom_jvp
    def function(x, kernel):
        return convolve(x, kernel)

    @function.defjvp
    def _(primals, tangents):
        return function(*primals), convolve(tangents[0], primals[1])

    return function(x, kernel)


def scanned(x, kernel):
    return lax.scan(lambda c, k: (convolve(c, k * kernel), c.sum()), x, jnp.arange(1.0, 4.0))[0]


def looped(x, kernel):
    def body(carry):
        return carry[0] + 1, convolve(carry[1], kernel)

    return lax.fori_loop(0, 3, lambda i, x: convolve(x, kernel), x) + lax.stop_gradient(
        lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]
    )


def branched(x, kernel):
    branches = [lambda x: convolve(x, kernel), lambda x: x * 2, lambda x: convolve(x, 2 * kernel)]
    return lax.switch(2, branches, x) + lax.cond(x.sum() > 1e9, branches[0], branches[1], x)


def spread(x, kernel):
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    split, same = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    return jax.shard_map(convolve, mesh=mesh, in_specs=(split, same), out_specs=split)(x, kernel)


def mapped(x, kernel):
    """One example at a time, as equinox has it."""
    return jax.vmap(lambda x: convolve(x[None], kernel)[0])(x)


def mapped_loop(x, kernel):
    """One example at a time, each until it is small."""

    def of_one(x):
        still = lambda z: jnp.abs(z).max() > 0.1  # noqa: E731
        small = lambda z: convolve(z, kernel / jnp.abs(kernel).sum() / 2)  # noqa: E731
        return (
            convolve(x[None], kernel)[0]
            + lax.stop_gradient(lax.while_loop(still, small, x[None]))[0]
        )

    return jax.vmap(of_one)(x)


def with_a_gradient_inside(x, kernel):
    """A penalty on the gradient of the input, whose convolutions have other axes."""

    def energy(x):
        return (jnp.tanh(convolve(x, kernel)) ** 2).sum()

    return convolve(x, kernel) + jax.grad(energy)(x)


@pytest.mark.parametrize(
    "function",
    [
        jax.jit(convolve),
        jax.checkpoint(convolve),
        ruled,
        forward_ruled,
        scanned,
        looped,
        branched,
        spread,
        with_a_gradient_inside,
        mapped,
        mapped_loop,
    ],
    ids=lambda function: getattr(function, "__name__", "function"),
)
def test_programs_inside_programs(x64, function):
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 2))
    kernel = np.random.default_rng(1).normal(size=(3, 3, 2, 2)) / 4

    def gradients(function, x, kernel):
        loss = lambda x, kernel: (function(x, kernel) ** 2).sum()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(x, kernel)

    expected = jax.jit(functools.partial(gradients, function))(x, kernel)
    got = functools.partial(gradients, lowered(function))
    assert bool(names(got, x, kernel)) == (function is mapped_loop)
    for ours, theirs in zip(
        jax.tree.leaves(jax.jit(got)(x, kernel)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("precision", ["highest", "F32_F32_F32", "BF16_BF16_F32"])
def test_the_precision_of_matrix_products_may_be_an_algorithm(precision):
    """XLA convolves with the default precision then."""
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 2)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(3, 3, 2, 2)).astype(np.float32)

    def convolved(x, kernel):
        with jax.default_matmul_precision(precision):
            return convolve(x, kernel)

    def gradients(function, x, kernel):
        loss = lambda x, kernel: (function(x, kernel) ** 2).sum()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(x, kernel)

    expected = gradients(convolve, x, kernel)
    got = jax.jit(functools.partial(gradients, lowered(convolved)))(x, kernel)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(abs(theirs).max()))


def test_what_another_platform_computes_is_not_compiled():
    there = Primitive("only_there")  # no compiler here knows it
    there.def_abstract_eval(lambda x: x)

    def function(x, kernel):
        branches = {"cpu": lambda x: convolve(x, kernel), "tpu": lambda x: there.bind(x)}
        return lax.platform_dependent(convolve(x, kernel), **branches)

    x = np.random.default_rng(0).normal(size=(2, 5, 4, 2)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(3, 3, 2, 2)).astype(np.float32)
    expected = convolve(convolve(x, kernel), kernel)
    found = jax.jit(lowered(function))(x, kernel)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_what_has_no_other_form_is_called_as_it_is():
    def dense(x, w):
        return nn.relu(x @ w)

    def integers(x, w):
        return convolve(x.astype(np.int32), w.astype(np.int32))

    x, w = np.ones((2, 3), np.float32), np.ones((3, 3), np.float32)
    assert str(jax.make_jaxpr(lowered(dense))(x, w)) == str(jax.make_jaxpr(dense)(x, w))
    images, kernel = np.ones((1, 4, 4, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    program = str(jax.make_jaxpr(lowered(integers))(images, kernel))
    assert program == str(jax.make_jaxpr(integers)(images, kernel))
    for context in (tracing_with("lax"), tracing_for(named("v5e"))):
        with context:
            program = str(jax.make_jaxpr(lowered(convolve))(images, kernel))
        assert program == str(jax.make_jaxpr(convolve)(images, kernel))


def test_results_that_are_no_arrays_scopes_and_keys_survive():
    def function(x, kernel, key):
        with jax.named_scope("of_the_user"):
            noise = jax.random.normal(key, x.shape)
            return {"y": convolve(x + noise, kernel), "name": "text", "key": key, "none": None}

    x, kernel = np.ones((1, 4, 4, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    key = jax.random.key(0)
    ours, theirs = lowered(function)(x, kernel, key), function(x, kernel, key)
    assert ours["name"] == "text"
    assert ours["none"] is None
    assert (jax.random.key_data(ours["key"]) == jax.random.key_data(key)).all()
    np.testing.assert_allclose(ours["y"], theirs["y"], rtol=1e-5, atol=1e-5)
    text = (
        jax.jit(lambda *a: lowered(function)(*a)["y"])
        .lower(x, kernel, key)
        .as_text(debug_info=True)
    )
    assert "of_the_user" in text


class Net(nn.Module):
    """A CNN as a user writes it."""

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(4, (3, 3), strides=2)(x)), (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(len(x), -1))


@pytest.fixture(scope="module")
def task():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 8, 8, 1)).astype(np.float32)
    clients = data.partition((x, rng.integers(0, 3, 48)), "iid", num_clients=4, seed=0)
    model = models.from_linen(Net())
    return model, jax.jit(model.init)(jax.random.key(0), x[:1]), clients


def test_a_users_cnn_runs_in_other_forms_with_the_same_results(task):
    model, params, clients = task
    loss = models.classification_loss(model.apply)
    algorithm = algorithms.fedavg(loss, client_lr=0.1)
    how = {"cohort_size": 3, "local_steps": 2, "batch_size": 4}
    runs = [
        simulate(algorithm, params, clients, rounds=4, eval_every=2, lowering=lowering, **how)
        for lowering in ("auto", "lax")
    ]
    for ours, theirs in zip(*(jax.tree.leaves(run.params) for run in runs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    batch = data.draw_batch(clients, jax.random.key(0), 0, **how)
    state = algorithm.init(params, 4)
    for client_map in ("scan", "vmap", "chunk:2", "shard_map"):
        assert not names(build_round(algorithm, client_map), state, batch)
    assert names(build_round(algorithm, "scan", lowering="lax"), state, batch)


class Traced(Exception):
    pass


@pytest.mark.methods
@pytest.mark.parametrize("lowering", ["auto", "lax"])
@pytest.mark.parametrize("search", ["sweep", "tune"])
def test_searches_take_the_lowering(search, lowering, task, monkeypatch):
    model, params, clients = task

    def compiled(self, name, size, function, arguments, donated=()):
        if name == "start":
            return jax.jit(function)
        raise Traced(names(function, *arguments))

    monkeypatch.setattr(Program, "compiled", compiled)
    build = functools.partial(algorithms.fedavg, models.classification_loss(model.apply))
    how = {"cohort_size": 3, "local_steps": 2, "batch_size": 4, "rounds": 2, "lowering": lowering}
    if search == "sweep":
        begin = functools.partial(sweep, build, points={"client_lr": [0.1]}, seeds=(0,))
    else:
        begin = functools.partial(tune, {"fedavg": build}, {"client_lr": [0.1, 0.2]}, budget=2)
    with pytest.raises(Traced) as caught:
        begin(params=params, clients=clients, **how)
    assert bool(caught.value.args[0]) == (lowering == "lax")


def test_a_training_loop_of_ones_own_takes_other_forms(task):
    model, params, clients = task
    x = clients.examples.x[:4]

    def loss(params):
        return jnp.square(model.apply(params, x)).sum()

    assert not names(jax.grad(loss), params)
    with tracing_with("lax"):
        assert names(jax.grad(loss), params)


@pytest.mark.parametrize(
    ("pool", "size", "stays"),
    [
        (nn.max_pool, 32, False),
        (nn.max_pool, 33, True),  # in slices it would take minutes to compile
        (nn.avg_pool, 33, True),
        (lambda x, window: nn.avg_pool(x, window, window), 33, False),  # a reshape
    ],
)
def test_a_pooling_over_a_long_window(x64, pool, size, stays):
    x = np.random.default_rng(0).normal(size=(2, 70, 3))
    function = lambda x: pool(x, (size,))  # noqa: E731
    assert bool(names(lowered(function), x)) == stays
    np.testing.assert_allclose(lowered(function)(x), function(x), rtol=1e-12)


def test_a_pooling_without_a_window(x64):
    x = np.arange(20.0).reshape(5, 4)
    for start, reduce in ((-jnp.inf, lax.max), (0.0, lax.add)):
        function = lambda x: lax.reduce_window(x, start, reduce, (1, 1), (2, 1), "VALID")  # noqa: B023, E731
        np.testing.assert_array_equal(lowered(function)(x), x[::2])


@pytest.mark.parametrize(
    ("machine", "size", "stays"), [("h100", 2, False), ("h100", 3, True), ("v5e", 2, True)]
)
def test_a_pooling_elsewhere(machine, size, stays):
    """On a GPU, windows that lie beside one another take another form; on a TPU none."""
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 2)).astype(np.float32)

    def pool(x):
        return nn.max_pool(x, (size, size), (2, 2))

    def gradient(x):
        return jax.grad(lambda x: (pool(x) ** 2).sum())(x)

    with tracing_for(named(machine)):
        assert bool(names(lowered(gradient), x)) == stays
        np.testing.assert_allclose(jax.jit(lowered(gradient))(x), gradient(x), rtol=1e-6)


def test_private_examples_and_evaluation_take_other_forms_too(task):
    model, params, clients = task
    loss = models.classification_loss(model.apply)
    private = algorithms.fedavg(loss, client_lr=0.1, example_clip=1.0)
    batch = data.draw_batch(
        clients, jax.random.key(0), 0, cohort_size=2, local_steps=1, batch_size=3
    )
    state = private.init(params, 4)
    ours = jax.jit(build_round(private, "scan"))(state, batch)[0]
    theirs = jax.jit(build_round(private, "scan", lowering="lax"))(state, batch)[0]
    for a, b in zip(jax.tree.leaves(ours.server), jax.tree.leaves(theirs.server), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert not names(build_round(private, "scan"), state, batch)
    correct = np.argmax(model.apply(params, clients.examples.x), -1) == clients.examples.y
    for lowering in ("auto", "lax"):
        how = {"count_fn": models.accuracy_counts(model.apply), "lowering": lowering}
        of_all = build_evaluation(test=clients.examples, **how)
        of_clients = build_client_evaluation(clients=clients, **how)
        own = build_personal_evaluation(model_of=lambda state, _: state, clients=clients, **how)
        for evaluate in (of_all, of_clients, own):
            assert bool(names(evaluate, params)) == (lowering == "lax")
        assert float(of_all(params)["accuracy"]) == pytest.approx(correct.mean())
        for scores in (of_clients(params), own(params)):
            total = (scores * clients.sizes).sum() / len(correct)
            assert float(total) == pytest.approx(correct.mean())


def wrapped(kind, loss, params):
    """(method, params), where the loss sees the params in another way."""
    fedavg = functools.partial(algorithms.fedavg, client_lr=0.1)
    if kind == "frozen":
        trained = {name: leaf for name, leaf in params.items() if name != "Conv_1"}

        def with_rest(trained, examples, key, frozen):
            return loss({**trained, **frozen}, examples, key)

        return with_frozen(fedavg, with_rest, {"Conv_1": params["Conv_1"]}), trained
    if kind == "personal":
        return with_personal(fedavg(loss), lambda path: path.startswith("Dense_0")), params
    return fedavg(loss), params


@pytest.mark.parametrize("kind", ["frozen", "personal", "divided"])
def test_wherever_a_loss_goes_its_model_has_other_forms(task, kind):
    model, params, clients = task
    algorithm, params = wrapped(kind, models.classification_loss(model.apply), params)
    client_map = "shard_map:2x2" if kind == "divided" else "scan"
    how = {"rounds": 2, "cohort_size": 2, "local_steps": 2, "batch_size": 4, "eval_every": 2}
    runs = [
        simulate(algorithm, params, clients, client_map=client_map, lowering=lowering, **how)
        for lowering in ("auto", "lax")
    ]
    ours, theirs = (jax.tree.leaves((run.params, run.state.clients)) for run in runs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Residual(nn.Module):
    """Norms, sums of two branches, reshapes and means, between convolutions."""

    @nn.compact
    def __call__(self, x):
        y = nn.GroupNorm(2)(nn.Conv(4, (3, 3), strides=2)(x))
        y = nn.Conv(4, (3, 3))(nn.silu(y))
        x = nn.relu(nn.Conv(4, (1, 1), strides=2)(x) + nn.LayerNorm()(y))
        squeezed = nn.sigmoid(nn.Dense(4)(x.mean((1, 2), keepdims=True)))
        x = jnp.concatenate([x * squeezed, nn.softplus(x[..., ::-1])], -1)
        x = nn.ConvTranspose(3, (2, 2), strides=(2, 2))(
            jnp.pad(x, ((0, 0), (1, 0), (0, 1), (0, 0)))
        )
        return nn.Dense(2)(x.max(1).reshape(len(x), -1))


def test_orders_of_axes_pass_through_a_network(x64):
    x = np.random.default_rng(0).normal(size=(3, 6, 5, 2))
    module = Residual()
    params = jax.tree.map(lambda p: p.astype(float), module.init(jax.random.key(1), x))

    def loss(params, x):
        return jnp.square(module.apply(params, x)).sum()

    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)
    got = jax.jit(jax.value_and_grad(lowered(loss), (0, 1)))(params, x)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-11)


def test_images_are_not_moved_between_convolutions():
    """Between the first and the last convolution the batch stays the minor axis.

    That holds for the images, and for what a norm broadcasts to them: a mean for each example and
    channel.
    """
    x = np.zeros((8, 16, 16, 4), np.float32)
    module = nn.Sequential(
        [nn.Conv(4, (3, 3)), nn.relu, nn.GroupNorm(2), nn.Conv(4, (3, 3)), nn.relu]
    )
    params = jax.jit(module.init)(jax.random.key(0), x)

    def loss(params):
        return jnp.square(module.apply(params, x) + 1).sum()

    program = jax.make_jaxpr(jax.grad(lowered(loss)))(params)
    read = [variable for equation in program.eqns for variable in equation.invars]
    moved = [
        equation
        for equation in program.eqns
        if equation.primitive.name == "transpose"
        and any(variable is equation.outvars[0] for variable in read)
    ]
    operands = [equation.invars[0].aval for equation in moved]
    (images,) = [operand for operand in operands if operand.size >= x.size]
    turned = [
        operand
        for equation, operand in zip(moved, operands, strict=True)
        if sum(length > 1 for length in operand.shape) > 1
        and equation.params["permutation"][-1] != operand.ndim - 1
    ]
    assert turned == [images]


def test_a_convolution_that_stays_slow_is_warned_of(task):
    _, params, clients = task
    model = models.from_linen(Net())

    def loss(params, examples, key):
        x = lax.complex(examples.x, examples.x)
        kernel = lax.complex(*[params["Conv_0"]["kernel"]] * 2)
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=ORDER)
        return jnp.abs(y).mean((1, 2, 3)) + model.apply(params, examples.x).mean(-1)

    how = {"cohort_size": 2, "local_steps": 1, "batch_size": 2}
    algorithm = algorithms.fedavg(loss, client_lr=0.1)
    batch = data.draw_batch(clients, jax.random.key(0), 0, **how)
    state = algorithm.init(params, 4)
    said = "a convolution .3 x 3, 1 to 4 channels, 8 x 8 pixels.*its operands are complex64"
    with pytest.warns(UserWarning, match=said) as caught:
        jax.make_jaxpr(build_round(algorithm, "scan"))(state, batch)
    assert {warning.filename for warning in caught} == {__file__}  # though JAX traces in between


ORDER = ("NHWC", "HWIO", "NHWC")


def test_a_plan_tells_the_forms(task):
    model, params, clients = task
    algorithm = algorithms.fedavg(models.classification_loss(model.apply), client_lr=0.1)
    how = {"cohort_size": 3, "local_steps": 2, "batch_size": 4}
    found = plan(algorithm, params, clients, client_map="scan", **how).convolutions
    assert list(found) == [
        "3 x 3, 1 to 4 channels, 8 x 8 pixels",
        "3 x 3, 4 to 4 channels, stride 2 x 2, 4 x 4 pixels",
    ]
    assert all(form.startswith("products of rows") for form in found.values())
    there = plan(algorithm, params, clients, client_map="vmap", target="h100", **how)
    assert set(there.convolutions.values()) == {"one product of all patches"}
    assert ["- 3 x 3, 1 to 4 channels, 8 x 8 pixels", "one product of all patches"] in there.rows()
    assert not plan(algorithm, params, clients, lowering="lax", **how).convolutions


def test_an_unknown_lowering_is_named(task):
    model, params, clients = task
    algorithm = algorithms.fedavg(models.classification_loss(model.apply), client_lr=0.1)
    with pytest.raises(ValueError, match="lowering is 'fast'; it must be one of auto, lax"):
        build_round(algorithm, "scan", lowering="fast")
    with pytest.raises(ValueError, match="lowering is 'fast'; it must be one of auto, lax"):
        simulate(
            *(algorithm, params, clients), rounds=1, cohort_size=2, local_steps=1, batch_size=2,
            lowering="fast",
        )  # fmt: skip
