"""Runs share what is compiled for them, as those of tests/simulation do."""

from tests.simulation.conftest import _programs_are_shared  # noqa: F401
