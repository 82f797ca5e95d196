"""Every lowering of a convolution against XLA's own, values and gradients, and against loops."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import algorithms, build_round, data, models, plan
from fedjax_lab.machine.target import named, tracing_for
from fedjax_lab.models.convolution import convolution
from fedjax_lab.models.layers import Conv, ConvBlock
from tests.tiers import few

LOWERINGS = ("gemm", "im2col", "lax")
# image, kernel, stride: odd sizes, a batch of one, a kernel as large as the image, pixels at the
# end that no kernel reaches, 1 x 1, oblong kernels and strides.
CASES = [
    ((2, 7, 8, 3), (5, 5, 3, 4), 1),
    ((1, 9, 7, 2), (3, 3, 2, 5), 2),
    ((1, 3, 3, 1), (3, 3, 1, 1), 1),
    ((3, 8, 11, 4), (1, 1, 4, 2), (3, 2)),
    ((4, 6, 5, 2), (4, 2, 2, 3), (1, 2)),
    ((2, 6, 7, 9), (4, 5, 9, 2), (2, 1)),
]
# With padding and dtype. Float32 and 7 x 7 kernels (slow to compile) need not meet everything.
COMBINATIONS = [
    *((*case, padding, np.float64) for case in CASES for padding in ("VALID", "SAME")),
    *((*case, "SAME", np.float32) for case in CASES[:2]),
    ((2, 14, 11, 1), (7, 7, 1, 3), (2, 3), "VALID", np.float64),
]


def normal(shape, seed, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def xla(x, kernel, strides, padding):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers)


def on_a_gpu(x, kernel, *arguments, **options):
    """The patches of a GPU, which have forms of their own."""
    with tracing_for(named("h100")):
        return convolution(x, kernel, *arguments, lowering="im2col", **options)


def value_and_gradients(fn, x, kernel):
    """fn(x, kernel), and the gradients of its weighted sum by x and by kernel."""

    def weighted(x, kernel):
        out = fn(x, kernel)
        return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum(), out

    grads, out = jax.grad(weighted, (0, 1), has_aux=True)(x, kernel)
    return out, *grads


def compare(got, expected, tolerance):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("shape", "kernel_shape", "stride", "padding", "dtype"), few(5, COMBINATIONS)
)
def test_values_and_gradients_are_xlas(x64, shape, kernel_shape, stride, padding, dtype):
    @jax.jit
    def run(x, kernel):
        strides = stride if isinstance(stride, tuple) else (stride, stride)
        expected = functools.partial(xla, strides=strides, padding=padding)
        forms = [
            *(functools.partial(convolution, lowering=lowering) for lowering in LOWERINGS[:2]),
            on_a_gpu,
        ]
        ours = [
            value_and_gradients(functools.partial(form, padding=padding, stride=stride), x, kernel)
            for form in forms
        ]
        return ours, value_and_gradients(expected, x, kernel)

    ours, expected = run(normal(shape, 0, dtype), normal(kernel_shape, 1, dtype))
    for got in ours:
        compare(got, expected, 1e-5 if dtype == np.float32 else 1e-10)


def test_kernels_of_one_pixel(x64):
    """More channels than features and fewer; rows as one product or, of many weights, in a loop."""
    sizes = [((3, 5), 1), ((5, 3), (2, 3)), ((96, 97), 1)]
    given = [
        (normal((2, 5, 4, size[0]), i), normal((1, 1, *size), 9 + i))
        for i, (size, _) in enumerate(sizes)
    ]

    @jax.jit
    def run(given):
        both = []
        for (_, stride), arrays in zip(sizes, given, strict=True):
            ours = functools.partial(convolution, stride=stride, lowering="gemm")
            strides = stride if isinstance(stride, tuple) else (stride, stride)
            theirs = functools.partial(xla, strides=strides, padding="VALID")
            both.append([value_and_gradients(form, *arrays) for form in (ours, theirs)])
        return both

    for ours, theirs in run(given):
        compare(ours, theirs, 1e-10)
    in_a_loop = [
        "while" in jax.jit(functools.partial(convolution, lowering="gemm")).lower(*arrays).as_text()
        for arrays in given
    ]
    assert in_a_loop == [False, False, True]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_values_are_those_of_loops(x64, lowering):
    x, kernel = normal((2, 6, 5, 2), 0), normal((4, 3, 2, 3), 1)
    strides = 2, 1
    # SAME: 3 x 5 outputs. Rows need (3 - 1) * 2 + 4 = 8, so one zero on each side; columns need
    # 4 + 3 = 7, the same.
    padded = np.zeros((2, 8, 7, 2))
    padded[:, 1:7, 1:6] = x
    expected = np.zeros((2, 3, 5, 3))
    for b, i, j, f in np.ndindex(expected.shape):
        for p, q, c in np.ndindex(4, 3, 2):
            pixel = padded[b, i * strides[0] + p, j * strides[1] + q, c]
            expected[b, i, j, f] += pixel * kernel[p, q, c, f]
    fn = jax.jit(functools.partial(convolution, padding="SAME", stride=strides, lowering=lowering))
    got = fn(x, kernel)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lowering", few(1, LOWERINGS))
def test_a_kernel_for_each_client(x64, lowering):
    """Mapped, scanned and split over devices: XLA's result, client after client."""
    x, kernels = normal((4, 2, 6, 7, 3), 0), normal((4, 3, 3, 3, 2), 1)

    def one(x, kernel):
        fn = functools.partial(convolution, padding="SAME", stride=2, lowering=lowering)
        return value_and_gradients(fn, x, kernel)

    def loop(xs, kernels):
        return jax.lax.map(lambda pair: one(*pair), (xs, kernels))

    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("clients",), automatic, devices=jax.devices()[:2])
    split = jax.sharding.PartitionSpec("clients")
    xlas = jax.jit(lambda *args: value_and_gradients(lambda x, k: xla(x, k, (2, 2), "SAME"), *args))
    expected = [xlas(x[i], kernels[i]) for i in range(4)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)
    compare(jax.jit(jax.vmap(one))(x, kernels), expected, 1e-10)
    compare(jax.jit(loop)(x, kernels), expected, 1e-10)
    sharded = jax.shard_map(loop, mesh=mesh, in_specs=(split, split), out_specs=split)
    compare(jax.jit(sharded)(x, kernels), expected, 1e-10)
    shared = jax.jit(jax.vmap(one, (None, 0)))(x[0], kernels)  # images that all clients share
    compare(shared[0][0], expected[0][0], 1e-10)


@pytest.mark.parametrize(("batch", "form"), [(20, "gemm"), (2, "winograd")])
def test_automatic_lowering_of_a_small_convolution_on_cpu(batch, form):
    x, kernel = jnp.ones((batch, 4, 4, 1)), jnp.ones((3, 3, 1, 1))
    programs = {
        lowering: str(jax.make_jaxpr(functools.partial(convolution, lowering=lowering))(x, kernel))
        for lowering in ("auto", "winograd", *LOWERINGS)
    }
    assert programs["auto"] == programs[form]
    assert ["conv_general" in programs[name] for name in LOWERINGS] == [False, False, True]


@pytest.mark.parametrize(("channels", "size"), few(1, [(2, 3), (2, 4), (9, 3), (9, 4)]))
def test_patches_of_a_gpu_have_forward_mode_and_second_derivatives(x64, channels, size):
    x, kernel = normal((2, 6, 5, channels), 0), normal((size, size, channels, 3), 1)
    of_x, of_kernel = normal(x.shape, 2), normal(kernel.shape, 3)

    def derivatives(fn):
        def loss(x, kernel):
            return jnp.sin(fn(x, kernel)).sum()

        gradient = jax.grad(loss, (0, 1))
        forward = jax.jvp(fn, (x, kernel), (of_x, of_kernel))
        hessian = jax.grad(lambda *at: sum(map(jnp.vdot, gradient(*at), (of_x, of_kernel))), (0, 1))
        return forward, jax.jvp(gradient, (x, kernel), (of_x, of_kernel)), hessian(x, kernel)

    ours = functools.partial(on_a_gpu, padding="SAME")
    theirs = functools.partial(xla, strides=(1, 1), padding="SAME")
    compare(jax.jit(lambda: derivatives(ours))(), jax.jit(lambda: derivatives(theirs))(), 1e-10)


@pytest.mark.parametrize(
    ("target", "client_map", "lowering"),
    few(
        2,
        [
            ("h100", "chunk:2", "im2col"),
            ("v5e", "vmap", "lax"),
            ("h100", "vmap", "im2col"),
            ("h100", "scan", "lax"),
        ],
    ),
)
def test_automatic_lowering_of_a_round(target, client_map, lowering):
    """On a GPU, clients at once multiply patches, because cuDNN computes groups one by one."""
    images = data.synthetic.noise_images(40, (8, 8, 1), seed=0)
    clients = data.partition(images, "iid", num_clients=4, seed=0)
    model = models.cnn(10, padding="SAME")
    params = jax.eval_shape(model.init, jax.random.key(0), images.x[:1])
    loss_fn = models.classification_loss(model.apply, data.preprocess())
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    machine = named(target)
    round_fn = build_round(algorithm, client_map, target=machine)
    schedule = {"cohort_size": 4, "batch_size": 2, "local_steps": 1}
    batch = data.draw_batch(clients, jax.random.key(0), 0, **schedule)
    state = jax.eval_shape(lambda p: algorithm.init(p, 4), params)
    program = str(jax.make_jaxpr(round_fn)(state, batch))
    assert ("conv_general" in program) == (lowering == "lax")
    planned = plan(algorithm, params, clients, target=machine, client_map=client_map, **schedule)
    assert planned.convolution == lowering


@pytest.mark.parametrize(("lowering", "work"), few(1, [("gemm", " dot("), ("winograd", " while(")]))
def test_gradient_that_nobody_reads_is_not_computed(lowering, work):
    def loss(x, kernel):
        return (convolution(x, kernel, lowering=lowering) ** 2).sum()

    def count(arguments):
        compiled = jax.jit(jax.grad(loss, arguments)).lower(x, kernel).compile()
        return compiled.as_text().count(work)

    x, kernel = jnp.ones((16, 9, 9, 2)), jnp.ones((3, 3, 2, 4))
    assert count((0, 1)) == 3  # the features, and a gradient each
    assert count(1) == count(0) == 2


def test_modules_hand_their_options_on():
    x, key = normal((2, 9, 8, 3), 0, np.float32), jax.random.key(0)
    for lowering in LOWERINGS:
        conv = Conv(4, 3, "SAME", stride=(2, 1), lowering=lowering)
        assert jax.eval_shape(conv.init_with_output, key, x)[0].shape == (2, 5, 8, 4)
        for module in (conv, ConvBlock(4, lowering=lowering)):
            program = str(jax.make_jaxpr(module.init_with_output)(key, x))
            assert ("conv_general" in program) == (lowering == "lax")


def test_pooling_before_the_activation_changes_nothing():
    """The papers' order is activation, then pool; also where gradients are zero."""
    x, weights = normal((2, 8, 9, 2), 0, np.float32), normal((2, 3, 3, 3), 1, np.float32)
    params = {"kernel": normal((3, 3, 2, 3), 2, np.float32), "bias": normal(3, 3, np.float32)}

    def block(params):
        return ConvBlock(3, kernel_size=3).apply({"params": {"conv": params}}, x)

    def papers(params):
        out = xla(x, params["kernel"], (1, 1), "VALID") + params["bias"].reshape(1, 1, 1, -1)
        return jnp.maximum(out, 0)[:, :6, :6].reshape(2, 3, 2, 3, 2, 3).max(axis=(2, 4))

    @jax.jit
    def run(params):
        losses = [lambda p, f=f: (f(p) * weights).sum() for f in (block, papers)]
        return [jax.value_and_grad(loss)(params) for loss in losses]

    ours, expected = run(params)
    compare(ours, expected, 1e-5)


@pytest.mark.parametrize("lowering", few(1, ["gemm", "im2col", "lax"]))
def test_zeros_on_every_side(lowering):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 5, 6, 3)), rng.normal(size=(3, 3, 3, 4))
    x, kernel = jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32)
    expected = xla(jnp.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0))), kernel, (2, 2), "VALID")
    found = convolution(x, kernel, 2, stride=2, lowering=lowering)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("shape", [(0, 6, 6, 2), (2, 0, 6, 2), (2, 6, 6, 0)])
def test_empty_images(lowering, shape):
    x, kernel = jnp.ones(shape), jnp.ones((3, 3, shape[-1], 4))

    def loss(x, kernel):
        features = convolution(x, kernel, "SAME", lowering=lowering)
        return features.sum(), features

    (_, features), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, kernel)
    np.testing.assert_array_equal(features, np.zeros((*shape[:3], 4)))
    for gradient, of in zip(gradients, (x, kernel), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(of.shape))


def test_bad_arguments_are_named():
    x, kernel = jnp.ones((2, 4, 4, 3)), jnp.ones((3, 3, 3, 2))
    with pytest.raises(ValueError, match="padding is 'FULL'; it must be one of SAME, VALID"):
        convolution(x, kernel, "FULL")
    with pytest.raises(ValueError, match="lowering is 'conv'; it must be one of auto, gemm"):
        convolution(x, kernel, lowering="conv")
    with pytest.raises(ValueError, match="stride is 0; it must be at least 1"):
        convolution(x, kernel, stride=0)
    with pytest.raises(TypeError, match=r"stride is 1\.5; it must be an integer"):
        convolution(x, kernel, stride=1.5)
    with pytest.raises(ValueError, match=r"stride is \(1, 1, 1\); it must be one number or two"):
        convolution(x, kernel, stride=(1, 1, 1))
    with pytest.raises(ValueError, match=r"x has shape \(4, 4, 3\); .* images \[B, H, W, C\]"):
        convolution(x[0], kernel)
    with pytest.raises(ValueError, match=r"kernel has shape .* it must be \[h, w, 3, F\]"):
        convolution(x, kernel[:, :, :2])
    with pytest.raises(ValueError, match=r"kernel has shape \(0, 3, 3, 2\); it must have rows"):
        convolution(x, kernel[:0])
    with pytest.raises(ValueError, match="at least 3 x 3 pixels"):
        convolution(x[:, :2], kernel)
    with pytest.raises(ValueError, match="with a padding of 1 needs at least 5 x 5 pixels"):
        convolution(x, jnp.ones((7, 7, 3, 2)), 1)
    with pytest.raises(ValueError, match="padding is -1; it must be at least 0"):
        convolution(x, kernel, -1)
    with pytest.raises(TypeError, match="x has dtype float32 and kernel bfloat16"):
        convolution(x, kernel.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="both must be one float"):
        convolution(x.astype(jnp.int32), kernel.astype(jnp.int32))
    assert math.prod(convolution(x, kernel, stride=(2, 1)).shape) == 2 * 1 * 2 * 2


@pytest.mark.parametrize("lowering", few(2, ["gemm", "winograd", "im2col"]))
def test_the_precision_around_a_model_holds_in_its_gradient(lowering):
    """In the program for a TPU, where the default is bfloat16."""

    def loss(x, kernel):
        with jax.default_matmul_precision("float32"):
            return convolution(x, kernel, lowering=lowering).sum()

    x, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 4))
    traced = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (None, 0))).trace(x, kernel[None])
    program = traced.lower(lowering_platforms=("tpu",)).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
