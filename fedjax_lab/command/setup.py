"""From a ``RunConfig`` to the objects of a run: data, clients, model, method, evaluation."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_lab import data, models
from fedjax_lab.checks import warn
from fedjax_lab.command.build import build_algorithm
from fedjax_lab.command.client_scores import ClientTests, build_client_tests
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.config_checks import parse_attack
from fedjax_lab.command.factories import build_model, find, is_own
from fedjax_lab.command.loaded_data import LoadedData
from fedjax_lab.command.loading import load_divided
from fedjax_lab.command.options import defaults_of
from fedjax_lab.command.own_code import sources
from fedjax_lab.command.settings import DataSettings, said_of
from fedjax_lab.data.federated import from_partition
from fedjax_lab.data.files import read_npz
from fedjax_lab.machine.keys import seeded
from fedjax_lab.models.losses import Preprocess
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.evaluate import (
    CountFn,
    build_client_evaluation,
    build_evaluation,
    with_recomputed_statistics,
)
from fedjax_lab.simulation.rounds import keep_chunks
from fedjax_lab.storage.fingerprint import add_bits
from fedjax_lab.types import Key, LossFn, Params

_OUTLIER = 1000  # times the median client's largest value
_EVALUATED = 1000  # examples of an evaluation's step
_MAX_LOGITS = 2**25  # of such a step, of text: 128 MiB
_STATISTICS_OF = 1000  # training examples, evenly spaced
# What the targets are -> builders of the loss and of the scores of each example.
_BUILDERS: dict[str, tuple[Callable[..., LossFn], Callable[..., CountFn]]] = {
    "classes": (models.classification_loss, models.accuracy_counts),
    "numbers": (models.regression_loss, models.squared_error_counts),
    "tokens": (models.language_model_loss, models.token_counts),
    "answers": (models.answer_loss, models.answer_counts),  # tokens, some of them not scored
}
_TEXT = ("tokens", "answers")


class Setup(NamedTuple):
    """The objects of a run, built from a config.

    Attributes:
      algorithm: the method.
      vary: hyperparameters by name, floats or traced -> the method with these values, for
        ``sweep``.
      loss_fn: the model's loss of each example.
      params: the initial global model.
      init: key -> an initial global model; ``params`` is the one for ``init_seed``.
      clients: the clients' training data, on the device.
      evaluate: params -> {"accuracy", "test_loss"} on the test set. For text also "perplexity", and
        the accuracy is that of next tokens. For a regression {"mean_squared_error", "test_loss"}.
      count_fn: the function of ``build_evaluation`` that scores each example.
      evaluate_clients: params -> accuracy, or mean squared error, [N] on each client's own
        training data.
      client_tests: functions that score the clients' models on the clients' own test examples.
      data: identity of the data set: sizes, shape of an example, classes (for text: size of the
        vocabulary) or outputs of a regression, and a hash.
    """

    algorithm: Algorithm
    vary: Callable[..., Algorithm]
    loss_fn: LossFn
    params: Params
    init: Callable[[Key], Params]
    clients: data.FederatedArrays
    evaluate: Callable[[Params], Mapping[str, Any]]
    count_fn: CountFn
    evaluate_clients: Callable[[Params], jax.Array]
    client_tests: ClientTests
    data: dict[str, Any]


def build(
    config: RunConfig,
    examples: tuple[data.Examples, data.Examples] | None = None,
    wrap: Callable[[Algorithm], Algorithm] | None = None,
    trained: Callable[[data.FederatedArrays], data.FederatedArrays] | None = None,
) -> Setup:
    """Load and partition the data, and build model, method and evaluation.

    Args:
      config: the settings; they are resolved here.
      examples: (train, test) in place of the data set, for example a split of the training
        data for tuning.
      wrap: function that wraps the config's method. None: the method itself.
      trained: clients -> the same arrays without held-out examples, which then count neither in
        the mean and deviation of the inputs nor in the means that fill gaps. None: all count.

    Raises:
      ValueError, TypeError: a setting is unknown, out of range, or missing.
      FileNotFoundError, ImportError: the data set, or what reads it, is not there.
    """
    config = config.resolve()
    if examples is None:
        given = load_divided(config.data, config.partition_seed)
    else:
        given = LoadedData(*examples)
    train, test = given.train, given.test
    kind = _kind_of(train)
    if kind == "numbers":
        outputs = _regressed(config, train)
    else:
        outputs = given.classes or data.num_classes(train)
        if kind == "classes":
            _check_labels(config, train, outputs)
    _check_model(config, kind)
    _check_flipped_labels(config, outputs, kind)
    with said_of("partition", config.data.partition):
        clients = given.clients or _clients(config, train)
    fitted: Any = train
    if trained is not None:
        fitted = trained(clients)
        if given.with_means_of is not None:
            given = given.with_means_of(np.asarray(fitted.indices))
            train, test = given.train, given.test
            clients = from_partition(train, clients.host_partition(), clients.names)
            fitted = trained(clients)
    _warn_of_outliers(clients)
    evaluated = _EVALUATED
    if kind in _TEXT:
        evaluated = max(1, min(evaluated, _MAX_LOGITS // (train.y.shape[1] * outputs)))

    content = _hash(*train, *test)
    # Code of the user's own may change.
    is_kept = wrap is None and trained is None and not sources(config)
    key = _but_seeds(config), content
    if is_kept and key in _last_task:
        task = _last_task[key]
    else:
        task = _task(config, train, test, fitted, kind, outputs, evaluated, wrap)
    if is_kept:
        _last_task.clear()
        _last_task[key] = task
        keep_chunks(task.algorithm)

    def init(key: Key) -> Params:
        return task.model.init(key, task.first_x)

    seed = config.rounds.seed if config.model.init_seed is None else config.model.init_seed
    params, evaluate, lowering = init(seeded(seed)), task.evaluate, config.machine.lowering
    if kind == "classes" and any(jax.tree.leaves(models.running_statistics(params))):
        shown = np.linspace(0, len(train.y) - 1, min(_STATISTICS_OF, len(train.y)), dtype=int)
        assert task.prepare is not None  # examples of classes are normalized
        sample = task.prepare(data.Examples(train.x[shown], train.y[shown]), None).x
        evaluate = with_recomputed_statistics(evaluate, task.model.apply, sample, lowering=lowering)

    return Setup(
        task.algorithm,
        task.vary,
        task.loss_fn,
        params,
        init,
        clients,
        evaluate,
        task.count_fn,
        build_client_evaluation(task.count_fn, clients, evaluated, lowering=lowering),
        build_client_tests(config, task.algorithm, task.count_fn, clients, test, given.tests),
        {
            "train": len(train.y),
            "test": len(test.y),
            "shape": list(train.x.shape[1:]),
            "outputs" if kind == "numbers" else "classes": outputs,
            "hash": content,
            **({} if given.table is None else {"table": given.table}),
        },
    )


class _Task(NamedTuple):
    """What does not depend on a seed: the model, and what is learned and measured with it.

    Attributes:
      model: the model.
      first_x: an input for its initialization, [1, ...].
      prepare: preprocessing of examples; None for text.
      loss_fn, count_fn, evaluate, vary, algorithm: as in ``Setup``.
    """

    model: models.Model
    first_x: Any
    prepare: Preprocess | None
    loss_fn: LossFn
    count_fn: CountFn
    evaluate: Callable[[Params], dict[str, jax.Array]]
    vary: Callable[..., Algorithm]
    algorithm: Algorithm


# The process's last task, at most one, so that runs with other seeds are not traced and lowered
# again: traced rounds belong to a Python object (``keep_chunks``), so runs have to share it. Of
# four times ``run --algorithm fedavg --rounds 5`` in one process, with FEDJAX_LAB_PROGRAMS=off, the
# first took 18 processor seconds and the others 3.5 each; without this, the others took 10 to 12.
# Another partition takes 4 (without: 16).
_last_task: dict[Any, _Task] = {}


def _but_seeds(config: RunConfig) -> str:
    """Return the recorded settings on which a task depends, as text."""
    values = config.record()
    for name in ("seed", "init_seed", "partition", "partition_seed"):
        if name != "seed" or config.privacy.attack is None:  # attackers are drawn with the seed
            values.pop(name, None)
    return repr(sorted(values.items()))


def _task(
    config: RunConfig,
    train: data.Examples,
    test: data.Examples,
    fitted: Any,
    kind: str,
    outputs: int,
    evaluated: int,
    wrap: Callable[[Algorithm], Algorithm] | None,
) -> _Task:
    """Build what does not depend on a seed.

    Args:
      fitted: examples whose mean and deviation normalize the inputs.
      kind: what the targets are.
      outputs: classes, or numbers of a regression.
      evaluated: examples of an evaluation's step.
      wrap: as in ``build``.
    """
    model = _model(config, outputs, kind)
    build_loss, build_counts = _BUILDERS[kind]
    first_x, prepare = train.x[:1], None
    if kind in _TEXT:
        loss_fn, count_fn = build_loss(model.apply), build_counts(model.apply)
    else:
        mean, std, scale = data.normalization(fitted)
        flip, crop = config.data.flip, config.data.crop
        prepare = data.preprocess(mean, std, scale=scale, flip=flip, crop=crop)
        first_x = prepare(data.Examples(first_x, train.y[:1]), None).x
        loss_fn, count_fn = build_loss(model.apply, prepare), build_counts(model.apply, prepare)
    total = count_fn
    if _kind_of(test) == "answers":  # every token counts alike, not every sequence
        total = models.answer_counts(model.apply, data.scored_per_row(test))
    evaluate = build_evaluation(total, test, evaluated, lowering=config.machine.lowering)

    def vary(**changed: Any) -> Algorithm:
        algorithm = build_algorithm(config, loss_fn, model, prepare, changed)
        return algorithm if wrap is None else wrap(algorithm)

    return _Task(model, first_x, prepare, loss_fn, count_fn, evaluate, vary, vary())


def _model(config: RunConfig, outputs: int, kind: str) -> models.Model:
    options = config.options()["model"]
    if kind == "numbers" or is_own("model", config.model.model):  # one output is enough
        model = build_model(config.model.model, outputs, options)
    else:
        model = models.build(config.model.model, outputs, **options)
    return models.mixed_precision(model, config.model.compute_dtype)


def _kind_of(examples: data.Examples) -> str:
    """Return what the targets are, a key of ``_BUILDERS``."""
    if examples.y.dtype.kind == "f":
        return "numbers"
    if examples.y.ndim == 1:
        return "classes"
    return "answers" if (examples.y < 0).any() else "tokens"


def _check_flipped_labels(config: RunConfig, classes: int, kind: str) -> None:
    if config.privacy.attack is None:
        return
    flipped = parse_attack(config.privacy.attack)[1].get("num_classes")
    if flipped is not None and kind == "numbers":
        raise ValueError(f"attack is {config.privacy.attack!r}; a regression has no labels.")
    if flipped not in (None, classes):
        raise ValueError(
            f"attack is {config.privacy.attack!r}, of {flipped} classes; {config.data.dataset} has "
            f"{classes}."
        )


def _check_model(config: RunConfig, kind: str) -> None:
    allowed = [
        name for name in models.MODELS if (name in models.LANGUAGE_MODELS) == (kind in _TEXT)
    ]
    name, settings = config.model.model, config.data
    if name not in allowed and not is_own("model", name):
        raise ValueError(
            f"model is {name!r}; {settings.dataset} is {'text' if kind in _TEXT else 'no text'}: "
            f"it must be one of {', '.join(allowed)}."
        )
    if kind in _TEXT and (settings.flip or settings.crop):
        raise ValueError(
            f"flip is {settings.flip} and crop {settings.crop}; they need images, and "
            f"{settings.dataset} is text."
        )


def _regressed(config: RunConfig, train: data.Examples) -> int:
    """Return the number of outputs of a regression."""
    if train.y.ndim > 2:
        raise ValueError(
            f"{config.data.dataset}: targets of shape {train.y.shape}; the models of a regression "
            "predict targets [n] or [n, outputs]. In Python, models.regression_loss accepts "
            "any."
        )
    if "model" in defaults_of(find("algorithm", config.method.algorithm), leave_out=()):
        raise ValueError(
            f"algorithm is {config.method.algorithm!r}, which compares class probabilities; "
            f"{config.data.dataset} is a regression (float y)."
        )
    return train.y.shape[1] if train.y.ndim > 1 else 1


def _check_labels(config: RunConfig, train: data.Examples, outputs: int) -> None:
    """Check that there are two classes, and warn of labels that no training example has."""
    if outputs < 2:
        raise ValueError(
            f"{config.data.dataset}: every label is 0; a classification needs two classes, 0 and 1."
        )
    used = np.unique(train.y)
    if len(used) < outputs:
        absent = np.setdiff1d(np.arange(len(used) + 1), used)[0]
        warn(
            f"the labels are up to {outputs - 1}, and only {len(used)} of these numbers occur in "
            f"the training data; {absent}, for example, does not. The model has an output for each "
            "number from 0; number the classes 0, 1, 2, ...",
        )


def _clients(config: RunConfig, train: data.Examples) -> data.FederatedArrays:
    return data.partition(
        train,
        _owners(config, train) if config.data.is_natural else config.data.partition,
        num_clients=config.data.num_clients,
        seed=config.partition_seed,
        min_size=config.data.min_client_size,
    )


def _owners(config: RunConfig, train: data.Examples) -> np.ndarray:
    """Read the id of each training example's client, [n], from the data's .npz file."""
    path, column = (text.partition(":")[2] for text in (config.data.dataset, config.data.partition))
    owners = read_npz(Path(path), config.data.dataset, [column])[column]
    if owners.shape != (len(train.y),):
        raise ValueError(
            f"partition is {config.data.partition!r}: the array {column} of {path} has shape "
            f"{owners.shape}; it must have an id for each training example, [{len(train.y)}]."
        )
    return owners


def _warn_of_outliers(clients: data.FederatedArrays) -> None:
    """Warn of clients whose values dwarf all others', because all share one normalization."""
    x = np.asarray(clients.examples.x)
    if not np.issubdtype(x.dtype, np.floating):
        return
    largest = np.zeros(clients.num_clients, x.dtype)
    owners = np.repeat(np.arange(clients.num_clients), np.asarray(clients.sizes))
    of_example = np.abs(x).reshape(len(x), -1).max(1)
    np.maximum.at(largest, owners, of_example[np.asarray(clients.indices)])
    typical = np.median(largest[np.asarray(clients.sizes) > 0])
    far = np.flatnonzero(largest > _OUTLIER * typical)
    if len(far):
        named = ", ".join(map(str, far[:10])) + (" ..." if len(far) > 10 else "")
        warn(
            f"the clients {named} have values up to {largest.max():.3g}, more than {_OUTLIER} "
            f"times those of the median client ({typical:.3g}); they dominate the mean and the "
            "standard deviation that normalize all inputs.",
        )


def are_the_data_of(before: Mapping[str, Any], config: RunConfig) -> bool:
    """Return True if a config's data are surely those that a run directory's config.json records.

    Clients of an array of ids and client times are files of their own, which only a run compares.

    Raises:
      ValueError, FileNotFoundError, ImportError: the data set, or what reads it, is not there.
      KeyError: the file lacks an entry.
    """
    data, seed = config.data, config.partition_seed
    if config.clock.times is not None:
        return False
    if not data.is_table:  # the seed and the partition leave the examples as they are
        data, seed = dataclasses.replace(data, num_clients=None, partition_seed=None), 0
        data = data if data.is_natural else dataclasses.replace(data, partition="iid")
    examples, clients = _hashes_of(data, seed)
    if data.is_natural and clients is None:
        return False
    is_same = clients is None or clients == before["partition"]["hash"]
    return is_same and examples == before["data"]["hash"]


@functools.lru_cache(maxsize=8)
def _hashes_of(settings: DataSettings, seed: int) -> tuple[str, str | None]:
    """Return the hash of the examples, and that of the clients with whom they come."""
    found = load_divided(settings, seed)
    clients = None if found.clients is None else found.clients.partition.hash
    return _hash(*found.train, *found.test), clients


def _hash(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in map(np.ascontiguousarray, arrays):
        digest.update(f"{array.shape} {array.dtype.str}".encode())
        add_bits(digest, array)
    return digest.hexdigest()[:16]
