"""A run read back from its directory, and its params as files that NumPy and others read."""

import dataclasses
import json
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax_checkpoint
import pytest
from orbax.checkpoint import args as orbax

import fedjax_lab
from fedjax_lab.storage import checkpoint as checkpoint_module
from fedjax_lab.storage.checkpoint import Checkpoints
from fedjax_lab.storage.run_dir import run_id
from fedjax_lab.storage.saved_run import export_params
from tests.simulation.test_run import FEDAVG, assert_same_bits, first_params, run

SHORT = {"algorithm": FEDAVG, "rounds": 4, "checkpoint_every": 2}


class Layer(NamedTuple):
    kernel: jax.Array
    scales: list


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    return directory, run(run_dir=directory, **SHORT)


def test_a_run_is_read_without_its_method(finished):
    directory, result = finished
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    read = fedjax_lab.load_run(directory)
    assert_same_bits(read.params, result.params)
    assert read.params["w"].dtype == np.float32
    assert read.history == result.history
    assert read.config == json.loads((directory / "config.json").read_text())
    assert read.round == 4
    after = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert after == before


def test_params_that_are_no_part_of_the_state(tmp_path):
    halved = dataclasses.replace(
        FEDAVG, params=lambda state: jax.tree.map(lambda leaf: leaf / 2, state.server.params)
    )
    result = run(halved, run_dir=tmp_path, rounds=2)
    read = fedjax_lab.load_run(str(tmp_path))
    assert_same_bits(read.params, result.params)
    assert_same_bits(read.params["w"], result.state.server.params["w"] / 2)


def test_an_interrupted_run_has_the_rows_and_the_params_of_its_checkpoint(tmp_path, finished):
    def stop(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(run_dir=tmp_path, on_row=stop, **SHORT)
    read = fedjax_lab.load_run(tmp_path)
    assert (read.round, read.history) == (2, finished[1].history[:1])
    assert_same_bits(run(run_dir=tmp_path, **SHORT).params, finished[1].params)


def save(run_dir, params):
    config = {"seed": 0}
    (run_dir / "config.json").write_text(json.dumps(config))
    checkpoints = Checkpoints(run_dir / "checkpoints", run_id(config))
    checkpoints.save(3, {"server": params}, {"rows": []}, params)
    checkpoints.close()


def test_other_structures_are_nested_dicts_or_like_the_params_given(tmp_path):
    tree = {"layers": [Layer(jnp.ones((2, 3)), [jnp.float32(4), jnp.bfloat16(5)])], "b": (1.0,)}
    tree = jax.tree.map(jnp.asarray, tree)
    save(tmp_path, tree)
    nested = fedjax_lab.load_run(tmp_path).params
    assert_same_bits(nested["layers"][0]["kernel"], np.ones((2, 3), np.float32))
    assert nested["layers"][0]["scales"][1].dtype == jnp.bfloat16
    read = fedjax_lab.load_run(tmp_path, like=jax.eval_shape(lambda: tree)).params
    assert jax.tree.structure(read) == jax.tree.structure(tree)
    assert_same_bits(read, tree)
    other = {**tree, "b": (jnp.ones(2),)}
    with pytest.raises(ValueError, match=r"like has float32\[2\] at 'b/0', .* float32\[\]"):
        fedjax_lab.load_run(tmp_path, like=other)


def test_leaves_whose_paths_read_alike_are_not_mixed_up(tmp_path):
    params = {"a": {"b": jnp.zeros(2)}, "a/b": jnp.ones(2)}
    save(tmp_path, params)
    assert_same_bits(fedjax_lab.load_run(tmp_path).params, params)
    with pytest.raises(ValueError, match="two leaves have the path 'a/b'"):
        fedjax_lab.load_run(tmp_path, like=params)


def checkpoint(directory, round, **more):
    """A checkpoint whose params are its round."""
    config = {"seed": 0}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    checkpoints = Checkpoints(directory / "checkpoints", run_id(config))
    state = {"w": jnp.full(3, round), **more}
    checkpoints.save(round, state, {"rows": [{"round": round}], "times": []}, state)
    checkpoints.close()
    return state


def test_a_checkpoint_under_another_rounds_name_is_left_out(tmp_path):
    for round in (2, 4):
        state = checkpoint(tmp_path, round)
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "checkpoints" / "50")
    with pytest.warns(UserWarning, match=r"checkpoints/50 .* saved after round 4\. The last"):
        assert fedjax_lab.load_run(tmp_path).round == 2
    writer = Checkpoints(tmp_path / "checkpoints", run_id({"seed": 0}))
    with pytest.warns(UserWarning, match="saved after round 4"):
        assert writer.restore(state)[0] == 2
    assert writer.rounds() == [2]
    writer.close()


def test_checkpoints_of_version_0_3_are_read_and_bound_to_their_last_row(tmp_path, monkeypatch):
    def old(about, arrays):  # what the digests were about, and what else is noted
        return about[1] if isinstance(about[0], int) else [about[0], about[1][1]]

    digest = checkpoint_module._digest
    monkeypatch.setattr(
        checkpoint_module, "_digest", lambda arrays, about: digest(arrays, old(about, arrays))
    )
    monkeypatch.setattr(Checkpoints, "_read_back", lambda *arguments: None)
    save = orbax.JsonSave

    def without_round(meta):
        return save({name: meta[name] for name in ("run", "digest", "extra", "params")})

    monkeypatch.setattr(orbax, "JsonSave", without_round)
    for round in (2, 4):
        checkpoint(tmp_path, round)
    monkeypatch.undo()
    read = fedjax_lab.load_run(tmp_path)
    assert (read.round, read.params["w"].tolist()) == (4, [4, 4, 4])
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "checkpoints" / "50")
    with pytest.warns(UserWarning, match="saved after round 4"):
        assert fedjax_lab.load_run(tmp_path).round == 2


def test_arrays_without_values_are_kept(tmp_path):
    nothing = {"ids": np.zeros(0, np.int32), "head": np.zeros((7, 0), jnp.bfloat16)}
    state = checkpoint(tmp_path, 2, **nothing)
    reader = Checkpoints(tmp_path / "checkpoints", run_id({"seed": 0}), read_only=True)
    assert_same_bits(reader.restore(state)[1], state)
    reader.close()
    params = fedjax_lab.load_run(tmp_path).params
    assert (params["head"].shape, params["head"].dtype) == ((7, 0), jnp.bfloat16)


def test_a_reader_goes_on_to_the_checkpoint_that_took_the_place_of_another(tmp_path, monkeypatch):
    for round in (2, 4):
        checkpoint(tmp_path, round)
    reader = Checkpoints(tmp_path / "checkpoints", run_id({"seed": 0}), read_only=True)
    for round in (6, 8):  # a run goes on, and of its checkpoints the last two are kept
        checkpoint(tmp_path, round)
    round, [(path, leaf)], _ = reader.restore_params()
    assert (round, path, leaf.tolist()) == (8, ["w"], [8, 8, 8])
    reader.close()

    manager, gone = orbax_checkpoint.CheckpointManager, [FileNotFoundError, NotADirectoryError]

    def listed(*arguments, **named):
        if gone:
            raise gone.pop()("a step went while the directory was listed")
        return manager(*arguments, **named)

    monkeypatch.setattr(orbax_checkpoint, "CheckpointManager", listed)
    assert fedjax_lab.load_run(tmp_path).round == 8


def test_a_first_checkpoint_that_cannot_be_read_is_told_at_once(tmp_path, monkeypatch):
    save = orbax_checkpoint.CheckpointManager.save

    def broken(self, round, args):
        save(self, round, args=args)
        for file in (tmp_path / "checkpoints" / str(round) / "state").rglob("*"):
            if file.is_file():
                file.write_bytes(b"")

    monkeypatch.setattr(orbax_checkpoint.CheckpointManager, "save", broken)
    with pytest.raises(OSError, match=r"first checkpoint was written but cannot be read.*run_dir"):
        checkpoint(tmp_path, 2)


def test_what_is_no_run_is_named(tmp_path, finished):
    with pytest.raises(FileNotFoundError, match=r"run_dir is '.*none'; there is no such directory"):
        fedjax_lab.load_run(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"has no run: no config\.json"):
        fedjax_lab.load_run(tmp_path)
    config = finished[0] / "config.json"
    (tmp_path / "config.json").write_text(config.read_text())
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        fedjax_lab.load_run(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        fedjax_lab.load_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        fedjax_lab.load_run(tmp_path)


def test_damage_and_checkpoints_without_params(tmp_path):
    whole = run(run_dir=tmp_path, **SHORT)
    half = run(**{**SHORT, "rounds": 2})
    state = {"w": jnp.zeros(1)}
    for file in (tmp_path / "checkpoints" / "4" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\0" * 30)
    with pytest.warns(
        UserWarning, match=r"checkpoint .*4 .* The last intact checkpoint is that of round 2"
    ):
        read = fedjax_lab.load_run(tmp_path)
    assert read.round == 2
    assert_same_bits(read.params, half.params)
    assert (tmp_path / "checkpoints" / "4").exists()  # reading takes nothing away
    assert_same_bits(run(run_dir=tmp_path, **SHORT).params, whole.params)

    # As versions before wrote them: the state alone.
    config = json.loads((tmp_path / "config.json").read_text())
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text(json.dumps(config))
    checkpoints = Checkpoints(old / "checkpoints", run_id(config))
    checkpoints.save(2, state, {"rows": []})
    assert checkpoints.restore(like=state)[0] == 2
    checkpoints.close()
    with pytest.raises(FileNotFoundError, match="no separate params"):
        fedjax_lab.load_run(old)
    other = Checkpoints(old / "checkpoints", "another", read_only=True)
    with pytest.raises(ValueError, match="belong to different runs"):
        other.restore(like=state)
    other.close()


NESTED = {
    "blocks_0": {"dense": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3).T}},
    "file": np.float32(3.5),
    "empty": np.zeros((0, 2), np.float64),
    "steps": [np.arange(3, dtype=np.int32)],
}
NAMES = ["blocks_0/dense/kernel", "empty", "file", "steps/0"]


def assert_same_arrays(read):
    assert sorted(read) == NAMES
    for name, leaf in zip(NAMES, jax.tree.leaves(NESTED), strict=True):
        assert (read[name].dtype, read[name].shape) == (leaf.dtype, np.shape(leaf))
        assert read[name].tobytes() == np.asarray(leaf).tobytes()


def test_npz_is_read_by_numpy(tmp_path):
    file = tmp_path / "model.npz"
    file.write_bytes(b"an older one")
    assert sorted(export_params(NESTED, file)) == NAMES
    with np.load(file, allow_pickle=False) as read:
        assert_same_arrays({name: read[name] for name in read.files})
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]


def test_safetensors_is_read_by_its_own_library(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    file = tmp_path / "model.safetensors"
    export_params(NESTED, file)
    assert_same_arrays(numpy.load_file(file))
    half = {"w": jnp.arange(5, dtype=jnp.bfloat16) / 3}
    export_params(half, file)
    flax = pytest.importorskip("safetensors.flax")
    assert_same_bits(flax.load_file(file), half)


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'safetensors[<>]"):
        export_params(first_params(), tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "params", "error", "message"),
    [
        ("m.bin", NESTED, ValueError, r"m\.bin'; it must end in \.npz or \.safetensors or \.pt"),
        ("no/m.npz", NESTED, FileNotFoundError, "there is no directory"),
        ("m.npz", {"a/b": np.ones(1), "a": {"b": np.ones(1)}}, ValueError, "the path 'a/b'"),
        ("m.npz", {"w": jnp.ones(1, jnp.bfloat16)}, ValueError, r"bfloat16 at 'w'.*safetensors"),
    ],
)
def test_what_cannot_be_exported(tmp_path, name, params, error, message):
    with pytest.raises(error, match=message):
        export_params(params, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
