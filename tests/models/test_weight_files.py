"""Files of weights: read and written as they are, and every way in which one can be wrong."""

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import model_shardings, models
from fedjax_lab.models import pretrained
from fedjax_lab.models.decoder_config import config_fields
from fedjax_lab.models.weight_files import WeightFiles
from fedjax_lab.models.weight_tables import decoder_table, torch_table
from fedjax_lab.storage.saved_run import export_params
from fedjax_lab.tree import by_path
from tests.models.test_decoder import CONFIGS, model_and_params, numpy_weights, run, tokens, twin
from tests.tiers import few

safetensors = pytest.importorskip("safetensors.numpy")
KINDS = {"float32": "F32", "bfloat16": "BF16"}


def write(folder, kind="llama", dtype="float32", shards=1, **changes):
    """A folder as others write it, by the library alone."""
    folder.mkdir(exist_ok=True)
    arrays = {
        name: np.ascontiguousarray(value.astype(jnp.dtype(dtype)))
        for name, value in numpy_weights(model_and_params(kind)[1]).items()
    }
    for name, value in changes.items():
        name = name.replace("__", ".")
        arrays.pop(name, None)
        if value is not None:
            arrays[name] = value
    fields = config_fields(CONFIGS[kind])
    (folder / "config.json").write_text(json.dumps(fields))
    if shards == 1:
        safetensors.save_file(arrays, folder / "model.safetensors")
        return folder
    where = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(arrays)}
    for file in set(where.values()):
        part = {name: value for name, value in arrays.items() if where[name] == file}
        safetensors.save_file(part, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == jax.tree.map(
        lambda leaf: leaf.dtype, expected
    )


@pytest.mark.parametrize(
    ("kind", "shards", "block"),
    few(1, [("llama", 1, 2**24), ("qwen", 3, 300), ("llama", 2, 1)]),
)
def test_a_model_is_read_as_it_was_written(kind, shards, block, tmp_path, monkeypatch):
    """Whole files or several, arrays in one piece or in blocks of a few rows."""
    monkeypatch.setattr(pretrained, "BLOCK_BYTES", block)
    _, params = model_and_params(kind)
    model, found = models.load_pretrained(write(tmp_path / "model", kind, shards=shards))
    assert_equal(found, params)
    if shards == 1:
        x = tokens((1, 9))
        np.testing.assert_allclose(run(kind)(found, x)[0], twin(kind, x[0]), atol=2e-5)
        assert jax.eval_shape(model.apply, found, x).shape == (1, 9, 29)


def test_bfloat16_is_read_and_converted(tmp_path):
    folder = write(tmp_path / "model", "qwen", "bfloat16")
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model_and_params("qwen")[1])
    assert_equal(models.load_pretrained(folder)[1], half)
    wide = models.load_pretrained(folder, dtype="float32")[1]
    assert_equal(wide, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half))


@pytest.mark.parametrize("block", [2**24, pytest.param(400, marks=pytest.mark.methods)])
def test_each_device_gets_its_part(block, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "BLOCK_BYTES", block)
    folder, (_, params) = write(tmp_path / "model", shards=2), model_and_params("llama")

    def divide(shapes):
        return model_shardings(shapes, "shard_map:1x4")

    found = models.load_pretrained(folder, sharding=divide)[1]
    assert_equal(found, params)
    wanted = divide(jax.tree.map(lambda leaf: leaf, params))
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == wanted
    kernel = found["layers"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    there = models.load_pretrained(folder, sharding=one)[1]
    assert {leaf.sharding for leaf in jax.tree.leaves(there)} == {one}


@pytest.mark.parametrize("kind", few(1, ["qwen", "llama"]))
def test_the_same_table_backwards(kind, tmp_path):
    """What is written is, to the library, what another would have written."""
    _, params = model_and_params(kind)
    models.save_pretrained(tmp_path / "new", CONFIGS[kind], params, max_shard_bytes=9000)
    files = sorted((tmp_path / "new").glob("*.safetensors"))
    assert len(files) > 2
    found = {}
    for file in files:
        assert file.stat().st_size < 12_000
        found |= safetensors.load_file(file)
    expected = numpy_weights(params)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name].astype(np.float32))
    assert models.read_decoder_config(tmp_path / "new") == CONFIGS[kind]
    assert_equal(models.load_pretrained(tmp_path / "new")[1], params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]


def test_writing_is_refused_where_it_would_be_wrong(tmp_path):
    config, (_, params) = CONFIGS["llama"], model_and_params("llama")
    adapters = models.init_adapters(jax.random.key(0), params, "layers/up/kernel", 1, stacked="*")
    for broken, message in (
        (models.attach_adapters(params, adapters), "layers/up/adapter_down'; the configuration"),
        ({k: v for k, v in params.items() if k != "norm"}, "params have nothing at 'norm/scale'"),
        (params | {"norm": {"scale": jnp.full(24, jnp.nan)}}, "'norm/scale' that is not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            models.save_pretrained(tmp_path / "new", config, broken)
    assert not list(tmp_path.iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError, match="which is there and not empty"):
        models.save_pretrained(tmp_path / "full", config, params)
    with pytest.raises(FileNotFoundError, match="there is no"):
        models.save_pretrained(tmp_path / "no" / "folder", config, params)


# --- other models


@pytest.mark.methods
def test_what_the_package_exports_is_read_back(tmp_path):
    images = np.zeros((1, 28, 28, 1), np.float32)
    shapes = jax.eval_shape(models.cnn().init, jax.random.key(0), images)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    export_params(params, tmp_path / "cnn.safetensors")
    assert_equal(models.load_safetensors(tmp_path / "cnn.safetensors", shapes), params)


def torch_forward(state, x):
    """What PyTorch computes of conv1, conv2, fc1, fc2, on images [C, H, W], loops in NumPy."""
    for name in ("conv1", "conv2"):
        kernel, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        size = x.shape[1] - 4
        out = np.zeros((len(kernel), size, size))
        for f, i, j in np.ndindex(out.shape):
            out[f, i, j] = (kernel[f] * x[:, i : i + 5, j : j + 5]).sum()
        out = np.maximum(out + bias[:, None, None], 0)
        x = out.reshape(len(out), size // 2, 2, size // 2, 2).max((2, 4))
    x = np.maximum(state["fc1.weight"] @ x.reshape(-1) + state["fc1.bias"], 0)
    return state["fc2.weight"] @ x + state["fc2.bias"]


def test_a_state_dict_of_pytorch(tmp_path):
    """Kernels are turned, and the rows of the first dense layer are put in our order of pixels."""
    model = models.cnn()
    x = np.random.default_rng(0).normal(size=(1, 20, 20, 2)).astype(np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    sizes = {"conv1": (32, 2, 5, 5), "conv2": (64, 32, 5, 5), "fc1": (512, 256), "fc2": (10, 512)}
    rng = np.random.default_rng(1)
    state = {}
    for name, size in sizes.items():
        scale = 1 / math.sqrt(math.prod(size[1:]))
        state[f"{name}.weight"] = rng.normal(0, scale, size).astype(np.float32)
        state[f"{name}.bias"] = rng.normal(0, 0.1, size[0]).astype(np.float32)
    safetensors.save_file(
        state | {"bn.num_batches_tracked": np.zeros(1, np.int64)}, tmp_path / "a.safetensors"
    )
    table = torch_table(shapes)
    params = models.load_safetensors(
        tmp_path / "a.safetensors", shapes, table, ignore=("*num_batches_tracked",)
    )
    expected = torch_forward(state, x[0].transpose(2, 0, 1))
    np.testing.assert_allclose(jax.jit(model.apply)(params, x)[0], expected, atol=1e-4)
    for path, leaf in by_path(params).items():  # and back
        stored = table[path]
        np.testing.assert_array_equal(stored.to_stored(np.asarray(leaf)), state[stored.name])


def test_tables_for_layers_with_names_of_their_own():
    model = models.lenet5(norm="group")
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 32, 32, 3), np.float32))
    with pytest.raises(ValueError, match="blocks_0/norm/group has no kernel; give the names"):
        torch_table(shapes)
    with pytest.raises(ValueError, match="is in one alone"):
        torch_table(shapes, {"blocks_0/conv": "conv1"})
    paths = {path.rpartition("/")[0] for path in by_path(shapes)}
    table = torch_table(shapes, {path: path.replace("/", "_") for path in paths})
    assert table["blocks_0/norm/group/scale"].name == "blocks_0_norm_group.weight"
    assert table["blocks_2/dense/kernel"].image == (64, 5, 5)
    assert table["blocks_3/dense/kernel"].image is None


# --- wrong files


class Trap:
    """What a pickle can do."""

    def __reduce__(self):
        return (os.mkdir, ("trap",))


Q = "model__layers__1__self_attn__q_proj__weight"
WRONG = {
    "missing": ({Q: None}, r"the files lack 'model\.layers\.1\.self_attn\.q_proj\.weight'\."),
    "left over": ({"model__extra": np.ones(2, np.float32)}, "the files have 'model.extra' besides"),
    "transposed": ({Q: np.ones((24, 32), np.float32)}, r"is F32\[24, 32\]; it must be floats \[32"),
    "integers": ({Q: np.ones((32, 24), np.int8)}, r"is I8\[32, 24\]; it must be floats"),
    "not finite": ({Q: np.full((32, 24), np.inf, np.float32)}, "that is not finite"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arrays_that_do_not_fit(case, tmp_path):
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        models.load_pretrained(write(tmp_path / "model", **changes))


def test_buffers_that_follow_from_the_configuration_are_left_out(tmp_path):
    buffer = {"model__layers__0__self_attn__rotary_emb__inv_freq": np.ones(4, np.float32)}
    assert_equal(
        models.load_pretrained(write(tmp_path / "model", **buffer))[1], model_and_params("llama")[1]
    )


@pytest.mark.parametrize("shards", few(1, [3, 1]))
def test_a_head_beside_tied_embeddings_is_left_out_if_it_is_the_same(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "BLOCK_BYTES", 1000)  # a few rows at a time
    _, params = model_and_params("qwen")
    head = np.array(params["embedding"])
    folder = write(tmp_path / "same", "qwen", shards=shards, lm_head__weight=head)
    assert_equal(models.load_pretrained(folder)[1], params)
    head[-1, -1] += 1
    for wrong in (head, head[:-1], head.astype(np.float16)):
        folder = write(tmp_path / "other", "qwen", lm_head__weight=wrong)
        with pytest.raises(ValueError, match=r"'lm_head\.weight' differs from 'model\.embed_"):
            models.load_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(fields))
    untied = models.load_pretrained(write_head(folder, head))[1]
    np.testing.assert_array_equal(untied["head"]["kernel"], head.T)


def write_head(folder, head):
    """Replace the head in a folder of one file."""
    arrays = safetensors.load_file(folder / "model.safetensors")
    safetensors.save_file(arrays | {"lm_head.weight": head}, folder / "model.safetensors")
    return folder


def header(text, size=0):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


ARRAY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": b"",
    "a pickle": pickle.dumps({"a": Trap()}),
    "no header": header(b"not json at all"),
    "a header of 2**60 bytes": (2**60).to_bytes(8, "little") + b"{}",
    "cut off": header({"a": ARRAY}, 7),
    "too long": header({"a": ARRAY}, 9),
    "a gap": header({"a": ARRAY, "b": {**ARRAY, "data_offsets": [16, 24]}}, 24),
    "an overlap": header({"a": ARRAY, "b": {**ARRAY, "data_offsets": [4, 12]}}, 12),
    "a shape that is not its bytes": header({"a": {**ARRAY, "shape": [3]}}, 8),
    "a shape beyond all": header({"a": {**ARRAY, "shape": [2**40, 2**40]}}, 8),
    "a negative shape": header({"a": {**ARRAY, "shape": [-2]}}, 8),
    "no such dtype": header({"a": {**ARRAY, "dtype": "F7"}}, 8),
    "offsets backwards": header({"a": {**ARRAY, "data_offsets": [8, 0]}}, 8),
    "a name twice": header(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        16,
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(DAMAGED[case])
    into = {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(ValueError, match=r"a\.safetensors is no whole file of safetensors"):
        models.load_safetensors(tmp_path / "a.safetensors", into)
    assert not Path("trap").exists()


def test_every_cut_of_a_file_is_an_error(tmp_path):
    """None gives a model, whichever byte is the last."""
    folder = write(tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    for size in np.linspace(0, len(whole) - 1, 25).astype(int):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is no whole file of safetensors"):
            WeightFiles(folder)


def test_a_file_that_is_cut_off_meanwhile(tmp_path):
    files = WeightFiles(write(tmp_path / "model"))
    os.truncate(tmp_path / "model" / "model.safetensors", 3000)
    last = max(files.entries, key=lambda name: files.entries[name].offset)
    with pytest.raises(ValueError, match="has been cut off since it was opened"):
        files.read(last)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../model-0.safetensors", "it must be the name of a .safetensors file in the same folder"),
        ("/etc/passwd.safetensors", "it must be the name of a .safetensors file"),
        ("..\\model-0.safetensors", "it must be the name of a .safetensors file"),
        ("model-0.bin", "it must be the name of a .safetensors file"),
        (3, "it must be the name of a .safetensors file"),
        ("model-1.safetensors", "is listed in model-1.safetensors; it is in model-0.safete"),
        (None, "is listed in no file; it is in model-0.safetensors"),
    ],
)
def test_an_index_that_lies(file, message, tmp_path):
    folder = write(tmp_path / "model", shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = next(iter(content["weight_map"]))
    content["weight_map"][first] = file
    if file is None:
        del content["weight_map"][first]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        models.load_pretrained(folder)


def test_files_that_are_not_there(tmp_path):
    folder = write(tmp_path / "model", shards=2)
    (folder / "model-1.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors, which the index names"):
        models.load_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(ValueError, match="has no weight_map"):
        models.load_pretrained(folder)
    (folder / "model.safetensors").touch()
    with pytest.raises(ValueError, match="has both"):
        models.load_pretrained(folder)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin is not read: unpickling"):
        models.load_pretrained(folder)
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        models.load_safetensors(tmp_path / "none", {})
    with pytest.raises(ValueError, match=r"it must end in \.safetensors"):
        models.load_safetensors(folder / "pytorch_model.bin", {})


def test_a_single_pattern_of_names_is_no_list_of_letters(tmp_path):
    file, into = tmp_path / "a.safetensors", {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}
    arrays = {"a": np.ones(2, np.float32), "bn.num_batches_tracked": np.zeros(1, np.int64)}
    safetensors.save_file(arrays, file)
    for ignore in ("*num_batches_tracked", ["*num_batches_tracked"]):
        assert_equal(models.load_safetensors(file, into, ignore=ignore), {"a": arrays["a"]})
    safetensors.save_file(arrays | {"b": np.ones(2, np.float32)}, file)
    with pytest.raises(ValueError, match="the files have 'b' besides"):
        models.load_safetensors(file, into, ignore="*num_batches_tracked")


@pytest.mark.parametrize("block", [pretrained.BLOCK_BYTES, 4])
def test_a_number_of_each_layer(block, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "BLOCK_BYTES", block)
    numbers = np.array([3, 5, 7], np.float32)
    arrays = {f"layers.{i}.gate": np.asarray(number) for i, number in enumerate(numbers)}
    safetensors.save_file(arrays, tmp_path / "a.safetensors")
    table = {"gate": models.Stored("layers.{layer}.gate")}
    into = {"gate": jax.ShapeDtypeStruct((3,), jnp.float32)}
    assert_equal(
        models.load_safetensors(tmp_path / "a.safetensors", into, table), {"gate": numbers}
    )


def test_a_head_without_columns_beside_tied_embeddings(tmp_path):
    empty = np.zeros((29, 0), np.float32)
    changes = {"lm_head__weight": empty, "model__embed_tokens__weight": empty}
    with pytest.raises(ValueError, match=r"is F32\[29, 0\]; it must be floats \[29, 24\]"):
        models.load_pretrained(write(tmp_path / "model", "qwen", **changes))


def test_tables_that_do_not_fit(tmp_path):
    file = tmp_path / "a.safetensors"
    safetensors.save_file({"a": np.ones(2, np.float32)}, file)
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    stored = models.Stored
    for into, rename, message in (
        ({"b": shape}, {"c": "a"}, "rename and into differ: 'b', 'c'"),
        ({"b": shape, "c": shape}, lambda path: "a", "rename has two leaves for 'a'"),
        ({"b": shape}, {"b": stored("a", (1, 0))}, r"into has \(2,\) at 'b', which cannot be"),
        ({"a": jax.ShapeDtypeStruct((2,), jnp.int32)}, None, "into has int32 at 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            models.load_safetensors(file, into, rename)
    with pytest.raises(TypeError, match="sharding is a str"):
        models.load_pretrained(write(tmp_path / "model"), sharding="cpu")


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    folder = write(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'safetensors[<>]"):
        models.load_pretrained(folder)


# --- memory

PEAK = """
import sys
import jax.numpy as jnp
from fedjax_lab import models

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

jnp.ones((64, 64)) @ jnp.ones((64, 64))
before = status("VmRSS")
model, params = models.load_pretrained(sys.argv[1])
size = sum(leaf.nbytes for leaf in __import__("jax").tree.leaves(params))
print(size, status("VmHWM") - before)
"""


def peak_of_loading(folder, layers):
    """(bytes of the weights, peak of the memory that loading them takes), in a new process."""
    config = models.DecoderConfig(
        vocab_size=32768, width=1024, num_layers=layers, num_heads=16, num_kv_heads=4,
        mlp_width=6144, tie=True,
    )  # fmt: skip
    model = models.decoder(config, dtype="bfloat16")
    shapes = by_path(jax.eval_shape(model.init, jax.random.key(0), tokens((1, 1))))
    listed, end = {}, 0
    for path, stored in decoder_table(config).items():
        shape = stored.stored_shape(shapes[path].shape)
        for name in stored.names(shapes[path].shape):
            begin, end = end, end + 2 * math.prod(shape)
            listed[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header(listed))
        file.truncate(file.tell() + end)  # zeros, of which the disk keeps nothing
    (folder / "config.json").write_text(json.dumps(config_fields(config)))
    # Compiled as users compile: without optimisations the copies alone would take minutes.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, folder],
        capture_output=True,
        text=True,
        check=True,
        env=env | {"JAX_PLATFORMS": "cpu"},
    )
    size, peak = map(int, done.stdout.split())
    assert size == end
    return size, peak


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_gibibyte_is_loaded_without_a_second_copy(tmp_path):
    size, peak = peak_of_loading(tmp_path, layers=24)
    assert size > 2**30
    assert peak < 1.15 * size, peak / size
