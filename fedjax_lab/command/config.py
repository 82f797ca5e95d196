"""Settings of one run as a value, for the command line, files and ``runner.run``.

Algorithms, data and models never see a ``RunConfig``: ``runner`` turns it into keyword arguments.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_lab.command.config_checks import NATURAL_SCHEME, check_config, is_natural
from fedjax_lab.command.config_file import convert, read_settings
from fedjax_lab.command.guards import GUARDS
from fedjax_lab.command.options import (
    algorithm_options,
    check_option_names,
    check_server_lr,
    convert_options,
    derived_options,
    did_you_mean,
    format_options,
    parse_options,
    published_settings,
    typed_options,
)
from fedjax_lab.command.own_code import check_hints, find
from fedjax_lab.command.table_data import TEST_SPLIT
from fedjax_lab.data import ClientTimes, Devices
from fedjax_lab.data.cohort import Schedule
from fedjax_lab.storage.run_dir import renamed_settings

# Settings of the run's files, on which the result does not depend.
_NOT_RECORDED = ("data_dir", "run_dir", "checkpoint_every", "log", "profile_dir")
_OPTIONS = ("option", "model_option", "dataset_option")
_NUM_CLIENTS = 20
# Not recorded if they have their defaults, so that older runs, which lack them, have equal records.
_NEW = (
    *(*GUARDS, "sampling", "client", "x", "target", "task", "test_split"),
    *("dataset_option", "tokens", "categories", "missing", "lowering"),
)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Settings of one run. Lists: `fedjax-lab algorithms | datasets | partitions | models`."""

    algorithm: str = "fedavg"
    """Method, such as fedavg, scaffold or gradma, or a factory of your own, package.module:name."""

    option: tuple[str, ...] = ()
    """Hyperparameter as name=value. memory_size (gradma, gradma_s): num_clients, at most 100."""

    client_lr: float = 0.1
    """Learning rate of the local steps."""

    client_lr_schedule: str = "constant"
    """Schedule over the rounds: constant, exponential:FACTOR (each round), or cosine (to 0). In
    fafed and stem, whose rate is of the local step, it falls within a round, too."""

    server_lr: float | None = None
    """Learning rate of the server. None: the method's default, if it has one."""

    as_published: bool = False
    """Run the method as its authors' published code does, if that differs from the paper;
    `fedjax-lab published` lists these methods and the differences."""

    clip_norm: float | None = None
    """Clip to this global norm. None: no clipping; with as_published, the code's norm."""

    weight_decay: float | None = None
    """Weight decay, added after clipping. None: 0; with as_published, the code's value."""

    clip: str | None = None
    """What clip_norm and weight_decay are applied to: gradient (of a mini-batch), or step (the
    whole direction of a local step). None: gradient; with as_published, the code's choice."""

    compressor: str | None = None
    """Compress the clients' messages, such as top_k:0.99, sign or top_k:0.9+qsgd:15."""

    error_feedback: bool = True
    """With a compressor: add the compression error to the client's next message."""

    downlink_compressor: str | None = None
    """Compress the server's broadcast as well."""

    robust_rule: str | None = None
    """Robust aggregation, which tolerates attackers, such as median or trimmed_mean:0.1."""

    dp_clip_norm: float | None = None
    """Client-level differential privacy: clip messages to this norm. None: no privacy."""

    dp_noise_multiplier: float | None = None
    """With dp_clip_norm: standard deviation of the noise on the sum, divided by the clip norm."""

    dp_delta: float | None = None
    """With dp_clip_norm: report epsilon for this delta (needs dp-accounting)."""

    dp_adaptive_quantile: float | None = None
    """With dp_clip_norm: adapt the norm to this quantile of the clients' norms."""

    dp_noise_bands: int | None = None
    """With dp_clip_norm: correlate noise over this number of rounds (DP-FTRL); needs cyclic
    sampling."""

    secure_bits: int | None = None
    """Secure aggregation with integers of this number of bits; with secure_clip."""

    secure_clip: float | None = None
    """With secure_bits: largest absolute value of a number of a message."""

    secure_neighbours: int | None = None
    """With secure_bits: share masks with this number of other clients (even). None: all."""

    attack: str | None = None
    """Simulate a share of attackers: NAME:SHARE[:STRENGTH] or label_flip:SHARE:CLASSES."""

    dataset: str = "digits"
    """Data set, such as digits, fashion_mnist, idx:FOLDER, npz:FILE, csv:FILE, parquet:FILE or
    text:FILE_OR_FOLDER; or a function of your own, package.module:name."""

    dataset_option: tuple[str, ...] = ()
    """An argument of a data set of your own as name=value."""

    client: str | None = None
    """For a table: column of client ids. None: partition divides the rows."""

    x: tuple[str, ...] = ()
    """Of a table: the columns of inputs; text becomes integers. None: all but client and target."""

    target: tuple[str, ...] = ()
    """For a table: column to predict, or several."""

    task: str | None = None
    """For a table: regression or classification. None: floats are a regression."""

    categories: tuple[str, ...] = ()
    """Of a table: columns of text, also where its cells are numbers, such as postcodes."""

    missing: tuple[str, ...] = ()
    """Of a table: what missing values mean: drop (their rows), mean (of the column) or a number, in
    x, keep (a category); or MARK=MEANING for some marks, such as ?=drop. None: they are errors."""

    test_split: str = TEST_SPLIT
    """Of a table, what tests: a share of the clients, all of whose rows training never sees;
    examples:0.2, a share of each client's rows; or another file .csv, .tsv or .parquet."""

    data_dir: str | None = None
    """Folder with the data set's files, where it is not found by itself."""

    tokens: str = "words"
    """What a text is cut into: words, characters or bytes."""

    sequence_length: int = 35
    """Tokens of an example of text, L."""

    vocabulary_size: int | None = None
    """Tell at most this many tokens of a text apart, the most frequent ones. None: all."""

    partition: str = "dirichlet:0.1"
    """How the data are divided among the clients: iid, classes_per_client:2, contiguous, ..., or
    natural:ARRAY, the clients' ids in an array [n] of npz:FILE. With client: by that column."""

    num_clients: int | None = None
    """Number of clients, N. None: 20, which suits digits (1,442 training images; 100 is usual for
    fashion_mnist); with natural ids, their number."""

    min_client_size: int | None = None
    """Smallest number of training examples of a client. None: 2; with natural ids, 1."""

    flip: bool = False
    """Mirror training images left to right at random."""

    crop: int = 0
    """Shift training images by up to this many pixels at random."""

    model: str = "mlp"
    """Model, such as linear, mlp, cnn (images of 16x16 or more), lstm or transformer (text), or a
    factory of your own, package.module:name."""

    model_option: tuple[str, ...] = ()
    """An option of the model as name=value, such as hidden=64,32."""

    compute_dtype: str = "float32"
    """Dtype of the model's computations: float32 or bfloat16; parameters are float32."""

    rounds: int = 100
    """Rounds of the whole run."""

    cohort_size: int = 5
    """Clients sampled per round, S."""

    sampling: str = "without_replacement"
    """Client sampling: without_replacement, poisson (each client independently; cohort_size is the
    expected number), or cyclic (fixed groups of at most cohort_size take turns)."""

    local_steps: int | None = None
    """Local steps of each client, K. None: 5, or determined by local_epochs."""

    local_epochs: int | None = None
    """Passes over each client's data, instead of local_steps."""

    min_local_steps: int | None = None
    """Clients take a random number of local steps, at least this one. None: all steps."""

    time_budget: float | None = None
    """Simulated seconds of a round; stragglers take only the steps that they finish in time."""

    step_time: float = 1.0
    """Simulated seconds of a local step with one gradient; the median over the clients."""

    step_time_spread: float = 0.0
    """Standard deviation of the logarithm of the step time over the clients."""

    dropout: float = 0.0
    """Probability that a sampled client drops out of a round."""

    times: str | None = None
    """Client times: FILE.npz with arrays step_seconds, download, upload, latency, availability."""

    over_selection: float = 1.0
    """With times: sampled clients per participant; the first ones to finish participate."""

    deadline: float | None = None
    """With times: simulated seconds after which the server stops waiting for stragglers."""

    concurrency: int | None = None
    """Buffered asynchronous aggregation (FedBuff) with this number of clients in flight; a server
    step uses cohort_size messages. None: synchronous rounds."""

    batch_size: int = 16
    """Examples per mini-batch, B."""

    replace: bool = False
    """Draw mini-batches with replacement instead of in shuffled passes."""

    weights: str = "uniform"
    """Weights of the clients in the aggregation: uniform, or examples (by size)."""

    full_examples: bool = False
    """Pass each client's whole data set to the method, for full local gradients."""

    seed: int = 0
    """Seed of client sampling, mini-batches and everything random inside a round."""

    partition_seed: int | None = None
    """Seed of the partition. None: seed."""

    init_seed: int | None = None
    """Seed of the initial model. None: seed."""

    eval_every: int = 10
    """Rounds between evaluations; also the length of a compiled chunk."""

    client_map: str = "auto"
    """How clients are mapped onto devices: auto (the planner chooses), measure (it times two
    plans), scan, vmap, chunk:n, pmap, shard_map."""

    lowering: str = "auto"
    """Form of the convolutions and poolings of the model: auto (what is fast on the machine), lax
    (as jax.lax has them)."""

    client_store: str = "auto"
    """Where client state is stored: device (a full copy on each), sharded (over the devices of
    shard_map), host (in files), auto (by its size)."""

    on_nonfinite: str = "exclude"
    """Policy for clients whose message or row is not finite: exclude (leave them out of the round
    and count them), stop (end the run before that round), keep (aggregate them like others)."""

    run_dir: str | None = None
    """Run directory, from which the run resumes. None:
    runs/ALGORITHM-DATASET-PARTITION-seedSEED."""

    checkpoint_every: int | None = None
    """Rounds between checkpoints. None: a tenth of the run."""

    log: tuple[str, ...] = ()
    """Write metrics also as csv, tensorboard or wandb; metrics.jsonl is always written."""

    profile_dir: str | None = None
    """Folder for a profile of the compiled rounds between two evaluations."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Create a config from plain values; missing settings have their defaults.

        ``option`` and ``model_option`` may be {name: value} or a list of "name=value".

        Args:
          values: {setting: value}.

        Raises:
          ValueError: a key is unknown.
          TypeError: a value has the wrong type.
        """
        hints, values = typing.get_type_hints(cls), renamed_settings(values)
        for key in values:
            if key not in hints:
                raise ValueError(
                    f"{key} is not a setting of a run.{did_you_mean(key, hints)} Settings: "
                    f"{', '.join(hints)}."
                )
        return cls(**{key: convert(key, value, hints[key]) for key, value in values.items()})

    @classmethod
    def from_file(cls, path: str | Path) -> "RunConfig":
        """Read settings from YAML (.yaml, .yml) or JSON, such as a run directory's config.json.

        Args:
          path: the file.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError, TypeError: it has no settings, or as in ``from_dict``.
        """
        values = read_settings(path)
        try:
            return cls.from_dict(values)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Convert all settings to plain values of JSON and YAML, the inverse of ``from_dict``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in _OPTIONS:
            values[name] = {
                option: list(value) if isinstance(value, tuple) else value
                for option, value in parse_options(values[name], name).items()
            }
        lists = ("x", "target", "categories", "missing", "log")
        return {**values, **{name: list(values[name]) for name in lists}}

    def record(self) -> dict[str, Any]:
        """Return the settings for config.json: ``to_dict`` without paths.

        Wrappers that are not used are omitted. Seeds that follow ``seed`` stay None, so that the
        record can be run with another seed.
        """
        default = [name for name in _NEW if getattr(self, name) == _DEFAULTS[name]]
        left_out = (*_NOT_RECORDED, *default)
        return {name: value for name, value in self.to_dict().items() if name not in left_out}

    def resolve(self) -> "RunConfig":
        """Check all settings, and fill in settings that depend on others.

        These are settings of the clients, ``local_steps``, required options of a method that have a
        default here, options of its published code if requested, and ``run_dir``.

        Raises:
          ValueError, TypeError: a setting is unknown, out of range, or missing.
        """
        if self.client is not None and self.partition != f"{NATURAL_SCHEME}:{self.client}":
            return self._by_column().resolve()
        natural = is_natural(self.partition)
        if self.num_clients is None and not natural:
            return dataclasses.replace(self, num_clients=_NUM_CLIENTS).resolve()
        if self.min_client_size is None:
            return dataclasses.replace(self, min_client_size=1 if natural else 2).resolve()
        check_config(self)
        published = published_settings(self.algorithm) if self.as_published else ({}, {})
        rest = {name: v for name, v in published[0].items() if getattr(self, name) is None}
        if rest or self.weight_decay is None:
            return dataclasses.replace(self, **{"weight_decay": 0.0, **rest}).resolve()
        given = parse_options(self.option, "option")
        options = {**derived_options(self.algorithm, self.num_clients), **published[1], **given}
        allowed = algorithm_options(self.algorithm, options.get("server_optimizer"))
        check_option_names(self.algorithm, options, allowed)
        options = convert_options(self.algorithm, options, allowed)
        check_server_lr(self.algorithm, self.server_lr)
        check_hints(self.algorithm, find("algorithm", self.algorithm), options)
        model_options = typed_options("model", self.model, self.model_option)
        dataset_options = typed_options("dataset", self.dataset, self.dataset_option)
        steps = 5 if self.local_steps is None and self.local_epochs is None else self.local_steps
        return dataclasses.replace(
            self,
            option=format_options(options),
            model_option=format_options(model_options),
            dataset_option=format_options(dataset_options),
            local_steps=steps,
            run_dir=self.run_dir or str(Path("runs") / self.run_name()),
        )

    def _by_column(self) -> "RunConfig":
        """Return the config with the column of client ids as its partition."""
        if self.partition != _DEFAULTS["partition"]:
            raise ValueError(
                f"partition is {self.partition!r} and client {self.client!r}; the column "
                "determines the clients of the rows: omit partition."
            )
        return dataclasses.replace(self, partition=f"{NATURAL_SCHEME}:{self.client}")

    def devices(self) -> Devices | None:
        """Build the clients' devices; None if all clients take all steps and time is not
        simulated."""
        settings = {name: getattr(self, name) for name in _OF_DEVICES}
        if all(value == _DEFAULTS[name] for name, value in settings.items()):
            return None
        return Devices(**settings)

    def client_times(self) -> ClientTimes | None:
        """Build the client times; None if time is not simulated, or only by ``devices``.

        Raises:
          FileNotFoundError: there is no file of that name.
          TypeError, ValueError: it is damaged, or a value is out of range.
        """
        if self.times is None:
            return None
        return ClientTimes.load(
            self.times, over_selection=self.over_selection, deadline=self.deadline
        )

    def schedule(self) -> dict[str, Any]:
        """Collect the keyword arguments about rounds and batches for ``simulate`` and ``sweep``."""
        kept = {name: getattr(self, name) for name in ("rounds", "eval_every", *SCHEDULE_SETTINGS)}
        return {**kept, "devices": self.devices(), "times": self.client_times()}

    def run_name(self) -> str:
        """Make a readable name from the settings, such as gradma-digits-dirichlet0.1-seed0.

        The name includes learning rates and options if they were given.
        """
        given = [
            f"{name}{value:g}"
            for name, value in (("client_lr", self.client_lr), ("server_lr", self.server_lr))
            if value is not None and value != _DEFAULTS[name]
        ]
        scheme, _, rest = self.dataset.partition(":")
        dataset = scheme + (f"-{Path(rest).stem}" if rest else "")
        given += [
            f"{name}{getattr(self, name)}"
            for name in (*_METHOD_SETTINGS, *_DEVICE_SETTINGS)
            if getattr(self, name) != _DEFAULTS[name]
        ]
        method = self.algorithm.rpartition(":")[2]
        parts = [method, dataset, self.partition, *given, *self.option, *self.model_option]
        name = "-".join([*(part.rstrip(",") for part in parts), f"seed{self.seed}"])
        return re.sub(r"[^\w.,-]", "", name)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(RunConfig)}
# The options of a schedule that are settings, too; its ``devices`` are several settings.
SCHEDULE_SETTINGS = tuple(name for name in Schedule._fields if name in _DEFAULTS)
_METHOD_SETTINGS = (
    *("as_published", "clip", "client_lr_schedule", "compressor"),
    "error_feedback",
    "downlink_compressor",
    "compute_dtype",
    *GUARDS,
    "sampling",
)
_OF_DEVICES = ("min_local_steps", "time_budget", "step_time", "step_time_spread", "dropout")
_DEVICE_SETTINGS = (*_OF_DEVICES, "over_selection", "deadline", "concurrency")
