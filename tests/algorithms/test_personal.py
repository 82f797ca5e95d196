"""The model that each client has of its own: against the twins, at the edges, under wrappers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from fedjax_lab import algorithms as a
from fedjax_lab import (
    build_round,
    models,
    with_attack,
    with_compression,
    with_dp,
    with_personal,
    with_robust_aggregation,
    with_secure_aggregation,
)
from fedjax_lab.clients.leaves import WORDS, paths_of, split
from fedjax_lab.models.batch_norm import BatchNorm
from fedjax_lab.types import ClientBatch, Cohort
from fedjax_lab.wrappers import client_params
from tests.algorithms.cases import N
from tests.algorithms.cases.personal import CASES
from tests.algorithms.compiled import begin, on_its_problem
from tests.algorithms.problem import flat, initial_params, loss_fn, run_rounds, to_batch
from tests.federations import batch_of
from tests.models.test_decoder import LLAMA
from tests.reference import problem as reference

MORE = pytest.mark.methods
LR = {"client_lr": 0.2}
AT_ONCE = ("fedrep", "ditto")
NAMES = [case.id for case in CASES if case.main and case.id != "fedbabu"]


@pytest.fixture(autouse=True, scope="module")
def _float64():
    with jax.enable_x64(True):
        yield


def own_models(algorithm, state):
    """[N, d], the model that each client uses."""
    models = jax.vmap(lambda i: client_params(algorithm, state, i))(jnp.arange(N))
    return np.concatenate([np.asarray(models[name]).reshape(N, -1) for name in "Wb"], axis=1)


def rounds(count=6, **more):
    return reference.make_rounds(5, count, cohort_size=4, max_steps=3, batch_size=4, **more)


def run(algorithm, drawn):
    state = begin(algorithm, initial_params())
    return run_rounds(build_round(algorithm, "scan"), state, drawn)[0]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in AT_ONCE else MORE) for n in NAMES]
)
def test_each_client_has_the_model_of_its_twin(name):
    method = on_its_problem(name)
    drawn, _, states = method.run
    twin = method.case.build_twin(flat(method.initial_params))
    for t, (clients, _) in enumerate(drawn):
        twin.round(clients, t)
        if t in (0, 6, len(drawn) - 1):
            theirs = [twin.personal_model(i) for i in range(N)]
            ours = own_models(method.algorithm, states[t + 1])
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert np.abs(ours - ours.mean(0)).max() > 0.05  # they are not one


@pytest.mark.parametrize(
    ("left", "right"),
    [
        pytest.param(
            a.ditto(loss_fn, prox_weight=0.0, **LR), a.local_only(loss_fn, **LR), id="ditto"
        ),
        pytest.param(
            a.apfl(loss_fn, mixing=1.0, adaptive_mixing=False, **LR),
            a.local_only(loss_fn, **LR),
            marks=MORE,
            id="apfl 1",
        ),
        pytest.param(
            a.apfl(loss_fn, mixing=0.0, adaptive_mixing=False, **LR),
            a.with_fine_tuning(a.fedavg(loss_fn, **LR), loss_fn, steps=1, **LR),
            marks=MORE,
            id="apfl 0",
        ),
        pytest.param(
            a.fedper(loss_fn, personal="b", **LR),
            with_personal(a.fedavg(loss_fn, **LR), lambda path: path == "b"),
            marks=MORE,
            id="fedper",
        ),
        pytest.param(
            a.ditto(loss_fn, prox_weight=0.4, **LR),
            with_compression(a.ditto(loss_fn, prox_weight=0.4, **LR), "identity"),
            marks=MORE,
            id="identity",
        ),
    ],
)
def test_limits_of_the_clients_models(left, right):
    drawn = rounds()
    left, right = (own_models(algorithm, run(algorithm, drawn)) for algorithm in (left, right))
    assert np.abs(left - flat(initial_params())).max() > 1e-2
    np.testing.assert_allclose(left, right, rtol=0, atol=1e-12)


@pytest.mark.methods
def test_the_servers_part_of_ditto_is_fedavg_bit_for_bit():
    drawn = rounds()
    for algorithm in (a.ditto(loss_fn, **LR), a.apfl(loss_fn, **LR)):
        ours, plain = (x.params(run(x, drawn)) for x in (algorithm, a.fedavg(loss_fn, **LR)))
        jax.tree.map(np.testing.assert_array_equal, ours, plain)


@MORE
def test_pfedme_with_a_heavy_weight_is_fedavg():
    """Two inner steps of rate 1 / weight end at w - g(w) / weight, but for 1 / weight squared."""
    heavy = a.pfedme(loss_fn, client_lr=0.2, prox_weight=1e5, personal_lr=1e-5, inner_steps=2)
    drawn = rounds()
    ours, plain = (flat(x.params(run(x, drawn))) for x in (heavy, a.fedavg(loss_fn, **LR)))
    np.testing.assert_allclose(ours, plain, atol=1e-4)
    weightless = a.pfedme(loss_fn, client_lr=0.2, prox_weight=0.0)
    np.testing.assert_array_equal(
        flat(weightless.params(run(weightless, drawn))), flat(initial_params())
    )


def test_fedbabus_head_never_changes_and_its_clients_fine_tune():
    case = next(case for case in CASES if case.id == "fedbabu")
    drawn = rounds()
    for fine_tune in ("all", "head"):
        more = {"fine_tune": fine_tune, "fine_tune_lr": 0.3}
        algorithm, twin = case.build(loss_fn, **more), case.build_twin(flat(initial_params()))
        if fine_tune == "all":
            state = run(algorithm, drawn)
        for t, (clients, _) in enumerate(drawn):
            twin.round(clients, t)
        np.testing.assert_array_equal(state.server.params["b"], initial_params()["b"])
        (clients, padded) = rounds(7, equal_steps=True)[-1]
        batch = to_batch(padded, 0)
        mine = ClientBatch(
            jax.tree.map(lambda leaf: leaf[1], batch.examples),
            None, None, jnp.int32(3), jax.random.key(0), jnp.int32(0), None, None, None,
        )  # fmt: skip
        tuned = flat(algorithm.personal.fine_tune(client_params(algorithm, state, 1), mine))
        expected = twin.fine_tuned(clients[1].minibatches, 0.3, head_only=fine_tune == "head")
        np.testing.assert_allclose(tuned, expected, rtol=0, atol=1e-9)
        assert np.abs(expected - twin.x).max() > 1e-2


@MORE
def test_a_step_transform_moves_nothing_that_is_frozen():
    """With momentum, what has moved once would go on without a gradient."""
    heavy = optax.trace(0.9)
    drawn = rounds(2, equal_steps=True)
    body = a.fedrep(loss_fn, personal="W", head_steps=2, step_transform=heavy, **LR)
    first, second = (begin(body, initial_params()), to_batch(drawn[0][1], 0))
    one_step = jax.tree.map(lambda leaf: leaf[:, 2:], (second.examples, second.example_mask))
    state, _ = jax.jit(body.round_fn)(first, second)
    moved = np.abs(own_models(body, state) - flat(initial_params()))
    assert (moved[:, reference.LEAVES[0]].max(1) > 0).sum() == 4  # of the cohort, in two steps
    # The bias moves in the third step alone: by its gradient there, without what came before.
    bias = state.server.shared["b"] - initial_params()["b"]
    ids = np.asarray(second.client_ids)
    gradients = []
    for slot, i in enumerate(ids):
        weights = flat(client_params(body, state, int(i)))[reference.LEAVES[0]]
        y = np.concatenate([weights, flat(initial_params())[reference.LEAVES[1]]])
        examples, _ = one_step
        minibatch = (np.asarray(examples["x"][slot, 0]), np.asarray(examples["y"][slot, 0]))
        gradients.append(reference.gradient(y, minibatch)[reference.LEAVES[1]])
    mean = np.average(gradients, axis=0, weights=np.asarray(second.weights))
    np.testing.assert_allclose(bias, -0.2 * mean, atol=1e-12)


WRAPPERS = {
    "compression": lambda x: with_compression(x, "top_k:0.5"),
    "dp": lambda x: with_dp(x, 0.5, 0.0),
    "robust": lambda x: with_robust_aggregation(x, "median"),
    "secure": lambda x: with_secure_aggregation(x, bits=32, clip=10.0),
    "attack": lambda x: with_attack(x, "sign_flip", share=0.3),
}


@MORE
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_change_what_the_server_hears_and_leave_the_clients_their_models(wrapper):
    """Around Ditto, the server's part is FedAvg's in that wrapper, and v_i is drawn to it."""
    wrap = WRAPPERS[wrapper]
    drawn = rounds(2, weighted=False, equal_steps=True)
    for t in range(len(drawn)):  # as with_dp wants it
        drawn[t][1]["weights"] = None
    ditto = a.ditto(loss_fn, prox_weight=0.4, **LR)
    plain, ours = wrap(a.fedavg(loss_fn, **LR)), wrap(ditto)
    state, other = begin(ours, initial_params()), begin(plain, initial_params())
    alone = begin(ditto, initial_params())
    step, step_plain, step_alone = (jax.jit(build_round(x, "scan")) for x in (ours, plain, ditto))
    for t, (_, padded) in enumerate(drawn):
        batch = to_batch(padded, t)
        # The same v_i as where the server had the wrapped FedAvg's params by itself.
        alone = alone._replace(server=alone.server._replace(params=plain.params(other)))
        alone, _ = step_alone(alone, batch)
        state, _ = step(state, batch)
        other, _ = step_plain(other, batch)
    served = flat(ours.params(state)), flat(plain.params(other))
    np.testing.assert_allclose(*served, rtol=0, atol=1e-12)
    own = own_models(ours, state), own_models(ditto, alone)
    np.testing.assert_allclose(*own, rtol=0, atol=1e-12)


def test_what_has_no_meaning_is_refused_with_a_reason():
    alone, ditto = a.local_only(loss_fn, **LR), a.ditto(loss_fn, **LR)
    for wrap in WRAPPERS.values():
        with pytest.raises(ValueError, match="local_only, whose clients send no messages"):
            wrap(alone)
    with pytest.raises(ValueError, match="ditto, which has a model for each client already"):
        with_personal(ditto, lambda path: path == "b")
    with pytest.raises(ValueError, match="fedavg, which has no model for each client"):
        client_params(a.fedavg(loss_fn, **LR), None, 0)
    tuned = a.with_fine_tuning(a.fedavg(loss_fn, **LR), loss_fn, steps=2, **LR)
    with pytest.raises(ValueError, match="fine-tune already"):
        a.with_fine_tuning(tuned, loss_fn, steps=2, **LR)
    for given, options, message in (
        ("fedavg", LR, "algorithm is str, not an Algorithm"),
        (a.fedavg(loss_fn, **LR), {}, r"with_fine_tuning\(\) missing a required .*'client_lr'"),
        (a.fedavg(loss_fn, **LR), {"lr": 0.1}, "did you mean 'client_lr'"),
    ):
        with pytest.raises(TypeError, match=message):
            a.with_fine_tuning(given, loss_fn, steps=2, **options)
    with pytest.raises(TypeError, match="loss_fn of with_fine_tuning is a int"):
        a.with_fine_tuning(a.fedavg(loss_fn, **LR), 3, steps=2, **LR)
    for name, wrap in (("with_dp", WRAPPERS["dp"]), ("with_secure", WRAPPERS["secure"])):
        with pytest.raises(
            ValueError, match=rf"fedexp, whose server needs the delta of each client; {name}"
        ):
            wrap(a.fedexp(loss_fn, **LR))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: a.fedper(loss_fn, personal=3, **LR), TypeError, "personal is 3; it must be"),
        (lambda: a.fedper(loss_fn, personal="(", **LR), ValueError, "personal is '\\(', no"),
        (lambda: a.fedrep(loss_fn, head_steps=-1, **LR), ValueError, "head_steps is -1"),
        (lambda: a.fedrep(loss_fn, head_steps=1.5, **LR), TypeError, "head_steps is 1.5"),
        (lambda: a.fedbabu(loss_fn, head="all", **LR), ValueError, "head is 'all'"),
        (lambda: a.fedbabu(loss_fn, fine_tune="boddy", **LR), ValueError, "fine_tune is 'boddy'"),
        (lambda: a.fedbabu(loss_fn, fine_tune_steps=-1, **LR), ValueError, "fine_tune_steps is -1"),
        (lambda: a.fedbabu(loss_fn, fine_tune_lr=-1, **LR), ValueError, "fine_tune_lr is -1"),
        (lambda: a.fedbabu(loss_fn, fine_tune_lr=optax.constant_schedule(0.1), **LR), TypeError,
         "fine_tune_lr is .*; it must be a number"),
        (lambda: a.ditto(loss_fn, prox_weight=-1, **LR), ValueError, "prox_weight is -1"),
        (lambda: a.ditto(loss_fn, personal_lr=-1, **LR), ValueError, "personal_lr is -1"),
        (lambda: a.pfedme(loss_fn, inner_steps=0, **LR), ValueError, "inner_steps is 0"),
        (lambda: a.pfedme(loss_fn, personal_lr=-1, **LR), ValueError, "personal_lr is -1"),
        (lambda: a.apfl(loss_fn, mixing=1.5, **LR), ValueError, "mixing is 1.5; .* at most 1"),
        (lambda: a.apfl(loss_fn, adaptive_mixing=1, **LR), TypeError, "adaptive_mixing is 1"),
        (lambda: a.fedexp(loss_fn, epsilon=-1, **LR), ValueError, "epsilon is -1"),
        (lambda: a.fedexp(loss_fn, average_last_two=2, **LR), TypeError, "average_last_two is 2"),
    ],
)  # fmt: skip
def test_bad_input(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("method", "word"),
    [
        (a.fedper(loss_fn, **LR), r"which holds for no leaves of .*: W, b\. The head is known"),
        (a.lg_fedavg(loss_fn, **LR), "personal is 'body', which holds for all leaves"),
        (a.fedbn(loss_fn, **LR), r"holds for no .* needs normalisation layers, such as models.mlp"),
        (a.fedper(loss_fn, personal="w", **LR), "personal is 'w', which holds for no"),
        (a.fedbabu(loss_fn, head=r"\w", **LR), r"head is .* holds for all leaves"),
    ],
)
def test_leaves_that_are_all_or_none(method, word):
    with pytest.raises(ValueError, match=word):
        method.init(initial_params(), N)


@pytest.mark.parametrize(("head_steps", "steps"), [(3, 3), (None, 1)])
def test_a_round_leaves_steps_for_the_shared_leaves(head_steps, steps):
    method = a.fedrep(loss_fn, personal="b", head_steps=head_steps, **LR)
    drawn = reference.make_rounds(0, 1, cohort_size=2, max_steps=steps, batch_size=2)
    state = method.init(initial_params(), N)
    with pytest.raises(ValueError, match=f"head_steps is {head_steps}; a round has {steps} local"):
        jax.eval_shape(method.round_fn, state, to_batch(drawn[0][1], 0))


def test_the_words_for_leaves_mean_those_of_the_models():
    """Heads and normalisation layers, as the library's own models and flax's layers call them."""
    model = models.mlp(10, hidden=(8,), norm="batch")
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4)))
    sizes = {word: models.count_params(split(params, word)[1]) for word in WORDS}
    head, norm, everything = 8 * 10 + 10, 4 * 8, 4 * 8 + 8 + 4 * 8 + 90
    assert sizes == {
        "head": head, "body": everything - head, "norm": norm, "all": everything, "nothing": 0
    }  # fmt: skip
    names = {"block_0": {"conv_norm_0": {"conv": 1, "norm": {"batch": 2}}, "LayerNorm_1": 4}}
    assert split({**names, "norm_1": 8, "normal": 16, "bn2": 32, "lm_head": 64}, "norm")[1] == {
        "block_0": {"conv_norm_0": {"conv": None, "norm": {"batch": 2}}, "LayerNorm_1": 4},
        **{"norm_1": 8, "normal": None, "bn2": 32, "lm_head": None},
    }


class Norms(nn.Module):
    """Layers of flax, by their own names and by such as other libraries give them."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="normal")(nn.InstanceNorm()(nn.LayerNorm()(x)))
        for name in ("gn1", "ln_f", "input_layernorm", "encoder_bn", "final_norm_2"):
            x = nn.Dense(8)(nn.GroupNorm(2, name=name)(x))
        return BatchNorm(name="bn")(x)


TOKENS = jnp.zeros((1, 4), jnp.int32)
NORMALISED = {
    "flax": (models.from_linen(Norms()), jnp.zeros((1, 3, 8))),
    "decoder": (models.decoder(LLAMA), TOKENS),
    "resnet20": (models.build("resnet20", 10), jnp.zeros((1, 8, 8, 3))),
    "vit": (models.build("vit", 10), jnp.zeros((1, 28, 28, 1))),
    "transformer": (models.build("transformer", 10), TOKENS),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_norm_means_each_normalisation_layer(name):
    """By the classes of the modules, not by their names."""
    model, x = NORMALISED[name]
    layers = set()

    def remember(call, args, kwargs, context):
        if re.fullmatch("(Batch|Group|Instance|Layer|RMS)Norm", type(context.module).__name__):
            layers.add("/".join(context.module.path) + "/")
        return call(*args, **kwargs)

    with nn.intercept_methods(remember):
        params = jax.eval_shape(model.init, jax.random.key(0), x)
    expected = {path for path in paths_of(params) if any(map(path.startswith, layers))}
    assert expected
    assert set(paths_of(split(params, "norm")[1])) == expected


EXP = a.fedexp(loss_fn, epsilon=0.25, **LR)


@jax.jit
def exp_step(deltas, weights):
    """The metric of a round in which three clients send these updates of the bias."""
    state = EXP.init({"W": jnp.zeros((5, 3)), "b": jnp.zeros(3)}, 3)
    zero, one = jnp.zeros(3, jnp.int32), jnp.ones(3, jnp.int32)
    cohort = Cohort(zero, weights > 0, weights, zero[0], one[0], 1, one, jax.random.key(0))
    message = {"delta": {"W": jnp.zeros((3, 5, 3)), "b": deltas}}
    return EXP.phases[0].server_update(state.server, message, cohort)[1]["server_step"]


@pytest.mark.parametrize(
    ("deltas", "weights", "step"),
    [
        ([[1, 2, 3], [0, 0, 0], [0, 0, 0]], [1, 0, 0], 1),  # one client
        ([[1, 2, 3]] * 3, [1 / 3] * 3, 1),  # all of a mind
        (100 * np.eye(3), [1 / 3] * 3, 3 / 2),  # orthogonal, of equal length: S / 2
        ([[1, 0, 0], [-1, 0, 0], [0, 0, 0]], [1 / 2, 1 / 2, 0], 1 / (2 * 0.25)),  # epsilon alone
        (np.zeros((3, 3)), [1 / 3] * 3, 1),
    ],
)
def test_fedexps_step_at_the_edges(deltas, weights, step):
    found = exp_step(jnp.asarray(deltas, float), jnp.asarray(weights, float))
    assert float(found) == pytest.approx(step, rel=1e-4)


def test_pfedme_keeps_the_state_of_a_gradient_transform_between_inner_steps(x64):
    pull, personal_lr, client_lr, decay, target = 2.0, 0.1, 0.05, 0.9, np.array([1.0, -2.0])
    algorithm = a.pfedme(
        lambda params, examples, key: 0.5 * jnp.square(params[None] - examples).sum(-1),
        client_lr=client_lr,
        prox_weight=pull,
        personal_lr=personal_lr,
        inner_steps=3,
        gradient_transform=optax.trace(decay),
    )
    batch = batch_of(jnp.broadcast_to(jnp.asarray(target), (1, 2, 4, 2)))  # two local steps
    state, _ = algorithm.round_fn(algorithm.init(jnp.zeros(2), 1), batch)
    w, theta, momentum = np.zeros(2), np.zeros(2), np.zeros(2)
    for _ in range(2):
        for _ in range(3):
            momentum = theta - target + decay * momentum
            theta = theta - personal_lr * (momentum + pull * (theta - w))
        w = w - client_lr * pull * (w - theta)
    np.testing.assert_allclose(algorithm.params(state), w, rtol=0, atol=1e-12)
    np.testing.assert_allclose(client_params(algorithm, state, 0), theta, rtol=0, atol=1e-12)
