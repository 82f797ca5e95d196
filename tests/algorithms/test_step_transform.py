"""``step_transform``, of the whole direction of a local step: twins, limits and traced values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_lab import algorithms, build_round
from tests.algorithms.cases import MAIN, N
from tests.algorithms.cases.base import LR, clip_and_decay
from tests.algorithms.compiled import ROUNDS, begin, both, case_of, draw, twin_after
from tests.algorithms.problem import initial_params, loss_fn, run_rounds, to_batch

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


def each(at_once):
    """Every method, of which some are in every run."""
    for case in MAIN:
        yield pytest.param(
            case, id=case.id, marks=() if case.id in at_once else pytest.mark.methods
        )


@pytest.mark.parametrize(("case", "kind"), list(by_turns("clip", "adam")))
def test_it_agrees_with_the_twin(case, kind, x64):
    ours, theirs = ADAM, adam_step
    if kind == "clip":  # which acts in some steps and not in others
        max_norm = float(np.median(norms_of_steps(case)))
        ours, theirs = clip(max_norm), clip_step(max_norm)
    client_map = ("vmap", "scan")[MAIN.index(case) // 2 % 2]
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


@pytest.mark.parametrize("case", list(each(FORMS[2:])))
def test_the_identity_gives_the_same_bits(case, x64):
    plain, _ = run(case)
    same, _ = run(case, step_transform=optax.identity())
    np.testing.assert_array_equal(plain, same)


def test_without_corrections_the_whole_step_is_the_gradient(x64):
    transform = optax.chain(clip(0.5), ADAM)
    ends = [
        run(case_of("fedavg"), **{name: transform})[0]
        for name in ("step_transform", "gradient_transform")
    ]
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-12)


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
