"""State dicts of PyTorch, in memory and in files, against convolutions written out in NumPy."""

import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_lab import models
from fedjax_lab.models import pretrained
from fedjax_lab.storage.saved_run import export_params
from fedjax_lab.tree import by_path

SHAPES = {"conv": (5, 2, 3, 3), "out": (4, 180)}  # PyTorch's, of images [2, 8, 8]
LAYERS = {"blocks_0/conv": "conv", "classifier": "out"}


def state_of(seed=0):
    rng = np.random.default_rng(seed)
    state = {f"{name}.weight": rng.normal(size=size) for name, size in SHAPES.items()}
    state |= {f"{name}.bias": rng.normal(size=size[0]) for name, size in SHAPES.items()}
    return {name: array.astype(np.float32) for name, array in state.items()}


PARAMS = {
    "blocks_0": {"conv": {"kernel": np.zeros((3, 3, 2, 5), "f4"), "bias": np.zeros(5, "f4")}},
    "classifier": {"kernel": np.zeros((180, 4), "f4"), "bias": np.zeros(4, "f4")},
}
TABLE = models.torch_table(PARAMS, LAYERS)


def in_torch(state, x):
    """conv 3x3, ReLU, flatten, linear of one image [C, H, W], place by place."""
    kernel = state["conv.weight"]
    out = np.empty((5, 6, 6))
    for f, i, j in np.ndindex(out.shape):
        out[f, i, j] = (kernel[f] * x[:, i : i + 3, j : j + 3]).sum() + state["conv.bias"][f]
    return state["out.weight"] @ np.maximum(out, 0).reshape(-1) + state["out.bias"]


def here(params, x):
    """The same of an image [H, W, C], by JAX's own convolution."""
    conv = params["blocks_0"]["conv"]
    dimensions = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(
        jnp.asarray(x)[None], conv["kernel"], (1, 1), "VALID", dimension_numbers=dimensions
    )
    out = np.maximum(np.asarray(out)[0] + np.asarray(conv["bias"]), 0).reshape(-1)
    classifier = jax.tree.map(np.asarray, params["classifier"])
    return out @ classifier["kernel"] + classifier["bias"]


def test_weights_of_another_byte_order(tmp_path):
    state = state_of()
    file = tmp_path / "big.npz"
    np.savez(file, **{name: array.astype(">f4") for name, array in state.items()})
    there, here_ = (models.load_state_dict(given, PARAMS, TABLE) for given in (file, state))
    for big, native in zip(jax.tree.leaves(there), jax.tree.leaves(here_), strict=True):
        np.testing.assert_array_equal(big, native)


def test_logits_are_equal_on_both_sides_and_after_the_way_back():
    state, x = state_of(), np.random.default_rng(1).normal(size=(2, 8, 8)).astype(np.float32)
    counted = state | {"norm.num_batches_tracked": np.array(3)}
    params = models.load_state_dict(counted, PARAMS, TABLE)
    expected = in_torch(state, x)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(here(params, x.transpose(1, 2, 0)), expected, atol=1e-5 * scale)
    trained = jax.tree.map(lambda leaf: leaf * 1.5 - 0.1, params)
    back = models.to_state_dict(trained, TABLE)
    assert {name: array.shape for name, array in back.items()} == {
        name: array.shape for name, array in state.items()
    }
    expected = in_torch(back, x)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(here(trained, x.transpose(1, 2, 0)), expected, atol=1e-5 * scale)


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_files(tmp_path):
    pytest.importorskip("safetensors")
    state = state_of()
    params = models.load_state_dict(state, PARAMS, TABLE)
    for suffix in (".npz", ".safetensors"):
        export_params(models.to_state_dict(params, TABLE), tmp_path / f"a{suffix}")
        assert_same(models.load_state_dict(tmp_path / f"a{suffix}", PARAMS, TABLE), params)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert {a.dtype.name for a in models.to_state_dict(half, TABLE).values()} == {"float32"}


def test_a_stacked_leaf_is_an_array_for_each_layer():
    leaf = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    table = {"w": models.Stored("layers.{layer}.weight", (1, 0))}
    state = models.to_state_dict({"w": leaf}, table)
    np.testing.assert_array_equal(state["layers.1.weight"], leaf[1].T)
    assert_same(models.load_state_dict(state, {"w": leaf}, table), {"w": leaf})


@pytest.mark.parametrize("layers", [None, {"": "fc1"}])
def test_a_network_of_one_layer_has_its_leaves_at_the_top(layers):
    params = {"kernel": jnp.arange(6.0).reshape(3, 2), "bias": jnp.ones(2)}
    table = models.torch_table(params, layers)
    state = models.to_state_dict(params, table)
    assert {name: part.shape for name, part in state.items()} == {
        "fc1.weight": (2, 3),
        "fc1.bias": (2,),
    }
    read = models.load_state_dict(state, params, table)
    jax.tree.map(np.testing.assert_array_equal, read, params)


def test_a_network_with_batch_norms():
    """The running statistics have their places, too."""
    model = models.resnet20(norm="batch")
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 32, 32, 3), np.float32))
    paths = sorted({path.rpartition("/")[0] for path in by_path(shapes)})
    table = models.torch_table(shapes, {path: path.replace("/", ".") for path in paths})
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype("f4"), shapes)
    state = models.to_state_dict(params, table)
    assert sum(name.endswith("running_var") for name in state) > 5
    assert_same(models.load_state_dict(state, shapes, table), params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv.weight": None}, r"the files lack 'conv.weight'\."),
        ({"conv.weight": None, "c": np.zeros(2)}, "lack 'conv.weight'; they have 'c' besides"),
        ({"more": np.zeros(2, "f4")}, "the files have 'more' besides"),
        ({"out.bias": np.zeros(3, "f4")}, r"'out.bias' is float32\[3\]; it must be floats \[4\]"),
        ({"out.bias": np.zeros(4, int)}, r"'out.bias' is int64\[4\]; it must be floats"),
        ({"out.bias": np.full(4, np.nan, "f4")}, "'out.bias' has a number that is not finite"),
        ({"out.bias": np.full(4, 1e39)}, "'out.bias' has a number that float32 does not hold"),
    ],
)
def test_state_dicts_that_do_not_fit(changes, message):
    state = {name: a for name, a in (state_of() | changes).items() if a is not None}
    with pytest.raises(ValueError, match=message):
        models.load_state_dict(state, PARAMS, TABLE)


@pytest.mark.parametrize("block", [pretrained.BLOCK_BYTES, 8])
def test_numbers_beyond_the_dtype_of_a_leaf(block, monkeypatch):
    """Read whole, or block by block: 65,504 is the largest number of float16."""
    monkeypatch.setattr(pretrained, "BLOCK_BYTES", block)
    params = {"a": {"kernel": jax.ShapeDtypeStruct((4, 3), np.float16)}}
    table = models.torch_table(params, {"a": "a"})
    state = {"a.weight": np.full((3, 4), 65504, "f4")}
    assert (models.load_state_dict(state, params, table)["a"]["kernel"] == 65504).all()
    state["a.weight"][1, 2] = 1e5
    with pytest.raises(ValueError, match=r"'a\.weight' has a number that float16 does not hold"):
        models.load_state_dict(state, params, table)


@pytest.mark.parametrize("block", [pretrained.BLOCK_BYTES, 8])
def test_float64_leaves_without_64_bits(block, monkeypatch):
    """The device has float32, of which the largest number is 3.4e38."""
    monkeypatch.setattr(pretrained, "BLOCK_BYTES", block)
    into, table = {"a": {"kernel": np.zeros((2, 1))}}, {"a/kernel": models.Stored("a", (1, 0))}
    found = models.load_state_dict({"a": np.array([[1e38, 1 / 3]])}, into, table)["a"]["kernel"]
    np.testing.assert_array_equal(found, np.array([[1e38], [1 / 3]], np.float32))
    with pytest.raises(ValueError, match="'a' has a number that float32 does not hold"):
        models.load_state_dict({"a": np.array([[1e39, 1]])}, into, table)


def test_two_leaves_of_one_path():
    """One of them would be lost."""
    params = {"a/w": np.ones(2, np.float32), "a": {"w": np.zeros(2, np.float32)}}
    for call in (models.to_state_dict, models.torch_table):
        with pytest.raises(ValueError, match="two leaves have the path 'a/w'; rename one"):
            call(params)
    with pytest.raises(ValueError, match="two leaves have the path 'a/w'; rename one"):
        models.to_state_dict(params, {"a/w": "w"})


def test_a_dense_kernel_that_may_follow_convolutions_of_later_names():
    """Its rows would stay in PyTorch's order of pixels."""
    layers = {"stem": "conv", "head": "out"}

    def table_of(inputs):
        sizes = {"stem": (3, 3, 2, 5), "head": (inputs, 4)}
        params = {name: {"kernel": np.zeros(size, "f4")} for name, size in sizes.items()}
        return models.torch_table(params, layers)

    with pytest.raises(ValueError, match=r"head comes before the convolutions .* its 180 inputs"):
        table_of(180)
    for inputs in (5, 7):  # the means of the channels; no images of them
        assert table_of(inputs)["head/kernel"] == models.Stored("out.weight", (1, 0))


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu121"])
def test_pytorch_whose_restricted_unpickling_runs_code(version, tmp_path, monkeypatch):
    (tmp_path / "a.pt").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__=version))
    with pytest.raises(
        ImportError, match=rf"PyTorch {re.escape(version)} may run .* 'torch>=2\.6'"
    ):
        models.load_state_dict(tmp_path / "a.pt", PARAMS, TABLE)


def test_wrong_sources(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="has a dict at 'state_dict'; it must have arrays"):
        models.load_state_dict({"state_dict": {}}, PARAMS, TABLE)
    with pytest.raises(ValueError, match=r"cnn\.onnx'; the file must end in one of \.safetensors"):
        models.load_state_dict("cnn.onnx", PARAMS, TABLE)
    with pytest.raises(FileNotFoundError, match=r"none\.pt'; there is no such file"):
        models.load_state_dict(tmp_path / "none.pt", PARAMS, TABLE)
    (tmp_path / "a.pt").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"a\.pt is a pickle, which needs PyTorch"):
        models.load_state_dict(tmp_path / "a.pt", PARAMS, TABLE)
    with pytest.raises(ImportError, match=r"\.pt needs PyTorch"):
        export_params({"w": np.zeros(2)}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"table and params differ: .* in one of them alone"):
        models.to_state_dict(PARAMS, {"w": "w"})
    with pytest.raises(ValueError, match=r"table and into differ: .* in one of them alone"):
        models.load_state_dict({"w": np.zeros(2)}, PARAMS, {"w": "w"})


def test_pytorch_reads_and_writes_pt(tmp_path):
    torch = pytest.importorskip("torch")
    state = state_of()
    torch.save({name: torch.tensor(a) for name, a in state.items()}, tmp_path / "a.pt")
    params = models.load_state_dict(tmp_path / "a.pt", PARAMS, TABLE)
    assert_same(params, models.load_state_dict(state, PARAMS, TABLE))
    export_params(models.to_state_dict(params, TABLE), tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    for name, array in state.items():
        np.testing.assert_array_equal(found[name].numpy(), array)
    torch.save(Trap(), tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"c\.pt is damaged, or no state dict"):
        models.load_state_dict(tmp_path / "c.pt", PARAMS, TABLE)
    assert not hasattr(sys, "attacked")


class Trap:
    def __reduce__(self):
        return exec, ("import sys; sys.attacked = True",)


@pytest.mark.parametrize("width", [3, 6])
def test_transposed_convolutions(width):
    """Of stride and size 2: each pixel of an image becomes a square of four."""
    rng = np.random.default_rng(0)
    sizes = (2, 4, 5, 3), (3, width, 2, 2), width
    x, weight, bias = (rng.normal(size=size).astype("f4") for size in sizes)
    layer = nn.ConvTranspose(width, (2, 2), (2, 2), "VALID", transpose_kernel=True)
    shapes = {"up": jax.eval_shape(layer.init, jax.random.key(0), x)["params"]}
    state, table = {"up.weight": weight, "up.bias": bias}, models.torch_table(shapes, {"up": "up"})
    params = models.load_state_dict(state, shapes, table)
    expected = np.zeros((2, 8, 10, width))
    for i, j in np.ndindex(2, 2):
        expected[:, i::2, j::2] = x @ weight[:, :, i, j] + bias
    np.testing.assert_allclose(layer.apply({"params": params["up"]}, x), expected, atol=1e-5)
    back = models.to_state_dict(params, table)
    assert all(np.array_equal(back[name], state[name]) for name in state)


def test_convolutions_of_one_dimension():
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.normal(size=s).astype("f4") for s in ((2, 9, 3), (4, 3, 5), 4))
    layer = nn.Conv(4, (5,), padding="VALID")
    shapes = {"conv": jax.eval_shape(layer.init, jax.random.key(0), x)["params"]}
    table = models.torch_table(shapes, {"conv": "conv"})
    table |= {"conv/kernel": models.Stored("conv.weight", (2, 1, 0))}
    state = {"conv.weight": weight, "conv.bias": bias}
    params = models.load_state_dict(state, shapes, table)
    windows = np.lib.stride_tricks.sliding_window_view(x, 5, axis=1)  # [B, l, C, 5]
    expected = np.einsum("blck,fck->blf", windows, weight) + bias
    np.testing.assert_allclose(layer.apply({"params": params["conv"]}, x), expected, atol=1e-5)


def test_leaves_called_weight_have_the_layout_of_pytorch_already():
    state = state_of()
    params = {
        "features": {"weight": state["conv.weight"], "bias": state["conv.bias"]},
        "logits": {"weight": state["out.weight"], "bias": state["out.bias"]},
    }
    table = models.torch_table(params, {"features": "conv", "logits": "out"})
    written = models.to_state_dict(params, table)
    assert written.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(written[name], array)
    assert {stored.name.split(".")[0] for stored in models.torch_table(params).values()} == {
        "conv1", "fc1"
    }  # fmt: skip
    params["features"]["bias"] = state["conv.bias"].reshape(5, 1, 1)  # as a convolution of Equinox
    with pytest.raises(ValueError, match=r"bias has shape \(5, 1, 1\); reshape it to one axis"):
        models.torch_table(params)
    with pytest.raises(ValueError, match=r"head/table, a leaf of an unknown kind; .*weight, bias"):
        models.torch_table({"head": {"table": np.zeros((3, 4))}}, {"head": "head"})
