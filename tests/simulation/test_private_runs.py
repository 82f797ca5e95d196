"""Runs that start from a private state: noise, cohorts, account, and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    algorithms,
    build_round,
    simulate,
    with_attack,
    with_dp,
    with_secure_aggregation,
)
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.wrappers.ledger import (
    Sampling,
    guarantees,
    one_more,
    record_cohorts,
    resume_privately,
)
from tests import federations
from tests.federations import softmax_loss
from tests.wrappers.teller import D, N, batch_of, params, teller, to_vector

DELTA = 1e-3
SETTINGS = {"cohort_size": 6, "local_steps": 1, "batch_size": 4, "client_map": "scan", "seed": 3}
CLIENTS, START = federations.signs(100), jnp.zeros((100, 2))
TURNS = math.ceil(CLIENTS.num_available / SETTINGS["cohort_size"])


def private(noise=2.0, delta=None, method=algorithms.fedavg, clip=1.0, **options):
    return with_dp(method(softmax_loss, client_lr=0.1), clip, noise, delta, **options)


def run(algorithm, state=None, rounds=1, **changes):
    start = START if state is None else None
    settings = {**SETTINGS, **changes}
    return simulate(algorithm, start, CLIENTS, state=state, rounds=rounds, **settings)


def on_paper(algorithm, state=None, rounds=1, **changes):
    """The state after a run, as far as it is private, and its epsilons; no round is computed."""
    schedule = Schedule(batch_size=4, local_steps=1, **{"cohort_size": 6, **changes})
    if state is None:
        start = record_cohorts(algorithm.init(START, CLIENTS.num_clients), schedule, CLIENTS)
        spent = guarantees(algorithm, schedule, CLIENTS)
    else:
        start = resume_privately(algorithm, state, schedule, CLIENTS)
        spent = guarantees(algorithm, schedule, CLIENTS, start)
    released = start.server.released
    for _ in range(rounds):
        released = one_more(released, algorithm.hyperparameters["dp_noise_multiplier"])
    ended = start._replace(server=start.server._replace(released=released))
    return ended, [spent(t).get("epsilon") for t in range(1, rounds + 1)]


@pytest.fixture
def counted(monkeypatch):
    """Rows whose epsilon is the number of rounds that it was asked for."""
    formula = lambda z, delta, rounds, **among: float(rounds)  # noqa: E731
    monkeypatch.setattr("fedjax_lab.wrappers.ledger.epsilon", formula)


def test_noise_and_cohorts_do_not_come_twice(counted):
    """Nor under the same seed: what one round adds is next to nothing but noise."""
    algorithm = private(1e4, DELTA, algorithms.scaffold, clip=1e-3)
    noise, cohorts, before, state = [], [], START, None
    rows = np.zeros((24, *START.shape))
    for rounds in (1, 2, 3):
        result = run(algorithm, state)
        assert [row["epsilon"] for row in result.history] == [rounds]
        noise.append(np.asarray(result.params - before).ravel())
        changed = np.asarray(result.state.clients) != rows
        cohorts.append(frozenset(np.flatnonzero(changed.reshape(24, -1).any(1))))
        before, rows, state = result.params, np.asarray(result.state.clients), result.state
    assert [len(cohort) for cohort in cohorts] == [6] * 3
    assert len(set(cohorts)) == 3
    size = noise[0].size
    likeness = np.abs(np.corrcoef(noise)[np.triu_indices(3, 1)])
    assert likeness.max() < 5 / math.sqrt(size)
    for drawn in noise:  # the mean over six
        assert drawn.std() == pytest.approx(1e4 * 1e-3 / 6, rel=5 / math.sqrt(2 * size))


@pytest.mark.methods
def test_a_round_by_hand_has_new_noise_though_its_key_is_the_same():
    """The first one has that which it always had: of the round's key and the exchange's number."""
    algorithm = with_dp(teller({"first": "sum"}), 2.0, 0.7)
    batch = batch_of(np.zeros((N, 2, D), np.float32))
    round_fn, drawn = jax.jit(build_round(algorithm, "vmap")), []
    state = algorithm.init(params(), N)
    for _ in range(3):
        state, _ = round_fn(state, batch)
        drawn.append(to_vector(state.server.inner["got"]["first"]))
    assert int(state.server.released.rounds) == 3
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert np.abs(drawn[one] - drawn[other]).min() > 1e-6
    key = jax.random.fold_in(jax.random.fold_in(batch.key, np.uint32(2**32 - 5)), 0)
    key, _ = jax.random.split(key)
    first = 1.4 * jax.random.normal(jax.random.fold_in(key, 0), (3,))
    np.testing.assert_allclose(drawn[0][:3], first, rtol=1e-6)


def test_epsilon_counts_what_was_released_before(counted):
    """Of all runs on the state, whatever their deltas."""
    state, epsilons = on_paper(private(delta=DELTA), rounds=3)
    assert epsilons == [1, 2, 3]
    state, epsilons = on_paper(private(delta=DELTA), state, rounds=2)
    assert epsilons == [4, 5]
    state, epsilons = on_paper(private(), state)
    assert epsilons == [None]
    assert on_paper(private(delta=DELTA / 2), state)[1] == [7]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["without_replacement", "poisson"])
def test_epsilon_of_two_runs_is_the_librarys(sampling):
    """Composed by dp_accounting itself."""
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import pld_privacy_accountant

    if sampling == "poisson":
        event = dp.PoissonSampledDpEvent(6 / 24, dp.GaussianDpEvent(2.0))
        spent = pld_privacy_accountant.PLDAccountant()
    else:
        event = dp.SampledWithoutReplacementDpEvent(24, 6, dp.GaussianDpEvent(1.0))
        relation = dp.NeighboringRelation.REPLACE_ONE
        spent = dp.rdp.RdpAccountant(neighboring_relation=relation)
    spent.compose(event, 3).compose(event, 2)
    algorithm = private(delta=DELTA)
    state, _ = on_paper(algorithm, rounds=3, sampling=sampling)
    _, epsilons = on_paper(algorithm, state, rounds=2, sampling=sampling)
    assert epsilons[-1] == pytest.approx(spent.get_epsilon(DELTA), rel=1e-4)


def test_clients_of_cyclic_cohorts_may_come_once_more_in_every_run():
    """The last of one run may be the first of the next: three runs of one round are three turns."""
    dp = pytest.importorskip("dp_accounting")
    state, algorithm = None, private(delta=DELTA)
    for runs in (1, 2, 3):
        state, (epsilon,) = on_paper(algorithm, state, sampling="cyclic")
        expected = dp.get_epsilon_gaussian(1 / math.sqrt(runs), DELTA)
        assert epsilon == pytest.approx(expected, rel=1e-9)
    # A whole turn more, and one round of another.
    _, epsilons = on_paper(algorithm, state, rounds=TURNS + 1, sampling="cyclic")
    expected = [dp.get_epsilon_gaussian(1 / math.sqrt(k), DELTA) for k in (4, 5)]
    assert epsilons[-2:] == pytest.approx(expected, rel=1e-9)


def test_what_is_not_known_together_is_refused(counted):
    first, _ = on_paper(private(delta=DELTA))
    say = r"state has 1 released rounds of noise_multiplier 2 and without_replacement cohorts of 6 "
    cases = [
        (private(3.0, DELTA), {}, say + r".* this run has noise_multiplier 3 and"),
        (private(delta=DELTA), {"cohort_size": 5}, say + r".* cohorts of 5 of .* omit delta"),
        (private(delta=DELTA), {"sampling": "poisson"}, say + r".* poisson cohorts"),
    ]
    for algorithm, changes, message in cases:
        with pytest.raises(ValueError, match=message):
            on_paper(algorithm, first, **changes)
    # Without an account it goes on, and the state remembers.
    many = r"state has 2 released rounds of several or unknown kinds"
    for algorithm, changes in ((private(), {"cohort_size": 5}), (private(3.0), {})):
        mixed, _ = on_paper(algorithm, first, **changes)
        with pytest.raises(ValueError, match=many):
            on_paper(private(delta=DELTA), mixed)
    own, _ = on_paper(private(), rounds=2, sample_cohort=lambda key, t: jnp.arange(6))
    with pytest.raises(ValueError, match=many):
        on_paper(private(delta=DELTA), own)


def test_rounds_that_simulate_did_not_run_are_not_accounted_for(counted):
    """A state on which nothing was run is like params."""
    algorithm = private(3.0, DELTA)
    fresh = algorithm.init(START, CLIENTS.num_clients)
    for first in (fresh, private(1.0).init(START, CLIENTS.num_clients)):
        state, epsilons = on_paper(algorithm, first)
        assert epsilons == [1]
        assert on_paper(algorithm, state)[1] == [2]
    by_hand = one_more(fresh.server.released, 3.0)
    by_hand = fresh._replace(server=fresh.server._replace(released=by_hand))
    with pytest.raises(ValueError, match="state has 1 released rounds of several or unknown kinds"):
        on_paper(algorithm, by_hand)


def test_the_numbers_in_checkpoints_keep_their_meaning():
    """Those of version 0.4; a state of that version is read by them."""
    assert {kind.name: int(kind) for kind in Sampling} == {
        "OTHER": -1,
        "NOT_RECORDED": 0,
        "CYCLIC": 1,
        "POISSON": 2,
        "WITHOUT_REPLACEMENT": 3,
    }
    for number, sampling in ((1, "cyclic"), (2, "poisson"), (3, "without_replacement")):
        state, _ = on_paper(private(), sampling=sampling)
        assert int(state.server.released.sampling) == number


def test_correlated_noise_does_not_go_on_in_another_run():
    """Neither with delta nor without: groups are dealt anew."""
    algorithm = private(noise_bands=3)
    state, _ = on_paper(algorithm, sampling="cyclic")
    with pytest.raises(ValueError, match=r"1 released rounds .* noise_bands 3; .* larger rounds"):
        run(algorithm, state, sampling="cyclic")


def test_example_noise_does_not_go_on_in_another_run():
    """A state does not say what its clients drew; without noise there is nothing to draw."""
    noised = algorithms.fedavg(softmax_loss, client_lr=0.1, example_clip=1.0, example_noise=1.0)
    state = noised.init(START, CLIENTS.num_clients)
    with pytest.raises(ValueError, match=r"state is set, and fedavg has example_noise 1\.0; .*"):
        run(noised, state)
    without = algorithms.fedavg(softmax_loss, client_lr=0.1, example_clip=1.0, example_noise=0.0)
    assert resume_privately(without, state, Schedule(6, 4, 1), CLIENTS) is state


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["none", "secure", "attack"])
def test_a_directory_goes_on_with_a_private_state(wrap, tmp_path, counted):
    """Interrupted or not, the same bits; a larger number of rounds, too."""
    algorithm = private(delta=DELTA, method=algorithms.scaffold)
    if wrap == "secure":
        algorithm = with_secure_aggregation(algorithm, 32, 1.0)
    elif wrap == "attack":
        algorithm = with_attack(algorithm, "sign_flip", share=0.2)
    state = run(algorithm, rounds=2).state
    whole = run(algorithm, state, rounds=6, eval_every=2)
    assert [row["epsilon"] for row in whole.history] == [4, 6, 8]
    for rounds in (2, 4, 6):
        parts = run(algorithm, state, rounds=rounds, eval_every=2, run_dir=tmp_path / "run")
    assert parts.history == whole.history
    for a, b in zip(jax.tree.leaves(parts.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(whole.state.server.released.rounds) == 8


@pytest.mark.slow
def test_rows_on_the_host(tmp_path, counted):
    algorithm = private(delta=DELTA, method=algorithms.scaffold)
    plain = run(algorithm, rounds=3)
    for rounds in (2, 3):
        host = run(
            algorithm, rounds=rounds, eval_every=1, client_store="host", run_dir=tmp_path / "run"
        )
    for a, b in zip(plain.state.server.released, host.state.server.released, strict=True):
        assert a == b
    np.testing.assert_array_equal(plain.params, host.params)
