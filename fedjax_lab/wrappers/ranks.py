"""Adapters whose rank differs from client to client, around any method of one exchange.

Cho, Liu, Xu, Fahrezi, Joshi: Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation
Models. EMNLP 2024 (HetLoRA), section 3: the server truncates its adapters to a client's rank, and
pads what it gets back with zeros to the largest rank.

=========================  ==========================================
paper                      here
=========================  ==========================================
r_k                        ``ranks[k]``
r_max                      the rank of the server's adapters
\\bar A, \\bar B             adapters of the server: ``down``, ``up``
p_k                        ``weights`` of the batch, normalised over the cohort
=========================  ==========================================

Departures: p_k is not the norm of B_k A_k, since a message's weight would then depend on what is in
it, which a bound on one client's influence excludes; ranks are not pruned in training.

Truncation needs no masks in the local steps: where a column of ``down`` and the row of ``up`` that
it meets are both 0, so are their gradients, and both stay 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_choice
from fedjax_lab.models.lora import Adapter
from fedjax_lab.round import MANY_CLIENTS, Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Cohort, FedState, Params, PyTree
from fedjax_lab.wrappers.base import State, Wrapper

PADDED = ("adapters", "changes")


class RankRow(NamedTuple):
    """A client's row.

    Attributes:
      inner: the method's own row.
      rank: int32 scalar.
    """

    inner: PyTree
    rank: jax.Array

    @staticmethod
    def of_arguments(hyperparameters):
        """Name the fields that a run takes from its method, not from an earlier state.

        Args:
          hyperparameters: of the method, as it records them.
        """
        return ("rank",)


@suggest_keywords
def with_ranks(
    algorithm: Algorithm, ranks: Sequence[int] | np.ndarray, *, padded: str = "adapters"
) -> Algorithm:
    """Wrap a method so that each client trains and sends adapters of its own rank.

    ::

        adapters = models.init_adapters(key, params, "layers/*/kernel", rank=16, stacked="layers/*")
        hetlora = with_ranks(with_frozen(fedavg, loss_fn, params), [4, 8, 16, ...])

    A client of rank r receives the first r columns of each ``down`` and the first r rows of each
    ``up``, and the same part of everything else that the method broadcasts or stores for it
    (control variates, momenta). The bytes of a round count only this part: r / r_max of a message.
    Single numbers beside it, such as the steps that FedNova sends, count in full. So do messages
    in a direction that has a compressor, or with secure aggregation: they are as long for every
    rank.

    Source: Cho et al. (HetLoRA), EMNLP 2024, section 3.

    Args:
      algorithm: a method of one exchange that sends its change as ``delta``, such as FedAvg,
        FedProx, FedAdam and SCAFFOLD.
      ranks: int [N], each from 1 to the rank of the server's adapters, r_max.
      padded: what the server pads with zeros. "adapters": a client's trained adapters, as in
        HetLoRA; columns that few clients have shrink towards 0. "changes": a client's changes.
        Clients without a column then leave it unchanged, and the methods minimise the mean over
        clients of their losses at truncated adapters.

    Raises:
      TypeError: ``ranks`` does not hold integers.
      ValueError: ``ranks`` or ``padded`` is out of range, or the method has several exchanges,
        sends no ``delta``, sends one that the server adds up (FedADMM, with
        ``padded="adapters"``) or has a wrapper that excludes this one. When the method starts:
        params are not adapters of one rank, the largest of ``ranks``, or the number of clients
        differs.
    """
    check_choice("padded", padded, PADDED)
    wrapper = Wrapper(algorithm, "ranks" if padded == "changes" else "padded_ranks")
    phase = wrapper.only_phase()
    if "delta" not in phase.reduce:
        fields = ", ".join(phase.reduce)
        raise ValueError(
            f"algorithm is {algorithm.name}, whose clients send {fields}; with_ranks takes methods "
            "whose clients send delta."
        )
    if padded == "adapters" and phase.reduce["delta"] == "sum":
        raise ValueError(
            f"algorithm is {algorithm.name}, whose server adds up what clients send; with it "
            "padded must be 'changes'."
        )
    table = np.asarray(ranks)
    if table.ndim != 1 or table.dtype.kind not in "iu":
        raise TypeError(f"ranks is {ranks!r}; it must be integers, one for each client.")
    if not table.size or table.min() < 1:
        raise ValueError(f"ranks is {table.tolist()}; each must be at least 1.")
    largest = int(table.max())

    def around(params, num_clients, server, rows):
        _check(params, largest, num_clients, len(table))
        return server, RankRow(rows, jnp.resize(jnp.asarray(table, jnp.int32), num_clients))

    def change(phase, place):
        phase = _truncated(phase, algorithm, table, largest, padded == "adapters")
        parts = (largest, lambda client_ids: _ranks_of(table, client_ids))
        return phase._replace(costs=phase.costs._replace(parts=parts))

    return wrapper.wrap(
        "ranks",
        change,
        state=State(around, row=RankRow, first_batch=True),
        hyperparameters={"ranks": table.tolist(), "padded": padded},
    )


def truncate_adapters(values: PyTree, rank: int | jax.Array) -> PyTree:
    """Set the columns and rows of adapters beyond a rank to 0; other leaves are unchanged.

    Args:
      values: pytree of arrays [...] with ``Adapter`` nodes.
      rank: number of columns of ``down`` and of rows of ``up`` that stay; may be traced.
    """

    def one(node):
        if not isinstance(node, Adapter):
            return node
        kept = jnp.arange(node.down.shape[-1]) < rank
        of_down = kept.reshape(*[1] * (node.down.ndim - 1), -1)
        of_up = kept.reshape(*[1] * (node.up.ndim - 2), -1, 1)
        return Adapter(jnp.where(of_down, node.down, 0), jnp.where(of_up, node.up, 0))

    return jax.tree.map(one, values, is_leaf=lambda node: isinstance(node, Adapter))


def _truncated(
    phase: Phase, algorithm: Algorithm, table: np.ndarray, largest: int, pads_adapters: bool
) -> Phase:
    """Wrap a phase for a server of rank r_max and clients of lower ranks."""

    def client_update(received, row, batch):
        received, inner = truncate_adapters((received, row.inner), row.rank)
        message, row, report = phase.client_update(received, row._replace(inner=inner), batch)
        message, inner = truncate_adapters((message, row.inner), row.rank)
        return message, row._replace(inner=inner), report

    def server_update(server, messages, cohort: Cohort):
        if pads_adapters:
            params = algorithm.params(FedState(server, (), cohort.num_clients))
            messages = {**messages, "delta": padded(params, messages["delta"], cohort)}
        return phase.server_update(server, messages, cohort)

    def padded(params: Params, delta: PyTree, cohort: Cohort) -> PyTree:
        """Compute x_t minus the clients' trained adapters, which are 0 beyond their ranks."""
        columns = jnp.arange(largest)[None] >= _ranks_of(table, cohort.client_ids)[:, None]
        lost = columns.astype(cohort.weights.dtype)  # [S, r]
        if phase.reduce["delta"] == "mean":
            lost = jnp.where(cohort.participates, cohort.weights, 0) @ lost

        def times(factors: jax.Array, leaf: jax.Array, axis: int) -> jax.Array:
            front = factors.shape[:-1]
            shape = [1] * leaf.ndim
            shape[axis] = largest
            return factors.reshape(*front, *shape) * leaf.reshape(*[1] * len(front), *leaf.shape)

        def one(adapter, change):
            return Adapter(
                change.down + times(lost, adapter.down, -1), change.up + times(lost, adapter.up, -2)
            )

        return jax.tree.map(one, params, delta, is_leaf=lambda node: isinstance(node, Adapter))

    return phase._replace(client_update=client_update, server_update=server_update)


def _ranks_of(table: np.ndarray, client_ids: jax.Array) -> jax.Array:
    """Return the rank of each slot, int32 [S]."""
    return jnp.asarray(table, jnp.int32).at[client_ids].get(mode="clip")


def _check(params: Params, largest: int, num_clients: int, known: int) -> None:
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Adapter))
    if not all(isinstance(node, Adapter) for node in nodes):
        raise ValueError(
            "params have leaves that are no adapters; with_ranks takes what models.init_adapters "
            "returns."
        )
    found = sorted({node.down.shape[-1] for node in nodes})
    if found != [largest]:
        raise ValueError(
            f"params have adapters of the ranks {found}; they must have one, the largest of ranks, "
            f"{largest}."
        )
    if num_clients not in (known, MANY_CLIENTS):
        raise ValueError(f"ranks has {known} entries; there are {num_clients} clients.")
