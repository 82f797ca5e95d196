"""Robust rules on the rows of a matrix [n, d], in float64, written from their papers."""

import numpy as np


def median(x):
    return np.median(x, axis=0)


def trimmed_mean(x, cut):
    """Without the ``cut`` smallest and largest of each column."""
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(0)


def krum_scores(x, attackers):
    scores = []
    for i, row in enumerate(x):
        distances = sorted(((row - other) ** 2).sum() for j, other in enumerate(x) if j != i)
        scores.append(sum(distances[: len(x) - attackers - 2]))
    return np.array(scores)


def multi_krum(x, attackers, chosen):
    return x[np.argsort(krum_scores(x, attackers), kind="stable")[:chosen]].mean(0)


def distance_sum(point, x, weights):
    return (weights * np.linalg.norm(x - point, axis=1)).sum()


def geometric_median(x, weights, iterations=20_000):
    """Weiszfeld's steps until they stand still, from the best of the rows and the mean."""
    starts = [weights @ x, *x]
    v = min(starts, key=lambda point: distance_sum(point, x, weights)).astype(float)
    v = v + 1e-9  # not exactly on a row
    for _ in range(iterations):
        pull = weights / np.maximum(np.linalg.norm(x - v, axis=1), 1e-12)
        new = pull @ x / pull.sum()
        if np.linalg.norm(new - v) < 1e-13:
            break
        v = new
    return v


def norm_clip(x, weights, limit):
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return weights @ (x * np.minimum(1, limit / np.maximum(norms, 1e-300)))
