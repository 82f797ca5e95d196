"""GradMA, GradMA-W, GradMA-S (Luo et al., CVPR 2023, Algorithms 1 to 4) and their QP.

QP        min_q 1/2 ||q - p||^2  s.t.  <q, M_c> >= margin ||p|| ||M_c||
          q = p + M z with z >= 0 the dual solution; without a margin, z = argmin ||M z + p||^2
worker    y_{k+1} = y_k - eta_l QP( g(y_k); g(y_{k-1}), g(x_t), y_k - x_t ), one mini-batch a step;
          y_{-1} = x_t, or the client's last local model (keep_local_model, x_0 at first)
mem_red   counters c(i) and at most m buffered clients; see ``mem_red``
server    m    = beta1 m~ + sum_i w_i d_i
          D_i  = beta2 D_i + d_i (took part), d_i (took part, new), beta2 D_i (absent)
          m~   = QP(m; D) ;  x <- x - eta_g m~

Weights of 1 give the paper's plain mean, sample counts that of the published code. The QP is
solved by non-negative least squares in float64, which shares nothing with projected gradients.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from tests.reference.base import Twin, at, cohort_weights, participants, weighted_mean


def unit(v):
    """(v / ||v||, ||v||), safe for squares that under- or overflow; (v, 0) for v = 0."""
    largest = np.max(np.abs(v), initial=0.0)
    if largest == 0:
        return v, 0.0
    scaled = v / largest
    norm = np.linalg.norm(scaled)
    return scaled / norm, norm * largest


def project_to_cone(p, rows, margin=0.0):
    """(q, z, feasible): p projected on {q : <q, rows[c]> >= margin ||p|| ||rows[c]||}.

    Zero rows are no constraints, the others are scaled to unit norm, and so is p. Without a margin
    the dual is the non-negative least squares problem min_{z>=0} ||M z + p||. With one, the shift
    u = q - p is the shortest vector with A u >= h, h_c = margin - <A_c, p>, and the classical
    equivalence of least distance programming is used (Lawson and Hanson 1974, chapter 23): w =
    argmin_{w>=0} || [A^T; h^T] w - e_{d+1} ||, whose residual r is 0 if and only if the constraints
    contradict each other, and z = w / (1 - h^T w) otherwise. Infeasible: (p, 0, False).
    """
    p = np.asarray(p, dtype=np.float64)
    rows = np.asarray(rows, dtype=np.float64).reshape(-1, p.size)
    z = np.zeros(len(rows))
    direction, size = unit(p)
    scaled = [unit(row) for row in rows]
    kept = [c for c, (_, norm) in enumerate(scaled) if norm > 0]
    if size == 0 or not kept:
        return p.copy(), z, True
    a = np.array([scaled[c][0] for c in kept])
    h = margin - a @ direction
    if np.all(h <= 0):
        return p.copy(), z, True
    if margin == 0:
        w, _ = nnls(a.T, -direction, maxiter=1000 * len(kept))
    else:
        target = np.append(np.zeros(p.size), 1.0)
        stacked = np.vstack([a.T, h])
        w, residual = nnls(stacked, target, maxiter=1000 * len(kept))
        if residual < 1e-6:
            return p.copy(), z, False
        w = w / (1 - h @ w)
    for c, weight in zip(kept, w, strict=True):
        z[c] = weight * size / scaled[c][1]
    return size * (direction + a.T @ w), z, True


def kkt_residual(p, rows, z, margin=0.0):
    """Largest violation of z >= 0, G z + b >= 0, z (G z + b) = 0, for unit rows and unit p."""
    direction, size = unit(np.asarray(p, dtype=np.float64))
    rows = np.asarray(rows, dtype=np.float64).reshape(-1, direction.size)
    scaled = [unit(row) for row in rows]
    kept = [c for c, (_, norm) in enumerate(scaled) if norm > 0]
    if size == 0 or not kept:
        return float(np.max(np.abs(z), initial=0.0))
    a = np.array([scaled[c][0] for c in kept])
    w = np.array([z[c] * scaled[c][1] / size for c in kept])
    slack = a @ (direction + a.T @ w) - margin
    complementarity = np.abs(w * slack) / (1 + np.max(w))
    return float(max(np.max(-w), np.max(-slack), np.max(complementarity)))


def mem_red(memory, counter, cohort, size):
    """Algorithm 4, in place: who is in the buffer. Returns the clients that are new in it.

    ``memory`` maps client to row in order of entry (a dict keeps it), ``cohort`` lists those who
    took part. When the buffer is full, the buffered client outside the cohort with the smallest
    counter leaves (the first entered among equals), and its counter restarts at 0.
    """
    new = set()
    for i in cohort:
        if i not in memory:
            if len(memory) == size:
                outside = [j for j in memory if j not in cohort]
                leaving = min(outside, key=lambda j: counter[j])
                del memory[leaving]
                counter[leaving] = 0
            memory[i] = None
            new.add(i)
        counter[i] += 1
    return new


class GradMA(Twin):
    """``memory`` is a dict client -> D_i in order of entry, ``momentum`` is m~."""

    worker = True
    server = True

    def __init__(
        self,
        x0,
        num_clients,
        gradient,
        *,
        client_lr,
        server_momentum=0.9,
        memory_decay=0.5,
        memory_size=None,
        keep_local_model=False,
        margin=0.0,
        qp_scope="global",
        leaves=None,
        **options,
    ):
        super().__init__(x0, num_clients, gradient, client_lr=client_lr, **options)
        self.beta1, self.beta2 = server_momentum, memory_decay
        self.memory_size = num_clients if memory_size is None else memory_size
        if self.memory_size > num_clients:
            raise ValueError("the memory cannot be larger than the number of clients")
        self.keep_local_model = keep_local_model
        self.margin = margin
        self.leaves = [slice(None)] if qp_scope == "global" else leaves
        self.momentum = np.zeros_like(self.x)
        self.memory = {}
        self.counter = [0] * num_clients
        self.local_models = np.tile(self.x, (num_clients, 1))

    def project(self, p, rows):
        """The QP, over the whole vector or over each leaf alone."""
        q = p.copy()
        for leaf in self.leaves:
            q[leaf], _, _ = project_to_cone(p[leaf], [row[leaf] for row in rows], self.margin)
        return q

    def worker_update(self, client, t):
        """Algorithm 2: the last local model."""
        previous = self.local_models[client.id] if self.keep_local_model else self.x
        y, S = self.x.copy(), self.new_step()
        for minibatch in client.minibatches:
            g = self.grad(y, minibatch)
            if self.worker:
                rows = [self.grad(previous, minibatch), self.grad(self.x, minibatch), y - self.x]
                g = self.project(g, rows)
            previous, y = y, y - at(self.client_lr, t) * S(g, y)
        return y

    def server_update(self, clients, moves, mean, t):
        """Algorithm 3: the direction m~."""
        moves = {client.id: d for client, d in zip(clients, moves, strict=True)}
        m = at(self.beta1, t) * self.momentum + mean
        if self.memory_size > 0:
            new = mem_red(self.memory, self.counter, list(moves), self.memory_size)
            for i in self.memory:
                if i in new:
                    self.memory[i] = moves[i]
                else:
                    self.memory[i] = at(self.beta2, t) * self.memory[i] + moves.get(i, 0.0)
        self.momentum = self.project(m, list(self.memory.values()))
        return self.momentum

    def round(self, clients, t):
        if self.server and 0 < self.memory_size < len(clients):
            raise ValueError("the memory cannot be smaller than the cohort")
        clients = participants(clients)
        if not clients:
            return
        ends = [self.worker_update(client, t) for client in clients]
        moves = [self.x - y for y in ends]
        step = weighted_mean(moves, cohort_weights(clients))
        if self.server:
            step = self.server_update(clients, moves, step, t)
        self.x = self.x - at(self.server_lr, t) * step
        for client, y in zip(clients, ends, strict=True):
            self.local_models[client.id] = y


class GradMAW(GradMA):
    """The worker half, then plain averaging."""

    server = False


class GradMAS(GradMA):
    """Plain local SGD, then the server half."""

    worker = False
