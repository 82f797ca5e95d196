"""Robust rules against NumPy, against attackers of 1e6, and around every method."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_lab import algorithms, build_round, with_robust_aggregation
from fedjax_lab.wrappers import rules
from tests.algorithms.cases import MAIN
from tests.algorithms.cases import N as CLIENTS
from tests.algorithms.problem import (
    CLIENT_MAPS,
    drawn,
    finish,
    flat,
    initial_params,
    loss_fn,
)
from tests.reference import robust_numpy as twin
from tests.tiers import few
from tests.wrappers.teller import D, N, batch_of, params, teller, to_vector

RULES = (
    *("median", "trimmed_mean:0.2", "trimmed_mean:0.4", "krum:2", "multi_krum:2:3"),
    *("geometric_median", "norm_clip:1.5"),
)
COUNT = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1], bool)  # of N slots
WEIGHTS = np.array([1, 2, 3, 4, 0.5, 1, 1, 2, 0.7])


def by_hand(rule, messages, weights, scope="global"):
    """What the fields become, [2, D], of the messages [n, 2, D] that count."""
    n, weights = len(messages), weights / weights.sum()
    parts = {
        "global": [messages.reshape(n, -1)],
        "per_field": [messages[:, 0], messages[:, 1]],
        "per_leaf": [messages[:, i, part] for i in (0, 1) for part in (slice(0, 3), slice(3, 7))],
    }[scope]
    if rule.startswith("norm_clip"):
        limit = float(rule.split(":")[1])
        first = [twin.norm_clip(x, weights, limit) for x in parts]
        second = [twin.norm_clip(x, np.ones(n), limit) for x in parts]
        return np.stack([np.concatenate(first)[:D], np.concatenate(second)[D:]])
    name, *numbers = rule.split(":")
    result = {
        "median": lambda x: twin.median(x),
        "trimmed_mean": lambda x: twin.trimmed_mean(x, int(float(numbers[0]) * n)),
        "krum": lambda x: twin.multi_krum(x, int(numbers[0]), 1),
        "multi_krum": lambda x: twin.multi_krum(x, *map(int, numbers)),
        "geometric_median": lambda x: twin.geometric_median(x, weights),
    }[name]
    fields = np.concatenate([result(x) for x in parts]).reshape(2, D)
    return fields * np.array([[1], [n]])


def round_of(algorithm, client_map="vmap", on_nonfinite="exclude"):
    """batch -> (what the server got [2, D], metrics)."""
    round_fn = jax.jit(build_round(algorithm, client_map, on_nonfinite))

    def run(batch):
        state, metrics = round_fn(algorithm.init(params(batch.examples.dtype), N), batch)
        return np.stack([to_vector(field) for field in state.server["got"].values()]), metrics

    return run


def run(algorithm, batch, client_map="vmap"):
    return round_of(algorithm, client_map)(batch)


def draw(seed=0, n=N):
    return np.random.default_rng(seed).normal(size=(n, 2, D)) * [[[1], [3]]]


SCOPED = [
    pytest.param(
        rule,
        scope,
        marks=()
        if scope == "global" or (rule, scope) in [("krum:2", "per_leaf"), (RULES[-1], "per_field")]
        else pytest.mark.slow,
    )
    for rule in RULES
    for scope in ("global", "per_field", "per_leaf")
]


@pytest.mark.parametrize(("rule", "scope"), SCOPED)
def test_rules_agree_with_their_twins_over_those_who_count(rule, scope, x64):
    """Absent clients, padded slots, weights of 0 and what is not finite reach no rule."""
    messages, ids = draw(), np.arange(N)
    messages[2], messages[7] = 1e9, -1e9
    expected = by_hand(rule, messages[COUNT], WEIGHTS[COUNT], scope)
    tolerance = 1e-3 if rule == "geometric_median" else 1e-9  # it stops near its limit
    algorithm = with_robust_aggregation(teller(), rule, scope=scope)
    present = np.ones(N, bool)
    weightless, broken = (
        np.where(COUNT, WEIGHTS, 0),
        np.where(COUNT[:, None, None], messages, np.nan),
    )
    batches = [
        batch_of(messages, weights=WEIGHTS, participates=COUNT, ids=ids),
        batch_of(messages, weights=weightless, participates=present, ids=ids),
        batch_of(messages, weights=WEIGHTS, participates=present, ids=np.where(COUNT, ids, N)),
        batch_of(broken, weights=WEIGHTS, participates=present, ids=ids),
    ]
    run = round_of(algorithm)
    for number, batch in enumerate(batches):
        actual, metrics = run(batch)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
        assert metrics["nonfinite_clients"] == (2 if number == 3 else 0)
    if rule == "median":
        actual, _ = round_of(algorithm, "vmap", "keep")(batches[3])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "client_map",
    [pytest.param(m, marks=() if m == "chunk:2" else pytest.mark.slow) for m in CLIENT_MAPS[1:]],
)
def test_every_client_map(client_map):
    """With a cohort that the maps have to pad."""
    messages = draw(1).astype(np.float32)
    batch = batch_of(messages, weights=WEIGHTS, participates=COUNT)
    rule = "multi_krum:2:3"
    algorithm = with_robust_aggregation(teller(), rule)
    expected = by_hand(rule, messages[COUNT].astype(float), WEIGHTS[COUNT])
    np.testing.assert_allclose(run(algorithm, batch, client_map)[0], expected, atol=1e-5)


# The largest number of attackers among 9 that a rule is meant for, and how far it may then be from
# the honest clients' mean, in units of what the function is given.
BOUNDS = {
    # The median and each value left by trimming lie within the honest range of a coordinate.
    "median": (4, lambda honest: np.abs(honest - honest.mean(0)).max(0)),
    "trimmed_mean:0.4": (3, lambda honest: np.abs(honest - honest.mean(0)).max(0)),
    # Krum: n = 2 F + 3 with F = 3. An honest message has its n - F - 2 neighbours among the honest.
    # A chosen attacker has at most F - 1 attackers among its neighbours, so that one honest client
    # is nearer than the worst honest score's root.
    "krum:3": (3, lambda honest: 3 * _diameter(honest) * np.sqrt(4)),
    "multi_krum:3:6": (3, lambda honest: 3 * _diameter(honest) * np.sqrt(4)),
    # 2 (1 - a) / (1 - 2 a) times the radius (Wu et al., IEEE TSP 2020, Lemma 1), a = 4/9.
    "geometric_median": (4, lambda honest: 2 * (5 / 9) / (1 / 9) * _radius(honest)),
}


def _radius(honest):
    return np.linalg.norm(honest - honest.mean(0), axis=1).max()


def _diameter(honest):
    return max(np.linalg.norm(a - b) for a in honest for b in honest)


@pytest.mark.parametrize("rule", few(2, BOUNDS))
def test_breakdown(rule):
    """So many attackers of 1e6 move the result no further than the theorem allows; a mean, far."""
    attackers, bound = BOUNDS[rule]
    plain = teller({"first": "mean", "second": "mean"})
    run = round_of(with_robust_aggregation(plain, rule))
    for seed, lie in enumerate((1e6, -1e6, "each", "split")):
        messages = draw(seed).astype(np.float32)
        honest = messages[attackers:].reshape(N - attackers, -1).astype(float)
        if lie == "each":
            messages[:attackers] = 1e6 * draw(7, attackers)
        else:
            signs = np.where(np.arange(attackers) % 2, 1, -1) if lie == "split" else 1
            value = 1e6 if lie == "split" else lie
            messages[:attackers] = value * np.broadcast_to(signs, (attackers,))[:, None, None]
        got = run(batch_of(messages))[0].reshape(-1)
        moved = got - honest.mean(0)
        limit = bound(honest)
        assert (np.linalg.norm(moved) if np.ndim(limit) == 0 else np.abs(moved) - limit).max() <= (
            limit + 1e-2 if np.ndim(limit) == 0 else 1e-5
        )
        if lie != "split":
            assert np.linalg.norm(messages.reshape(N, -1).mean(0)) > 1e5


@pytest.mark.parametrize("n", [11, 25, 51, 101])
def test_the_geometric_median_of_nearly_half_attackers(n):
    """40 to 49 %: within the bound, and where Weiszfeld's steps in float64 end."""
    rng = np.random.default_rng(n)
    for attackers in sorted({-(-2 * n // 5), int(0.45 * n), (n - 1) // 2 if n < 100 else 49}):
        for size in (1e3, 1e6, 1e9):
            x = rng.normal(size=(n, 20)).astype(np.float32)
            x[:attackers] = size * rng.normal(size=20)
            honest, share = x[attackers:].astype(float), attackers / n
            got = compiled("geometric_median", n)(x)
            bound = 2 * (1 - share) / (1 - 2 * share) * _radius(honest)
            assert np.linalg.norm(got - honest.mean(0)) <= bound
            exact = twin.geometric_median(x.astype(float), np.full(n, 1 / n), 2000)
            assert np.linalg.norm(got - exact) <= 5e-3 * _radius(honest)


def test_the_geometric_median_of_many_attackers_of_little_weight():
    """The weights count, not the clients: six of nine attack, with 30 % of the weight."""
    x = draw(5)[:, 0].astype(np.float32)
    x[:6] = 1e6
    weights = np.array([0.05] * 6 + [0.25, 0.25, 0.2])
    shares = jax.jit(rules.geometric_median)(x, jnp.float32(weights), jnp.ones(N, bool))
    exact = twin.geometric_median(x.astype(float), weights, 2000)
    np.testing.assert_allclose(shares @ x, exact, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6])
def test_the_geometric_median_has_no_scale_of_its_own(scale):
    x = np.random.default_rng(4).normal(size=(9, 5))
    x[0] = 1e3
    got = compiled("geometric_median", 9)(np.float32(scale * x)) / scale
    np.testing.assert_allclose(got, twin.geometric_median(x, np.full(9, 1 / 9), 2000), atol=1e-3)


def test_clipping_bounds_what_one_client_does():
    """A client of weight w moves the mean by at most 2 w C."""
    run = round_of(with_robust_aggregation(teller(), "norm_clip:1.5"))
    messages = draw(2).astype(np.float32)
    ends = []
    for value in (1e6, -1e6, 1e30):
        messages[4] = value
        ends.append(run(batch_of(messages, weights=WEIGHTS))[0])
    share = WEIGHTS[4] / WEIGHTS.sum()
    for end in ends[1:]:
        moved = (end - ends[0]) / np.array([[share], [1]])
        assert np.linalg.norm(moved) <= 2 * 1.5 * (1 + 1e-5)
    assert np.isfinite(ends[2]).all()


@functools.cache
def compiled(rule, n):
    parsed = rules.parse_rule(rule)
    counts = jnp.ones(n, bool)

    @jax.jit
    def combine(x):
        if parsed.entrywise:
            return parsed.entrywise(x, counts)
        return parsed.shares({"x": x}, jnp.full(n, 1 / n), counts) @ x

    return combine


@pytest.mark.parametrize("rule", [r for r in RULES if "clip" not in r])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), shift=st.floats(-100, 100), order=st.permutations(range(9)))
def test_order_and_place_do_not_matter(rule, seed, shift, order):
    """A rule of shuffled and shifted messages is the shifted rule."""
    x = np.random.default_rng(seed).normal(size=(9, 5)).astype(np.float32)
    there = compiled(rule, 9)(x)
    moved = compiled(rule, 9)(x[list(order)] + np.float32(shift))
    np.testing.assert_allclose(moved - np.float32(shift), there, atol=3e-4)


def test_many_coordinates_are_taken_some_at_a_time(monkeypatch):
    monkeypatch.setattr(rules, "_AT_ONCE", 50)
    x = np.random.default_rng(3).normal(size=(9, 4, 6)).astype(np.float32)
    actual = rules.trimmed_mean(jnp.asarray(x), jnp.ones(9, bool), lambda n: (n - 1) // 2)
    np.testing.assert_allclose(actual, np.median(x, axis=0))


def test_equal_values_are_cut_once_each():
    x = np.array([1, 1, 1, 1, 5, 0, 0, 0, 0], np.float32)[:, None]
    for cut in range(5):
        actual = rules.trimmed_mean(jnp.asarray(x), jnp.ones(9, bool), lambda n, cut=cut: cut)
        np.testing.assert_allclose(actual, twin.trimmed_mean(x, cut), rtol=1e-6)


def test_a_share_is_what_it_says():
    """0.29 of 100 are 29, though 0.29 * 100 is less in floating point."""
    x = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    rule = rules.parse_rule("trimmed_mean:0.29")
    actual = rule.entrywise(jnp.asarray(x), jnp.ones(100, bool))
    np.testing.assert_allclose(actual, twin.trimmed_mean(x.astype(float), 29), atol=1e-6)


LIKE_A_MEAN = ("trimmed_mean:0", f"multi_krum:0:{4}", "norm_clip:1e9")


MEANS = [(name, rule) for name in ("fedavg", "scaffold") for rule in LIKE_A_MEAN]


@pytest.mark.parametrize(
    ("name", "rule"),
    [pytest.param(*m, marks=pytest.mark.slow if i != 4 else ()) for i, m in enumerate(MEANS)],
)
@pytest.mark.slow
def test_rules_that_are_means_are_the_plain_method(name, rule, x64):
    plain = getattr(algorithms, name)(loss_fn, client_lr=0.2, server_lr=0.8)
    batches = drawn(equal_steps=True, has_weights=False)
    expected, _ = finish(plain, batches)
    actual, _ = finish(with_robust_aggregation(plain, rule), batches)
    chex.assert_trees_all_close(actual, expected, atol=1e-12)


@pytest.mark.slow
def test_clipping_far_away_keeps_the_weights(x64):
    plain = algorithms.scaffold(loss_fn, client_lr=0.2)
    expected, _ = finish(plain, drawn())
    actual, _ = finish(with_robust_aggregation(plain, "norm_clip:1e9"), drawn())
    chex.assert_trees_all_close(actual, expected, atol=1e-12)


def test_a_field_without_arrays_is_left_as_it_is():
    plain = teller()
    (inner,) = plain.phases

    def client_update(received, row, batch):
        message, row, report = inner.client_update(received, row, batch)
        return {**message, "none": ()}, row, report

    phase = inner._replace(
        client_update=client_update,
        reduce={**inner.reduce, "none": "mean"},
        message=lambda params: {"first": params, "second": params, "none": ()},
    )
    own = dataclasses.replace(plain, phases=(phase,))
    messages = draw(4).astype(np.float32)
    for rule in ("norm_clip:1", "krum:1"):
        expected, actual = (
            run(with_robust_aggregation(method, rule, scope="per_field"), batch_of(messages))[0]
            for method in (plain, own)
        )
        np.testing.assert_array_equal(actual, expected)


def test_a_function_is_a_rule():
    seen = []

    def first_in_line(messages, weights):
        seen.append(jax.tree.map(jnp.shape, (messages, weights)))
        return jax.tree.map(lambda leaf: leaf[weights.argmax()], messages)

    messages = draw(4).astype(np.float32)
    algorithm = with_robust_aggregation(teller(), first_in_line)
    got, _ = run(algorithm, batch_of(messages, weights=WEIGHTS))
    np.testing.assert_allclose(got, messages[3] * [[1], [N]], rtol=1e-6)
    assert seen[0][0]["first"] == {"v": (N, 3), "w": (N, 2, 2)}
    assert algorithm.hyperparameters["rule"]["function"].endswith("first_in_line")
    wrong = with_robust_aggregation(teller(), lambda messages, weights: messages)
    with pytest.raises(ValueError, match=r"rule returned arrays .* they must be"):
        run(wrong, batch_of(messages))


ONE_BY_ONE = {"gradma", "gradma_s", "fedexp"}
FEW = ("mime", "gradma_s")


def around(case):
    plain = case.build(case.problem.loss)
    if case.id == "local_only":
        with pytest.raises(
            ValueError, match="algorithm is local_only, whose clients send no messages"
        ):
            with_robust_aggregation(plain, "median")
        return
    if case.id in ONE_BY_ONE:
        with pytest.raises(ValueError, match=rf"algorithm is {case.id}, .* delta of each client"):
            with_robust_aggregation(plain, "median")
        algorithm = with_robust_aggregation(plain, "norm_clip:0.1")
    else:
        algorithm = with_robust_aggregation(plain, "median")
    batches = drawn(equal_steps=True)
    start = case.problem.initial_params()
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    state = jax.jit(lambda p: algorithm.init(p, CLIENTS, batches[0]))(start)
    first = state
    for batch in batches:
        state, metrics = round_fn(state, batch)
    chex.assert_trees_all_equal_shapes_and_dtypes(first, state)
    moved = case.problem.flat(algorithm.params(state)) - case.problem.flat(start)
    assert np.isfinite(moved).all()
    assert np.abs(moved).max() > 1e-4
    assert all(np.isfinite(value) for value in metrics.values())
    assert algorithm.uplink(start) == plain.uplink(start)
    nobody = batches[0]._replace(participates=jnp.zeros(4, bool))
    chex.assert_trees_all_equal(round_fn(state, nobody)[0], state)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c.id in FEW else pytest.mark.slow) for c in MAIN],
    ids=lambda case: case.id,
)
@pytest.mark.slow
def test_every_method(case):
    around(case)


@pytest.mark.slow
def test_first_estimates_pass_the_rule():
    """One client of four lies about its gradient: the median of the others' is what counts."""
    algorithm = algorithms.fafed(loss_fn, client_lr=0.1, momentum=0.5, second_moment_decay=0.9)
    robust = with_robust_aggregation(algorithm, "median")
    (batch,) = drawn(count=1, equal_steps=True)
    x = np.array(batch.examples["x"])
    x[1] *= 1e4
    spoilt = batch._replace(examples=batch.examples | {"x": jnp.asarray(x)})
    norms = []
    for method in (algorithm, robust):
        state = jax.jit(lambda p, b, m=method: m.init(p, CLIENTS, b))(initial_params(), spoilt)
        state, _ = jax.jit(method.round_fn)(state, spoilt)
        norms.append(np.abs(flat(state.server.momentum)).max())
    assert norms[0] > 100 > 10 > norms[1]


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        ("medain", r"rule is 'medain'; .*Did you mean 'median'"),
        ("median:2", r"rule is 'median:2'; it must be of the form median"),
        ("trimmed_mean", r"of the form trimmed_mean:SHARE"),
        ("trimmed_mean:0.5", r"SHARE must be at least 0 and less than 0\.5"),
        ("trimmed_mean:-0.1", r"SHARE must be at least 0"),
        ("trimmed_mean:x", r"SHARE is 'x', which is not a number"),
        ("trimmed_mean:nan", r"not a number"),
        ("krum:1.5", r"F is '1\.5', which is not an integer"),
        ("krum:-1", r"F must be at least 0"),
        ("multi_krum:1:0", r"M at least 1"),
        ("multi_krum:1", r"multi_krum:F:M"),
        ("norm_clip:0", r"C must be finite and greater than 0"),
        ("norm_clip:inf", r"C must be finite"),
    ],
)
def test_wrong_rules(rule, match):
    with pytest.raises(ValueError, match=match):
        with_robust_aggregation(teller(), rule)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="rule is 3"):
        with_robust_aggregation(teller(), 3)
    with pytest.raises(ValueError, match="scope is 'field'"):
        with_robust_aggregation(teller(), "median", scope="field")
    for rule, needed in (("krum:4", 11), ("multi_krum:3:7", 10)):
        algorithm = with_robust_aggregation(teller(), rule)
        with pytest.raises(ValueError, match=rf"rule is '{rule}', .* {needed} clients; .* has 9"):
            run(algorithm, batch_of(draw()))
    run(with_robust_aggregation(teller(), "krum:3"), batch_of(draw()))
    with pytest.raises(ValueError, match=r"'trimmed_mean:0.1', .* 10 clients; .*would cut nothing"):
        run(with_robust_aggregation(teller(), "trimmed_mean:0.1"), batch_of(draw()))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "fewest"), [("krum:2", 7), ("trimmed_mean:0.15", 7)])
def test_too_few_who_count_are_told_of(rule, fewest):
    """Nine slots are enough, but some clients are absent."""
    run = round_of(with_robust_aggregation(teller(), rule))
    for there in (fewest, fewest - 1):
        _, metrics = run(batch_of(draw(), participates=np.arange(N) < there))
        assert metrics["too_few_for_rule"] == (there < fewest)
