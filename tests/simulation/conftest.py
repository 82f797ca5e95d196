"""Runs share what is compiled for them: a program takes a hundred times as long as its rounds."""

import importlib

import pytest

simulation = importlib.import_module("fedjax_lab.simulation.run")


@pytest.fixture(autouse=True, scope="module")
def _programs_are_shared():
    """``simulate`` traces and compiles once for all runs of one algorithm object and schedule."""
    kept = {}
    build_chunk = simulation.build_chunk

    def kept_chunk(algorithm, *settings):
        key = (id(algorithm), *settings[:5], repr(settings[5:]))  # shardings have no hash
        if key not in kept:  # with its arguments, so that no other ones get their ids
            kept[key] = build_chunk(algorithm, *settings), algorithm, settings
        return kept[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "build_chunk", kept_chunk)
        yield
