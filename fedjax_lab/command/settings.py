"""The settings of a run, in groups: what each is called, its type, range, default and help.

Each group is the arguments of a few calls of the library. A setting's name is its flag and its key
in a settings file, so names are unique over the groups. The text below a setting is its help. What
else the command line has to know of a setting are its ``Facts``.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, NamedTuple

import tyro

from fedjax_lab.checks import (
    LAST_SEED,
    MOST_ROUNDS,
    check_choice,
    check_int,
    check_number,
    check_share,
)
from fedjax_lab.clients.mapping import check_client_map
from fedjax_lab.command.options import CLIPS
from fedjax_lab.compressors import as_compressor
from fedjax_lab.data import ClientTimes, Devices
from fedjax_lab.data.cifar import LABELS
from fedjax_lab.data.client_sampling import SAMPLINGS
from fedjax_lab.data.shakespeare import FEDERATED
from fedjax_lab.data.sources import LOAD_OPTIONS, TABLES
from fedjax_lab.data.text import TOKENS
from fedjax_lab.machine.target import LOWERINGS
from fedjax_lab.models import COMPUTE_DTYPES
from fedjax_lab.round import ON_NONFINITE
from fedjax_lab.simulation.loggers import LOGGERS
from fedjax_lab.simulation.placement import CLIENT_STORES
from fedjax_lab.storage.run_path import check_run_dir
from fedjax_lab.wrappers.rules import parse_rule

DEFAULT_TEST_SPLIT = "clients:0.2"
# A partition of the command line alone: in Python, ids are an array.
NATURAL = "natural:ARRAY"
NATURAL_SCHEME = "natural"
Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]  # a flag that may be given several times
# Commands that do not use a setting.
_NOT_RUN, _SEARCHES = ("plan", "sweep", "tune"), ("sweep", "tune")


class Facts(NamedTuple):
    """What the command line knows of a setting, besides its name, type, default and help.

    Attributes:
      check: its range: function of name and value, which raises an error; of each value if it is a
        tuple. None: any.
      needs: setting of the group that must not be None, unless this one has its default.
      is_varied: whether ``sweep`` and ``tune`` may vary it; its value may then be traced.
      is_recorded: whether config.json has it, so that a run that resumes must have the same value
        (except of ``rounds``).
      in_grid: whether ``run`` takes several values of it, if it is recorded, and a word or number.
      refused_by: commands that do not use it and refuse a file with another value than the default.
      ignored_by: commands that do not use it, and whose results are the same for all its values.
    """

    check: Callable[[str, Any], Any] | None = None
    needs: str | None = None
    is_varied: bool = False
    is_recorded: bool = True
    in_grid: bool = True
    refused_by: tuple[str, ...] = ()
    ignored_by: tuple[str, ...] = ()


def setting(default: Any, check: Callable[[str, Any], Any] | None = None, **facts: Any) -> Any:
    """Define a setting by its default and its ``Facts``."""
    return dataclasses.field(default=default, metadata={"facts": Facts(check, **facts)})


def facts_of(field: dataclasses.Field[Any]) -> Facts:
    """Return the facts of a group's field."""
    return field.metadata.get("facts", Facts())


# Ranges of settings.
count = partial(check_int, minimum=1, maximum=MOST_ROUNDS)
seed_number = partial(check_int, minimum=0, maximum=LAST_SEED)
not_negative = partial(check_number, minimum=0.0)
positive = partial(check_number, minimum=0.0, exclusive_minimum=True)


def at_least(minimum: int) -> Any:
    """Return the range of the integers from a minimum."""
    return partial(check_int, minimum=minimum)


def one_of(choices: Iterable[str]) -> Any:
    """Return the range of some words."""
    return partial(check_choice, choices=tuple(choices))


def form_of(check: Callable[[Any], Any]) -> Any:
    """Return the range of what a function of the value alone accepts."""
    return lambda name, value: check(value)


def check_ranges(group: Any) -> None:
    """Check each setting of a group against its range, and that it does not lack another one.

    Raises:
      ValueError, TypeError: a setting is out of range, has another type, or needs another one.
    """
    for field in dataclasses.fields(group):
        name, value, facts = field.name, getattr(group, field.name), facts_of(field)
        if facts.check is not None and value is not None:
            for each in value if isinstance(value, tuple | list) else (value,):
                with said_of(name, each):
                    facts.check(name, each)
        if facts.needs and value != field.default and getattr(group, facts.needs) is None:
            raise ValueError(f"{name} is {value}; it requires {facts.needs}.")


@dataclasses.dataclass(frozen=True)
class MethodSettings:
    """The method and its compressors. Lists: `fedjax-lab algorithms | compressors`."""

    algorithm: str = "fedavg"
    """Method, such as fedavg, scaffold or gradma, or a factory of your own, package.module:name."""

    option: Repeated = ()
    """Hyperparameter of the method as name=value; `fedjax-lab algorithms` lists them. With several
    methods, METHOD.name=value is of one."""

    client_lr: float = setting(0.1, not_negative, is_varied=True)
    """Learning rate of the local steps."""

    client_lr_schedule: str = "constant"
    """Schedule over the rounds: constant, exponential:FACTOR (each round), step:ROUNDS:FACTOR,
    multistep:30,60:FACTOR (at these rounds), cosine (to 0), or warmup_cosine:ROUNDS (rises first).
    In fafed and stem, whose rate is of the local step, it changes within a round, too."""

    server_lr: float | None = setting(None, not_negative, is_varied=True)
    """Learning rate of the server. None: the method's default, if it has one."""

    as_published: bool = False
    """Run the method as its authors' published code does, if that differs from the paper;
    `fedjax-lab published` lists these methods and the differences."""

    clip_norm: float | None = setting(None, positive, is_varied=True)
    """Clip gradients (or steps, see clip) to this global norm. None: no clipping; with
    as_published, the published code's norm."""

    weight_decay: float | None = setting(None, not_negative, is_varied=True)
    """Weight decay, added after clipping. None: 0; with as_published, the published code's
    value."""

    clip: str | None = setting(None, one_of(CLIPS))
    """What clip_norm and weight_decay act on: gradient (of a mini-batch) or step (the whole
    direction of a local step). None: gradient; with as_published, the published code's choice."""

    compressor: str | None = setting(None, as_compressor)
    """Compress the clients' messages, such as top_k:0.99, sign or top_k:0.9+qsgd:15."""

    error_feedback: bool = True
    """With a compressor: add the compression error to the client's next message."""

    downlink_compressor: str | None = setting(None, as_compressor)
    """Compress the server's broadcast as well."""


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The model. List: `fedjax-lab models`."""

    model: str = "mlp"
    """Model, such as linear, mlp, cnn (images of 16x16 or more), lstm or transformer (text), or a
    factory of your own, package.module:name."""

    model_option: Repeated = ()
    """Option of the model as name=value, such as hidden=64,32."""

    compute_dtype: str = setting("float32", one_of(COMPUTE_DTYPES))
    """Dtype of the model's computations: float32 or bfloat16; parameters are float32."""

    init_seed: int | None = setting(None, seed_number, in_grid=False)
    """Seed of the initial model. None: seed."""


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """The data set and its partition. Lists: `fedjax-lab datasets | partitions`."""

    dataset: str = "digits"
    """Data set, such as digits, fashion_mnist, cifar10:PATH, images:FOLDER, npz:FILE, csv:FILE,
    parquet:FILE, text:FILE_OR_FOLDER or shakespeare:FOLDER; or a function of your own,
    package.module:name."""

    dataset_option: Repeated = ()
    """Argument of a data set of your own, as name=value."""

    data_dir: str | None = setting(None, is_recorded=False)
    """Folder with the files of the data set. None: the usual places."""

    client: str | None = setting(None, in_grid=False)
    """For a table: column of client ids. None: partition divides the rows."""

    x: tuple[str, ...] = ()
    """For a table: columns of inputs; text becomes integers. None: all but client and target."""

    target: tuple[str, ...] = ()
    """For a table: column to predict, or several columns."""

    task: str | None = None
    """For a table: regression or classification. None: floats are a regression."""

    categories: tuple[str, ...] = ()
    """For a table: columns to read as text even if their cells are numbers, such as postcodes."""

    missing: tuple[str, ...] = ()
    """For a table: meaning of missing values. drop: leave out their rows; mean: the mean of the
    training rows; a number; keep: a category of its own. Two of these are for columns of numbers
    and of text: mean keep. MARK=MEANING for single marks, such as ?=drop. None: missing values are
    errors."""

    test_split: str = DEFAULT_TEST_SPLIT
    """For a table: the test set. clients:0.2 holds out a share of the clients, examples:0.2 a share
    of each client's rows; or another file .csv, .tsv or .parquet."""

    tokens: str = setting("words", one_of(TOKENS))
    """For text: split it into words, characters or bytes."""

    sequence_length: int = setting(35, count)
    """For text: number of tokens of an example, L."""

    vocabulary_size: int | None = setting(None, at_least(2))
    """Keep only this many of a text's tokens, the most frequent ones; the others become one token.
    None: keep all."""

    labels: str = setting("fine", one_of(LABELS))
    """For cifar100:PATH: fine labels (100 classes) or coarse ones (20)."""

    image_size: int | None = setting(None, at_least(1))
    """For images:FOLDER: scale the images to this height and width. None: all must have one
    size."""

    partition: str = "dirichlet:0.1"
    """Partition of the data among the clients: iid, dirichlet:0.1, classes_per_client:2, ..., or
    natural:ARRAY, the name of an array of client ids in npz:FILE. With client: by that column."""

    num_clients: int | None = setting(None, at_least(1))
    """Number of clients, N. None: 20, which suits digits (100 is usual for fashion_mnist); with
    natural ids, their number."""

    min_client_size: int | None = setting(None, at_least(0))
    """Smallest number of training examples of a client. None: 2; with natural ids, 1."""

    partition_seed: int | None = setting(None, seed_number, in_grid=False)
    """Seed of the partition. None: seed."""

    flip: bool = False
    """Flip training images left to right at random."""

    crop: int = setting(0, at_least(0))
    """Shift training images by up to this many pixels at random."""

    @property
    def scheme(self) -> str:
        """Form of the data set's name: "csv" of csv:FILE."""
        return self.dataset.partition(":")[0]

    @property
    def is_table(self) -> bool:
        """Whether the data set is a table."""
        return self.scheme in TABLES

    @property
    def is_federated(self) -> bool:
        """Whether the data set comes with its clients and their test examples."""
        return self.scheme in FEDERATED

    @property
    def is_natural(self) -> bool:
        """Whether the partition uses the clients' own ids."""
        return self.partition.partition(":")[0] == NATURAL_SCHEME

    @property
    def least_examples(self) -> int:
        """Examples that each client has at least, of data that come with their clients."""
        return 1 if self.min_client_size is None else self.min_client_size

    def load_options(self) -> dict[str, Any]:
        """Return the options of ``data.load``."""
        return {name: getattr(self, name) for name in LOAD_OPTIONS}


@dataclasses.dataclass(frozen=True)
class RoundsSettings:
    """Rounds, client sampling and local steps."""

    rounds: int = setting(100, count)
    """Number of communication rounds."""

    cohort_size: int = 5
    """Clients sampled per round, S."""

    sampling: str = setting("without_replacement", one_of(SAMPLINGS))
    """Client sampling: without_replacement, poisson (each client independently; cohort_size is the
    expected number), or cyclic (fixed groups of at most cohort_size take turns)."""

    local_steps: int | None = setting(None, count)
    """Local steps of each client, K. None: 5, or determined by local_epochs."""

    local_epochs: int | None = setting(None, count)
    """Passes over each client's data, instead of local_steps."""

    batch_size: int = setting(16, count)
    """Examples per mini-batch, B."""

    replace: bool = False
    """Draw mini-batches with replacement instead of in shuffled passes."""

    full_examples: bool = False
    """Give the method each client's whole data set, for full local gradients."""

    weights: str = setting("uniform", one_of(("uniform", "examples")))
    """Weights of the clients in the aggregation: uniform, or examples (number of examples)."""

    eval_every: int = setting(10, count, ignored_by=("plan", "tune"))
    """Rounds between evaluations; also the length of a compiled chunk."""

    on_nonfinite: str = setting("exclude", one_of((*ON_NONFINITE, "stop")), refused_by=("tune",))
    """What to do with a client whose message or state is not finite: exclude (leave it out of the
    round and count it), stop (end the run before that round), keep (aggregate it like the
    others)."""

    seed: int = setting(0, seed_number, in_grid=False)
    """Seed of client sampling, mini-batches and everything random inside a round."""


@dataclasses.dataclass(frozen=True)
class ClockSettings:
    """Stragglers, client times and asynchronous rounds."""

    min_local_steps: int | None = None
    """Each client takes a random number of local steps, at least this many. None: all steps."""

    time_budget: float | None = None
    """Simulated seconds of a round; stragglers take only the steps that they finish in time."""

    step_time: float = 1.0
    """Simulated seconds of a local step with one gradient; the median over the clients."""

    step_time_spread: float = 0.0
    """Standard deviation of the logarithm of the step time over the clients."""

    dropout: float = 0.0
    """Probability that a sampled client drops out of a round."""

    times: str | None = setting(None, in_grid=False)
    """File of client times, FILE.npz with arrays step_seconds, download, upload, latency,
    availability."""

    over_selection: float = setting(1.0, needs="times")
    """With times: sampled clients per participant; the first ones to finish participate."""

    deadline: float | None = setting(None, needs="times")
    """With times: simulated seconds after which the server stops waiting for stragglers."""

    concurrency: int | None = None
    """Buffered asynchronous aggregation (FedBuff) with this number of clients in flight, a multiple
    of cohort_size; a server step uses cohort_size messages. None: synchronous rounds."""

    def devices(self) -> Devices | None:
        """Build the clients' devices; None if all clients take all steps and time is not
        simulated."""
        names = [field.name for field in dataclasses.fields(Devices) if field.name in vars(self)]
        devices = Devices(**{name: getattr(self, name) for name in names})
        return None if devices == Devices() else devices

    def client_times(self) -> ClientTimes | None:
        """Read the client times; None if there is no file of them."""
        if self.times is None:
            return None
        return ClientTimes.load(
            self.times, over_selection=self.over_selection, deadline=self.deadline
        )


@dataclasses.dataclass(frozen=True)
class PrivacySettings:
    """Robust aggregation, differential privacy, secure aggregation and attacks."""

    robust_rule: str | None = setting(None, form_of(parse_rule))
    """Robust aggregation, such as median or trimmed_mean:0.1."""

    dp_clip_norm: Annotated[float | None, tyro.conf.arg(aliases=("--dp-clip",))] = setting(
        None, positive, needs="dp_noise_multiplier", is_varied=True
    )
    """Client-level differential privacy: clip each message to this norm. None: no privacy."""

    dp_noise_multiplier: Annotated[float | None, tyro.conf.arg(aliases=("--dp-noise",))] = setting(
        None, not_negative, needs="dp_clip_norm", is_varied=True
    )
    """With dp_clip_norm: standard deviation of the noise on the sum, divided by the clip norm."""

    dp_delta: float | None = setting(
        None, check_share, needs="dp_clip_norm", ignored_by=("plan", "tune")
    )
    """With dp_clip_norm: report epsilon for this delta (needs dp-accounting)."""

    dp_adaptive_quantile: float | None = setting(None, check_share, needs="dp_clip_norm")
    """With dp_clip_norm: adapt the norm to this quantile of the clients' norms."""

    dp_noise_bands: int | None = setting(None, needs="dp_clip_norm")
    """With dp_clip_norm: correlate noise over this number of rounds (DP-FTRL); needs cyclic
    sampling."""

    secure_bits: int | None = setting(
        None, partial(check_int, minimum=2, maximum=32), needs="secure_clip"
    )
    """Secure aggregation with integers of this number of bits; with secure_clip."""

    secure_clip: float | None = setting(None, positive, needs="secure_bits")
    """With secure_bits: largest absolute value of a number of a message."""

    secure_neighbours: int | None = setting(None, needs="secure_bits")
    """With secure_bits: share masks with this number of other clients (even). None: all."""

    attack: str | None = None
    """Simulate attackers: NAME:SHARE or NAME:SHARE:STRENGTH; label_flip:SHARE:CLASSES."""


@dataclasses.dataclass(frozen=True)
class MachineSettings:
    """How the rounds are mapped onto devices."""

    client_map: str = setting(
        "auto", form_of(check_client_map), in_grid=False, ignored_by=("tune",)
    )
    """How clients are mapped onto devices: auto (the planner chooses), measure (time two plans and
    keep the faster one), scan, vmap, chunk:n, pmap, shard_map. In a sweep only auto, scan, vmap,
    chunk:n."""

    client_store: str = setting("auto", one_of(CLIENT_STORES), in_grid=False, ignored_by=_SEARCHES)
    """Where client state is stored: device (a full copy on each), sharded (over the devices of
    shard_map), host (in files), auto (by its size)."""

    lowering: str = setting("auto", one_of(LOWERINGS), in_grid=False)
    """Form of the model's convolutions and poolings: auto (the fastest on this machine) or lax (as
    jax.lax computes them)."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``simulate`` and ``plan``, which are called as the settings."""
        return {name: getattr(self, name) for name in vars(self)}


@dataclasses.dataclass(frozen=True)
class OutputSettings:
    """Files of the run."""

    run_dir: str | None = setting(
        None, form_of(check_run_dir), is_recorded=False, refused_by=("plan", "tune")
    )
    """Run directory; the same command resumes the run in it. Several runs: the folder of their
    directories. None: runs/ALGORITHM-DATASET-PARTITION-...-seedSEED, with the learning rates and
    options that are given; of a sweep: nothing is written."""

    checkpoint_every: int | None = setting(None, count, is_recorded=False, refused_by=_NOT_RUN)
    """Rounds between checkpoints. None: a tenth of the run."""

    log: Repeated = setting((), one_of(LOGGERS), is_recorded=False, refused_by=_NOT_RUN)  # noqa: RUF009
    """Also write metrics as csv, tensorboard or wandb; metrics.jsonl is always written."""

    profile_dir: str | None = setting(None, is_recorded=False, refused_by=_NOT_RUN)
    """Folder for a profile of the compiled rounds between two evaluations."""


@contextmanager
def said_of(setting: str, value: Any) -> Iterator[None]:
    """Let the library's error say of which setting it is, where it has another name for it."""
    try:
        yield
    except (FileNotFoundError, TypeError, ValueError) as error:
        if str(error).startswith(setting):
            raise
        kinds = FileNotFoundError, TypeError, ValueError  # a subclass may take other arguments
        kind = next(kind for kind in kinds if isinstance(error, kind))
        raise kind(f"{setting} is {value!r}: {error}") from error
