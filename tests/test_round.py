"""What a phase may send: messages of any shape, counted from their shapes."""

import dataclasses
import functools
from typing import NamedTuple, Unpack

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
    tree,
    with_compression,
)
from fedjax_lab.checks import KnownArrays
from fedjax_lab.clients import planner
from fedjax_lab.clients.costs import Costs
from fedjax_lab.clients.host_devices import WaitingCalls
from fedjax_lab.clients.local import Gradient, local_steps
from fedjax_lab.clients.store import zero_row_per_client
from fedjax_lab.method import Common, LocalTraining, ServerSGD, factory
from tests.algorithms.problem import flat, initial_params, loss_fn, to_batch
from tests.reference import problem as reference
from tests.tiers import few

N = reference.NUM_CLIENTS


class Server(NamedTuple):
    params: dict


def head_only(**declared):
    """Clients train all of the model and send their bias, in a list, and a number."""
    gradient = Gradient(loss_fn)

    def client_update(params, row, batch):
        local = local_steps(gradient, gradient, params, batch, 0.2)
        bias = params["b"] - local.params["b"]
        message = {"head": [bias], "size": jnp.abs(bias).max()}
        return message, row, local.report

    def server_update(server, messages, cohort):
        (delta,) = messages["head"]
        params = server.params | {"b": server.params["b"] - delta}
        return Server(params), {"delta_norm": jnp.linalg.norm(delta), "size": messages["size"]}

    phase = Phase(
        lambda server, round: server.params,
        client_update,
        server_update,
        reduce={"head": "mean", "size": "sum"},
        **declared,
    )
    return Algorithm("head", lambda p, n, b: (Server(p), ()), (phase,), lambda s: s.server.params)


def shapes(params):
    return {"head": [params["b"]], "size": jnp.zeros(())}


def one_round(algorithm):
    drawn = reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4)
    state = algorithm.init(initial_params(), N)
    return state, *jax.jit(build_round(algorithm, "vmap"))(state, to_batch(drawn[0][1], 0))


def test_a_message_may_have_any_shape():
    algorithm = head_only(message=shapes)
    before, after, metrics = one_round(algorithm)
    params = algorithm.params(after)
    np.testing.assert_array_equal(params["W"], before.server.params["W"])
    assert np.abs(flat(params) - flat(before.server.params)).max() > 1e-3
    assert algorithm.uplink(params) == 3 * 4 + 4
    assert algorithm.downlink(params) == 18 * 4
    assert metrics["bytes_up"] == metrics["participants"] * 16
    assert metrics["bytes_down"] == metrics["participants"] * 72


def test_a_compressed_message_keeps_its_shape():
    plain = head_only(message=shapes)
    algorithm = with_compression(plain, "identity")
    state = algorithm.init(initial_params(), N)
    (residuals,) = state.clients.residuals
    assert jax.tree.map(jnp.shape, residuals) == {"head": [(N, 3)], "size": (N,)}
    sizes = [compressors.identity().bytes(d) for d in (3, 1)]
    assert algorithm.uplink(initial_params()) == sum(sizes)
    ends = [flat(a.params(one_round(a)[1])) for a in (plain, algorithm)]
    np.testing.assert_allclose(*ends, atol=1e-7)
    with_downlink = with_compression(plain, "sign", downlink="int8")
    _, after, metrics = one_round(with_downlink)
    assert np.isfinite(flat(with_downlink.params(after))).all()
    assert metrics["bytes_down"] == metrics["participants"] * compressors.int8().bytes(18)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({}, r"message\['head'\] is .*float32\[3\].* as the params"),
        ({"message": lambda params: shapes(params) | {"size": params["b"]}}, r"\['size'\] is"),
    ],
)
def test_a_message_of_another_shape_than_declared(declared, said):
    with pytest.raises(ValueError, match=said):
        one_round(head_only(**declared))


PLAIN = algorithms.fedavg(loss_fn, client_lr=0.2)


def keeps_last_change(params, row, batch):
    message, _, report = PLAIN.phases[0].client_update(params, row, batch)
    return message, message["delta"], report


def fedavg_with(**halves):
    """FedAvg whose clients keep their last change, with other halves."""

    def start(params, num_clients, batch):
        return Server(params), zero_row_per_client(params, num_clients)

    phase = PLAIN.phases[0]._replace(client_update=keeps_last_change)
    return Algorithm("kept", start, (phase._replace(**halves),))


def with_other_row(params, row, batch):
    message, new, report = keeps_last_change(params, row, batch)
    return message, {**new, "b": new["b"][:1]}, report


def with_other_message(params, row, batch):
    message, new, report = keeps_last_change(params, row, batch)
    delta = message["delta"]
    return {"delta": {**delta, "b": delta["b"].astype(jnp.float16)}}, new, report


def with_other_dtype(server, messages, cohort):
    return Server(server.params | {"b": server.params["b"].astype(jnp.float16)}), {}


def with_other_structure(server, messages, cohort):
    return server.params, {}


@pytest.mark.parametrize(
    ("halves", "said"),
    [
        (
            {"client_update": with_other_row},
            r"row\['b'\] is float32\[1\]; it must be float32\[3\], since client_update must return",
        ),
        (
            {"client_update": with_other_message},
            r"message\['delta'\]\['b'\] is float16\[3\]; it must be float32\[3\]",
        ),
        (
            {"server_update": with_other_dtype},
            r"state.params\['b'\] is float16\[3\]; .* float32\[3\], since server_update must",
        ),
        (
            {"server_update": with_other_structure},
            r"state is \{.*it must be Server\(.*server_update",
        ),
        ({"if_nobody": "kept"}, "if_nobody is 'kept'; .* restored, unchanged, updated"),
        (
            {"costs": Costs(derived=("dual",))},
            r"derived names \['dual'\]; message has fields \['delta'\]",
        ),
    ],
)
def test_halves_that_do_not_fit(halves, said):
    one_round(fedavg_with())
    with pytest.raises(ValueError, match=said):
        one_round(fedavg_with(**halves))


def descending(direction, memory=()):
    """FedAvg whose local steps descend another direction."""
    training = LocalTraining(loss_fn, client_lr=0.2)

    def client_update(x, row, batch):
        local = training.steps(x, batch, functools.partial(direction, training), memory=memory)
        return {"delta": tree.subtract(x, local.params)}, row, local.report

    return {"client_update": client_update}


def counting(training, y, step):
    """Carries how many steps there were, as a Python number at first."""
    gradient, report = training.gradient(y, step)
    return gradient, report._replace(memory=step.memory + 1)


def carries_a_vector(training, y, step):
    gradient, report = training.gradient(y, step)
    return gradient, report._replace(memory=gradient["b"])


def only_the_bias(training, y, step):
    gradient, report = training.gradient(y, step)
    return {**gradient, "W": gradient["b"]}, report


def without_report(training, y, step):
    return training.gradient(y, step)[0], {}


def returning(report, message=None):
    def client_update(x, row, batch):
        return {"delta": x} if message is None else message, row, report

    return {"client_update": client_update}


@pytest.mark.parametrize(
    ("halves", "said"),
    [
        ({"client_update": lambda x, row, batch: ({"delta": x}, row)}, "a tuple of 2; .* row, rep"),
        (returning(None), "client_update returned a NoneType as report; it must be a dict"),
        (returning({"loss": 1.0}), r"report\['loss'\] of client_update is .*\(total, weight\)"),
        (returning({}, jnp.zeros(3)), "client_update returned a .* as message; it must be a dict"),
        ({"server_update": lambda s, m, c: s}, r"returned a Server; .* \(server state, metrics\)"),
        ({"server_update": lambda s, m, c: (s, None)}, "returned a NoneType as metrics"),
        (
            {"server_update": lambda s, m, c: (s, {"round": 0.5, "bytes_up": 1.0})},
            "server_update reports bytes_up, round, which a run itself enters",
        ),
        *(
            ({"server_update": lambda s, m, c, of=of: (s, of)}, f"server_update reports {told}; a")
            for of, told in [
                ({"a": None}, "'a': NoneType"),
                ({"a": "x"}, "'a': str"),
                ({"a": [1.0]}, "'a': list"),
                ({"a": {"b": 1.0}}, "'a': dict"),
                ({"a": 1j}, r"'a': complex of complex\d+"),
                ({1: 1.0}, "1: a number"),
            ]
        ),
        (
            returning({"participants": (1.0, 1.0)}),
            "client_update reports participants, which a run itself enters",
        ),
        ({"server_update": ServerSGD(1.0, 0.9)}, "Server without momentum; .* first_momentum"),
        ({"reduce": {"delta": "average"}}, r"reduce\['delta'\] is 'average'; .* mean, stack, sum"),
        (descending(carries_a_vector, jnp.zeros(())), r"memory is float32\[3\]; .* float32\[\]"),
        (descending(only_the_bias), r"direction\['W'\] is \[3\]; it must be \[5, 3\]"),
        (descending(without_report), "a direction returned a dict as StepReport"),
        (descending(lambda t, y, step: t.gradient(y, step)[0]), "a direction returned a dict; "),
    ],
)
def test_functions_that_return_something_else(halves, said):
    with pytest.raises(ValueError, match=said):
        one_round(fedavg_with(**({"client_update": PLAIN.phases[0].client_update} | halves)))


@factory
def own(loss_fn, *, halves, **common: Unpack[Common]):
    """FedAvg with other halves."""
    return fedavg_with(**({"client_update": PLAIN.phases[0].client_update} | halves))


def with_a_number(x, row, batch):
    return {"delta": x, "n": jnp.zeros(())}, row, {}


@pytest.mark.parametrize(
    ("halves", "said"),
    [
        ({"server_update": lambda s, m, c: s}, r"returned a Server; .* \(server state, metrics\)"),
        ({"server_update": lambda s, m, c: (s, None)}, "returned a NoneType as metrics"),
        (returning(None), "client_update returned a NoneType as report; it must be a dict"),
        (
            returning({}, {"model": jnp.zeros(3)}),
            r"message has fields \['model'\], not \['delta'\]",
        ),
        (
            {"client_update": with_a_number, "reduce": {"delta": "mean", "n": "sum"}},
            r"message\['n'\] is float32\[\]; it must be .* as the phase's ``message`` specifies",
        ),
    ],
)
def test_a_method_in_a_wrapper_says_the_same(halves, said):
    """What reads a method's results before the round does ended in an error of Python."""
    plain = fedavg_with(**({"client_update": PLAIN.phases[0].client_update} | halves))
    for method in (plain, own(loss_fn, client_lr=0.2, halves=halves)):
        with pytest.raises(ValueError, match=said):
            one_round(with_compression(method, "top_k:0.5"))


def test_a_number_that_is_carried_from_step_to_step():
    one_round(fedavg_with(**descending(counting, 0)))


@pytest.mark.parametrize(
    ("started", "said"),
    [
        (lambda params, count: Server(params), r"start returned a Server; .* clients' state\)"),
        (lambda params, count: params, "start returned a dict; it must"),
        (lambda params, count: (Server(params), params), r"clients\['W'\] is float32.* rows"),
        (lambda params, count: (Server(params), jnp.zeros(())), r"clients is float32\[\]; .* rows"),
    ],
)
def test_a_start_that_returns_something_else(started, said):
    """A model in place of a table would have been read as one, row by row."""
    method = Algorithm("own", lambda params, n, batch: started(params, n), PLAIN.phases)
    with pytest.raises(ValueError, match=said):
        method.init(initial_params(), N)


def test_a_phase_without_a_comma():
    for phases in (PLAIN.phases[0], [PLAIN]):
        with pytest.raises(TypeError, match=r"phases of own must be a tuple .*\(phase,\)"):
            Algorithm("own", PLAIN.start, phases)


def test_a_reduce_that_names_no_fields():
    phases = (PLAIN.phases[0]._replace(reduce="mean"),)
    with pytest.raises(TypeError, match=r"reduce is 'mean'; it must be a dict .* mean, sum, stack"):
        Algorithm("own", PLAIN.start, phases)


def test_a_state_of_another_method_has_no_params():
    params = initial_params()
    state = algorithms.fedper(loss_fn, client_lr=0.2, personal="W").init(params, N)
    for algorithm in (PLAIN, with_compression(PLAIN, "sign")):
        for other in (state, params):
            with pytest.raises(ValueError, match=r"state is not one of fedavg.*: .* no attribute"):
                algorithm.params(other)
    np.testing.assert_array_equal(flat(PLAIN.params(PLAIN.init(params, N))), flat(params))


def test_a_round_takes_the_states_of_its_method_alone():
    drawn = reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4)
    params, batch = initial_params(), to_batch(drawn[0][1], 0)
    made = {
        "fedavg": PLAIN,
        "scaffold": algorithms.scaffold(loss_fn, client_lr=0.2),
        "feddyn": algorithms.feddyn(loss_fn, client_lr=0.2),
        "compressed": with_compression(PLAIN, "sign"),
        "both ways": with_compression(PLAIN, "sign", downlink="sign"),
    }
    made["scaffold both ways"] = with_compression(made["scaffold"], "sign", downlink="sign")

    def start_with_numbers(params, num_clients, batch):
        return PLAIN.start(params, num_clients, batch)[0], jnp.zeros(num_clients)

    made["a number for each client"] = dataclasses.replace(PLAIN, start=start_with_numbers)
    states = {name: algorithm.init(params, N) for name, algorithm in made.items()}
    for name, algorithm in made.items():
        for round_fn in (build_round(algorithm, "scan"), jax.jit(algorithm.round_fn)):
            for other, state in states.items():
                if other == name:
                    round_fn(state, batch)
                    continue
                with pytest.raises(ValueError, match="state is not one of "):
                    round_fn(state, batch)
        with pytest.raises(TypeError, match="state is CohortBatch; it must be a FedState"):
            build_round(algorithm)(batch, states[name])


@pytest.mark.parametrize("first", [False, True])
def test_a_round_takes_a_state_with_and_without_first_estimates(first):
    drawn = reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4)
    params, batch = initial_params(), to_batch(drawn[0][1], 0)
    for algorithm in (
        algorithms.stem(loss_fn, client_lr=0.2, momentum=0.5),
        algorithms.fafed(loss_fn, client_lr=0.2, momentum=0.5, second_moment_decay=0.9),
    ):
        state = algorithm.init(params, N, batch if first else None)
        after, _ = jax.eval_shape(build_round(algorithm, "scan"), state, batch)
        assert jax.tree.structure(after) == jax.tree.structure(state)


def test_bytes_of_what_is_sent():
    params = initial_params()
    plain = fedavg_with()
    assert plain.uplink(params) == 18 * 4
    assert fedavg_with(costs=Costs(extra=5)).uplink(params) == 18 * 4 + 5
    derived = fedavg_with(costs=Costs(derived=("delta",), extra=5))
    assert derived.uplink(params) == 5
    halved = fedavg_with(costs=Costs(up=lambda sent: tree.nbytes(sent["delta"]) // 2))
    assert halved.uplink(params) == 18 * 2
    # Compressed, a field that could be derived is sent like the others.
    compressed = with_compression(derived, "int8")
    assert compressed.uplink(params) == compressors.int8().bytes(18) + 5


def test_a_message_of_pythons_numbers():
    def client_update(x, row, batch):
        message, row, report = PLAIN.phases[0].client_update(x, row, batch)
        return {**message, "one": 1.0, "two": 2}, row, report

    def server_update(server, messages, cohort):
        server, metrics = PLAIN.phases[0].server_update(server, messages, cohort)
        return server, {**metrics, "one": messages["one"], "two": messages["two"]}

    algorithm = fedavg_with(
        client_update=client_update,
        server_update=server_update,
        reduce={"delta": "mean", "one": "mean", "two": "sum"},
        message=lambda params: {"delta": params, "one": jnp.zeros(()), "two": jnp.int32(0)},
    )
    _, _, metrics = one_round(algorithm)
    assert metrics["one"] == 1
    assert metrics["two"] == 2 * metrics["participants"] > 0


@pytest.mark.parametrize(("kind", "vote"), [("int8", -1), ("uint8", 1), ("int16", 255)])
def test_narrow_integers_of_many_clients_are_summed(kind, vote):
    """300 votes of -1 in int8 added up to -44; a vote in int8 is still sent as one byte."""
    clients = data.from_clients({i: (np.ones((1, 2)), np.zeros(1)) for i in range(300)})

    def client_update(x, row, batch):
        return {"votes": jnp.full(2, vote, kind)}, row, {"local_steps": (batch.num_steps, 1.0)}

    def server_update(server, messages, cohort):
        return server, {"votes": messages["votes"]}

    phase = Phase(
        lambda server, round: server.params,
        client_update,
        server_update,
        reduce={"votes": "sum"},
        message=lambda params: {"votes": jnp.zeros(2, kind)},
    )
    algorithm = Algorithm("vote", lambda params, n, batch: (Server(params), ()), (phase,))
    state, key = algorithm.init({"w": jnp.zeros(2)}, 300), jax.random.key(0)
    batch = data.draw_batch(clients, key, 0, cohort_size=300, local_steps=1, batch_size=1)
    for client_map in ("vmap", "scan"):
        _, metrics = build_round(algorithm, client_map)(state, batch)
        np.testing.assert_array_equal(metrics["votes"], [300 * vote] * 2)
    assert metrics["bytes_up"] == 300 * 2 * np.dtype(kind).itemsize


def test_a_random_key_may_be_broadcast():
    """It counts with its bits, and all clients draw the same mask with it."""

    def broadcast(server, round):
        return server.params, jax.random.fold_in(jax.random.key(0), round)

    def client_update(received, row, batch):
        params, key = received
        message, row, report = PLAIN.phases[0].client_update(params, row, batch)
        mask = jax.random.bernoulli(key, 0.5, (5, 3))
        return {"delta": {**message["delta"], "W": message["delta"]["W"] * mask}}, row, report

    algorithm = fedavg_with(broadcast=broadcast, client_update=client_update)
    before, after, _ = one_round(algorithm)
    _, plain, _ = one_round(fedavg_with())
    start, ends = before.server.params["W"], (after.server.params["W"], plain.server.params["W"])
    mask = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), 0), 0.5, (5, 3))
    np.testing.assert_allclose(ends[0], jnp.where(mask, ends[1], start), atol=1e-6)
    assert algorithm.downlink(start) - fedavg_with().downlink(start) == 8


def test_rounds_in_which_nothing_travels():
    """Bytes follow the server's own word."""

    def server_update(server, messages, cohort):
        server, metrics = PLAIN.phases[0].server_update(server, messages, cohort)
        return server, {**metrics, "communicated": (cohort.round > 0).astype(float)}

    quiet = fedavg_with(server_update=server_update)
    drawn = reference.make_rounds(0, 2, cohort_size=4, max_steps=3, batch_size=4)
    round_fn, state = jax.jit(build_round(quiet, "vmap")), quiet.init(initial_params(), N)
    for index, (_, padded) in enumerate(drawn):
        state, metrics = round_fn(state, to_batch(padded, index))
        assert metrics["communicated"] == index
        assert metrics["bytes_up"] == metrics["participants"] * index * 72
        assert metrics["bytes_down"] == metrics["participants"] * index * 72


def test_bytes_of_models_larger_than_an_integer():
    """Two gigabytes and more do not fit into int32."""
    params = {"W": jax.ShapeDtypeStruct((2**20, 2**10), jnp.float32)}
    algorithm = head_only(message=lambda params: {"head": [params["W"]], "size": jnp.zeros(())})
    assert algorithm.uplink(params) == 2**32 + 4
    assert algorithm.downlink(params) == 2**32


def test_a_round_of_a_large_model_can_be_traced():
    def tiny_loss(params, examples, key):
        return examples["x"] @ params["w"][: reference.FEATURES]

    algorithm = algorithms.fedavg(tiny_loss, client_lr=0.1)
    state = jax.eval_shape(lambda: algorithm.init({"w": jnp.zeros(2**30, jnp.float32)}, N))
    drawn = reference.make_rounds(0, 1, cohort_size=4, max_steps=2, batch_size=4)
    batch = to_batch(drawn[0][1], 0)
    after, metrics = jax.eval_shape(build_round(algorithm, "scan"), state, batch)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    assert metrics["bytes_up"].dtype == jnp.float32


def test_a_round_outside_of_jit_compiles_once():
    drawn = reference.make_rounds(0, 3, cohort_size=4, max_steps=3, batch_size=4)
    batches = [to_batch(batch, t) for t, (_, batch) in enumerate(drawn)]
    round_fn, compiled = build_round(PLAIN, "scan"), []
    state = PLAIN.init(initial_params(), N)
    jitted = jax.jit(round_fn)(state, batches[0])
    jax.tree.map(np.testing.assert_array_equal, round_fn(state, batches[0]), jitted)

    def note(name, seconds, **_):
        if "backend_compile" in name:
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    for batch in batches[1:]:
        state, _ = round_fn(state, batch)
    jax.monitoring.unregister_event_duration_listener(note)
    assert compiled == []
    with pytest.raises(ValueError, match="ids must be distinct"):
        round_fn(state, batches[0]._replace(client_ids=jnp.zeros(4, jnp.int32)))


def noisy(params, examples, key):
    losses = loss_fn(params, examples, key)
    return losses * (1 + 0.5 * jax.random.normal(key, losses.shape, losses.dtype))


@pytest.mark.parametrize("impl", few(1, ["rbg", "unsafe_rbg"]))
def test_a_clients_draws_do_not_depend_on_the_map_with_any_generator(impl):
    batch = to_batch(reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4)[0][1], 0)
    algorithm = algorithms.fedavg(noisy, client_lr=0.2)
    state = algorithm.init(initial_params(), N)
    ends = [
        jax.jit(build_round(algorithm, how))(
            state, batch._replace(key=jax.random.key(3, impl=kind))
        )[0]
        for how, kind in (("vmap", impl), ("scan", impl), ("scan", "threefry2x32"))
    ]
    for end in ends[1:]:
        np.testing.assert_allclose(*(flat(algorithm.params(e)) for e in (ends[0], end)), atol=1e-6)


@pytest.mark.parametrize("client_map", ["vmap", "scan", "chunk:3", "shard_map"])
def test_each_client_knows_its_number(client_map):
    """Clients send one-hot vectors of their numbers; the server sums them."""

    def client_update(params, row, batch):
        assert batch.client_id.shape == ()
        assert batch.client_id.dtype == jnp.int32
        own = (jnp.arange(N) == batch.client_id).astype(jnp.float32)
        return {"own": own * batch.num_steps}, row, {}

    def server_update(server, messages, cohort):
        return Server(server.params | {"seen": messages["own"]}), {"delta_norm": jnp.ones(())}

    start = {"seen": jnp.zeros(N)}
    phase = Phase(
        lambda server, round: server.params,
        client_update,
        server_update,
        reduce={"own": "sum"},
        message=lambda params: {"own": jnp.zeros(N)},
    )
    algorithm = Algorithm("who", lambda p, n, b: (Server(p), ()), (phase,))
    batch = to_batch(reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4)[0][1], 0)
    ids, steps = jnp.int32([5, 1, N, 3]), jnp.int32([3, 1, 2, 2])
    batch = batch._replace(client_ids=ids, num_steps=steps, participates=None)
    state, _ = jax.jit(build_round(algorithm, client_map))(algorithm.init(start, N), batch)
    expected = np.zeros(N)
    taken = np.ones((4, 3), bool) if batch.example_mask is None else batch.example_mask.any(2)
    for client, k, real in zip(ids.tolist(), steps.tolist(), np.asarray(taken), strict=True):
        if client < N:
            expected[client] = real[:k].sum()
    np.testing.assert_array_equal(state.server.params["seen"], expected)


@pytest.mark.parametrize(("few_steps", "devices"), [(0, 4), (50, 1)])
def test_in_a_program_of_ones_own_a_cpu_is_one_device(monkeypatch, few_steps, devices):
    """XLA ends the process if more than 32 calls of a program for several CPU devices wait.

    A small round is on one device anyway.
    """
    monkeypatch.setattr(planner, "FEW_STEPS", few_steps)
    (_, drawn), *_ = reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4)
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    state, batch = algorithm.init(initial_params(), N), to_batch(drawn, 0)
    round_fn = build_round(algorithm)
    alone, _ = round_fn(state, batch)
    assert len(jax.tree.leaves(alone.server)[0].devices()) == devices
    in_program, _ = jax.jit(lambda state, batch: round_fn(state, batch))(state, batch)
    assert len(jax.tree.leaves(in_program.server)[0].devices()) == 1
    chex.assert_trees_all_close(alone.server, in_program.server, rtol=1e-6)


def test_few_rounds_on_several_cpu_devices_wait(monkeypatch):
    waited = []
    monkeypatch.setattr(WaitingCalls, "add", lambda _, result: waited.append(result))
    (_, drawn), *_ = reference.make_rounds(0, 1, cohort_size=4, max_steps=3, batch_size=4)
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    build_round(algorithm, "shard_map:2")(algorithm.init(initial_params(), N), to_batch(drawn, 0))
    assert [len(result.devices()) for result in waited] == [2]


class Result:
    """A result that says when somebody waits for it."""

    def __init__(self, number, waited, devices):
        self.number, self.waited, self._devices = number, waited, devices

    def devices(self):
        return self._devices

    def block_until_ready(self):
        self.waited.append(self.number)


@pytest.mark.parametrize(("devices", "expected"), [(2, [0, 1, 2, 3]), (1, [])])
def test_the_oldest_calls_are_waited_for(devices, expected):
    calls, waited = WaitingCalls(), []
    for number in range(12):
        calls.add(Result(number, waited, set(jax.devices()[:devices])))
    assert waited == expected


def test_a_drawn_batch_is_not_read_but_one_for_another_federation_is():
    clients = data.partition(
        data.Examples(np.zeros((60, 6), np.float32), np.arange(60) % 3), "iid", num_clients=6
    )
    algorithm = algorithms.fedavg(loss_fn, client_lr=0.1)
    batch = data.draw_batch(
        clients, jax.random.key(0), 0, cohort_size=6, local_steps=1, batch_size=2
    )
    round_fn = build_round(algorithm)
    with pytest.raises(ValueError, match="ids must lie between 0 and 2"):
        round_fn(algorithm.init(initial_params(), 3), batch)
    wrong = batch._replace(weights=jnp.full(6, jnp.nan))
    with pytest.raises(ValueError, match="weights is"):
        round_fn(algorithm.init(initial_params(), 6), wrong)


def test_what_is_known_of_an_array_ends_with_it():
    known, array = KnownArrays(), jnp.arange(3) + 1
    known.add(array, 7)
    assert known.get(array) == 7
    assert known.get(jnp.arange(3) + 1) is None
    number = id(array)
    del array
    assert number not in known._of
