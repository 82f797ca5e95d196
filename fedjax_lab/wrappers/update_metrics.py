"""Metrics of the update of each participant, around any method.

The update of a client is what it sends as ``delta``, the global model minus its local model. In a
method without this field it is the first field of the message. With u_i the updates, p_i the
clients' shares in the mean (1/n if all count alike) and u = Σ p_i u_i their mean:

========================  ======================================================================
``update_norm``           ||u_i||
``update_cosine``         cosine of u_i and u
``cosine_to_last``        cosine of u_i and the client's update of its last round; optional
``client_drift``          ||y_i - x||², of the local params y_i after the last step, without the
                          running statistics of BatchNorm
``gradient_diversity``    Σ ||p_i u_i||² / ||u||²: 1/n if all updates are equal, 1 if they are
                          orthogonal (Yin et al., AISTATS 2018)
========================  ======================================================================

Axes: N clients, S slots of the cohort.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_lab import tree
from fedjax_lab.clients.metrics import IS_KNOWN, PER_CLIENT, UPDATE_QUANTILES
from fedjax_lab.clients.store import one_row_per_client
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import Cohort, Metrics, PyTree
from fedjax_lab.wrappers.base import Place, State, Wrapper, sends, with_field
from fedjax_lab.wrappers.client_messages import select

# Fields that this wrapper adds to a message; the server needs them only for metrics.
_UPDATES, _NUMBERS = "measured_updates", "measured_numbers"


class MeasuredRow(NamedTuple):
    """The row of a client: the method's, its last update, and whether there is one."""

    inner: PyTree
    last: PyTree
    has_last: jax.Array


class _Numbers(NamedTuple):
    """Numbers of a client's update: ||u_i||², ||y_i - x||², the cosine to the last, if any."""

    squared: jax.Array
    drift: jax.Array
    to_last: jax.Array
    has_last: jax.Array


@suggest_keywords
def with_update_metrics(
    algorithm: Algorithm, *, cosines: bool = True, to_last: bool = False, per_client: bool = False
) -> Algorithm:
    """Measure the norm, the cosines and the drift of each participant's update.

    Metrics of a round are means over its participants, and the 10 %, 50 % and 90 % quantiles with
    the endings ``_p10``, ``_p50`` and ``_p90``; see the table in ``wrappers.update_metrics``. Rows
    of the history have their means over the rounds. The other numbers change only by rounding.

    Apply it last, around all other wrappers: it measures what the server receives of each client,
    such as compressed or attacked messages. No noise protects these metrics.

    Args:
      algorithm: any method whose clients send messages.
      cosines: measure ``update_cosine``. All updates of a cohort are then in memory, S models;
        otherwise only their mean, unless the method needs all of them anyway.
      to_last: measure ``cosine_to_last``. Each client then stores its last update, as many numbers
        as a model. A client's first round is left out of the mean and the quantiles; a round
        in which no client has a last update counts 0.
      per_client: a round's metrics also have these numbers of each slot [S], under
        "per_client/NAME"; "per_client/client" has the ids, and "per_client/participates" says
        which slots count. ``simulate`` writes them to ``client_updates.csv`` of its ``run_dir``.

    Raises:
      TypeError: ``algorithm`` is no ``Algorithm``.
      ValueError: its clients send no messages, they send masked ones, or the wrapper is not the
        last one; or (when a round is traced) its clients do not report ``client_drift``, as those
        that take ``local_steps`` do.
    """
    wrapper = Wrapper(algorithm, "update_metrics")
    phase = _measured_phase(algorithm)
    field = "delta" if "delta" in phase.reduce else next(iter(phase.reduce))

    def around(params, num_clients, server, rows):
        zeros = tree.zeros_like(phase.message_like(params)[field])
        last = one_row_per_client(zeros, num_clients)
        return server, MeasuredRow(rows, last, jnp.zeros(num_clients, bool))

    def change(phase: Phase, place: Place) -> Phase:
        return _measured(phase, field, cosines, to_last, per_client)

    state = State(around, row=MeasuredRow, first_batch=True) if to_last else State(first_batch=True)
    measured = wrapper.wrap(
        "update_metrics",
        change,
        of=lambda other: other is phase,
        state=state,
        hyperparameters={
            "update_metrics": {"cosines": cosines, "to_last": to_last, "per_client": per_client}
        },
    )
    return dataclasses.replace(measured, name=algorithm.name)  # the same method, measured


def _measured_phase(algorithm: Algorithm) -> Phase:
    """Return the phase in which clients send their updates."""
    sending = list(filter(sends, algorithm.phases))
    regular = [phase for phase in sending if not phase.once] or sending
    with_delta = [phase for phase in regular if "delta" in phase.reduce]
    return (with_delta or regular)[-1]


def _measured(phase: Phase, field: str, cosines: bool, to_last: bool, per_client: bool) -> Phase:
    """Wrap a phase so that the server measures the updates."""
    is_stacked = phase.reduce[field] == "stack"
    adds_updates = cosines and not is_stacked

    def client_update(received, row, batch):
        message, row, report = phase.client_update(received, row, batch)
        if "client_drift" not in report:
            raise ValueError(
                "with_update_metrics requires clients that report client_drift, as the report of "
                f"local_steps does; this report has {', '.join(sorted(report))}."
            )
        update, zero = message[field], jnp.zeros(())
        squared, (drift, weight) = _dot(update, update), report["client_drift"]
        cosine, has_last = zero, zero
        if to_last:
            product, before = _dot(update, row.last), _dot(row.last, row.last)
            cosine, has_last = _cosine(product, squared, before), row.has_last
            row = row._replace(last=update, has_last=jnp.ones_like(row.has_last))
        numbers = _Numbers(squared, tree.safe_divide(drift, weight), cosine, has_last)
        dtype = jnp.result_type(float)
        more = {_NUMBERS: jax.tree.map(lambda value: value.astype(dtype), numbers)}
        if adds_updates:
            more[_UPDATES] = update
        return {**message, **more}, row, report

    def server_update(server, messages, cohort):
        own = {name: messages[name] for name in phase.reduce}
        server, metrics = phase.server_update(server, own, cohort)
        updates = messages.get(_UPDATES, messages[field] if is_stacked else None)
        shares, mean = _mean_update(phase.reduce[field], updates, messages[field], cohort)
        numbers: _Numbers = messages[_NUMBERS]
        products = None
        if cosines:
            products = jax.vmap(_dot, (0, None))(select(cohort.participates, updates), mean)
        found = _summary(numbers, shares, _dot(mean, mean), products, to_last, cohort)
        if not per_client:
            found = {name: value for name, value in found.items() if PER_CLIENT not in name}
        return server, {**metrics, **found}

    measured = with_field(phase, _NUMBERS, lambda message: _Numbers(*[jnp.zeros(())] * 4), "stack")
    if adds_updates:
        measured = with_field(measured, _UPDATES, lambda message: message[field], "stack")
    return measured._replace(client_update=client_update, server_update=server_update)


def _mean_update(
    how: str, updates: PyTree | None, received: PyTree, cohort: Cohort
) -> tuple[jax.Array, PyTree]:
    """Return the clients' shares in the mean update, [S], and the mean update.

    Args:
      updates: pytree [S, ...]; None: only ``received`` is there.
    """
    counts = cohort.participates.astype(cohort.weights.dtype)
    each = tree.safe_divide(1.0, counts.sum())
    shares = counts * each if how == "sum" else jnp.where(cohort.participates, cohort.weights, 0)
    if updates is not None:
        return shares, tree.weighted_sum(select(cohort.participates, updates), shares)
    return shares, tree.scale(received, each) if how == "sum" else received


def _summary(
    numbers: _Numbers,
    shares: jax.Array,
    mean_squared: jax.Array,
    products: jax.Array | None,
    to_last: bool,
    cohort: Cohort,
) -> Metrics:
    """Return means, quantiles and the numbers of each slot."""
    counts = cohort.participates
    numbers = select(counts, numbers)
    of_clients = {
        "update_norm": (jnp.sqrt(numbers.squared), counts),
        "client_drift": (numbers.drift, counts),
    }
    if products is not None:
        of_clients["update_cosine"] = _cosine(products, numbers.squared, mean_squared), counts
    if to_last:
        of_clients["cosine_to_last"] = numbers.to_last, counts & (numbers.has_last > 0)
    total = (jnp.square(shares) * numbers.squared).sum()
    found = {
        "gradient_diversity": tree.safe_divide(total, mean_squared),
        f"{PER_CLIENT}client": cohort.client_ids,
        f"{PER_CLIENT}participates": counts,
    }
    for name, (values, has) in of_clients.items():
        if name != "client_drift":  # whose mean the clients report
            found[name] = tree.safe_divide(jnp.where(has, values, 0).sum(), has.sum())
        for ending, share in UPDATE_QUANTILES.items():
            found[f"{name}_{ending}"] = _quantile(values, has, share)
        found[f"{PER_CLIENT}{name}"] = values
        if name == "cosine_to_last":  # a first round has none
            found[f"{PER_CLIENT}{name}{IS_KNOWN}"] = has
    return found


def _quantile(values: jax.Array, has: jax.Array, share: float) -> jax.Array:
    """Return a quantile of some of the values, linearly interpolated as by NumPy; 0 of none.

    Args:
      values: float [S].
      has: bool [S], the values that count.
      share: in [0, 1].
    """
    count = has.sum()
    ordered = jnp.sort(jnp.where(has, values, jnp.inf))
    place = share * jnp.maximum(count - 1, 0)
    below = jnp.floor(place).astype(jnp.int32)
    above = jnp.minimum(below + 1, jnp.maximum(count - 1, 0))
    low, high = ordered[below], ordered[above]
    return jnp.where(count > 0, low + (place - below) * (high - low), 0)


def _dot(one: PyTree, other: PyTree) -> jax.Array:
    """Return the inner product of two trees, in at least 32 bits."""

    def of_leaves(a, b):
        dtype = tree.wide_dtype(a.dtype)
        return (a.astype(dtype) * b.astype(dtype)).sum()

    return sum(jax.tree.leaves(jax.tree.map(of_leaves, one, other)), jnp.zeros(()))


def _cosine(product: jax.Array, squared: jax.Array, other: jax.Array) -> jax.Array:
    """Return cosines; 0 of a vector of zeros."""
    return tree.safe_divide(product, jnp.sqrt(squared) * jnp.sqrt(other))
