"""Runs share what is compiled for them: a program takes a hundred times as long as its rounds."""

import importlib

import pytest

chunks = importlib.import_module("fedjax_lab.simulation.chunks")


@pytest.fixture(autouse=True, scope="module")
def _programs_are_shared():
    """``simulate`` traces and compiles once for all runs of one algorithm object and schedule."""
    kept = {}
    build_chunk = chunks.build_chunk

    def kept_chunk(run, place, state_sharding):
        where = place.client_map.name, place.client_store
        layout = repr((place.params_sharding, state_sharding))  # shardings have no hash
        key = (id(run.algorithm), run.schedule, run.in_round, *where, layout)
        if key not in kept:  # with its arguments, so that no other ones get their ids
            kept[key] = build_chunk(run, place, state_sharding), run, place
        return kept[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "build_chunk", kept_chunk)
        yield
