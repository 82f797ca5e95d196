"""Every method compiled once, for all tests over the catalogue.

Nearly all of a test's time is compilation. So a method's round is one program in float64, whose
hyper-parameters are arguments: as given, at the end of their range, or a learning rate of 0.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import build_round
from tests.algorithms import problem as softmax
from tests.algorithms.cases import MAIN, N
from tests.algorithms.cases.base import Problem
from tests.reference import problem as reference

ROUNDS, EMPTY_ROUND = 12, 5


def begin(algorithm, params, batch=None, num_clients=N):
    """The first state, in one program: operation by operation, each would be compiled alone."""
    return jax.jit(lambda p, b: algorithm.init(p, num_clients, b))(params, batch)


def noisy_loss(params, examples, key):
    """The softmax loss; where the examples ask for it, with a randomness of its own.

    A client that gets another one's key, or the same key twice, then gets another loss. It also
    returns metrics, of each example and of the mini-batch.
    """
    noise = jax.random.uniform(key, examples["y"].shape, minval=-0.5, maxval=0.5)
    factor = 1 + examples["noise"] * noise.astype(params["b"].dtype)
    losses = factor * softmax.loss_fn(params, examples, key)
    labels = examples["y"]
    return losses, {"mean_label": labels, "highest_label": labels.max(), "again": losses}


def with_noise(batch, amplitude):
    """The batch for ``noisy_loss``."""

    def add(examples):
        if examples is None:
            return None
        return examples | {"noise": jnp.full(examples["y"].shape, amplitude)}

    return batch._replace(examples=add(batch.examples), full_examples=add(batch.full_examples))


class Compiled:
    """A method of the table and its compiled round.

    Attributes:
      algorithm: with the hyper-parameters as given.
      given: the float hyper-parameters by name.
      initial_params: the first server model.
    """

    def __init__(self, case, problem, loss):
        self.case, self.problem = case, problem
        self.given = {n: v for n, v in case.options.items() if isinstance(v, float)}
        self.algorithm = case.build(loss)
        self.initial_params = problem.initial_params()
        self._noisy = loss is noisy_loss

        def one_round(values, state, batch):
            return build_round(case.build(loss, **values), "vmap")(state, batch)

        self.program = jax.jit(one_round)

    def batch(self, padded, t, amplitude=0.0):
        """A round of ``reference.make_rounds`` as the program takes it."""
        batch = softmax.to_batch(padded, t)
        return with_noise(batch, amplitude) if self._noisy else batch

    @functools.cached_property
    def first(self):
        """The first state; no program may take its memory."""
        return begin(self.algorithm, self.initial_params)

    def round(self, state, batch, **changed):
        return self.program(self.given | changed, state, batch)

    def advance(self, batches, **changed):
        """The state and the metrics after all rounds."""
        state = self.first
        for batch in batches:
            state, metrics = self.round(state, batch, **changed)
        return state, metrics

    @functools.cached_property
    def run(self):
        """Twelve ragged rounds: what was drawn, the batches, and the states from the first on."""
        drawn = draw(self.case, ROUNDS)
        batches = [self.batch(padded, t) for t, (_, padded) in enumerate(drawn)]
        states = [self.first]
        for batch in batches:
            states.append(self.round(states[-1], batch)[0])
        return drawn, batches, states


def draw(case, rounds, seed=3):
    """Ragged rounds of partial participation; nobody takes part in one of them."""
    full = case.full or case.options.get("control_update") == "I"
    return reference.make_rounds(
        seed, rounds, cohort_size=4, max_steps=3, batch_size=4, empty_round=EMPTY_ROUND, full=full
    )


def twin_after(case, drawn, **changes):
    """The twin after all rounds."""
    twin = case.build_twin(case.problem.flat(case.problem.initial_params()), **changes)
    for t, (clients, _) in enumerate(drawn):
        twin.round(clients, t)
    return twin


def both(case, client_map, *, ours=None, theirs=None):
    """The params after twelve ragged rounds, ours and the twin's, each with what it changes."""
    drawn, problem = draw(case, ROUNDS), case.problem
    params, flat = problem.initial_params(), problem.flat
    algorithm = case.build(problem.loss, **(ours or {}))
    state = algorithm.init(params, N)
    state, _ = softmax.run_rounds(build_round(algorithm, client_map), state, drawn)
    twin = twin_after(case, drawn, **(theirs or {}))
    assert np.abs(twin.x - flat(params)).max() > 0.05  # the run went somewhere
    return flat(algorithm.params(state)), twin.x


def case_of(name):
    return next(case for case in MAIN if case.id == name)


@functools.cache
def on_its_problem(name):
    """The method on the problem of its twin."""
    case = case_of(name)
    if case.problem != Problem():
        return Compiled(case, case.problem, case.problem.loss)
    return on_softmax(name)


@functools.cache
def on_softmax(name):
    """The method on softmax regression, with a loss that can be made noisy."""
    return Compiled(case_of(name), Problem(), noisy_loss)


def rows_of(tree, rows):
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def assert_same_bits(tree_a, tree_b):
    jax.tree.map(np.testing.assert_array_equal, tree_a, tree_b)
