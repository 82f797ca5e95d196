"""Attacks: who attacks, what attackers send, and what that does to a run."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_lab import (
    algorithms,
    build_round,
    data,
    models,
    with_attack,
    with_robust_aggregation,
)
from fedjax_lab.wrappers.attacks import attackers
from tests import federations
from tests.algorithms.cases import MAIN
from tests.algorithms.cases import N as CLIENTS
from tests.algorithms.problem import CLIENT_MAPS, drawn, finish, loss_fn
from tests.federations import softmax_loss
from tests.wrappers.teller import D, N, batch_of, params, run, teller

WEIGHTS = np.array([1, 2, 3, 4, 0.5, 1, 1, 2, 0.7])
COUNT = np.array([1, 1, 0, 1, 1, 1, 1, 1, 1], bool)
SHARE, SEED = 0.33, 5  # 3 of 9
WHO = attackers(N, SHARE, SEED)


def draw(seed=0):
    return np.random.default_rng(seed).normal(size=(N, 2, D)) * [[[1], [3]]]


def total(sent):
    """The weighted mean of the first field and the sum of the second."""
    weights = np.where(COUNT, WEIGHTS, 0)
    return np.stack([weights / weights.sum() @ sent[:, 0], COUNT @ sent[:, 1]])


def with_lies(messages, lie):
    sent = messages.copy()
    sent[WHO] = lie
    return sent


def test_who_attacks():
    assert len(WHO) == 3
    assert len(set(WHO)) == 3
    counts = np.bincount(
        np.concatenate([attackers(10, 0.25, s) for s in range(2000)]), minlength=10
    )
    assert counts.sum() == 2000 * 3  # 2.5 rounded up
    assert stats.chisquare(counts).pvalue > 1e-4
    assert attackers(10, 0.0, 1).size == 0
    np.testing.assert_array_equal(attackers(4, 1.0, 1), np.arange(4))


def test_who_attacks_is_drawn_once_for_shapes_alone(monkeypatch):
    """Bytes are asked for whenever a round is traced, of a method with a million clients."""
    drawn, default_rng = [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda s: drawn.append(s) or default_rng(s))
    seed = 987_654
    for share in (0.1, 0.2, 0.2):
        algorithm = with_attack(teller(), "sign_flip", share=share, seed=seed)
        algorithm.downlink(params())
    assert drawn == [seed]
    inverse = np.argsort(default_rng(seed).permutation(100))
    np.testing.assert_array_equal(attackers(100, 0.3, seed), np.flatnonzero(inverse < 30))


@pytest.mark.parametrize(
    ("num_clients", "shares"),
    # 0.145 * 100 is 14.5 in decimals and in float32, and less in float64.
    [(10, [0.0, 0.1, 0.25, 0.5, 1.0]), (100, [0.145, 0.265, 0.285, 0.525, 0.585])],
)
def test_the_share_may_be_swept(num_clients, shares):
    """As an argument of the program it makes the same clients attackers."""

    @jax.jit
    def marked(share):
        algorithm = with_attack(teller(), "sign_flip", share=share, seed=SEED)
        return algorithm.init(params(), num_clients).clients.attacks

    for share in shares:
        np.testing.assert_array_equal(
            np.flatnonzero(marked(share)), attackers(num_clients, share, SEED)
        )


@pytest.mark.parametrize(
    ("attack", "client_map"),
    [
        pytest.param(attack, m, marks=() if m == usual else pytest.mark.slow)
        for attack, usual in (
            ("sign_flip", "vmap"),
            ("inner_product", "scan"),
            ("alie", "shard_map:2"),
        )
        for m in ("vmap", "scan", "shard_map:2")
    ],
)
def test_what_is_sent(attack, client_map, x64):
    """In the server's mean and sum, by the papers' formulas over those who take part."""
    messages = draw()
    honest = messages[COUNT & ~np.isin(np.arange(N), WHO)]
    n, m = COUNT.sum(), COUNT[WHO].sum()
    if attack == "sign_flip":
        lie, strength = -2.0 * messages[WHO], 2.0
    elif attack == "inner_product":
        lie, strength = -0.5 * honest.mean(0), None
    else:
        needed = n // 2 + 1 - m
        z = max(0, stats.norm.ppf((n - m - needed) / (n - m)))
        lie, strength = honest.mean(0) - z * honest.std(0), None
    algorithm = with_attack(teller(), attack, share=SHARE, seed=SEED, strength=strength)
    batch = batch_of(messages, weights=WEIGHTS, participates=COUNT)
    got, _ = run(algorithm, batch, client_map)
    np.testing.assert_allclose(got, total(with_lies(messages, lie)), rtol=1e-6, atol=1e-9)


def multiples(messages, honest, key):
    """Each attacker sends its own message times -3."""
    return jax.tree.map(lambda leaf: -3 * leaf, messages)


def beyond_the_honest(messages, honest, key):
    """All send the honest mean plus the largest norm of a participant's first field."""
    shares = honest / honest.sum()
    vectors = jnp.concatenate([leaf.reshape(N, -1) for leaf in jax.tree.leaves(messages)], 1)
    most = jnp.linalg.norm(vectors, axis=1).max()
    return jax.tree.map(lambda leaf: jnp.tensordot(shares, leaf, 1) + most, messages)


@pytest.mark.parametrize("client_map", ["vmap", "scan"])
@pytest.mark.parametrize("attack", [multiples, beyond_the_honest])
def test_what_is_sent_by_a_function(attack, client_map, x64):
    messages = draw()
    messages[~COUNT] = 1e6  # of clients that do not participate
    honest = messages[COUNT & ~np.isin(np.arange(N), WHO)]
    lie = -3.0 * messages[WHO]
    if attack is beyond_the_honest:
        lie = honest.mean(0) + np.linalg.norm(messages[COUNT].reshape(-1, 2 * D), axis=1).max()
    algorithm = with_attack(teller(), attack, share=SHARE, seed=SEED)
    batch = batch_of(messages, weights=WEIGHTS, participates=COUNT)
    got, _ = run(algorithm, batch, client_map)
    np.testing.assert_allclose(got, total(with_lies(messages, lie)), rtol=1e-6, atol=1e-9)
    assert algorithm.hyperparameters["attack"]["function"].endswith(attack.__name__)
    assert algorithm.name == f"teller+{attack.__name__}"


def test_a_function_draws_with_the_key_of_the_round():
    def noise(messages, honest, key):
        drawn = jax.random.normal(key, (N, D))
        field = {"v": drawn[:, :3], "w": drawn[:, 3:].reshape(N, 2, 2)}
        return {"first": field, "second": field}

    algorithm = with_attack(teller(), noise, share=1.0)
    got = [run(algorithm, batch_of(draw(), seed=seed))[0] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(got[0], got[1])
    assert np.abs(got[0] - got[2]).min() > 0
    np.testing.assert_allclose(got[0][0] * N, got[0][1], rtol=1e-5)  # a mean and a sum


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (lambda messages: messages["first"], r"attack returned .*'v'.* must return the fields"),
        (
            lambda messages: jax.tree.map(lambda leaf: leaf[0, :1], messages),
            r"shape \(1,\) for first/v; it must be \(9, 3\), .* or \(3,\), the same",
        ),
    ],
)
def test_a_function_that_returns_no_message(returned, match):
    algorithm = with_attack(teller(), lambda m, honest, key: returned(m), share=SHARE)
    with pytest.raises(ValueError, match=match):
        run(algorithm, batch_of(draw()))


@pytest.mark.slow
def test_alie_of_a_given_strength_and_many_attackers(x64):
    """z is that of the paper's example, 50 clients of which 24 attack, and a strength replaces it.

    n = 50, m = 24: s = 2, and z is the quantile at 24 / 26.
    """
    from fedjax_lab.wrappers.attacks import _alie_z

    assert _alie_z(jnp.asarray(50), jnp.asarray(26.0)) == pytest.approx(stats.norm.ppf(24 / 26))
    assert _alie_z(jnp.asarray(10), jnp.asarray(9.0)) == 0  # 4 / 9 is below the mean
    messages = draw(1)
    honest = np.delete(messages, WHO, axis=0)
    algorithm = with_attack(teller(), "alie", share=SHARE, seed=SEED, strength=1.5)
    got, _ = run(algorithm, batch_of(messages))
    sent = with_lies(messages, honest.mean(0) - 1.5 * honest.std(0))
    np.testing.assert_allclose(got, np.stack([sent[:, 0].mean(0), sent[:, 1].sum(0)]), atol=1e-9)
    everyone = with_attack(teller(), "alie", share=1.0)
    assert np.isfinite(run(everyone, batch_of(messages))[0]).all()


def test_alie_of_messages_whose_squares_vanish_in_their_dtype():
    """Deviations of 1e-4, of which float16 has no squares."""
    messages = np.float16(1e-4 * draw(2))
    honest = np.delete(np.float64(messages), WHO, axis=0)
    algorithm = with_attack(teller(), "alie", share=SHARE, seed=SEED, strength=1.5)
    got, _ = run(algorithm, batch_of(messages))
    sent = with_lies(np.float64(messages), honest.mean(0) - 1.5 * honest.std(0))
    exact = np.stack([sent[:, 0].mean(0), sent[:, 1].sum(0)])
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-6)


@pytest.mark.methods
def test_gaussian_messages():
    """Of the attackers alone: independent over clients, numbers, rounds, and as strong as said."""
    messages = np.zeros((N, 2, D))
    messages[np.setdiff1d(np.arange(N), WHO)] = 1.0
    algorithm = with_attack(
        teller({"first": "stack", "second": "stack"}), "gaussian", share=SHARE, strength=3.0,
        seed=SEED,
    )  # fmt: skip
    round_fn = jax.jit(jax.vmap(build_round(algorithm, "vmap"), in_axes=(None, 0)))
    batches = [batch_of(messages.astype(np.float32), seed=s) for s in range(200)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    state, _ = round_fn(algorithm.init(params(), N), stacked)
    got = np.concatenate(
        [np.asarray(leaf).reshape(200, N, -1) for leaf in jax.tree.leaves(state.server["got"])], 2
    )
    honest = np.delete(got, WHO, axis=1)
    np.testing.assert_array_equal(honest, 1.0)
    noise = got[:, WHO].reshape(200, -1)
    assert noise.std() == pytest.approx(3.0, rel=0.03)
    assert stats.kstest(noise.ravel() / 3, "norm").pvalue > 1e-4
    correlations = np.corrcoef(noise.T)[np.triu_indices(noise.shape[1], 1)]
    assert np.abs(correlations).max() < 0.35


@pytest.mark.slow
def test_flipped_labels_are_other_data():
    """An attack is the plain method on data whose attackers' labels are flipped, and no more."""
    train, clients = federations.digits(400, 8)
    plain = algorithms.fedavg(softmax_loss, client_lr=0.1)
    algorithm = with_attack(plain, "label_flip", share=0.25, num_classes=10)
    drawn = data.draw_batch(
        clients, jax.random.key(0), 0, cohort_size=8, batch_size=8, local_steps=2
    )
    x = jnp.zeros((64, 10))
    got = jax.jit(algorithm.round_fn)(algorithm.init(x, 8), drawn)[0]
    mine = np.isin(np.repeat(np.arange(8), np.asarray(clients.sizes)), attackers(8, 0.25, 0))
    labels = np.array(train.y)
    rows = np.asarray(clients.indices)[mine]
    labels[rows] = 9 - labels[rows]
    by_hand = drawn._replace(source=drawn.source._replace(y=jnp.asarray(labels)))
    expected = jax.jit(plain.round_fn)(plain.init(x, 8), by_hand)[0]
    np.testing.assert_allclose(got.server.params, expected.server.params, rtol=1e-7, atol=1e-7)
    untouched = jax.jit(plain.round_fn)(plain.init(x, 8), drawn)[0]
    assert np.abs(got.server.params - untouched.server.params).max() > 1e-3


@pytest.mark.parametrize("attack", [pytest.param("sign_flip", marks=pytest.mark.slow), "alie"])
@pytest.mark.slow
def test_nobody_attacks(attack, x64):
    plain = algorithms.scaffold(loss_fn, client_lr=0.2)
    expected, _ = finish(plain, drawn(equal_steps=True))
    actual, _ = finish(with_attack(plain, attack, share=0.0), drawn(equal_steps=True))
    chex.assert_trees_all_close(actual.server.params, expected.server.params, rtol=1e-7, atol=1e-12)


def test_a_rule_sees_the_attack():
    """Inner products of a strong attack turn the mean round, and not the median."""
    messages = draw(2).astype(np.float32) * 0.1 + 1
    ends = []
    for method in (teller(), with_robust_aggregation(teller(), "median")):
        algorithm = with_attack(method, "inner_product", share=SHARE, strength=10.0, seed=SEED)
        ends.append(run(algorithm, batch_of(messages))[0])
    assert (ends[0][0] < 0).all()
    assert (ends[1][0] > 0.5).all()


FEW = ("fedavg",)


@pytest.mark.parametrize("attack", [pytest.param("sign_flip", marks=pytest.mark.slow), "alie"])
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c.id in FEW else pytest.mark.slow) for c in MAIN],
    ids=lambda case: case.id,
)
def test_every_method(case, attack):
    plain = case.build(case.problem.loss)
    if case.id == "local_only":
        with pytest.raises(
            ValueError, match="algorithm is local_only, whose clients send no messages"
        ):
            with_attack(plain, attack, share=0.3)
        return
    algorithm = with_attack(plain, attack, share=0.3)
    start, batches = case.problem.initial_params(), drawn(2, equal_steps=True)
    state = jax.jit(lambda p, b: algorithm.init(p, CLIENTS, b))(start, batches[0])
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    for batch in batches:
        before = jax.tree.map(jnp.shape, state)
        state, metrics = round_fn(state, batch)
        assert jax.tree.map(jnp.shape, state) == before
    assert np.isfinite(case.problem.flat(algorithm.params(state))).all()
    assert all(np.isfinite(value) for value in metrics.values())
    assert algorithm.uplink(start) == plain.uplink(start)
    assert algorithm.downlink(start) == plain.downlink(start)


@pytest.mark.slow
@pytest.mark.parametrize("client_map", CLIENT_MAPS)
def test_every_client_map(client_map):
    algorithm = with_attack(algorithms.scaffold(loss_fn, client_lr=0.2), "alie", share=0.3)
    expected, _ = finish(algorithm, drawn(equal_steps=True))
    actual, _ = finish(algorithm, drawn(equal_steps=True), client_map)
    chex.assert_trees_all_close(actual.server.params, expected.server.params, rtol=1e-7, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"attack": "sign"}, r"attack is 'sign'; .* Did you mean"),
        ({"share": 1.5}, r"share is 1\.5; it must be .* at most 1"),
        ({"seed": -1}, r"seed is -1"),
        ({"strength": -1.0}, r"strength is -1"),
        ({"attack": "label_flip"}, r"num_classes is None; label_flip needs"),
        ({"num_classes": 3}, r"num_classes is 3; sign_flip does not use"),
        ({"attack": multiples, "strength": 2.0}, r"strength is 2.0; multiples has none"),
        ({"attack": multiples, "num_classes": 3}, r"num_classes is 3; multiples does not use"),
        ({"attack": "label_flip", "num_classes": 1}, r"num_classes is 1"),
        ({"attack": "label_flip", "num_classes": 3, "strength": 1.0}, r"label_flip has none"),
    ],
)
def test_wrong_arguments(options, match):
    with pytest.raises(ValueError, match=match):
        with_attack(teller(), **{"attack": "sign_flip", "share": 0.2, **options})


def test_a_share_that_is_nobody():
    algorithm = with_attack(teller(), "sign_flip", share=0.05)
    with pytest.raises(ValueError, match=r"share is 0\.05, .* 9 clients.* 0, or at least 0\.0555"):
        algorithm.init(params(), 9)
    algorithm.init(params(), 10)  # half a client is one


def test_a_label_beyond_the_classes_is_no_other_class():
    _, clients = federations.digits(200, 4)
    loss = models.classification_loss(lambda x, examples, key: examples @ x)
    plain = algorithms.fedavg(loss, client_lr=0.1)
    attacked = with_attack(plain, "label_flip", share=0.5, num_classes=5)
    drawn = data.draw_batch(
        clients, jax.random.key(0), 0, cohort_size=4, batch_size=8, local_steps=2
    )
    state = attacked.init(jnp.zeros((64, 10)), 4)
    _, metrics = jax.jit(attacked.round_fn)(state, drawn)
    assert jnp.isnan(metrics["loss"])


def test_tokens_that_are_not_scored_stay_so():
    """One step from 0, where a word's probability is 1/C: its gradient is known for flipped y."""
    words, lr = 5, 0.5
    loss = models.answer_loss(lambda params, x, key: params[x])
    algorithm = with_attack(
        algorithms.fedavg(loss, client_lr=lr), "label_flip", share=1.0, num_classes=words
    )
    x, y = np.array([[0, 1, 2], [3, 4, 0]]), np.array([[1, -1, 4], [-1, 0, -1]])
    examples = data.Examples(jnp.asarray(x)[:, None, None], jnp.asarray(y)[:, None, None])
    state = algorithm.init(jnp.zeros((words, words)), 2)
    state, metrics = build_round(algorithm, "scan")(state, federations.batch_of(examples))
    expected = np.zeros((words, words))
    for tokens, targets in zip(x, y, strict=True):
        scored = targets >= 0
        for token, target in zip(tokens[scored], targets[scored], strict=True):
            gradient = 1 / words - (np.arange(words) == words - 1 - target)
            expected[token] -= lr * gradient / scored.sum() / 2
    np.testing.assert_allclose(state.server.params, expected, atol=1e-6)
    assert metrics["participants"] == 2


def test_examples_without_labels():
    algorithm = with_attack(teller(), "label_flip", share=0.5, num_classes=3)
    with pytest.raises(ValueError, match=r"examples are .* without integer labels in a field y"):
        run(algorithm, batch_of(draw()))
