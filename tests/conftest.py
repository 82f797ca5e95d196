"""Strict settings for all tests: 8 CPU devices, and rank promotion is an error.

Nearly all of the tests' time goes into compiling small programs. So they are compiled without
LLVM's optimisations and without XLA's own code generator for fused loops, which takes four times
as long, and without the lines of code that each operation comes from; and a program that another
test, another worker or an earlier run has compiled is read from a cache (``tests.kept_programs``).
FEDJAX_LAB_TEST_OPTIMIZED=1 compiles as users do, FEDJAX_LAB_TEST_PROGRAMS=off keeps no programs.
FEDJAX_LAB_TEST_PLATFORM=cuda runs on a GPU, for which `make test-gpu` has a choice of the tests.
"""

import gc
import itertools
import os
import shutil

import jax
import pytest

import fedjax_lab
from tests.kept_programs import KeptPrograms, common_folder, use_programs
from tests.tiers import long_cases

os.environ.setdefault("MPLBACKEND", "agg")
FAST_TO_COMPILE = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
]
if jax.__version_info__ < (0, 11):  # no flag since then, and an unknown one ends the process
    FAST_TO_COMPILE.append("--xla_cpu_use_fusion_emitters=false")
if "FEDJAX_LAB_TEST_OPTIMIZED" not in os.environ:
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST_TO_COMPILE]).strip()
_KEPT = None
if "FEDJAX_LAB_TEST_CACHE" not in os.environ:
    _KEPT = KeptPrograms(common_folder())
    os.environ["FEDJAX_LAB_TEST_CACHE"] = str(_KEPT.folder)  # workers inherit it
use_programs(os.environ["FEDJAX_LAB_TEST_CACHE"])
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.config.update("jax_platforms", os.environ.get("FEDJAX_LAB_TEST_PLATFORM", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


# The tests save hundreds of checkpoints, which wait for the disk; a folder in memory is as good.
_IN_MEMORY = "/dev/shm"
if os.access(_IN_MEMORY, os.W_OK) and shutil.disk_usage(_IN_MEMORY).free > 2**32:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _IN_MEMORY)


@pytest.fixture
def x64():
    """Run a test in float64."""
    with jax.enable_x64(True):
        yield


_MODULES = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs stay in memory otherwise: gigabytes by the end of the suite.

    Not after every module, because the small ones, of single operations, serve many of them.
    """
    yield
    if next(_MODULES) % 6 == 0:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _forget_signals():
    """A test whose run a signal ends must not end the next test's runs."""
    yield
    fedjax_lab.forget_signal()


def pytest_unconfigure():
    if _KEPT is not None:
        _KEPT.close()


def pytest_collection_finish():
    """Modules stay, and looking for garbage in them at every turn takes a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


# The tests over all methods, of which --methods picks some.
CATALOGUE = {
    f"test_{name}.py"
    for name in ("contract", "twins", "limits", "bad_input", "step_transform", "published")
}


def pytest_addoption(parser):
    parser.addoption("--methods", nargs="+", help="of tests/algorithms, these methods alone")
    parser.addoption("--long", action="store_true", help="the cases of long_cases.txt, too")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config, items):
    long = frozenset() if config.getoption("--long") else long_cases()
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.methods)
    chosen = config.getoption("--methods")
    if not chosen:
        return

    def methods_of(item):
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if "case" in values:
            case = values["case"]
            return {getattr(case.factory, "__name__", case.id)}  # a partial has no name
        if "limit" in values:
            return {values["limit"].left.name}
        return {values.get("name")}

    kept = [
        item for item in items if item.path.name not in CATALOGUE or methods_of(item) & set(chosen)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
