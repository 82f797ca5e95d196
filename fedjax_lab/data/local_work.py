"""The local work of a round: how many steps clients take, who finishes first, the mini-batches.

All randomness is a function of (key, round, client id). A client's mini-batches do not depend on
its slot, the cohort size, or the devices.

Axes: N clients, S slots of the cohort, S' sampled clients, K local steps, B examples of a
mini-batch, n_i examples of client i.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_lab.checks import check_int
from fedjax_lab.data.clock import Devices, RoundTimes, check_devices
from fedjax_lab.data.example_order import WORDS, shuffled
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.sampler import RoundKeys
from fedjax_lab.machine.keys import below, bits_at
from fedjax_lab.types import Key, Metrics


class Asked(NamedTuple):
    """The sampled clients of a round and their local steps, all int32 [S'].

    Attributes:
      ids: distinct; N in padded places.
      known: the ids by which ``Devices`` know the clients.
      planned: the steps that the schedule asks for.
      steps: the local steps K_i.
    """

    ids: jax.Array
    known: jax.Array
    planned: jax.Array
    steps: jax.Array

    def in_time(self, times: RoundTimes | None) -> jax.Array:
        """Return which clients take a step and meet the deadline, bool [S'].

        Args:
          times: of the clients, or None.
        """
        found = (self.planned > 0) & (self.steps > 0)
        if times is not None and times.most_steps is not None:
            found = found & (self.steps <= times.most_steps[self.ids])
        return found


class LocalWork(NamedTuple):
    """The local work of a schedule on clients' data; whole before a cohort is drawn.

    Attributes:
      clients: the federation.
      devices: the clients' devices; None: every client takes all its steps.
      replace: whether mini-batches are drawn with replacement.
      batch_size: B.
      num_steps: K.
      epochs: passes over a client's data; None: K steps, or those in ``clients.local_steps``.
    """

    clients: FederatedArrays
    devices: Devices | None
    replace: bool
    batch_size: int
    num_steps: int
    epochs: int | None

    @property
    def is_equal(self) -> bool:
        """True if the schedule asks every client for K steps."""
        clients, batch_size = self.clients, self.batch_size
        if self.epochs is None:
            return clients.local_steps is None
        return -(-clients.min_size // batch_size) == -(-clients.max_size // batch_size)

    @property
    def is_full(self) -> bool:
        """True if no mini-batch without replacement has masked places."""
        smallest, largest = self.clients.min_size, self.clients.max_size
        if smallest == largest and largest % self.batch_size == 0:
            return True
        return self.epochs is None and smallest >= self.num_steps * self.batch_size

    def sizes_alike(self) -> tuple[int, int]:
        """Return a smallest and a largest size of clients that have the same consequences."""
        if self.epochs is None:
            longest = self.num_steps * self.batch_size
            return (longest, longest) if self.is_full else (1, 2)
        largest = self.num_steps // self.epochs * self.batch_size
        if self.is_full:
            return largest, largest
        return (largest - self.batch_size + 1 if self.is_equal else 1), largest

    def ask(self, keys: RoundKeys, round: jax.Array, ids: jax.Array) -> Asked:
        """Compute the local steps of clients.

        Args:
          keys: keys of the round.
          round: int32 scalar.
          ids: int32 [S'].

        Raises:
          ValueError: ``min_local_steps`` exceeds K, or a subclass of ``Devices`` returns no
            integers [S'].
        """
        clients, devices, most = self.clients, self.devices, self.num_steps
        if clients.local_steps is not None:
            planned = clients.local_steps[ids]
        elif self.epochs is None or self.is_equal:
            planned = jnp.full(ids.shape, most, jnp.int32)
        else:
            planned = self.epochs * ((clients.sizes[ids] + self.batch_size - 1) // self.batch_size)
        known = ids if clients.numbers is None else clients.numbers[ids]
        if devices is None:
            return Asked(ids, known, planned, planned)
        if devices.min_local_steps is not None:
            check_int("min_local_steps", devices.min_local_steps, minimum=1, maximum=most)
        steps = jnp.asarray(devices.local_steps(keys.run, round, known, planned))
        if not jnp.issubdtype(steps.dtype, jnp.integer) or steps.shape != ids.shape:
            raise ValueError(
                f"{type(devices).__name__}.local_steps returned {steps.dtype}{list(steps.shape)}; "
                f"it must be integers {list(ids.shape)}, from 0 to {most}."
            )
        if type(devices).local_steps is not Devices.local_steps:
            steps = jnp.clip(steps, 0, most).astype(jnp.int32)
        return Asked(ids, known, planned, steps)

    def first_to_finish(
        self, keys: RoundKeys, asked: Asked, slots: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Metrics]:
        """Select the clients that finish first, and compute how long the server waits.

        The server waits until S clients (or all, if fewer) have reported; if that never happens,
        until the deadline or the end of the time budget. Without either, the server knows which
        clients have failed.

        Args:
          keys: keys of the round.
          asked: the sampled clients; the server waits for none that is asked for no step.
          slots: S, at most S'.

        Returns:
          The ids of the cohort, int32 [S], in the order of sampling; their K_i; the simulated
          seconds until each is done, float [S]; which ones take a step, do not fail and are in
          time, bool [S]; and metrics of the round.

        Raises:
          ValueError: as ``check_devices``.
        """
        devices, times, num_clients = self.devices, self.clients.times, self.clients.num_clients
        check_devices(times, devices)
        client_ids, known, planned, steps = asked
        is_client = (client_ids < num_clients) & (planned > 0)
        reports = (client_ids < num_clients) & asked.in_time(times)
        if devices is not None and (alive := devices.reports(keys.dropout, known)) is not None:
            reports = reports & alive
        if times is not None:
            limit = times.deadline
            seconds = steps * times.step_seconds[client_ids]
            seconds = jnp.where(is_client, times.exchange_seconds[client_ids] + seconds, 0.0)
        else:
            assert devices is not None
            limit = devices.time_budget
            seconds = steps * devices.step_seconds(keys.run, known)
            if limit is not None:  # a client that finishes no step is done at the end
                seconds = jnp.where(steps > 0, jnp.minimum(seconds, limit), limit)
        is_enough = reports.sum() >= jnp.minimum(is_client.sum(), slots)
        if client_ids.shape[0] > slots:
            order = jnp.argsort(jnp.where(reports, seconds, jnp.inf), stable=True)
            first = jnp.sort(order[:slots])
            client_ids, steps, seconds, reports = (
                leaf[first] for leaf in (client_ids, steps, seconds, reports)
            )
        waited = jnp.where(reports, seconds, 0.0).max()
        if limit is not None:
            waited = jnp.where(is_enough, jnp.minimum(waited, limit), limit)
        measured = {"round_seconds": waited}
        if times is not None:
            dropped = is_client.sum() - reports.sum()
            measured["dropped_clients"] = dropped.astype(seconds.dtype)
        return client_ids, steps, seconds, reports, measured

    def expected_share(self, keys: RoundKeys, round: jax.Array) -> jax.Array | float:
        """Compute the expected share of the clients with data that can take part in a round.

        Args:
          keys: keys of the round.
          round: int32 scalar.
        """
        clients = self.clients
        if clients.local_steps is None and clients.times is None and self.devices is None:
            return 1.0
        everyone = jnp.arange(clients.num_clients, dtype=jnp.int32)
        ids = everyone if clients.nonempty is None else clients.nonempty
        late = 1 - self.ask(keys, round, ids).in_time(clients.times)
        dropout = 0.0 if self.devices is None else self.devices.dropout
        return (1 - late.mean()) * (1 - dropout)  # exactly 1 if all can

    def mini_batches(
        self, key: Key, ids: jax.Array, sizes: jax.Array, steps: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Draw the mini-batches of clients.

        Args:
          key: the round's key for mini-batches.
          ids: int32 [S], of clients with data.
          sizes: int32 [S], their n_i.
          steps: int32 [S], the local steps that they take; None: all K.

        Returns:
          Positions in the clients' lists, int32 [S, K, B], and which of them are used, bool
          [S, K, B]; None: all that ``steps`` allows.
        """
        step = jnp.arange(self.num_steps, dtype=jnp.int32)
        place = jnp.arange(self.batch_size, dtype=jnp.int32)[None, None]
        # All bits of a round in one block: keys folded by client, pass and step compile for longer.
        if self.replace:
            bits = bits_at(key, ids[:, None, None], step[None, :, None] * self.batch_size + place)
            positions = below(bits, sizes[:, None, None])
            is_real = jnp.ones(positions.shape, bool)
        else:
            per_pass = ((sizes + self.batch_size - 1) // self.batch_size)[:, None]
            step, per_pass = jnp.broadcast_arrays(step[None], per_pass)
            passes = jax.lax.div(step, per_pass)
            first = (step - passes * per_pass) * self.batch_size
            place = first[..., None] + place
            is_real = place < sizes[:, None, None]
            numbers = passes[..., None] * WORDS + jnp.arange(WORDS)[None, None]
            words = bits_at(key, ids[:, None, None], numbers)
            positions = shuffled(words, jnp.where(is_real, place, 0), sizes)
        if self.is_equal if self.replace else self.is_full:
            return positions, None
        if steps is not None:
            is_taken = jnp.arange(self.num_steps, dtype=jnp.int32)[None, :] < steps[:, None]
            is_real = is_real & is_taken[..., None]
        return positions, is_real
