"""Two problems for the tests: quadratics with known trajectories, and softmax regression.

The quadratic toy has N = 4, d = 2 and full-batch gradients a_i (y - b_i); a mini-batch is the pair
(a_i, b_i) as arrays of one example. Softmax regression has seven clients of unequal sizes, five
features and three classes; a vector is W [5, 3] row by row, then b [3], and a mini-batch is a pair
(features [n, 5], labels [n]). ``make_rounds`` draws rounds of it twice over: ragged for the twins,
padded for the library.
"""

from __future__ import annotations

import numpy as np

from tests.reference.base import ReferenceClient

TOY_A = np.array([[1, 2], [2, 1], [0.5, 1.5], [1.5, 0.5]])
TOY_B = np.array([[1, 0], [0, 1], [-1, 2], [2, -1.0]])
TOY_SIZES = (10, 20, 30, 40)
TOY_X0 = np.array([0.5, -0.5])
TOY_OPTIMUM = np.array([0.7, 0.7])
TOY_COHORTS = ((0, 1), (2, 3), (0, 2))


def toy_gradient(y, minibatch):
    """Mean over the examples of a (y - b)."""
    a, b = minibatch
    return np.mean(a * (y - b), axis=0)


def toy_clients(cohort, steps=3, weights=None):
    """A round of the toy; ``steps`` is one number, or one per client of the problem."""
    steps = [steps] * len(TOY_A) if isinstance(steps, int) else steps
    weights = [1.0] * len(TOY_A) if weights is None else weights
    return [
        ReferenceClient(i, [(TOY_A[i : i + 1], TOY_B[i : i + 1])] * steps[i], weights[i])
        for i in cohort
    ]


NUM_CLIENTS = 7
FEATURES = 5
CLASSES = 3
DIMENSION = FEATURES * CLASSES + CLASSES
SIZES = (4, 9, 13, 6, 17, 8, 11)
LEAVES = [slice(0, FEATURES * CLASSES), slice(FEATURES * CLASSES, DIMENSION)]


def pack(weights, bias):
    return np.concatenate([np.asarray(weights).reshape(-1), np.asarray(bias)])


def unpack(y):
    return y[: FEATURES * CLASSES].reshape(FEATURES, CLASSES), y[FEATURES * CLASSES :]


def client_data(seed=0):
    """Per client (features [n_i, 5], labels [n_i]), values that float32 holds exactly."""
    rng = np.random.default_rng(seed)
    teacher = rng.normal(size=(FEATURES, CLASSES))
    data = []
    for n in SIZES:
        x = rng.normal(size=(n, FEATURES)) + 0.7 * rng.normal(size=FEATURES)
        logits = x @ teacher + rng.normal(size=CLASSES)
        labels = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
        data.append((_float32_exact(x), labels.astype(np.int32)))
    return data


def initial_point(seed=0):
    """A random start, values that float32 holds exactly."""
    return _float32_exact(0.3 * np.random.default_rng(seed).normal(size=DIMENSION))


def probabilities(y, x):
    weights, bias = unpack(y)
    logits = x @ weights + bias
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


def loss(y, minibatch):
    """Mean cross-entropy."""
    x, labels = minibatch
    return -np.mean(np.log(probabilities(y, x)[np.arange(len(labels)), labels]))


def gradient(y, minibatch):
    """Gradient of the mean cross-entropy: (X^T (P - Y) / n, mean of P - Y)."""
    x, labels = minibatch
    error = (probabilities(y, x) - np.eye(CLASSES)[labels]) / len(labels)
    return pack(x.T @ error, error.sum(axis=0))


def make_rounds(
    seed,
    rounds,
    cohort_size,
    max_steps,
    batch_size,
    *,
    weighted=True,
    full=False,
    equal_steps=False,
    empty_round=None,
):
    """Rounds as pairs (list of ReferenceClient, dict of padded arrays).

    Ragged by default: K_i in 0..max_steps, mini-batches of 1..batch_size examples at random
    places, steps within K_i without a valid example (not taken), real clients that do not take
    part, padded slots (id N). What is masked out holds finite junk, and steps beyond K_i may even
    have their mask set. ``equal_steps``: every slot is a client that takes all its steps with full
    mini-batches. ``full``: explicit full local data, in ``ReferenceClient.full`` and under
    ``full_x``, ``full_y``, ``full_mask``. ``empty_round``: a round in which nobody takes part.

    The padded dict: client_ids [S] int32, x [S,K,B,5], y [S,K,B] int32, example_mask [S,K,B] bool,
    num_steps [S] int32, weights [S], participates [S] bool.
    """
    rng = np.random.default_rng(seed)
    data = client_data()
    drawn = []
    for t in range(rounds):
        padded = _junk(rng, cohort_size, max_steps, batch_size, weighted, full)
        slots = list(range(cohort_size))
        if not equal_steps and t % 3 == 1 and cohort_size > 1:
            slots.remove(t % cohort_size)  # this slot stays padding
        slots = slots[:NUM_CLIENTS]
        ids = rng.permutation(NUM_CLIENTS)[: len(slots)]
        clients = [ReferenceClient(NUM_CLIENTS, [], w) for w in padded["weights"].tolist()]
        for place, (slot, i) in enumerate(zip(slots, ids.tolist(), strict=True)):
            sizes = [batch_size] * max_steps
            if not equal_steps:
                sizes = _sizes(rng, t, place, max_steps, batch_size)
            absent = t == empty_round or (not equal_steps and place == 2 and t % 4 == 3)
            minibatches = _fill(rng, padded, slot, i, data[i], sizes)
            padded["participates"][slot] = not absent
            clients[slot].id = i
            clients[slot].minibatches = [] if absent else minibatches
            clients[slot].full = data[i] if full else None
        drawn.append((clients, padded))
    return drawn


def _sizes(rng, t, place, max_steps, batch_size):
    """Examples per step; 0 is a step without any, and the list's length the client's num_steps."""
    sizes = rng.integers(1, batch_size + 1, size=max_steps).tolist()
    if place == 0:
        if t % 2 == 1 and max_steps > 1:
            sizes[(t // 2) % max_steps] = 0
        return sizes
    if place == 1 and t % 4 == 2:
        return []
    if place == 1 and t % 4 == 0 and t > 0:
        return [0] * max_steps
    return sizes[: rng.integers(1, max_steps + 1)]


def _junk(rng, s, k, b, weighted, full):
    """A padded round in which nothing is valid yet."""
    most = max(SIZES)
    padded = {
        "client_ids": np.full(s, NUM_CLIENTS, np.int32),
        "x": _float32_exact(rng.normal(scale=3.0, size=(s, k, b, FEATURES))),
        "y": rng.integers(CLASSES, size=(s, k, b)).astype(np.int32),
        "example_mask": rng.random((s, k, b)) < 0.5,
        "num_steps": np.full(s, k, np.int32),
        "weights": _float32_exact(rng.uniform(0.5, 2.0, size=s)) if weighted else np.ones(s),
        "participates": np.zeros(s, bool),
    }
    if full:
        padded["full_x"] = _float32_exact(rng.normal(scale=3.0, size=(s, most, FEATURES)))
        padded["full_y"] = rng.integers(CLASSES, size=(s, most)).astype(np.int32)
        padded["full_mask"] = np.zeros((s, most), bool)
    return padded


def _fill(rng, padded, slot, i, data, sizes):
    """Write client i into a slot; returns its ragged mini-batches, those of the steps taken."""
    x, y = data
    padded["client_ids"][slot] = i
    padded["num_steps"][slot] = len(sizes)
    minibatches = []
    for step, size in enumerate(sizes):
        examples = rng.integers(len(y), size=size)
        where = rng.permutation(padded["y"].shape[2])[:size]
        padded["example_mask"][slot, step] = False
        padded["example_mask"][slot, step, where] = True
        padded["x"][slot, step, where] = x[examples]
        padded["y"][slot, step, where] = y[examples]
        if size > 0:
            minibatches.append((x[examples], y[examples]))
    if "full_x" in padded:
        padded["full_x"][slot, : len(y)] = x
        padded["full_y"][slot, : len(y)] = y
        padded["full_mask"][slot, : len(y)] = True
    return minibatches


def _float32_exact(values):
    return values.astype(np.float32).astype(np.float64)
