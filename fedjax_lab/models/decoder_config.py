"""The configuration of a decoder, from the ``config.json`` of Llama and Qwen2 models.

An unknown field might change what the model computes. So each field is read, known to have no
effect on the model's numbers, or refused.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_lab.checks import check_choice, check_flag, check_int, check_number, errors_about
from fedjax_lab.machine.json_file import read_json

# Fields without effect on the model's numbers: how it was made, how text is generated with it, and
# what other programs note. transformers ignores an old file's max_sequence_length as well.
_NEUTRAL = frozenset(
    {
        "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
        "sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id", "dtype",
        "torch_dtype", "transformers_version", "use_cache", "cache_implementation", "model_type",
        "is_decoder", "is_llama_config", "return_dict", "output_attentions",
        "output_hidden_states", "chunk_size_feed_forward", "id2label", "label2id", "num_labels",
        "problem_type", "tokenizer_class", "auto_map", "_name_or_path", "_attn_implementation",
        "_attn_implementation_autoset", "_attn_implementation_internal", "attn_implementation",
        "_flash_attn_2_enabled", "_commit_hash", "max_window_layers", "task_specific_params",
        "finetuning_task", "is_encoder_decoder", "torchscript", "use_bfloat16", "tf_legacy_loss",
        "cross_attention_hidden_size", "prefix", "gradient_checkpointing", "neftune_noise_alpha",
        "max_sequence_length", "model_max_length", "unsloth_fixed", "unsloth_version",
        "transformers.js_config",
        # Of generation, as transformers 4 wrote them.
        "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
        "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
        "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
        "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
        "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens",
    }
)  # fmt: skip
# Fields with a single accepted value, the one with which the numbers are those of this decoder.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "use_sliding_window": (False, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
# Fields that may be missing: those written for both families, and those for Llama alone.
_OF_BOTH = {
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_length",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie",
}
_OF_LLAMA = {"mlp_bias": "mlp_bias", "head_dim": "head_width"}
_READ = {
    *("attention_bias", "rope_theta", "rope_scaling", "rope_parameters", "layer_types"),
    *("sliding_window", *_SIZES, *_OF_BOTH, *_OF_LLAMA),
}
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_FULL = "full_attention"  # the kind of all layers
# Defaults of fields that a configuration of the family omits.
_DEFAULTS = {"llama": {"max_length": 2048}, "qwen2": {"max_length": 32768}}


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Frequencies for longer texts, of the kind "llama3".

    Attributes:
      factor: divisor of low frequencies.
      low_freq_factor: wavelengths above ``original_length / low_freq_factor`` are stretched fully.
      high_freq_factor: wavelengths below ``original_length / high_freq_factor`` are unchanged.
      original_length: longest text before the stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check_real(self, "factor", minimum=1)
        _check_real(self, "low_freq_factor", minimum=0, exclusive_minimum=True)
        _check_real(self, "high_freq_factor", minimum=self.low_freq_factor, exclusive_minimum=True)
        _hold_int(self, "original_length", minimum=1)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Configuration of a decoder; every field changes its numbers or the names of its params.

    Attributes:
      vocab_size: V, the number of tokens.
      width: F, of the residual stream.
      num_layers: number of layers.
      num_heads: N, of the attention's queries.
      mlp_width: of the gated perceptron.
      num_kv_heads: K, of its keys and values, which divides N; 0: N.
      head_width: D, an even number; 0: F / N.
      max_length: the longest sequence T.
      norm_epsilon: under the root of RMSNorm.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: None, or ``RotaryScaling``.
      tie: whether the head is the transpose of the embedding.
      qkv_bias: whether queries, keys and values have biases.
      out_bias: whether the attention's output has one.
      mlp_bias: whether the perceptron's three maps have them.
      init_std: standard deviation of the first kernels and embeddings.

    Raises:
      TypeError, ValueError: a field is of another type or out of range.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    num_kv_heads: int = 0
    head_width: int = 0
    max_length: int = 2048
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RotaryScaling | None = None
    tie: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "num_layers", "num_heads", "mlp_width", "max_length"):
            _hold_int(self, name, minimum=1)
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        _hold_int(self, "num_kv_heads", minimum=1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads, which is "
                f"{self.num_kv_heads}."
            )
        if self.head_width == 0:
            if self.width % self.num_heads:
                raise ValueError(
                    f"width is {self.width}; without head_width it must be a multiple of num_heads,"
                    f" which is {self.num_heads}."
                )
            object.__setattr__(self, "head_width", self.width // self.num_heads)
        if _hold_int(self, "head_width", minimum=2) % 2:
            raise ValueError(f"head_width is {self.head_width}; it must be even.")
        _check_real(self, "norm_epsilon", minimum=0, exclusive_minimum=True)
        _check_real(self, "rope_theta", minimum=1, exclusive_minimum=True)
        _check_real(self, "init_std", minimum=0)
        if not isinstance(self.rope_scaling, RotaryScaling | None):
            raise TypeError(
                f"rope_scaling is {self.rope_scaling!r}; it must be None or a RotaryScaling."
            )
        for name in ("tie", "qkv_bias", "out_bias", "mlp_bias"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))


def _hold_int(config: Any, name: str, *, minimum: int) -> int:
    """Check a field and hold it as Python's int, since JSON has no integers of NumPy."""
    value = check_int(name, getattr(config, name), minimum=minimum)
    object.__setattr__(config, name, value)
    return value


def _check_real(config: Any, name: str, **limits: Any) -> None:
    """Check a field as ``check_number`` does; it is Python's int or float, as JSON has them."""
    value = getattr(config, name)
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number.")
    check_number(name, value, **limits)


def read_decoder_config(folder: str | Path) -> DecoderConfig:
    """Read the ``config.json`` of a Llama or Qwen2 model.

    Args:
      folder: folder of the file.

    Raises:
      FileNotFoundError: there is no such folder or file.
      ValueError: the file is not a JSON object, is for another kind of model, has a field that is
        unknown or has an unsupported value, or lacks a field.
    """
    path = Path(folder) / "config.json"
    return parse_decoder_config(read_json(path), str(path))


def parse_decoder_config(fields: Mapping[str, Any], where: str = "config") -> DecoderConfig:
    """Parse the fields of a ``config.json``.

    Raises:
      ValueError: as ``read_decoder_config``.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise ValueError(
            f"{where}: model_type is {kind!r}; it must be {' or '.join(map(repr, _DEFAULTS))}."
        )
    for name, value in fields.items():
        if name in _FIXED:
            if value not in _FIXED[name]:
                raise ValueError(
                    f"{where}: {name} is {value!r}; this decoder computes {_FIXED[name][0]!r} only."
                )
        elif name not in _NEUTRAL and name not in _READ:
            raise ValueError(
                f"{where}: the field {name!r} (here {value!r}) is not known. It might change "
                "what the model computes, so it is not ignored."
            )
    layers = fields.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or {*map(str, layers)} - {_FULL}):
        raise ValueError(f"{where}: layer_types is {layers!r}; this decoder has {_FULL!r} only.")
    if kind == "llama" and fields.get("sliding_window") is not None:
        raise ValueError(f"{where}: sliding_window is {fields['sliding_window']}; it must be null.")
    if missing := [name for name in _SIZES if name not in fields]:
        raise ValueError(f"{where} has no {', '.join(missing)}.")
    if layers is not None and len(layers) != fields["num_hidden_layers"]:
        raise ValueError(
            f"{where}: layer_types names {len(layers)} layers, and num_hidden_layers is "
            f"{fields['num_hidden_layers']}."
        )
    theta, scaling = _rotary(fields, where)
    bias = fields.get("attention_bias", False)
    found: dict[str, Any] = {ours: fields[name] for name, ours in _SIZES.items()}
    for name, ours in (_OF_BOTH | _OF_LLAMA).items():
        if fields.get(name) is not None:
            found[ours] = fields[name]
    if zero := [name for name in ("num_key_value_heads", "head_dim") if fields.get(name) == 0]:
        raise ValueError(f"{where}: {zero[0]} is 0.")
    with errors_about(where, (TypeError, ValueError)):
        config = DecoderConfig(
            **_DEFAULTS[kind] | found,
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=True if kind == "qwen2" else bias,
            out_bias=False if kind == "qwen2" else bias,
        )
    usual = config.head_width * config.num_heads == config.width
    if kind == "qwen2" and (bias or config.mlp_bias or not usual):
        raise ValueError(
            f"{where}: attention_bias, mlp_bias and another head_dim than hidden_size / "
            "num_attention_heads are no fields of qwen2."
        )
    return config


def _rotary(fields: Mapping[str, Any], where: str) -> tuple[float, RotaryScaling | None]:
    """Read (theta, scaling) from rope_theta and rope_scaling, or from rope_parameters."""
    given = fields.get("rope_parameters")
    if given is None:
        given = fields.get("rope_scaling")
    elif fields.get("rope_scaling") not in (None, given):
        raise ValueError(f"{where} has both rope_parameters and rope_scaling, which differ.")
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: the rotary parameters are {given!r}; they must be an object.")
    rest = dict(given)
    kinds = [rest.pop(name) for name in ("rope_type", "type") if name in rest] or ["default"]
    thetas = [rest.pop("rope_theta", None), fields.get("rope_theta")]
    thetas = [theta for theta in thetas if theta is not None] or [10000.0]
    part = rest.pop("partial_rotary_factor", None)
    if part not in (1, None) or thetas[0] != thetas[-1] or kinds[0] != kinds[-1]:
        raise ValueError(
            f"{where}: the rotary parameters {dict(given)} with rope_theta="
            f"{fields.get('rope_theta')} contradict each other, or rotate a part of a head only."
        )
    theta, kind = thetas[0], kinds[0]
    with errors_about(f"{where}: rotary parameters", (TypeError, ValueError)):
        check_choice("rope_type", kind, ("default", "llama3"))
        if kind == "default":
            if rest:
                raise ValueError(f"{sorted(rest)} are no parameters of the kind 'default'.")
            return theta, None
        if set(rest) != set(_SCALING):
            raise ValueError(f"the kind 'llama3' has {sorted(rest)}; it needs {sorted(_SCALING)}.")
        return theta, RotaryScaling(*(rest[name] for name in _SCALING))


def config_fields(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a ``config.json`` for ``transformers``.

    Raises:
      ValueError: neither Llama nor Qwen2 models have such a combination of biases.
    """
    qwen = config.qkv_bias and not config.out_bias
    if (config.out_bias and not config.qkv_bias) or (
        qwen and (config.mlp_bias or config.head_width * config.num_heads != config.width)
    ):
        raise ValueError(
            f"config has qkv_bias={config.qkv_bias}, out_bias={config.out_bias} and mlp_bias="
            f"{config.mlp_bias}, head_width={config.head_width}; neither llama nor qwen2 has that."
        )
    kind = "qwen2" if qwen else "llama"
    fields: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": kind,
        **{name: getattr(config, ours) for name, ours in (_SIZES | _OF_BOTH).items()},
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
    }
    if not qwen:
        fields["attention_bias"] = config.qkv_bias
        fields |= {name: getattr(config, ours) for name, ours in _OF_LLAMA.items()}
    if (scaling := config.rope_scaling) is not None:
        values = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            **dict(zip(_SCALING, (*values, scaling.original_length), strict=True)),
        }
    return fields
