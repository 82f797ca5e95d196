"""Reads and writes a decoder's adapters in the format of ``peft``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_lab.checks import check_int, check_number, errors_about
from fedjax_lab.machine.json_file import read_json
from fedjax_lab.models.decoder import decoder, params_shapes
from fedjax_lab.models.decoder_config import DecoderConfig
from fedjax_lab.models.lora import Adapter
from fedjax_lab.models.pretrained import load_safetensors
from fedjax_lab.models.weight_files import write_folder
from fedjax_lab.models.weight_tables import Stored, decoder_table
from fedjax_lab.tree import by_path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields of peft's configuration that change an adapter's output, and their values here.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, []),
    "layer_replication": (None, []),
    "modules_to_save": (None, []),
    "exclude_modules": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "megatron_config": (None,),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "use_bdlora": (False, None),
    "use_rslora": (False, True, None),
}
# First values of an adapter with which the model's own kernels stay as they are. With all others,
# such as "pissa", "olora", "corda", "lora_ga" and "loftq", peft may change them, or has chosen
# ranks: kernel and adapter are then not the model that was trained.
_STARTS = (True, False, None, "gaussian", "orthogonal")
_NEUTRAL = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
        "eva_config", "inference_mode", "loftq_config", "lora_alpha", "lora_dropout",
        "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size",
        "r", "revision", "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip


def save_adapters(
    folder: str | Path,
    config: DecoderConfig,
    adapters: Mapping[str, Adapter],
    scale: float = 1.0,
    *,
    dropout: float = 0.0,
) -> None:
    """Write adapters for ``peft``: ``PeftModel.from_pretrained(model, folder)``.

    Args:
      folder: folder to create; an existing one must be empty.
      config: the decoder's configuration.
      adapters: {path: ``Adapter``} for kernels of ``models.decoder(config)``, all of one rank r.
      scale: as in ``attach_adapters``; stored as alpha = r ``scale``.
      dropout: dropout rate in the file, for further training.

    Raises:
      ValueError: ``adapters`` is empty; adapters have different ranks, fit no kernel of the
        decoder, or are not finite; or ``scale`` is out of range.
      FileExistsError: the folder is not empty.
      FileNotFoundError: the parent folder does not exist.
      ImportError: the package safetensors is missing.
    """
    scale = float(check_number("scale", scale, minimum=0, exclusive_minimum=True))
    dropout = float(check_number("dropout", dropout, minimum=0, maximum=1, exclusive_maximum=True))
    ranks = {adapter.down.shape[-1] for adapter in adapters.values()}
    if len(ranks) != 1:
        raise ValueError(f"adapters have the ranks {sorted(ranks)}; they must have one.")
    (rank,) = ranks
    leaves, shapes = by_path(adapters), by_path(_shapes(config, list(adapters), rank))
    arrays: dict[str, Any] = {}
    for name, stored in _table(config, list(adapters)).items():
        leaf, wanted = np.asarray(leaves[name]), shapes[name].shape
        if leaf.shape != wanted or not np.isfinite(leaf).all():
            path, _, side = name.rpartition("/")
            raise ValueError(
                f"adapters[{path!r}].{side} has the shape {leaf.shape}; it must be {wanted}, of "
                "finite numbers."
            )
        arrays |= stored.parts(leaf)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": dropout,
        "target_modules": sorted({_module(config, path) for path in adapters}),
        "bias": "none",
        "inference_mode": True,
    }
    total = sum(size for size, _ in arrays.values())
    write_folder(Path(folder), fields, arrays, total, (CONFIG, WEIGHTS))


def load_adapters(folder: str | Path, config: DecoderConfig) -> tuple[dict[str, Adapter], float]:
    """Read LoRA adapters that ``peft`` or ``save_adapters`` wrote.

    Args:
      folder: folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
      config: configuration of the decoder that the adapters belong to.

    Returns:
      (adapters, float32; scale), for ``attach_adapters`` and ``merge_adapters``.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or its adapters are not plain LoRA or do not fit the decoder.
      ImportError: the package safetensors is missing.
    """
    where = Path(folder) / CONFIG
    fields = read_json(where)
    if (begin := fields.pop("init_lora_weights", True)) not in _STARTS:
        raise ValueError(
            f"{where}: init_lora_weights is {begin!r}; it must be true, false, 'gaussian' or "
            "'orthogonal'. With others, peft may change the model's own kernels, so that these "
            "adapters do not fit the model. Save them with peft's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...), or merge them there and read the "
            "merged model with load_pretrained."
        )
    for name, value in fields.items():
        if name in _PLAIN and value not in _PLAIN[name]:
            raise ValueError(f"{where}: {name} is {value!r}; it must be {_PLAIN[name][0]!r}.")
        if name not in _PLAIN and name not in _NEUTRAL and value not in (None, False):
            raise ValueError(
                f"{where}: the field {name!r} (here {value!r}) is not known. It might change "
                "what an adapter adds, so it is not ignored."
            )
    with errors_about(str(where), (TypeError, ValueError)):
        rank = check_int("r", fields.get("r"), minimum=1)
        alpha = check_number("lora_alpha", fields.get("lora_alpha"))
    targets = fields.get("target_modules")
    kernels = {
        _module(config, path): path for path in decoder_table(config) if path.endswith("kernel")
    }
    if not isinstance(targets, list) or not targets or not {*map(str, targets)} <= {*kernels}:
        raise ValueError(
            f"{where}: target_modules is {targets!r}; it must be a list of {sorted(kernels)}."
        )
    paths = [path for module, path in kernels.items() if module in targets]
    shapes, table = _shapes(config, paths, rank), _table(config, paths)
    found = load_safetensors(Path(folder) / WEIGHTS, shapes, table)
    return found, alpha / (rank**0.5 if fields.get("use_rslora") else rank)


def _module(config: DecoderConfig, path: str) -> str:
    """Return peft's name of a kernel's layer, such as "q_proj"."""
    stored = decoder_table(config).get(path)
    if stored is None or not path.endswith("kernel"):
        raise ValueError(f"adapters has {path!r}, which is no kernel of the decoder.")
    return stored.name.removesuffix(".weight").rpartition(".")[2]


def _table(config: DecoderConfig, paths: list[str]) -> dict[str, Stored]:
    table = {}
    for path in paths:
        stem = decoder_table(config)[path].name.removesuffix(".weight")
        for side, letter in (("down", "A"), ("up", "B")):
            name = f"base_model.model.{stem}.lora_{letter}.weight"
            table[f"{path}/{side}"] = Stored(name, (1, 0))
    return table


def _shapes(config: DecoderConfig, paths: list[str], rank: int) -> dict[str, Adapter]:
    leaves = by_path(params_shapes(decoder(config)))
    found: dict[str, Any] = {}
    for path in paths:
        _module(config, path)
        *layers, m, n = leaves[path].shape
        down, up = ((*layers, *sides) for sides in ((m, rank), (rank, n)))
        sides: Any = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (down, up)]
        found[path] = Adapter(*sides)
    return found
