"""The client map of a run is parsed once, and travels as the value that came of it."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_lab
from fedjax_lab import algorithms, data, simulate
from fedjax_lab.clients import planner
from fedjax_lab.clients.mapping import ClientMap

PACKAGE = str(Path(fedjax_lab.__file__).parent)


def visits(client_map):
    """The functions of the package that get the client map, from ``simulate`` to its programs."""
    x = np.ones((12, 2), np.float32)
    clients = data.from_clients({str(i): (x[i::3], x[i::3, 0]) for i in range(3)})
    method = algorithms.fedavg(lambda p, examples, key: examples[0] @ p["w"], client_lr=0.1)
    found = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            count = code.co_argcount + code.co_kwonlyargcount
            values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
            text = (value for value in values if isinstance(value, str))
            if any(isinstance(v, ClientMap) for v in values) or client_map in text:
                found.append(code.co_name)

    plan = {"rounds": 1, "cohort_size": 2, "local_steps": 1, "batch_size": 2}
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        simulate(method, {"w": jnp.ones(2)}, clients, client_map=client_map, **plan)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize(
    "client_map", [pytest.param("chunk:2", marks=pytest.mark.methods), "shard_map:2"]
)
def test_a_client_map_is_parsed_once_and_ten_functions_get_it_at_most(client_map):
    found = visits(client_map)
    assert found[0] == "simulate"
    assert found.count("parse_client_map") == 1
    assert len(found) <= 10


@pytest.mark.methods
def test_a_map_that_cannot_divide_the_rows_is_not_measured(monkeypatch, tmp_path):
    """``scan`` would be the faster one, and end the run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seconds = iter((2.0, 1.0))
    monkeypatch.setattr(planner, "timed", lambda run: next(seconds))
    x = np.ones((24, 2), np.float32)
    clients = data.from_clients({str(i): (x[i::8], x[i::8, 0]) for i in range(8)})
    method = algorithms.scaffold(lambda p, examples, key: examples[0] @ p["w"], client_lr=0.1)
    plan = {"rounds": 1, "cohort_size": 4, "local_steps": 1, "batch_size": 2}
    maps = {"client_map": "measure", "client_store": "sharded"}
    simulate(method, {"w": jnp.ones(2)}, clients, run_dir=tmp_path / "run", **maps, **plan)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["client_map"] == "shard_map:4"


@pytest.mark.parametrize("store", ["auto", "sharded"])
def test_a_run_takes_as_many_devices_as_shorten_it_also_with_small_rounds(tmp_path, store):
    """So that the bits are those of other stores and of several processes."""
    x = np.ones((24, 2), np.float32)
    clients = data.from_clients({str(i): (x[i::8], x[i::8, 0]) for i in range(8)})
    method = algorithms.scaffold(lambda p, examples, key: examples[0] @ p["w"], client_lr=0.1)
    plan = {"rounds": 1, "cohort_size": 4, "local_steps": 1, "batch_size": 2}
    simulate(method, {"w": jnp.ones(2)}, clients, client_store=store, run_dir=tmp_path, **plan)
    config = json.loads((tmp_path / "config.json").read_text())
    found = [config[name] for name in ("client_map", "client_store", "num_devices")]
    assert found == ["shard_map:4", "sharded", 4]
