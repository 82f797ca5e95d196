"""Strict settings for all tests: 8 CPU devices, and rank promotion is an error.

Nearly all of the tests' time goes into compiling small programs. So they are compiled without
LLVM's optimisations, and a program that another test or worker has compiled is read from a cache
that lives as long as the test run.
"""

import os
import tempfile

import jax
import pytest

os.environ.setdefault("MPLBACKEND", "agg")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
)
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="fedjax-lab-tests-", ignore_cleanup_errors=True)
    os.environ["FEDJAX_LAB_TEST_CACHE"] = _CACHE.name  # workers inherit it
jax.config.update("jax_compilation_cache_dir", os.environ["FEDJAX_LAB_TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    """Run a test in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs stay in memory otherwise: gigabytes by the end of the suite."""
    yield
    jax.clear_caches()
