"""``step_transform``, of the whole direction of a local step: twins, limits and traced values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms, build_round, with_compression, with_personal
from tests.algorithms.cases import CASES, MAIN, N
from tests.algorithms.cases.base import LR, clip_and_decay
from tests.algorithms.compiled import ROUNDS, begin, both, case_of, draw, twin_after
from tests.algorithms.problem import (
    initial_params,
    loss_fn,
    run_rounds,
    stack_rounds,
    to_batch,
    toy_loss,
    toy_round,
)
from tests.reference import problem as reference

DECAY = 0.1
B1, B2, EPS = 0.8, 0.9, 1e-2
ADAM = optax.scale_by_adam(B1, B2, EPS)


def clip(max_norm):
    return optax.chain(optax.clip_by_global_norm(max_norm), optax.add_decayed_weights(DECAY))


def clip_step(max_norm, decay=DECAY):
    """The twin's clipping, then decay at y; the same in every step."""
    step = clip_and_decay(max_norm, decay)["transform"]
    return lambda: step


def adam_step():
    """The twin's Adam, bias corrected, from a client's first step of a round on."""
    m = v = n = 0

    def step(direction, y):
        nonlocal m, v, n
        n += 1
        m = B1 * m + (1 - B1) * direction
        v = B2 * v + (1 - B2) * direction**2
        return m / (1 - B1**n) / (np.sqrt(v / (1 - B2**n)) + EPS)

    return step


def halving_step():
    """The twin's schedule: steps of 1, 1/2, 1/4, ... of the direction."""
    factor = 2.0

    def step(direction, y):
        nonlocal factor
        factor /= 2
        return factor * direction

    return step


def norms_of_steps(case):
    """Of all directions that the twin descends when nothing transforms them."""
    norms = []

    def step(direction, y):
        norms.append(np.linalg.norm(direction))
        return direction

    twin_after(case, draw(case, ROUNDS), step_transform=lambda: step)
    return norms


# The transform is a property of the local steps: in every run, a plain direction, a corrected and a
# perturbed one; `make test-methods` has the rest.
FORMS = ("fedavg", "scaffold", "fedspeed")


def by_turns(*kinds):
    """Every method with every kind; the forms with one of them, in turn, in every run."""
    for case in MAIN:
        for turn, kind in enumerate(kinds):
            now = case.id in FORMS and FORMS.index(case.id) % len(kinds) == turn
            marks = () if now else pytest.mark.methods
            yield pytest.param(case, kind, id=f"{case.id}-{kind}", marks=marks)


LESAM_S = next(case for case in CASES if case.id == "fedlesam-S")


def each(at_once):
    """Every method, of which some are in every run."""
    for case in MAIN:
        yield pytest.param(
            case, id=case.id, marks=() if case.id in at_once else pytest.mark.methods
        )


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *by_turns("clip", "adam"),
        pytest.param(LESAM_S, "adam", id="fedlesam-S-adam", marks=pytest.mark.methods),
    ],
)
def test_it_agrees_with_the_twin(case, kind, x64):
    ours, theirs = ADAM, adam_step
    if kind == "clip":  # which acts in some steps and not in others
        max_norm = float(np.median(norms_of_steps(case)))
        ours, theirs = clip(max_norm), clip_step(max_norm)
    client_map = ("vmap", "scan")[CASES.index(case) // 2 % 2]
    ours, theirs = both(
        case, client_map, ours={"step_transform": ours}, theirs={"step_transform": theirs}
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [pytest.param("fedavg", marks=pytest.mark.methods), "scaffold"])
def test_a_schedule_counts_the_steps_of_a_round(name, x64):
    halving = optax.scale_by_schedule(lambda count: 0.5**count)
    ours, theirs = both(
        case_of(name),
        "vmap",
        ours={"step_transform": halving},
        theirs={"step_transform": halving_step},
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


def run(case, rounds=3, **changes):
    """The params after ragged rounds, and the rounds' metrics."""
    algorithm = case.build(case.problem.loss, **changes)
    state = begin(algorithm, case.problem.initial_params())
    state, metrics = run_rounds(build_round(algorithm, "vmap"), state, draw(case, rounds))
    return case.problem.flat(algorithm.params(state)), metrics


@pytest.mark.parametrize("case", list(each(FORMS[1:2])))
def test_no_client_moves_along_zeros(case, x64):
    _, metrics = run(case, step_transform=optax.set_to_zero())
    assert (metrics["participants"] > 0).all()
    assert (metrics["client_drift"] == 0).all()


RADIUS = {"perturbation_radius": 0.01}
CONTROLLED = {
    "scaffold": {},
    "fedgamma": RADIUS,
    "fedmo": {"momentum": 0.5},
    "fedmoswa": {"momentum": 0.5},
    "fedlesam": RADIUS | {"variant": "S"},
    "fedcm": {"mixing": 0.3},
    "mofedsam": {"mixing": 0.3} | RADIUS,
}


def controlled():
    """The methods that average the gradients of a client's steps, one of them in every run."""
    for name in CONTROLLED:
        yield pytest.param(name, marks=() if name == "scaffold" else pytest.mark.methods)


def toy_run(algorithm, rounds, steps=10):
    """The state after rounds with all four clients, in one program."""
    batches = jax.vmap(lambda t: toy_round(0, (0, 1, 2, 3), steps)._replace(round=t))(
        jnp.arange(rounds, dtype=jnp.int32)
    )
    state = algorithm.init(jnp.asarray(reference.TOY_X0), 4)
    return jax.jit(lambda s, b: jax.lax.scan(build_round(algorithm, "vmap"), s, b)[0])(
        state, batches
    )


@pytest.mark.parametrize("name", list(controlled()))
@pytest.mark.methods
def test_momentum_converges_where_it_does_for_fedavg(name, x64):
    """To the optimum, in closed form; read off the displacement, c_i is 4.1 times too large."""
    momentum = {"client_lr": 0.01, "step_transform": optax.trace(0.9)}
    distance = {}
    for each, options in (("fedavg", {}), (name, CONTROLLED[name])):
        made = getattr(algorithms, each)(toy_loss, **momentum, **options)
        end = made.params(toy_run(made, 80))
        distance[each] = np.linalg.norm(np.asarray(end) - reference.TOY_OPTIMUM)
    assert distance["fedavg"] < 0.1  # client drift
    assert distance[name] < 0.1


@pytest.mark.parametrize(
    "transform",
    [
        optax.trace(0.9),
        pytest.param(optax.scale_by_adam(), marks=pytest.mark.methods),
        pytest.param(optax.scale_by_schedule(lambda k: 0.5**k), marks=pytest.mark.methods),
    ],
)
@pytest.mark.parametrize("name", list(controlled()))
def test_a_control_is_the_mean_gradient(name, transform, x64):
    """At a learning rate so small that all steps see the gradient at x_0, a_i (x_0 - b_i)."""
    gradients = reference.TOY_A * (reference.TOY_X0 - reference.TOY_B)
    method = getattr(algorithms, name)
    made = method(toy_loss, client_lr=1e-9, step_transform=transform, **CONTROLLED[name])
    state = toy_run(made, 1)
    if name in ("fedcm", "mofedsam"):  # the mean over clients, of mixing * g in round 0
        found, expected = state.server.direction, 0.3 * gradients.mean(0)
    else:
        found, expected = getattr(state.clients, "correction", state.clients), gradients
    if "perturbation_radius" in CONTROLLED[name] and name != "fedlesam":
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        ascent = 0.01 * reference.TOY_A * gradients / norms
        expected = expected + (0.3 * ascent.mean(0) if name == "mofedsam" else ascent)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", list(controlled()))
def test_under_adam_the_scale_of_the_loss_does_not_matter(name, x64):
    if name in ("fedmoswa", "fedgamma"):
        pytest.skip("the same code as fedmo and scaffold")
    adam = optax.scale_by_adam(eps=1e-12)
    ends = []
    for scale in (1.0, 1e4):
        made = getattr(algorithms, name)(
            lambda y, examples, key, s=scale: s * toy_loss(y, examples, key),
            client_lr=0.01,
            step_transform=adam,
            **CONTROLLED[name],
        )
        ends.append(made.params(toy_run(made, 5)))
    np.testing.assert_allclose(*ends, rtol=1e-7)


@pytest.mark.methods
def test_wrappers_leave_the_mean_gradient(x64):
    """With a compressor that loses nothing, and with leaves that stay with their clients."""
    plain = algorithms.scaffold(loss_fn, **LR, step_transform=ADAM)
    wrapped = with_compression(plain, "identity", error_feedback=False)
    batches = stack_rounds(draw(case_of("scaffold"), 4))
    ends = []
    for algorithm in (plain, wrapped, with_personal(plain, lambda path: "b" in path)):
        state = algorithm.init(initial_params(), N)
        round_fn = build_round(algorithm, "vmap")
        state, _ = jax.jit(lambda s, b, f=round_fn: jax.lax.scan(f, s, b))(state, batches)
        ends.append(algorithm.params(state))
    np.testing.assert_allclose(ends[0]["W"], ends[1]["W"], rtol=0, atol=1e-12)
    assert np.isfinite(ends[2]["W"]).all()
    assert np.abs(ends[2]["W"] - ends[0]["W"]).max() > 1e-3


@pytest.mark.parametrize("name", ["fedcm", "mofedsam"])
def test_a_direction_that_the_server_cannot_compute_is_sent(name):
    options = {"client_lr": 0.1, **CONTROLLED[name]}
    size = 18 * 4
    for given, vectors in (
        ({}, 1),
        ({"step_transform": ADAM}, 2),
        ({"step_transform": ADAM, "mean_from": "displacement"}, 1),
    ):
        method = getattr(algorithms, name)(loss_fn, **options, **given)
        assert method.uplink(initial_params()) == vectors * size


def test_mean_from_is_checked():
    for name in ("scaffold", "fedcm"):
        with pytest.raises(ValueError, match="mean_from is 'steps'; it must be one of"):
            getattr(algorithms, name)(loss_fn, client_lr=0.1, mean_from="steps", **CONTROLLED[name])


# Their mean gradients are the displacement's without a transform, and added up with one.
MEANS = ("scaffold", "fedgamma", "fedmo", "fedmoswa", "fedcm", "mofedsam")


@pytest.mark.parametrize("case", list(each(FORMS[2:])))
def test_the_identity_gives_the_same_bits(case, x64):
    plain, _ = run(case)
    same, _ = run(case, step_transform=optax.identity())
    np.testing.assert_allclose(plain, same, rtol=0, atol=1e-12 if case.id in MEANS else 0)


def test_without_corrections_the_whole_step_is_the_gradient(x64):
    transform = optax.chain(clip(0.5), ADAM)
    ends = [
        run(case_of("fedavg"), **{name: transform})[0]
        for name in ("step_transform", "gradient_transform")
    ]
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-12)


@pytest.mark.methods
def test_clip_norms_can_be_swept(x64):
    drawn = draw(case_of("fedavg"), 1)
    batch = to_batch(drawn[0][1], 0)

    def after(max_norm):
        transform = optax.clip_by_global_norm(max_norm)
        algorithm = algorithms.fedavg(loss_fn, **LR, step_transform=transform)
        state = algorithm.init(initial_params(), N)
        state, _ = build_round(algorithm, "vmap")(state, batch)
        params = algorithm.params(state)
        return jnp.concatenate([params["W"].reshape(-1), params["b"]])

    max_norms = (0.1, 0.5, 100.0)
    ends = jax.jit(jax.vmap(after))(jnp.array(max_norms))
    for max_norm, ours in zip(max_norms, ends, strict=True):
        twin = twin_after(case_of("fedavg"), drawn, step_transform=clip_step(max_norm, 0.0))
        np.testing.assert_allclose(ours, twin.x, rtol=0, atol=1e-12)
    assert np.abs(np.diff(ends, axis=0)).max(1).min() > 1e-2
