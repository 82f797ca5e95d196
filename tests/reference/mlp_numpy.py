"""A small multi-layer perceptron with its gradients derived by hand, for twins that look inside.

Layers l = 1..L map h_{l-1} [n, in] to h_l = act(h_{l-1} W_l + b_l), the last without act: h_0 are
the features of a mini-batch, h_L its logits, h_{L-1} its representation. A parameter vector is
W_1 [in, out] row by row, b_1, W_2, b_2, ... . The default has 5 -> 4 -> 4 -> 3, for the data of
``problem``, and 59 parameters; its blocks are its layers.
"""

from __future__ import annotations

import numpy as np

from tests.reference import problem

WIDTHS = (problem.FEATURES, 4, 4, problem.CLASSES)


class MLP:
    """``activation`` is "tanh" or "relu"."""

    def __init__(self, widths=WIDTHS, activation="tanh"):
        self.widths = tuple(widths)
        self.tanh = activation == "tanh"
        self.shapes = list(zip(self.widths[:-1], self.widths[1:], strict=True))
        self.depth = len(self.shapes)
        self.size = sum(rows * columns + columns for rows, columns in self.shapes)

    def layers(self, y):
        """The pairs (W_l [in, out], b_l [out])."""
        pairs, start = [], 0
        for (rows, columns), part in zip(self.shapes, self.blocks(), strict=True):
            weights = y[start : start + rows * columns].reshape(rows, columns)
            pairs.append((weights, y[start + rows * columns : part.stop]))
            start = part.stop
        return pairs

    def blocks(self):
        """Where each layer lies in a parameter vector."""
        parts, start = [], 0
        for rows, columns in self.shapes:
            parts.append(slice(start, start + rows * columns + columns))
            start = parts[-1].stop
        return parts

    def pack(self, layers):
        """The parameter vector of pairs (W_l, b_l)."""
        arrays = [np.asarray(array, dtype=float) for pair in layers for array in pair]
        return np.concatenate([array.reshape(-1) for array in arrays])

    def forward(self, y, h, depth=0):
        """[h_depth, ..., h_L] from h = h_depth."""
        path = [h]
        for level, (weights, bias) in enumerate(self.layers(y)[depth:], start=depth + 1):
            h = h @ weights + bias
            if level < self.depth:
                h = np.tanh(h) if self.tanh else np.maximum(h, 0)
            path.append(h)
        return path

    def backward(self, y, path, upstream, depth=0, injected=None):
        """Gradients by the parameters, flat, and by h_depth.

        ``path`` is that of ``forward``, ``upstream`` the gradient by h_L, and ``injected`` maps a
        level l to a further gradient by h_l. Layers up to ``depth`` get zeros.
        """
        injected = injected or {}
        layers = self.layers(y)
        gradients = [(0 * weights, 0 * bias) for weights, bias in layers]
        g = upstream
        for level in range(self.depth, depth, -1):
            h = path[level - depth]
            if level < self.depth:
                g = g + injected.get(level, 0.0)
                g = g * ((1 - h**2) if self.tanh else (h > 0))
            gradients[level - 1] = path[level - 1 - depth].T @ g, g.sum(axis=0)
            g = g @ layers[level - 1][0].T
        return self.pack(gradients), g

    def representation(self, y, x):
        """h_{L-1} [n, F]."""
        return self.forward(y, x)[-2]

    def loss(self, y, minibatch):
        """Mean cross-entropy."""
        x, labels = minibatch
        return cross_entropy(self.forward(y, x)[-1], labels)[0].mean()

    def gradient(self, y, minibatch):
        """Gradient of the mean cross-entropy."""
        x, labels = minibatch
        path = self.forward(y, x)
        upstream = cross_entropy(path[-1], labels)[1] / len(labels)
        return self.backward(y, path, upstream)[0]

    def initial_point(self, seed=0):
        """A random start, values that float32 holds exactly."""
        values = 0.5 * np.random.default_rng(seed).normal(size=self.size)
        return values.astype(np.float32).astype(np.float64)


def log_softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def cross_entropy(logits, labels):
    """Per example: the loss [n] and its gradient by the logits [n, C]."""
    log_p, rows = log_softmax(logits), np.arange(len(labels))
    return -log_p[rows, labels], np.exp(log_p) - np.eye(logits.shape[1])[labels]
