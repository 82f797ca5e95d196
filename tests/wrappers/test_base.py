"""A wrapper of one's own: what the shared code does for it, against NumPy and by hand."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_lab import (
    algorithms,
    build_round,
    tree,
    with_attack,
    with_buffered_aggregation,
    with_client_metrics,
    with_compression,
    with_dp,
    with_robust_aggregation,
    with_secure_aggregation,
)
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.wrappers import client_params
from fedjax_lab.wrappers.base import State, Wrapper, add_metrics
from tests.federations import distance_loss
from tests.wrappers.teller import D, batch_of, params, teller, to_vector

N, LIMIT = 4, 1.5


class CountedRow(NamedTuple):
    """A row beside which a wrapper counts how often it was shortened."""

    inner: jax.Array
    times: jax.Array  # int32 scalar


class CountedServer(NamedTuple):
    """A server beside which a wrapper counts its steps."""

    inner: dict
    steps: jax.Array  # int32 scalar


def with_clipped_rows(algorithm, limit):
    """The same method, whose clients keep rows of a norm of at most ``limit``."""
    wrapper = Wrapper(algorithm, "clipped_rows")
    counter = jnp.int32

    def around(params, num_clients, server, rows):
        counts = jnp.zeros(num_clients, counter)
        return CountedServer(server, jnp.zeros((), counter)), CountedRow(rows, counts)

    def change(phase, place):
        def client_update(received, row, batch):
            message, row, report = phase.client_update(received, row, batch)
            norm = tree.norm(row.inner)
            inner = tree.scale(row.inner, jnp.minimum(1, limit / norm))
            row = CountedRow(inner, row.times + (norm > limit))
            if place.is_last:
                report = add_metrics(report, {"row_norm": (norm, jnp.ones_like(norm))})
            return message, row, report

        def server_update(server, messages, cohort):
            server, metrics = phase.server_update(server, messages, cohort)
            return server._replace(steps=server.steps + 1), metrics

        return phase._replace(client_update=client_update, server_update=server_update)

    return wrapper.wrap(
        "clipped_rows",
        change,
        state=State(around, server=CountedServer, row=CountedRow),
        hyperparameters={"row_limit": limit},
    )


def test_a_wrapper_says_what_it_changes_and_no_more():
    """Rows count up by 1 in each round, or down to the limit where that is more."""
    algorithm = with_clipped_rows(teller(stateful=True), LIMIT)
    assert algorithm.name == "teller+clipped_rows"
    assert algorithm.wrappers == ("clipped_rows",)
    assert algorithm.hyperparameters == {"row_limit": LIMIT}
    said = np.random.default_rng(0).normal(size=(2, 2, D)).astype(np.float32)
    state, round_fn = algorithm.init(params(), N), build_round(algorithm, "vmap")
    row, times = 0.0, 0
    for round in range(3):
        state, metrics = round_fn(state, batch_of(said, round=round))
        assert metrics["row_norm"] == pytest.approx(row + 1)
        times += row + 1 > LIMIT
        row = min(row + 1, LIMIT)
        np.testing.assert_allclose(state.clients.inner, [row, row, 0, 0], rtol=1e-6)
        np.testing.assert_array_equal(state.clients.times, [times, times, 0, 0])
        got = to_vector(state.server.inner["got"]["first"])
        np.testing.assert_allclose(got, said[:, 0].mean(0), rtol=1e-6)
    assert state.server.steps == 3
    assert algorithm.params(state) is state.server.inner["params"]
    assert algorithm.uplink(params()) == teller().uplink(params())


def two_exchanges():
    """A method whose clients send nothing in its first exchange of three."""
    (phase,) = teller(stateful=True).phases
    nothing = Phase(
        lambda server, round: (),
        lambda received, row, batch: ({}, row + 10, {}),
        lambda server, messages, cohort: (server, {}),
        {},
    )
    start = teller(stateful=True).start
    return Algorithm("two", start, (nothing, phase, phase), lambda state: state.server["params"])


def test_other_exchanges_pass_and_places_are_counted():
    places = []

    def change(phase, place):
        places.append((place.number, place.index, place.count, place.is_last))
        return phase

    def around(params, num_clients, server, rows):
        return server, CountedRow(rows, jnp.zeros(num_clients))

    wrapper = Wrapper(two_exchanges(), "clipped_rows")
    algorithm = wrapper.wrap("passed", change, state=State(around, row=CountedRow))
    assert places == [(1, 0, 2, False), (2, 1, 2, True)]
    state, _ = build_round(algorithm, "vmap")(
        algorithm.init(params(), N), batch_of(np.ones((1, 2, D)))
    )
    np.testing.assert_array_equal(state.clients.inner, [12, 0, 0, 0])
    outside = wrapper.wrap("outside", change, otherwise=lambda phase: phase._replace(once=True))
    assert [phase.once for phase in outside.phases] == [True, False, False]


def test_the_models_of_clients_are_those_of_the_method_inside():
    ditto = algorithms.ditto(distance_loss, client_lr=0.1)
    algorithm = with_clipped_rows(ditto, LIMIT)
    state = algorithm.init({"w": jnp.arange(3.0)}, N)
    np.testing.assert_array_equal(client_params(algorithm, state, 1)["w"], [0, 1, 2])


def test_a_new_wrapper_keeps_to_the_order_of_the_others():
    plain = teller(stateful=True)
    with pytest.raises(ValueError, match=r"attack last, with_attack\(with_clipped_rows\(\.\.\.\)"):
        with_clipped_rows(with_attack(plain, "sign_flip", share=0.5), LIMIT)
    wrapped = with_dp(with_clipped_rows(plain, LIMIT), 1.0, 0.0)
    assert wrapped.wrappers == ("clipped_rows", "dp")
    nothing = algorithms.local_only(lambda params, examples, key: 0, client_lr=0.1)
    with pytest.raises(ValueError, match="no messages for with_clipped_rows to change"):
        with_clipped_rows(nothing, LIMIT)


def test_a_metric_of_the_same_name_is_refused():
    measured = with_client_metrics(
        algorithms.scaffold(distance_loss, client_lr=0.1), row_norm=lambda params, gradient: 0.0
    )
    algorithm = with_clipped_rows(measured, LIMIT)
    batch = batch_of(np.ones((2, 2, D)))._replace(examples=jnp.ones((2, 1, 2, 3)))
    with pytest.raises(ValueError, match="both have a metric called row_norm"):
        algorithm.round_fn(algorithm.init({"w": jnp.zeros(3)}, N), batch)


def counting(dtype):
    """A method whose clients also send a number, of a dtype."""
    (phase,) = teller().phases

    def client_update(received, row, batch):
        message, row, report = phase.client_update(received, row, batch)
        return {**message, "count": jnp.asarray(12, dtype)}, row, report

    counted = phase._replace(
        client_update=client_update,
        reduce={**phase.reduce, "count": "sum"},
        message=lambda params: {
            **dict.fromkeys(phase.reduce, params),
            "count": jnp.zeros((), dtype),
        },
    )
    plain = teller()
    return Algorithm("counting", plain.start, (counted,), plain.params)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda method: with_buffered_aggregation(method, 2, 4),
        lambda method: with_robust_aggregation(method, "norm_clip:1"),
        lambda method: with_attack(method, "sign_flip", share=0.5),
        lambda method: with_dp(method, 1.0, 1.0),
        lambda method: with_secure_aggregation(method, bits=20, clip=20.0),
        lambda method: with_compression(method, "sign"),
    ],
    ids=["buffered", "robust", "attack", "dp", "secure", "compression"],
)
def test_messages_of_integers_are_refused_where_they_would_be_rounded(wrap):
    wrap(counting(jnp.float32)).init(params(), N)
    with pytest.raises(
        ValueError, match=r"message\['count'\] of .* has int32\[\]; with_\w+ requires"
    ):
        wrap(counting(jnp.int32)).init(params(), N)


def test_an_attack_on_labels_leaves_integers_alone():
    with_attack(counting(jnp.int32), "label_flip", share=0.5, num_classes=3).init(params(), N)


def test_the_settings_of_an_inner_wrapper_are_kept():
    method = with_compression(with_compression(teller(), "top_k:0.5"), "qsgd:3")
    assert method.hyperparameters["inner_compressor"].startswith("top_k(")
    assert method.hyperparameters["compressor"].startswith("qsgd(")
