"""Schedules of the command line against the papers' formulas, and a paper's symbol as an option."""

import math

import jax
import numpy as np
import pytest

from fedjax_lab import algorithms
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.runner import run
from fedjax_lab.command.schedules import client_schedule

RATE, ROUNDS = 0.4, 12


def warmup_cosine(t):
    """From 0.4 / 4 to 0.4 in 4 rounds, then half a cosine of 8 rounds."""
    return 0.1 + 0.3 * t / 4 if t < 4 else 0.2 * (1 + math.cos(math.pi * (t - 4) / 8))


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("exponential:0.5", lambda t: RATE * 0.5**t),
        ("step:5:0.1", lambda t: RATE * 0.1 ** (t // 5)),
        ("multistep:3,7:0.5", lambda t: RATE * 0.5 ** ((t >= 3) + (t >= 7))),
        ("cosine", lambda t: RATE * (1 + math.cos(math.pi * t / ROUNDS)) / 2),
        ("warmup_cosine:4", warmup_cosine),
    ],
)
def test_the_rate_of_each_round(text, rate):
    expected = [rate(t) for t in range(ROUNDS)]
    rounds = np.arange(ROUNDS)
    # As in a sweep, where the first rate is an argument of the program.
    found = jax.jit(lambda r: jax.vmap(client_schedule(text, r, ROUNDS))(rounds))(RATE)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert min(expected) > 0  # of a rate of 0 a method learns nothing, or divides by it


def test_a_constant_is_the_number_itself():
    assert client_schedule("constant", RATE, ROUNDS) is RATE


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("linear", r"one of constant, exponential:FACTOR, step:ROUNDS:FACTOR, .*\.$"),
        ("step:5", "step:ROUNDS:FACTOR"),
        ("step:0:0.1", "ROUNDS is 0; it must be at least 1"),
        ("step:x:0.1", "invalid literal"),
        ("multistep:7,3:0.1", "each ROUND must be later"),
        ("multistep:3:-1", "FACTOR is -1.0"),
        ("warmup_cosine:0", "ROUNDS is 0; it must be at least 1"),
        ("warmup_cosine:12", "ROUNDS is 12 and rounds 12; rounds must be more than the warm-up"),
    ],
)
def test_another_text_is_refused_with_the_forms(text, why):
    with pytest.raises(ValueError, match=rf"client_lr_schedule is '{text}'; .*{why}"):
        RunConfig.of(client_lr_schedule=text, rounds=ROUNDS).resolve()


def test_a_run_takes_a_schedule_and_names_it(tmp_path):
    """A factor that ends all learning: from round 1 on, no model moves."""
    small = {
        "model": "linear",
        "num_clients": 4,
        "cohort_size": 2,
        "local_steps": 1,
        "batch_size": 4,
    }
    config = RunConfig.of(rounds=3, eval_every=1, client_lr_schedule="multistep:1:1e-30", **small)
    assert (
        config.run_name() == "fedavg-digits-dirichlet0.1-client_lr_schedulemultistep1,1e-30-seed0"
    )
    history = run(config.replace(run_dir=str(tmp_path)), progress=False).history
    moves = [row["delta_norm"] for row in history]
    assert moves[0] > 1e-3
    assert max(moves[1:]) < 1e-20


@pytest.mark.parametrize(
    ("algorithm", "symbol", "means"),
    [
        ("fedprox", "mu", "the paper's mu is 'prox_weight' here."),
        ("fedavg", "eta_l", "the learning rate of the local steps is 'client_lr' here."),
    ],
)
def test_a_papers_symbol_is_answered_as_in_python(algorithm, symbol, means):
    with pytest.raises(ValueError, match=f"{symbol} is not an option of {algorithm}; {means}"):
        RunConfig.of(algorithm=algorithm, option=(f"{symbol}=0.1",)).resolve()
    with pytest.raises(TypeError, match=means):
        getattr(algorithms, algorithm)(lambda p, e, k: 0.0, client_lr=0.1, **{symbol: 0.1})
