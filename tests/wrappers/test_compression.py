"""Compression around a method: what travels, what stays with the client, what is counted."""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    Algorithm,
    Phase,
    algorithms,
    build_round,
    compressors,
    data,
    simulate,
    with_compression,
    with_personal,
)
from fedjax_lab.algorithms.factory import LocalTraining
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.store import zero_row_per_client
from fedjax_lab.wrappers.compression import message_key
from tests.algorithms.cases import N
from tests.algorithms.problem import flat, initial_params, loss_fn, stack_rounds, to_batch
from tests.federations import batch_of
from tests.reference import cfedavg_numpy
from tests.reference import problem as reference

METHODS = pytest.mark.methods
SCOPES = ("global", pytest.param("per_leaf", marks=METHODS))
LR = {"client_lr": 0.2, "server_lr": 0.8}
D = reference.DIMENSION


def rounds(count=8, seed=3, **changes):
    options = {"cohort_size": 4, "max_steps": 3, "batch_size": 4, **changes}
    return reference.make_rounds(seed, count, **options)


def begin(algorithm):
    """The first state, in one program."""
    return jax.jit(lambda params: algorithm.init(params, N))(initial_params())


def run(algorithm, drawn, client_map="scan"):
    """All rounds from the first state on, in one program."""

    @jax.jit
    def whole(params, batches):
        state = algorithm.init(params, N)
        return jax.lax.scan(build_round(algorithm, client_map), state, batches)

    return whole(initial_params(), stack_rounds(drawn))


class Ledger(NamedTuple):
    """FedAvg's server, with the sum of what each client sent."""

    params: dict
    received: dict


def with_ledger():
    """FedAvg that adds up each client's changes on both sides."""
    client_update = LocalTraining(loss_fn, client_lr=0.2).client_update

    def start(params, num_clients, batch):
        zeros = zero_row_per_client(params, num_clients)
        return Ledger(params, zeros), zero_row_per_client(params, num_clients)

    def keep_sum(params, row, batch):
        message, _, report = client_update(params, (), batch)
        return message, jax.tree.map(jnp.add, row, message["delta"]), report

    def server_update(server, messages, cohort):
        ids = jnp.where(cohort.participates, cohort.client_ids, N)
        received = jax.tree.map(
            lambda total, new: total.at[ids].add(new, mode="drop"),
            server.received,
            messages["delta"],
        )
        params = jax.tree.map(
            lambda x, new: x - jnp.tensordot(cohort.weights.astype(x.dtype), new, 1),
            server.params,
            messages["delta"],
        )
        return Ledger(params, received), {"delta_norm": jnp.zeros(())}

    phase = Phase(lambda server, t: server.params, keep_sum, server_update, {"delta": "stack"})
    return Algorithm("ledger", start, (phase,), lambda state: state.server.params)


COMPRESSORS = ("top_k:0.8", "random_drop:0.5", "sign", "qsgd:3", "low_rank:1", "int8")


@functools.cache
def ledger_under(scope):
    """(which of the compressors, params, batches) -> the state after all rounds, compiled once."""
    through = [compressors.as_compressor("", text).apply for text in COMPRESSORS]

    @jax.jit
    def whole(which, params, batches):
        one_of_them = dataclasses.replace(
            compressors.identity(), direct=lambda key, v: jax.lax.switch(which, through, key, v)
        )
        algorithm = with_compression(with_ledger(), one_of_them, scope=scope)
        state = algorithm.init(params, N)
        return jax.lax.scan(build_round(algorithm, "vmap"), state, batches)[0]

    return whole


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_what_was_sent_and_the_residual_add_up_to_what_was_computed(compressor, scope, x64):
    batches = stack_rounds(rounds(12, empty_round=5))
    state = ledger_under(scope)(COMPRESSORS.index(compressor), initial_params(), batches)
    residual = state.clients.residuals[0]["delta"]
    accounted = jax.tree.map(jnp.add, state.server.received, residual)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(residual)) > 1e-4
    chex.assert_trees_all_close(accounted, state.clients.inner, rtol=0, atol=1e-12)


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.slow
def test_the_papers_three_norms(error_feedback, x64):
    drawn = rounds(8)
    algorithm = algorithms.cfedavg(
        loss_fn, compressor="top_k:0.7", error_feedback=error_feedback, **LR
    )
    _, metrics = run(algorithm, drawn)
    twin = cfedavg_numpy.CFedAvg(
        flat(initial_params()),
        N,
        reference.gradient,
        compressor=cfedavg_numpy.top_k(0.7),
        error_feedback=error_feedback,
        **LR,
    )
    for t, (clients, _) in enumerate(drawn):
        twin.round(clients, t)
        change, message, error = (
            np.mean([(vectors[i] ** 2).sum() for vectors in twin.sent.values()]) for i in range(3)
        )
        np.testing.assert_allclose(metrics["change_sq"][t], change, rtol=1e-5)
        np.testing.assert_allclose(metrics["message_sq"][t], message, rtol=1e-5)
        np.testing.assert_allclose(metrics["error_sq"][t], error, rtol=1e-5)


def test_bytes():
    params, top_k = initial_params(), compressors.top_k(0.7)
    scaffold = algorithms.scaffold(loss_fn, **LR)
    assert with_compression(scaffold, top_k).uplink(params) == 2 * top_k.bytes(D)
    per_leaf = with_compression(scaffold, top_k, scope="per_leaf")
    assert per_leaf.uplink(params) == 2 * (top_k.bytes(15) + top_k.bytes(3))
    assert per_leaf.downlink(params) == scaffold.downlink(params) == 2 * 4 * D
    both = with_compression(scaffold, top_k, downlink="sign")
    assert both.downlink(params) == 2 * compressors.sign().bytes(D)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert with_compression(scaffold, "identity").uplink(half) == 2 * 2 * D
    _, metrics = run(both, rounds(3))
    participants = metrics["participants"]
    np.testing.assert_array_equal(metrics["bytes_up"], participants * both.uplink(params))
    np.testing.assert_array_equal(metrics["bytes_down"], participants * both.downlink(params))


def test_what_a_method_sends_beyond_its_fields_is_counted_in_full():
    algorithm = with_ledger()
    (phase,) = algorithm.phases
    phase = phase._replace(costs=Costs(extra=4))
    algorithm = Algorithm("more", algorithm.start, (phase,), algorithm.params)
    top_k = compressors.top_k(0.7)
    assert with_compression(algorithm, top_k).uplink(initial_params()) == top_k.bytes(D) + 4


def test_the_scope_decides_what_is_kept():
    """With 3 of 15 and 1 of 3 kept, each array sends its own largest."""
    algorithm = with_compression(with_ledger(), "top_k:0.8", scope="per_leaf", error_feedback=False)
    state, _ = run(algorithm, rounds(1, equal_steps=True))
    sent = np.count_nonzero(state.server.received["W"], axis=(1, 2))
    assert sorted(sent.tolist()) == [0, 0, 0, 3, 3, 3, 3]
    assert sorted(np.count_nonzero(state.server.received["b"], axis=1).tolist())[3:] == [1] * 4


def test_fields_clients_and_rounds_have_their_own_randomness():
    algorithm = with_compression(algorithms.scaffold(loss_fn, **LR), "random_drop:0.5")
    kept = []
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    first = begin(algorithm)
    for t, (_, padded) in enumerate(rounds(2, equal_steps=True)):
        state, _ = round_fn(first, to_batch(padded, t))
        for field in ("delta", "control_change"):
            residual = state.clients.residuals[0][field]
            rows = np.concatenate([np.asarray(residual[n]).reshape(N, -1) for n in ("W", "b")], 1)
            kept += [tuple(row == 0) for row in rows if row.any()]
    assert len(kept) == len(set(kept)) == 16
    key = jax.random.key(0)
    others = [jax.random.fold_in(key, i) for i in (*range(100), 2**32 - 1)]
    mine = [message_key(key, field) for field in range(3)]
    assert len({tuple(jax.random.key_data(k).tolist()) for k in others + mine}) == 104


def test_a_client_that_takes_no_part_keeps_its_residual():
    algorithm = algorithms.cfedavg(loss_fn, compressor="top_k:0.8", **LR)
    round_fn = jax.jit(build_round(algorithm, "vmap"))
    state = begin(algorithm)
    for t, (_, padded) in enumerate(rounds(3, equal_steps=True)):
        state, _ = round_fn(state, to_batch(padded, t))
    batch = to_batch(padded, 3)._replace(num_steps=jnp.array([0, 3, 0, 2]))
    after, metrics = round_fn(state, batch)
    silent = np.asarray(batch.client_ids)[[0, 2]]
    residuals = jax.tree.leaves(state.clients.residuals)
    assert len(residuals) == 2
    assert all(np.abs(leaf[silent]).max() > 0 for leaf in residuals)
    jax.tree.map(
        lambda old, new: np.testing.assert_array_equal(old[silent], new[silent]),
        state.clients,
        after.clients,
    )
    assert metrics["participants"] == 2


@pytest.mark.parametrize(
    ("compressor", "error_feedback"),
    [("sign", False), ("sign", True), ("int8", False), ("qsgd:3", True)],
)
@pytest.mark.slow
def test_one_round_of_nan_does_not_silence_a_client(compressor, error_feedback):
    """Of a NaN, a compressor may make a number; and a NaN in a residual would stay for ever."""
    plain = algorithms.fedavg(loss_fn, **LR)
    wrapped = with_compression(plain, compressor, error_feedback=error_feedback)
    round_fn = jax.jit(build_round(wrapped, "scan"))
    batch = to_batch(rounds(1, equal_steps=True)[0][1], 0)
    x = np.array(batch.examples["x"])
    x[1] = np.nan
    spoilt = batch._replace(examples=batch.examples | {"x": jax.device_put(x)})
    absent = batch._replace(participates=jax.device_put(np.array([True, False, True, True])))
    state, metrics = round_fn(begin(wrapped), spoilt)
    expected, _ = round_fn(begin(wrapped), absent)
    chex.assert_trees_all_close(state, expected, rtol=1e-6)
    assert metrics["nonfinite_clients"] == 1
    assert round_fn(state, batch)[1]["nonfinite_clients"] == 0


@pytest.mark.parametrize("name", ["fedavg", pytest.param("gradma_s", marks=METHODS)])
def test_a_round_without_clients_keeps_what_the_clients_hold(name):
    """Also where the method's own server sees to it that nothing of it changes."""
    options = {"memory_size": N} if name == "gradma_s" else {}
    plain = getattr(algorithms, name)(loss_fn, **LR, **options)
    wrapped = with_compression(plain, "identity", downlink="top_k:0.75")
    round_fn = jax.jit(build_round(wrapped, "scan"))
    first, second = (to_batch(padded, t) for t, (_, padded) in enumerate(rounds(2)))
    state, _ = round_fn(begin(wrapped), first)
    nobody = second._replace(participates=jnp.zeros(len(second.client_ids), bool))
    chex.assert_trees_all_equal(round_fn(state, nobody)[0], state)


@pytest.mark.slow
def test_an_uncompressed_downlink_changes_nothing(x64):
    plain = algorithms.scaffold(loss_fn, **LR)
    wrapped = with_compression(plain, "identity", downlink="identity")
    expected, _ = run(plain, rounds(6))
    actual, _ = run(wrapped, rounds(6))
    chex.assert_trees_all_close(expected.server, actual.server.inner, atol=1e-12)
    chex.assert_trees_all_close(expected.clients, actual.clients.inner, atol=1e-12)


@pytest.mark.slow
def test_the_clients_catch_up_with_the_server(x64):
    """h follows x by compressed differences, and what was left out is sent later."""
    lr = {"client_lr": lambda t: jnp.where(t < 3, 0.2, 0.0)}
    algorithm = with_compression(
        algorithms.fedavg(loss_fn, **lr), "identity", downlink="top_k:0.75", scope="global"
    )
    round_fn = jax.jit(build_round(algorithm, "scan"))
    state, lags = begin(algorithm), []
    for t, (_, padded) in enumerate(rounds(8, equal_steps=True)):
        held, x = state.server.held[0][0], algorithm.params(state)
        state, _ = round_fn(state, to_batch(padded, t))
        top = cfedavg_numpy.top_k(0.75)(flat(x) - flat(held))
        now = flat(state.server.held[0][0])
        np.testing.assert_allclose(now, flat(held) + top, atol=1e-12)
        lags.append(np.abs(flat(algorithm.params(state)) - now).max())
    assert max(lags[:3]) > 1e-3
    assert lags[-1] < 1e-12


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.slow
def test_the_norms_of_several_phases_add_up(error_feedback):
    """Two phases of FedAvg in one round are two rounds of it."""
    plain = algorithms.fedavg(loss_fn, **LR)
    twice = Algorithm("twice", plain.start, plain.phases * 2, plain.params)
    batch = to_batch(rounds(1, equal_steps=True)[0][1], 0)
    one, two = (
        with_compression(algorithm, "top_k:0.7", error_feedback=error_feedback)
        for algorithm in (plain, twice)
    )
    norms = []
    if error_feedback:  # each phase has residuals of its own: only the first messages agree
        two = with_compression(twice, "identity")
        one = with_compression(plain, "identity")
    state, round_fn = begin(one), jax.jit(one.round_fn)
    for _ in range(2):
        state, metrics = round_fn(state, batch)
        norms.append([metrics[name] for name in ("message_sq", "error_sq", "change_sq")])
    after, metrics = jax.jit(two.round_fn)(begin(two), batch)
    assert two.uplink(initial_params()) == 2 * one.uplink(initial_params())
    actual = [metrics[name] for name in ("message_sq", "error_sq", "change_sq")]
    np.testing.assert_allclose(actual, np.sum(norms, axis=0), rtol=1e-5)
    chex.assert_trees_all_close(two.params(after), one.params(state), atol=1e-6)


def sends(fields):
    """Local SGD whose clients send what ``fields`` makes of their change."""
    training = LocalTraining(loss_fn, client_lr=0.2)

    def client_update(params, row, batch):
        message, row, report = training.client_update(params, row, batch)
        return fields(message["delta"]), row, report

    def server_update(received, messages, cohort):
        return {"params": received["params"], **messages}, {}

    def start(params, num_clients, batch):
        nothing = jax.tree.map(lambda leaf: jnp.zeros((4, *leaf.shape)), fields(params))
        return {"params": params, **nothing}, ()

    phase = Phase(
        lambda server, t: server["params"],
        client_update,
        server_update,
        reduce=dict.fromkeys(fields(initial_params()), "stack"),
        message=fields,
    )
    return Algorithm("sends", start, (phase,), lambda state: state.server["params"])


@pytest.mark.parametrize("scope", SCOPES)
def test_messages_of_any_shape(scope, x64):
    """Each field alone: its own key, its own residual, its own bytes."""

    def fields(delta):
        return {"sums": delta["W"].sum(0), "two": (delta["b"].sum(), delta["W"][:2]), "none": ()}

    qsgd = compressors.qsgd(3)
    plain, wrapped = (
        sends(fields),
        with_compression(sends(fields), qsgd, error_feedback=False, scope=scope),
    )
    pieces = [3, 1, 6] if scope == "per_leaf" else [3, 7]
    assert wrapped.uplink(initial_params()) == sum(qsgd.bytes(d, jnp.float64) for d in pieces)
    through = jax.jit(qsgd.apply)
    batch = to_batch(rounds(1, equal_steps=True)[0][1], 0)
    computed, sent = (
        jax.jit(build_round(method, "scan"))(begin(method), batch)[0].server
        for method in (plain, wrapped)
    )
    for slot, client in enumerate(np.asarray(batch.client_ids)):
        key = jax.random.fold_in(jax.random.fold_in(batch.key, 0), client)  # 0: the phase
        for number, name in enumerate(("sums", "two")):
            mine = [np.asarray(leaf[slot]).ravel() for leaf in jax.tree.leaves(computed[name])]
            if scope == "global":
                expected = through(message_key(key, number), jnp.asarray(np.concatenate(mine)))
            else:
                keys = [jax.random.fold_in(message_key(key, number), i) for i in range(len(mine))]
                expected = np.concatenate(
                    [through(k, jnp.asarray(v)) for k, v in zip(keys, mine, strict=True)]
                )
            received = [np.asarray(leaf[slot]).ravel() for leaf in jax.tree.leaves(sent[name])]
            np.testing.assert_allclose(np.concatenate(received), expected, atol=1e-12)


def test_a_message_with_integers_is_refused():
    wrapped = with_compression(
        sends(lambda delta: {"sums": delta["b"], "count": delta["b"] > 0}), "sign"
    )
    with pytest.raises(ValueError, match=r"message\['count'\] of sends has bool\[3\]; with_comp"):
        wrapped.init(initial_params(), N)


def test_a_field_without_arrays_passes():
    wrapped = with_compression(sends(lambda delta: {"sums": delta["b"], "none": ()}), "top_k:0.5")
    batch = to_batch(rounds(1, equal_steps=True)[0][1], 0)
    after, _ = jax.eval_shape(build_round(wrapped, "scan"), begin(wrapped), batch)
    assert after.server["none"] == ()


def test_what_a_run_records():
    wrapped = with_compression(
        algorithms.scaffold(loss_fn, **LR), "top_k:0.9+qsgd:3", downlink="int8", scope="per_leaf"
    )
    recorded = dict(wrapped.hyperparameters)
    assert wrapped.name == "scaffold+compose"
    assert recorded["compressor"].startswith("compose(sparsifier=top_k(comp=0.9")
    assert recorded["downlink"] == "int8()"
    assert (recorded["scope"], recorded["error_feedback"]) == ("per_leaf", True)
    assert recorded["client_lr"] == 0.2
    cfedavg = algorithms.cfedavg(loss_fn, compressor=compressors.sign(), **LR)
    assert cfedavg.hyperparameters["compressor"] == "sign()"
    assert cfedavg.name == "cfedavg"


def test_a_compressor_that_enlarges_is_a_warning():
    wrapped = with_compression(algorithms.fedavg(loss_fn, **LR), "top_k:0.01")
    said = r"comp=0\.01.* 84 bytes in place of fedavg's 72"
    with pytest.warns(UserWarning, match=said) as caught:
        begin(wrapped)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("size", [-4, float("nan"), None])
def test_a_size_that_is_none_is_named(size):
    own = dataclasses.replace(compressors.identity(), bytes=lambda d, dtype="float32": size)
    method = with_compression(algorithms.fedavg(loss_fn, client_lr=0.1), own)
    with pytest.raises((TypeError, ValueError), match=rf"bytes of the compressor .* is {size}; "):
        method.init(initial_params(), N)


def test_error_feedback_with_a_compressor_whose_error_may_grow_is_a_warning():
    size = sum(leaf.size for leaf in jax.tree.leaves(initial_params()))
    bound = compressors.qsgd(1).snr_bound(size)
    assert bound > 1
    with pytest.warns(UserWarning, match=rf"levels=1.* bound of {bound:.3g} .* for {size} numbers"):
        begin(with_compression(algorithms.fedavg(loss_fn, **LR), "qsgd:1"))
    for text, error_feedback in (("qsgd:1:scaled", True), ("qsgd:1", False)):  # no warning
        wrapped = algorithms.fedavg(loss_fn, **LR)
        begin(with_compression(wrapped, text, error_feedback=error_feedback))


def test_nested_compressors_have_their_own_randomness():
    """Each of two keeps half of the numbers: together a quarter, and not the same half."""
    fedavg = algorithms.fedavg(lambda params, examples, key: -(examples @ params), client_lr=1.0)
    twice = fedavg
    for _ in range(2):
        twice = with_compression(twice, "random_k:0.5", error_feedback=False)
    clients = data.from_clients({0: np.ones((1, 4000), np.float32)})
    run = {"rounds": 1, "cohort_size": 1, "local_steps": 1, "batch_size": 1}
    params = simulate(twice, jnp.zeros(4000), clients, **run).params
    assert abs(np.mean(np.asarray(params) != 0) - 0.25) < 0.03  # 4 standard deviations


def test_wrong_arguments():
    fedavg = algorithms.fedavg(loss_fn, **LR)
    with pytest.raises(TypeError, match=r"error_feedback is 'no'; it must be True or False"):
        with_compression(fedavg, "sign", error_feedback="no")
    with pytest.raises(ValueError, match=r"scope is 'leaf'; .* global, per_leaf"):
        with_compression(fedavg, "sign", scope="leaf")
    with pytest.raises(ValueError, match=r"compressor is 'signs'; .* Did you mean 'sign'"):
        with_compression(fedavg, "signs")
    with pytest.raises(TypeError, match=r"downlink is 0\.9; it must be a Compressor or text"):
        with_compression(fedavg, "sign", downlink=0.9)


@pytest.mark.parametrize("name", ["with_personal", "fedper"])
def test_a_downlink_compresses_what_is_shared(name):
    """A personal leaf that the loss does not read: as without it, in bytes and in every bit."""

    def loss(params, examples, key):
        return jnp.square(examples["x"] - params["w"][None]).sum(-1)

    fedavg = functools.partial(algorithms.fedavg, client_lr=0.1)
    if name == "fedper":
        method = algorithms.fedper(loss, client_lr=0.1, personal="own")
    else:
        method = with_personal(fedavg(loss), lambda path: path == "own")
    x = np.random.default_rng(0).normal(size=(3, 4, 2, 2, 6)).astype(np.float32)
    shared = {"w": jnp.arange(6.0)}
    ends = []
    for algorithm, params in ((method, {**shared, "own": jnp.ones(5)}), (fedavg(loss), shared)):
        wrapped = with_compression(algorithm, "identity", downlink="top_k:0.5")
        assert wrapped.downlink(params) == compressors.top_k(0.5).bytes(6)
        state = wrapped.init(params, num_clients=4)
        for t in range(3):
            state, _ = wrapped.round_fn(state, batch_of({"x": jnp.asarray(x[t])}, t))
        ends.append(wrapped.params(state)["w"])
    np.testing.assert_array_equal(*ends)
