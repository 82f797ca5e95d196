"""Attacks: some clients of a method send manipulated messages.

Sign flip and Gaussian messages: Blanchard et al., NeurIPS 2017; Li, Xu, Chen, Giannakis, Ling:
RSA. AAAI 2019. Label flip: Fung, Yoon, Beschastnikh: The Limitations of Federated Learning in
Sybil Settings. RAID 2020. ALIE: Baruch, Baruch, Goldberg: A Little Is Enough: Circumventing
Defenses For Distributed Learning. NeurIPS 2019, Algorithm 3. Inner-product manipulation: Xie,
Koyejo, Gupta: Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation.
UAI 2019.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from fedjax_lab import tree
from fedjax_lab.checks import LAST_SEED, check_choice, check_int, check_number, is_traced
from fedjax_lab.descriptions import describe
from fedjax_lab.round import Algorithm, Phase
from fedjax_lab.signatures import suggest_keywords
from fedjax_lab.types import ClientBatch, Cohort, Key, PyTree, Scalar
from fedjax_lab.wrappers.base import State, Wrapper, recorded, sends, tag, with_field
from fedjax_lab.wrappers.client_messages import reduce_messages, select, stack_all

# Attack -> its default strength; None: computed, or the attack has none.
ATTACKS = {
    "alie": None,
    "gaussian": 1.0,
    "inner_product": 0.5,
    "label_flip": None,
    "sign_flip": 1.0,
}
_SEES_ALL = ("alie", "inner_product")
# (messages, field -> pytree [S, ...]; honest, bool [S]; key) -> the attackers' messages
AttackFn = Callable[[dict[str, PyTree], jax.Array, Key], dict[str, PyTree]]
_FLAG = "attacks"  # a field of the message that only the simulation sees
_NOISE = tag(4)


class AttackedRow(NamedTuple):
    """A client's row.

    Attributes:
      inner: the method's own row.
      attacks: bool, whether the client is an attacker.
    """

    inner: PyTree
    attacks: jax.Array

    @staticmethod
    def of_arguments(hyperparameters):
        """Name the fields that a run takes from its method, not from an earlier state.

        Args:
          hyperparameters: of the method, as it records them.
        """
        return ("attacks",)


def attackers(num_clients: int, share: float, seed: int) -> np.ndarray:
    """Draw the attackers: share * N clients, rounded to the nearest integer.

    Args:
      num_clients: N.
      share: in [0, 1].
      seed: seed of the draw, in which all sets of this size are equally likely.

    Returns:
      int [round(share * N)], ids in ascending order.
    """
    return np.flatnonzero(_turns(num_clients, seed) < _count(num_clients, share))


@functools.lru_cache(maxsize=8)  # shapes are computed repeatedly, for very many clients
def _turns(num_clients: int, seed: int) -> np.ndarray:
    """Draw the order in which clients become attackers as the share grows: int [N], positions."""
    turns = np.empty(num_clients, int)
    turns[np.random.default_rng(seed).permutation(num_clients)] = np.arange(num_clients)
    turns.flags.writeable = False
    return turns


def _count(num_clients: int, share: Scalar) -> Any:
    """Round share * N; in JAX's precision, so that a traced share gives the same number."""
    xp: Any = jnp if is_traced(share) else np
    return xp.floor(xp.asarray(share, jnp.result_type(float)) * num_clients + 0.5)


@suggest_keywords
def with_attack(
    algorithm: Algorithm,
    attack: str | AttackFn,
    *,
    share: Scalar,
    seed: int = 0,
    strength: Scalar | None = None,
    num_classes: int | None = None,
) -> Algorithm:
    """Simulate attackers: a fixed share of the clients sends manipulated messages in every round.

    ==================  ========================================================  ==============
    attack              message of an attacker                                    strength
    ==================  ========================================================  ==============
    ``sign_flip``       its honest message times -strength                        1
    ``gaussian``        normal noise with standard deviation ``strength``         1
    ``label_flip``      its message after training with labels C - 1 - y          none
    ``alie``            mean - z std of each number over the honest messages      z, computed
    ``inner_product``   mean of the honest messages times -strength               0.5
    a function          what it returns, see below                                none
    ==================  ========================================================  ==============

    In ``alie`` and ``inner_product``, the attackers know the honest messages of the round, and all
    of them send the same message; zeros if there is no honest client. For these attacks and for a
    function all messages of a cohort are in memory at once, S times one message.

    A function ``(messages, honest, key) -> message`` gets what all clients of the cohort would send
    (field -> pytree [S, ...], zeros for clients that do not participate), which of them are honest
    and participate, bool [S], and a PRNG key of the round. It returns the same fields, in
    operations that JAX can trace: with arrays [S, ...], of which the attackers' rows are sent, or
    with arrays [...] that all attackers send.

    ALIE's z is computed as in the paper for the n clients and m attackers of the round: the
    quantile at (n - m - s) / (n - m) with s = floor(n / 2 + 1) - m, but at least 0. If s is not
    positive, it is the quantile at 1 - 1 / (n - m + 1).

    The number of attackers in a cohort varies from round to round. An attacker's row is updated as
    if the client were honest, and metrics include all clients. Apply this wrapper last: attackers
    then neither compress nor clip their messages. With secure aggregation, their numbers are
    limited like all others. First estimates (FAFED, STEM) are attacked in the first round.

    Source: Blanchard et al., NeurIPS 2017 (``sign_flip``, ``gaussian``); Fung et al., RAID 2020
    (``label_flip``); Baruch et al., NeurIPS 2019 (``alie``); Xie et al., UAI 2019
    (``inner_product``).

    Args:
      algorithm: any method, with all its other wrappers.
      attack: one of the names above, or a function.
      share: share of the N clients that attack, in [0, 1]; may be swept.
      seed: seed that selects the attackers of the run: ``attackers(N, share, seed)``.
      strength: strength of the attack; None: the default in the table.
      num_classes: C; only for ``label_flip``, which needs examples with integer labels in the field
        ``y``. If a label is C or larger, the loss of the attacker and of the round is NaN. Labels
        below 0, of tokens that are not scored, stay.

    Raises:
      TypeError, ValueError: an argument is unknown, missing, superfluous or out of range; a
        function returns other fields or shapes, or the examples have no integer labels ``y`` (when
        the round is traced); or the share is not 0 but less than half a client (when the method is
        started).
    """
    wrapper = Wrapper(algorithm, "attack")
    if not callable(attack):
        check_choice("attack", attack, ATTACKS)
    name = getattr(attack, "__name__", "function") if callable(attack) else attack
    check_number("share", share, minimum=0.0, maximum=1.0)
    check_int("seed", seed, minimum=0, maximum=LAST_SEED)
    if (attack == "label_flip") != (num_classes is not None):
        needs = "needs the number of classes" if num_classes is None else "does not use it"
        raise ValueError(f"num_classes is {num_classes}; {name} {needs}.")
    if num_classes is not None:
        check_int("num_classes", num_classes, minimum=2)
    if strength is not None:
        if callable(attack) or attack == "label_flip":
            raise ValueError(f"strength is {strength}; {name} has none.")
        check_number("strength", strength, minimum=0.0)
    elif not callable(attack):
        strength = ATTACKS[attack]

    def around(params, num_clients, server, rows):
        if not is_traced(share) and share > 0 and _count(num_clients, share) == 0:
            raise ValueError(
                f"share is {share}, which is less than half of one of {num_clients} clients; it "
                f"must be 0, or at least {1 / (2 * num_clients):g}."
            )
        attacks = jnp.asarray(_turns(num_clients, seed) < _count(num_clients, share))
        return server, AttackedRow(rows, attacks)

    def change(phase, place):
        if callable(attack):
            lie = _by_function(attack)
        elif attack in _SEES_ALL:
            lie = functools.partial(_lie, attack, strength)
        else:
            return _alter(phase, attack, strength, num_classes)
        return _replace(phase, lie, place.index) if sends(phase) else phase

    return wrapper.wrap(
        name,
        change,
        of=lambda phase: True,
        needs_floats=attack != "label_flip",
        state=State(around, row=AttackedRow),
        hyperparameters={
            "attack": describe(attack) if callable(attack) else attack,
            "attack_share": recorded(share),
            "attack_seed": seed,
            "attack_strength": None if strength is None else recorded(strength),
        },
    )


def _alter(phase: Phase, attack: str, strength: Any, num_classes: int | None) -> Phase:
    """Wrap a phase so that attackers change their own message."""

    def client_update(received, row, batch):
        if attack == "label_flip":
            batch = _flip_labels(batch, row.attacks, num_classes)
        message, row, report = phase.client_update(received, row, batch)
        if attack == "sign_flip":
            lie = tree.scale(message, -jnp.asarray(strength))
        elif attack == "gaussian":
            drawn = tree.normal_like(jax.random.fold_in(batch.key, _NOISE), message)
            lie = tree.scale(drawn, strength)
        else:
            lie = message
        return tree.where(row.attacks, lie, message), row, report

    return phase._replace(client_update=client_update)


# (messages [S, ...], honest [S], cohort, key) -> the attackers' messages, [S, ...] or [...]
_Lie = Callable[[dict, jax.Array, Cohort, Key], dict]


def _replace(phase: Phase, lie: _Lie, index: int) -> Phase:
    """Wrap a phase so that attackers use the messages of the cohort."""

    def client_update(received, row, batch):
        message, row, report = phase.client_update(received, row, batch)
        return {**message, _FLAG: row.attacks}, row, report

    def server_update(server, messages, cohort):
        messages = dict(messages)
        attacks = messages.pop(_FLAG)
        honest = cohort.participates & ~attacks
        key = jax.random.fold_in(jax.random.fold_in(cohort.key, _NOISE), index)
        made_up = lie(messages, honest, cohort, key)
        messages = jax.tree.map(
            lambda leaf, lies: jnp.where(tree.along(attacks, leaf), lies, leaf), messages, made_up
        )
        return phase.server_update(server, reduce_messages(phase.reduce, messages, cohort), cohort)

    flagged = with_field(stack_all(phase), _FLAG, lambda message: jnp.zeros((), bool), "stack")
    return flagged._replace(client_update=client_update, server_update=server_update)


def _by_function(attack: AttackFn) -> _Lie:
    """Return what computes the messages by a function, and checks them."""

    def lie(messages, honest, cohort, key):
        lies = attack(select(cohort.participates, messages), honest, key)
        wanted: Any = jax.tree.structure(messages)
        if jax.tree.structure(lies) != wanted:
            raise ValueError(
                f"attack returned {jax.tree.structure(lies)}; it must return the fields and arrays "
                f"of messages, {wanted}."
            )
        for (path, leaf), made_up in zip(
            jax.tree_util.tree_leaves_with_path(messages), jax.tree.leaves(lies), strict=True
        ):
            if jnp.shape(made_up) not in (leaf.shape, leaf.shape[1:]):
                raise ValueError(
                    f"attack returned the shape {jnp.shape(made_up)} for "
                    f"{tree.path_text(path)}; it must be {leaf.shape}, a message of each client, "
                    f"or {leaf.shape[1:]}, the same of all attackers."
                )
        return _in_dtypes(lies, messages)

    return lie


def _lie(
    attack: str, strength: Any, messages: dict, honest: jax.Array, cohort: Cohort, key: Key
) -> dict:
    """Compute the attackers' message from the honest ones; zeros if there are none."""
    count = honest.sum(dtype=cohort.weights.dtype)
    shares = jnp.where(honest, tree.safe_divide(1.0, count), 0)
    wide = tree.widen(select(honest, messages))  # squares may vanish in float16
    mean = tree.weighted_sum(wide, shares)
    if attack == "inner_product":
        return _in_dtypes(tree.scale(mean, -jnp.asarray(strength)), messages)
    centred = jax.tree.map(lambda leaf, m: jnp.square(leaf - m[None]), wide, mean)
    variance = tree.weighted_sum(select(honest, centred), shares)
    z = _alie_z(cohort.participates.sum(), count) if strength is None else strength
    lies = jax.tree.map(lambda m, v: m - jnp.asarray(z, m.dtype) * jnp.sqrt(v), mean, variance)
    return _in_dtypes(lies, messages)


def _in_dtypes(lies: dict, messages: dict) -> dict:
    return jax.tree.map(lambda lie, leaf: jnp.asarray(lie, leaf.dtype), lies, messages)


def _alie_z(n: jax.Array, honest: jax.Array) -> jax.Array:
    """Compute the largest z for which a majority is further from the mean than the attackers."""
    needed = jnp.maximum(n // 2 + 1 - (n - honest), 0)
    share = tree.safe_divide(honest - needed, honest)
    share = jnp.where(needed > 0, share, honest / (honest + 1))
    return jnp.maximum(ndtri(jnp.clip(share, 0.5, 1 - 1e-6)), 0)


def _flip_labels(batch: ClientBatch, attacks: jax.Array, num_classes: Any) -> ClientBatch:
    """Replace y by C - 1 - y in the batch of an attacker; only the labels are copied.

    A label below 0 stays: it marks a token that is not scored.
    """
    if batch.source is not None:
        return batch._replace(source=_flipped(batch.source, attacks, num_classes))
    full = batch.full_examples
    if full is not None:
        full = _flipped(full, attacks, num_classes)
    examples = _flipped(batch.examples, attacks, num_classes)
    return batch._replace(examples=examples, full_examples=full)


def _flipped(examples: PyTree, attacks: jax.Array, num_classes: int) -> PyTree:
    labels = examples.get("y") if isinstance(examples, dict) else getattr(examples, "y", None)
    if labels is None or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"examples are {type(examples).__name__} without integer labels in a field y, which "
            "label_flip needs."
        )
    other = num_classes - 1 - labels
    # A label without a class, so that the loss is NaN; JAX counts negative labels from the end.
    other = jnp.where(labels < num_classes, other, jnp.iinfo(labels.dtype).max)
    flipped = jnp.where(attacks & (labels >= 0), other, labels).astype(labels.dtype)
    return (
        {**examples, "y": flipped} if isinstance(examples, dict) else examples._replace(y=flipped)
    )
