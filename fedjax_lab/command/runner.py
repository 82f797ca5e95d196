"""From a ``RunConfig`` to a finished run: load, partition, build, simulate, evaluate."""

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_lab import data, models
from fedjax_lab.checks import warn
from fedjax_lab.command.build import build_algorithm
from fedjax_lab.command.client_scores import ClientTests, build_client_tests, score_result
from fedjax_lab.command.config import RunConfig
from fedjax_lab.command.config_checks import parse_attack
from fedjax_lab.command.factories import build_model, find, is_own
from fedjax_lab.command.last_method import last_or_new
from fedjax_lab.command.loaded_data import LoadedData
from fedjax_lab.command.loading import load_divided
from fedjax_lab.command.options import defaults_of
from fedjax_lab.command.own_code import own_sources, sources
from fedjax_lab.command.schedules import depends_on_rounds
from fedjax_lab.command.settings import DataSettings, said_of
from fedjax_lab.data.federated import from_partition
from fedjax_lab.data.files import read_npz
from fedjax_lab.data.heterogeneity import labels_of
from fedjax_lab.machine.json_file import read_json
from fedjax_lab.machine.keys import seeded
from fedjax_lab.models.losses import Preprocess
from fedjax_lab.round import Algorithm
from fedjax_lab.simulation.evaluate import (
    CountFn,
    build_client_evaluation,
    build_evaluation,
    with_recomputed_statistics,
)
from fedjax_lab.simulation.history import SimulationResult
from fedjax_lab.simulation.loggers import Hook, build_loggers
from fedjax_lab.simulation.processes import Processes
from fedjax_lab.simulation.rounds import keep_chunks
from fedjax_lab.simulation.simulate import simulate
from fedjax_lab.storage.fingerprint import add_bits
from fedjax_lab.storage.run_dir import CONFIG, PARTITION, SUMMARY, write_json
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
    init_key = seeded(
        config.rounds.seed if config.model.init_seed is None else config.model.init_seed
    )
    evaluated = _EVALUATED
    if kind in _TEXT:
        evaluated = max(1, min(evaluated, _MAX_LOGITS // (train.y.shape[1] * outputs)))

    def of_no_seed():  # what does not depend on a seed
        model = _model(config, outputs, kind)
        task = _task(config, train, fitted, model, kind)
        _, prepare, loss_fn, count_fn = task
        total = count_fn
        if _kind_of(test) == "answers":  # every token counts alike, not every sequence
            total = models.answer_counts(model.apply, data.scored_per_row(test))
        evaluate = build_evaluation(total, test, evaluated, lowering=config.machine.lowering)

        def vary(**changed: Any) -> Algorithm:
            algorithm = build_algorithm(config, loss_fn, model, prepare, changed)
            return algorithm if wrap is None else wrap(algorithm)

        return model, task, evaluate, vary, vary()

    content = _hash(*train, *test)
    is_ours = wrap is None and trained is None and not sources(config)
    made = last_or_new(config, content, of_no_seed) if is_ours else of_no_seed()
    model, (first_x, prepare, loss_fn, count_fn), evaluate, vary, algorithm = made
    if is_ours:
        keep_chunks(algorithm)

    def init(key: Key) -> Params:
        return model.init(key, first_x)

    params = init(init_key)
    if kind == "classes" and any(jax.tree.leaves(models.running_statistics(params))):
        shown = np.linspace(0, len(train.y) - 1, min(_STATISTICS_OF, len(train.y)), dtype=int)
        sample = prepare(data.Examples(train.x[shown], train.y[shown]), None).x
        evaluate = with_recomputed_statistics(
            evaluate, model.apply, sample, lowering=config.machine.lowering
        )

    return Setup(
        algorithm,
        vary,
        loss_fn,
        params,
        init,
        clients,
        evaluate,
        count_fn,
        build_client_evaluation(count_fn, clients, evaluated, lowering=config.machine.lowering),
        build_client_tests(config, algorithm, count_fn, clients, test, given.tests),
        {
            "train": len(train.y),
            "test": len(test.y),
            "shape": list(train.x.shape[1:]),
            "outputs" if kind == "numbers" else "classes": outputs,
            "hash": content,
            **({} if given.table is None else {"table": given.table}),
        },
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


def _model(config: RunConfig, outputs: int, kind: str) -> models.Model:
    options = config.options()["model"]
    if kind == "numbers" or is_own("model", config.model.model):  # one output is enough
        model = build_model(config.model.model, outputs, options)
    else:
        model = models.build(config.model.model, outputs, **options)
    return models.mixed_precision(model, config.model.compute_dtype)


def _task(
    config: RunConfig, train: data.Examples, fitted: Any, model: models.Model, kind: str
) -> tuple[Any, Preprocess | None, LossFn, CountFn]:
    """Return (input for initialization, preprocessing, loss, evaluation function)."""
    build_loss, build_counts = _BUILDERS[kind]
    if kind in _TEXT:
        return train.x[:1], None, build_loss(model.apply), build_counts(model.apply)
    mean, std, scale = data.normalization(fitted)
    prepare = data.preprocess(mean, std, scale=scale, flip=config.data.flip, crop=config.data.crop)
    first_x = prepare(data.Examples(train.x[:1], train.y[:1]), None).x
    return first_x, prepare, build_loss(model.apply, prepare), build_counts(model.apply, prepare)


def run(
    config: RunConfig,
    *,
    examples: tuple[data.Examples, data.Examples] | None = None,
    wrap: Callable[[Algorithm], Algorithm] | None = None,
    progress: bool = True,
    on_row: Hook | Iterable[Hook] = (),
) -> SimulationResult:
    """Run a config, or resume it from its run directory.

    The run directory has the files of ``simulate``, with two additions.
    summary.json has ``client_accuracy`` [N] of the final global model (or of personal models) on
    each client's training data, its mean and ``worst_10_percent_accuracy`` (for a regression, the
    same of "mean_squared_error"). If the clients have test examples, ``client_test_accuracy`` [N]
    is the final score on these, and ``client_test_examples`` [N] their number; for methods with
    personal models, rows have ``personal_accuracy`` and other scores of them, and for others
    clients.jsonl has ``client_test_accuracy`` and so on: see ``client_scores.ClientTests``.
    partition.json has the label histogram (null for text).

    Args:
      config: the settings; they are resolved here.
      examples, wrap: as in ``build``.
      progress: show the run and its progress on stderr.
      on_row: as in ``simulate``, besides the loggers of ``config.output.log``.

    Raises:
      ValueError, TypeError: a setting is unknown, out of range, or missing.
      FileNotFoundError, ImportError: the data set, or what reads it, is not there.
      FileExistsError: the directory has another run.
    """
    config = config.resolve()
    setup = build(config, examples, wrap)
    result = simulate_setup(config, setup, progress=progress, on_row=on_row)
    if result.interrupted and not result.history:
        return result  # nothing has been computed that could be scored
    scores = score_result(config, setup, result)
    if not Processes.here().is_first:
        return result
    path = _run_dir(config)
    summary = read_json(path / SUMMARY)
    write_json(path / SUMMARY, {**summary, **scores})
    write_json(path / PARTITION, describe_partition(setup.clients))
    return result


def simulate_setup(
    config: RunConfig, setup: Setup, *, progress: bool = True, on_row: Hook | Iterable[Hook] = ()
) -> SimulationResult:
    """Run what ``build`` built, or resume it; a finished run is only read.

    Raises:
      ValueError, TypeError, FileExistsError: as ``simulate``.
    """
    path = _run_dir(config)
    processes = Processes.here()
    hooks = [on_row] if callable(on_row) else list(on_row)
    loggers = build_loggers(config.output.log if processes.is_first else (), path, config.record())
    schedule = config.schedule()
    bound = own_sources(config, path)
    if depends_on_rounds(config.method.client_lr_schedule):
        bound["client_lr_ends"] = config.rounds.rounds
    if progress and processes.is_first:
        print(_describe(config, setup, path), file=sys.stderr, flush=True)
    # Compiled here, so that the time of the rounds does not include it.
    jax.block_until_ready(setup.evaluate(setup.params))
    with ExitStack() as stack:
        for logger in loggers:
            stack.callback(logger.close)
        return simulate(
            setup.algorithm,
            setup.params,
            setup.clients,
            **schedule,
            seed=config.rounds.seed,
            evaluate=setup.evaluate,
            diagnose=setup.client_tests.diagnose,
            score_clients=setup.client_tests.score_clients,
            **config.machine.arguments(),
            on_nonfinite=config.rounds.on_nonfinite,
            run_dir=path,
            checkpoint_every=config.output.checkpoint_every,
            config={"run_config": config.record(), "data": setup.data, **bound},
            on_row=[*hooks, *loggers],
            profile_dir=config.output.profile_dir,
            progress=progress,
        )


def _run_dir(config: RunConfig) -> Path:
    assert config.output.run_dir is not None  # resolved
    return Path(config.output.run_dir)


def describe_partition(clients: data.FederatedArrays) -> dict[str, Any]:
    """Return the contents of partition.json: scheme, seed, hash, names, label histogram."""
    labels, names = labels_of(clients.examples), clients.names
    distance = histogram = None
    if labels is not None:
        measured = clients.heterogeneity()
        distance = measured.mean_tv_distance
        if labels.ndim == 1:  # a word's count in every client is much, and nothing to look at
            histogram = measured.label_histogram.tolist()
    return {
        "spec": clients.partition.spec,
        "seed": clients.partition.seed,
        "hash": clients.partition.hash,
        "names": None if names is None else list(names),
        "mean_tv_distance": distance,
        "label_histogram": histogram,
    }


def _describe(config: RunConfig, setup: Setup, path: Path) -> str:
    verb = "going on with" if (path / CONFIG).exists() else "new run in"
    size = models.count_params(setup.params)
    shape = "x".join(map(str, setup.data["shape"]))
    kind = config.data.tokens if config.model.model in models.LANGUAGE_MODELS else "classes"
    kind = "characters" if config.data.is_federated else kind
    kind = "outputs" if "outputs" in setup.data else kind
    return "\n".join(
        [
            f"{config.data.dataset}: {setup.data['train']:,} + {setup.data['test']:,} examples "
            f"{shape}, {setup.data.get('classes', setup.data.get('outputs')):,} {kind}",
            setup.clients.summary(),
            f"{config.model.model}: {size:,} parameters",
            f"{setup.algorithm.name}, {verb} {path}",
        ]
    )


def _hash(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in map(np.ascontiguousarray, arrays):
        digest.update(f"{array.shape} {array.dtype.str}".encode())
        add_bits(digest, array)
    return digest.hexdigest()[:16]
