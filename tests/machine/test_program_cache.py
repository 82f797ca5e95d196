"""Compiled programs on disk: where, when by default, after a killed process; and the same twice."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from filelock import FileLock
from jax._src.lru_cache import LRUCache

from fedjax_lab import CohortBatch, algorithms, build_round, models
from fedjax_lab.machine import program_cache as programs
from fedjax_lab.machine.program_cache import keep_by_default, keep_programs
from fedjax_lab.storage.fingerprint import hash_program

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_compilation_cache_max_size",
    "jax_enable_compilation_cache",
)


@pytest.fixture
def nothing_chosen(monkeypatch, tmp_path):
    """As in a user's script: no cache chosen, and a home of its own."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(programs.VARIABLE, raising=False)
    monkeypatch.delenv("PYTEST_VERSION")
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def folder():
    return jax.config.jax_compilation_cache_dir


def test_by_default_and_said_where_the_folder_is_new(nothing_chosen, tmp_path, capsys):
    keep_by_default()
    kept = Path(folder())
    assert kept.parent == tmp_path / "fedjax_lab" / "programs"
    assert kept.stat().st_mode & 0o077 == 0
    assert jax.config.jax_compilation_cache_max_size == 2**30
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.1
    said = capsys.readouterr().err
    assert said == (
        f"fedjax_lab: compiled programs are stored in {kept} (FEDJAX_LAB_PROGRAMS=off: never)\n"
    )
    keep_by_default()
    jax.config.update("jax_compilation_cache_dir", None)  # as in the next process
    keep_by_default()
    assert folder() == str(kept)
    assert capsys.readouterr().err == ""


def test_quiet(nothing_chosen, capsys):
    keep_by_default(quiet=True)
    assert folder() is not None
    assert capsys.readouterr().err == ""


def test_never_in_tests_unless_asked(nothing_chosen, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_VERSION", "9")
    keep_by_default()
    assert folder() is None
    monkeypatch.setenv(programs.VARIABLE, str(tmp_path / "asked"))
    keep_by_default()
    assert folder() == str(tmp_path / "asked")


def test_off(nothing_chosen, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(programs.VARIABLE, "off")
    keep_by_default()
    assert not keep_programs(tmp_path)
    monkeypatch.delenv(programs.VARIABLE)
    jax.config.update("jax_enable_compilation_cache", False)  # the user's own word
    keep_by_default()
    assert folder() is None
    assert capsys.readouterr().err == ""


def test_what_the_user_chose_stays(nothing_chosen, monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_max_size", 1000)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3.0)
    assert keep_programs(tmp_path / "mine")
    assert jax.config.jax_compilation_cache_max_size == 1000
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 3.0
    assert not keep_programs(tmp_path / "other")
    assert folder() == str(tmp_path / "mine")


def test_halves_of_a_killed_process_are_thrown_away(nothing_chosen, tmp_path):
    whole, cut = tmp_path / "a-1-cache", tmp_path / "b-2-cache"
    for path in (whole, cut):
        path.write_bytes(b"program")
    (tmp_path / "a-1-atime").write_bytes(bytes(8))
    (tmp_path / "other.txt").write_text("not ours")
    keep_programs(tmp_path)
    assert names(tmp_path) == {"a-1-cache", "a-1-atime", "other.txt"}


def names(path):
    return {file.name for file in path.iterdir()} - {".lockfile"}


def store(path, count):
    """Programs that were used one after the other, as JAX stores them."""
    cache = LRUCache(str(path), max_size=2**30)
    for i in range(count):
        cache.put(f"program-{i}", b"program")
        (path / f"program-{i}-atime").write_bytes((10**18 + i).to_bytes(8, "little"))


def test_the_most_recently_used_programs_stay(nothing_chosen, monkeypatch, tmp_path):
    """JAX looks at all programs when it stores one, so there are never many of them."""
    monkeypatch.setattr(programs, "_MOST_PROGRAMS", 5)
    store(tmp_path, 12)
    assert LRUCache(str(tmp_path), max_size=2**30).get("program-2") == b"program"  # used again
    keep_programs(tmp_path)
    left = {f"program-{i}-{kind}" for i in (2, 8, 9, 10, 11) for kind in ("cache", "atime")}
    assert names(tmp_path) == left


def test_another_processes_programs_stay_while_it_stores_one(nothing_chosen, monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "_MOST_PROGRAMS", 5)
    store(tmp_path, 12)
    with FileLock(tmp_path / ".lockfile", is_singleton=False):
        assert keep_programs(tmp_path)
    assert len(names(tmp_path)) == 24


def test_a_limit_of_the_users_is_the_only_one(nothing_chosen, monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "_MOST_PROGRAMS", 5)
    store(tmp_path, 12)
    jax.config.update("jax_compilation_cache_max_size", 2**20)
    keep_programs(tmp_path)
    assert len(names(tmp_path)) == 24


def test_a_folder_that_cannot_be_used_is_warned_of(nothing_chosen, monkeypatch, tmp_path):
    monkeypatch.setenv(programs.VARIABLE, str(tmp_path / "taken"))
    (tmp_path / "taken").write_text("")
    with pytest.warns(UserWarning, match="compiled programs cannot be stored: "):
        keep_by_default()
    assert folder() is None


def test_a_user_without_a_home_is_warned(nothing_chosen, monkeypatch):
    """As under a number without a name in a container."""

    def no_entry(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    with pytest.warns(UserWarning, match="cannot be stored: the user has no home; set HOME"):
        keep_by_default()
    assert folder() is None


@pytest.mark.parametrize("variable", [programs.VARIABLE, "XDG_CACHE_HOME"])
def test_no_folder_is_called_tilde(nothing_chosen, monkeypatch, tmp_path, variable):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv(variable, "~/programs")
    with pytest.warns(UserWarning, match=f"cannot be stored: {variable} is '~/programs', in which"):
        keep_by_default()
    assert folder() is None
    assert not any(tmp_path.iterdir())


def test_the_program_that_draws_a_model_is_kept_too(nothing_chosen):
    models.build("mlp", num_classes=2, hidden=(4,)).init(jax.random.key(0), jnp.ones((1, 3)))
    assert folder() is not None


HELPER = {"power": 2}


def helped(x):
    return x ** HELPER["power"]


def test_what_a_round_depends_on_changes_its_text(monkeypatch):
    """By which a program is found: an old one is never taken for another loss."""

    def text(factor=1.0, rate=0.1, function=helped):
        def loss_fn(params, examples, key):
            return factor * function(params["w"] * examples)

        algorithm = algorithms.fedavg(loss_fn, client_lr=rate)
        state = algorithm.init({"w": jnp.ones(())}, 3)
        batch = CohortBatch(jnp.arange(2), jnp.ones((2, 1, 1)), jax.random.key(0), jnp.int32(0))
        return hash_program(jax.jit(build_round(algorithm, "scan")).lower(state, batch))

    decays = [optax.exponential_decay(0.1, 10, rate) for rate in (0.5, 0.9)]
    found = [text(), text(factor=2.0), text(function=jnp.abs)]
    found += [text(rate=0.2), *(text(rate=decay) for decay in decays)]
    monkeypatch.setitem(HELPER, "power", 3)
    found.append(text())
    assert len(set(found)) == len(found)
    monkeypatch.setitem(HELPER, "power", 2)
    assert text() == found[0]


PROGRAM = """
import jax
from fedjax_lab import algorithms, build_round, CohortBatch
from fedjax_lab.storage.fingerprint import hash_program
import jax.numpy as jnp

def loss_fn(params, examples, key):
    return jnp.square(params["w"] * examples)

algorithm = algorithms.scaffold(loss_fn, client_lr=0.1)
state = algorithm.init({"w": jnp.ones(())}, 3)
key = jax.random.key(0)
batch = CohortBatch(jnp.arange(2), jnp.ones((2, 1, 1)), key, jnp.int32(0))
print(hash_program(jax.jit(build_round(algorithm, "scan")).lower(state, batch)))
"""


@pytest.mark.methods
def test_a_program_is_the_same_in_every_process():
    """Else a kept one is not found again, and a run directory would hold another run."""
    seeds = ("1", "2")  # of Python's hashes of text, after which sets order "loss" and "delta_norm"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in seeds
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    assert said[0]
    assert said[0] == said[1]
