"""Strict settings for all tests: 8 CPU devices, and rank promotion is an error."""

import os

import jax
import pytest

os.environ.setdefault("MPLBACKEND", "agg")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """Run a test in float64."""
    with jax.enable_x64(True):
        yield
