"""The settings of a run as flags, in the groups that ``--help`` shows."""

import ast
import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import tyro

from fedjax_lab.command.config import SCHEDULE_SETTINGS, RunConfig

# Group -> (description, settings); every setting is in one group.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "method": (
        "Method, model and training. Lists: `fedjax-lab algorithms | models | compressors`.",
        (
            *("algorithm", "option", "client_lr", "client_lr_schedule", "server_lr"),
            *("weights", "as_published", "clip_norm", "weight_decay", "clip", "compressor"),
            *("error_feedback", "downlink_compressor", "model", "model_option"),
        ),
    ),
    "data": (
        "Data set and its partition. Lists: `fedjax-lab datasets | partitions`.",
        (
            *(
                "dataset",
                "dataset_option",
                "data_dir",
                "client",
                "x",
                "target",
                "task",
                "categories",
                "missing",
                "test_split",
                "partition",
                "num_clients",
                "min_client_size",
            ),
            *("partition_seed", "flip", "crop", "tokens", "sequence_length", "vocabulary_size"),
        ),
    ),
    "local work": (
        "Rounds, client sampling, local steps, stragglers and client times.",
        (
            *("rounds", *(name for name in SCHEDULE_SETTINGS if name != "weights")),
            *("seed", "init_seed", "min_local_steps"),
            *("time_budget", "step_time", "step_time_spread", "dropout", "times"),
            *("over_selection", "deadline", "concurrency"),
        ),
    ),
    "privacy and robustness": (
        "Robust aggregation, attacks, differential privacy and secure aggregation.",
        (
            *(
                "dp_clip_norm",
                "dp_noise_multiplier",
                "dp_delta",
                "dp_adaptive_quantile",
                "dp_noise_bands",
            ),
            *("secure_bits", "secure_clip", "secure_neighbours"),
            *("robust_rule", "attack", "on_nonfinite"),
        ),
    ),
    "machine": (
        "Devices.",
        ("client_map", "client_store", "compute_dtype", "lowering", "profile_dir"),
    ),
    "output": (
        "What is kept.",
        ("run_dir", "checkpoint_every", "eval_every", "log"),
    ),
}
# Names before version 0.4.0.
_ALIASES = {"dp_clip_norm": ("--dp-clip",), "dp_noise_multiplier": ("--dp-noise",)}
_REPEATABLE = ("option", "model_option", "dataset_option", "log")  # given several times


@functools.cache  # tyro asks several times, and remembers what it finds about a type
def with_settings(command: type, defaults: RunConfig, **names: str) -> type:
    """Build a command whose field ``settings`` is parsed from one flag for each setting.

    Args:
      command: a dataclass with the field ``settings``.
      defaults: what flags mean that are not given, such as the settings of a file.
      **names: setting -> its flag, where the flag is not called as the setting is.
    """
    factory = functools.cache(functools.partial(_from_groups, defaults, names))
    parsed: Any = Annotated[RunConfig, tyro.conf.arg(name="", constructor_factory=factory)]
    made = dataclasses.make_dataclass(
        command.__name__, [("settings", parsed)], bases=(command,), frozen=True
    )
    made.__doc__ = command.__doc__
    return made


def _from_groups(defaults: RunConfig, names: Mapping[str, str]) -> Callable[..., RunConfig]:
    """Build a function: groups of settings -> ``RunConfig``; its arguments become flags."""

    def settings(**groups: Any) -> RunConfig:
        values: dict[str, Any] = {}
        for group in groups.values():
            values |= {
                field.name: getattr(group, field.name) for field in dataclasses.fields(group)
            }
        return RunConfig(**values)

    parameters = []
    for title, (about, members) in GROUPS.items():
        group = _group(title, about, members, defaults, names)
        kind = Annotated[group, tyro.conf.arg(name=title)]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(
                title.replace(" ", "_"), inspect.Parameter.KEYWORD_ONLY, annotation=kind
            )
        )
    settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    settings.__annotations__ = {p.name: p.annotation for p in parameters}
    settings.__doc__ = None
    return settings


def _group(
    title: str,
    about: str,
    members: tuple[str, ...],
    defaults: RunConfig,
    names: Mapping[str, str],
) -> type:
    """Build a dataclass of some settings, with the descriptions of ``RunConfig``."""
    hints, texts = typing.get_type_hints(RunConfig), descriptions()
    fields: list[Any] = []
    for name in members:
        about_flag = tyro.conf.arg(
            name=names.get(name), help=texts[name], aliases=_ALIASES.get(name)
        )
        kind: Any = Annotated[hints[name], about_flag]
        if name in _REPEATABLE:
            kind = tyro.conf.UseAppendAction[kind]  # type: ignore[misc]
        fields.append((name, kind, dataclasses.field(default=getattr(defaults, name))))
    made = dataclasses.make_dataclass(title.title().replace(" ", ""), fields, frozen=True)
    made.__doc__ = about
    return made


@functools.cache
def descriptions() -> dict[str, str]:
    """Return setting -> its description, the text below it in ``RunConfig``."""
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(RunConfig))).body
    assert isinstance(found, ast.ClassDef)
    texts = {}
    for field, text in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts
