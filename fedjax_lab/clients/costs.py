"""What a round costs a client: bytes in each direction, and gradients.

A phase says in its ``Costs`` what an exchange costs. ``Traffic`` adds up the bytes of a method's
exchanges once, outside of the rounds, and counts the bytes of a round, a run or a client with them.

Axes: N clients, S slots of the cohort, T rounds.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab import tree
from fedjax_lab.types import Cohort, Metrics, Params, PyTree

# (n, client ids int32 [...] -> int32 [...]): how many n-th parts of a message each client has
Parts = tuple[int, Callable[[jax.Array], jax.Array]]


class Costs(NamedTuple):
    """What one exchange costs a client.

    Attributes:
      derived: fields of the message that the server can compute from the others. They cost no
        bytes, but a compressor compresses them like any other field.
      extra: bytes that a client sends in addition to the fields of its message.
      up: fields that a client sends -> their size in bytes; by default, the size of the arrays.
        Wrappers with an encoding of their own replace it.
      down: (what ``broadcast`` returns, params) -> bytes that a client receives.
      parts: (n, client ids -> number of parts); each client sends and receives this number of n-th
        parts of the bytes, but all of ``extra``. None: whole messages.
      whole: "up" or "down" or both: the directions in which a client's bytes are those of a whole
        message in spite of ``parts``, because the message is encoded.
      gradients: gradients that a client computes in one local step.
    """

    derived: tuple[str, ...] = ()
    extra: int = 0
    up: Callable[[dict[str, PyTree]], int] = tree.nbytes
    down: Callable[[PyTree, Params], int] = lambda received, _: tree.nbytes(received)
    parts: Parts | None = None
    whole: tuple[str, ...] = ()
    gradients: int = 1

    def sent(self, message: Mapping[str, PyTree]) -> int:
        """Compute the number of bytes that a client sends.

        Args:
          message: field -> pytree of arrays or of ``jax.ShapeDtypeStruct``.

        Raises:
          ValueError: ``derived`` has a name that is no field of the message.
        """
        if unknown := sorted(set(self.derived) - message.keys()):
            raise ValueError(f"derived names {unknown}; message has fields {sorted(message)}.")
        sent = {name: field for name, field in message.items() if name not in self.derived}
        return self.up(sent) + self.extra


class Traffic(NamedTuple):
    """Bytes of a method's messages in a round, for given params.

    Attributes:
      up: bytes of all messages that a client sends, if they are whole.
      down: bytes of all that a client receives, likewise.
      parts: as in ``Costs``.
      extra: bytes among ``up`` that a client sends in full, whatever its parts; 0 without parts.
      extra_down: bytes among ``down`` that it receives in full, likewise.
    """

    up: int
    down: int
    parts: Parts | None = None
    extra: int = 0
    extra_down: int = 0

    def of_round(self, cohort: Cohort, metrics: Metrics) -> Metrics:
        """Compute the metrics of a round that count bytes; traced.

        Args:
          metrics: the round's other metrics. ``communicated`` is 0 in a round without messages.
        """
        found: Metrics = {}
        everybody = cohort.participates.sum(dtype=cohort.weights.dtype)
        happens = metrics.get("communicated", 1)
        if self.parts is None:
            senders = everybody * happens
        else:
            whole, parts_of = self.parts
            parts = jnp.where(cohort.participates, parts_of(cohort.client_ids), 0).sum()
            found["message_parts"] = parts.astype(everybody.dtype)
            senders = found["message_parts"] * happens / whole

        def total(size: int, extra: int) -> jax.Array:
            scaled = senders * float(size - extra)
            return scaled + everybody * happens * float(extra) if extra else scaled

        bytes_up, bytes_down = total(self.up, self.extra), total(self.down, self.extra_down)
        return {**found, "bytes_up": bytes_up, "bytes_down": bytes_down}

    def of_rounds(self, metrics: Mapping[str, np.ndarray]) -> tuple[int, int]:
        """Compute the exact numbers of bytes that the clients of several rounds send and receive.

        Args:
          metrics: metrics of the rounds, [T]. Those of ``of_round`` have the precision of float32.
        """
        happens = metrics.get("communicated", 1)
        parts = metrics.get("message_parts", metrics["participants"])
        sent, messages = (round((n * happens).sum()) for n in (parts, metrics["participants"]))
        whole = 1 if self.parts is None else self.parts[0]

        def total(size: int, extra: int) -> int:
            return sent * (size - extra) // whole + messages * extra

        return total(self.up, self.extra), total(self.down, self.extra_down)

    def of_clients(self, num_clients: int) -> tuple[Any, Any]:
        """Compute the bytes that each client sends and receives in a round, numbers or [N]."""
        if self.parts is None:
            return self.up, self.down
        whole, parts_of = self.parts
        share = np.asarray(parts_of(jnp.arange(num_clients))) / whole
        up = share * (self.up - self.extra) + self.extra
        return up, share * (self.down - self.extra_down) + self.extra_down
