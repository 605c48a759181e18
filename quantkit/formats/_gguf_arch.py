"""What llama.cpp calls the parts of a model: tensor names, metadata keys, row orders.

The names inside a block come from quantkit/models; here stands what is particular to GGUF.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit import plugins
from quantkit.formats._common import CannotRead, CannotStore
from quantkit.modelspec import ModelSpec

# model type -> class; every model type has its ModelSpec with gguf_arch and gguf_names
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text", "phi3": "phi3"}

GEMMA3_PERIOD = 6  # llama.cpp has it in code: five layers with a window, then one without


def spec_of(model_type: str) -> ModelSpec:
    """The architecture data of a model type. Raises CannotStore for one that is not in ``CLASSES``."""
    if model_type not in CLASSES:
        near = plugins.suggest(model_type, list(CLASSES))
        raise CannotStore(f"GGUF files of model type {model_type!r} are not written; {near}")
    spec: ModelSpec = plugins.load("models", model_type).SPEC
    return spec


def to_gguf(name: str, spec: ModelSpec) -> str:
    """Name of a tensor or module: ``model.layers.0.mlp.up_proj.weight`` -> ``blk.0.ffn_up.weight``."""
    module, suffix = _split(name)
    fixed = {spec.embed: "token_embd", spec.norm: "output_norm", spec.head: "output"}
    if module in fixed:
        return fixed[module] + suffix
    hit = re.fullmatch(re.escape(spec.blocks) + r"\.(\d+)\.(.+)", module)
    if hit and hit[2] in spec.gguf_names:
        return f"blk.{hit[1]}.{spec.gguf_names[hit[2]]}{suffix}"
    raise CannotStore(
        f"{name} has no name in a GGUF file of {spec.gguf_arch}, so the file would not be complete"
    )


def from_gguf(name: str, spec: ModelSpec) -> str:
    """Inverse of ``to_gguf``. Raises CannotRead for a tensor that the architecture does not have."""
    module, suffix = _split(name)
    fixed = {"token_embd": spec.embed, "output_norm": spec.norm, "output": spec.head}
    if module in fixed:
        return fixed[module] + suffix
    hit = re.fullmatch(r"blk\.(\d+)\.(.+)", module)
    inverse = {v: k for k, v in spec.gguf_names.items()}
    if hit and hit[2] in inverse:
        return f"{spec.blocks}.{hit[1]}.{inverse[hit[2]]}{suffix}"
    raise CannotRead(f"tensor {name} is not part of a model of architecture {spec.gguf_arch}")


def heads_of(name: str, arch: str, config: Mapping[str, Any]) -> int | None:
    """How many heads' rows of this tensor are permuted, or None: only llama's q and k are.

    llama.cpp rotates neighbouring pairs where Hugging Face rotates halves.
    """
    if arch != "llama":
        return None
    hit = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", name)
    if not hit:
        return None
    key = "num_attention_heads" if hit[1] == "q" else "num_key_value_heads"
    return int(config.get(key) or config["num_attention_heads"])


def permutation(rows: int, heads: int) -> Tensor:
    """int64 ``[rows]``: the row of Hugging Face's matrix that stands at each row of llama.cpp's."""
    return torch.arange(rows).reshape(heads, 2, rows // heads // 2).transpose(1, 2).reshape(rows)


def norm_offset(name: str, spec: ModelSpec) -> float:
    """What is added to a norm's weight: llama.cpp stores the factor itself."""
    return spec.norm_offset if name.endswith("norm.weight") else 0.0


def metadata(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The architecture's keys from config.json. Raises CannotStore for what llama.cpp cannot compute."""
    arch = spec.gguf_arch
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = _rope(config)
    theta = rope.get("rope_theta", 10000.0)
    out: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(theta),
        "vocab_size": config["vocab_size"],
    }
    if arch == "gemma3":
        out |= _gemma3(config, head_dim)
    if arch == "phi3":
        out["attention.sliding_window"] = config.get("sliding_window") or 0
    out |= _scaling(config, rope)
    return {f"{arch}.{key}": value for key, value in out.items()}


def extra_tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Frequency factors, float32 ``[head_dim / 2]``, of rope scalings that llama.cpp reads as tensors."""
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3_factors(config, rope)}
    if kind in ("longrope", "su"):
        return {
            f"rope_factors_{n}.weight": torch.tensor(rope[f"{n}_factor"]).float() for n in ("long", "short")
        }
    return {}


def config_from(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """config.json for a file's metadata. Raises CannotRead for an architecture that is not in MODEL_TYPES."""
    arch = metadata.get("general.architecture", "")
    if arch not in MODEL_TYPES:
        raise CannotRead(f"GGUF files of architecture {arch!r} are not read; {', '.join(MODEL_TYPES)} are")
    model_type = MODEL_TYPES[arch]

    def key(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{name}", default)
        if value is None:
            raise CannotRead(f"the file has no {arch}.{name}")
        return value

    hidden, heads = key("embedding_length"), key("attention.head_count")
    layers = key("block_count")
    theta = key("rope.freq_base", 10000.0)
    out: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [CLASSES[model_type]],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv", heads),
        "head_dim": key("attention.key_length", hidden // heads),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
    }
    for name, label in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        out[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{label}_token_id")
    if arch == "llama":
        out["attention_bias"] = "blk.0.attn_q.bias" in tensors
        out["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if arch == "gemma3":
        window = ["sliding_attention"] * (GEMMA3_PERIOD - 1) + ["full_attention"]
        out["layer_types"] = (window * layers)[:layers]
        out["sliding_window"] = key("attention.sliding_window")
        out["query_pre_attn_scalar"] = out["head_dim"]
        local = key("rope.freq_base_swa", 10000.0)
        out["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    if arch == "phi3":
        out["sliding_window"] = metadata.get("phi3.attention.sliding_window") or None
    _refuse_scaling(metadata, tensors, arch)
    return out


def _split(name: str) -> tuple[str, str]:
    for suffix in (".weight", ".bias"):
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters of transformers 5, or rope_theta and rope_scaling of older files."""
    rope = config.get("rope_parameters")
    if rope is None:
        rope = dict(config.get("rope_scaling") or {})
        rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    elif "full_attention" in rope:
        rope = rope["full_attention"]
    if "partial_rotary_factor" in config:
        rope = {"partial_rotary_factor": config["partial_rotary_factor"], **rope}
    return dict(rope)


def _scaling(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "llama3"):  # llama3's factors are a tensor
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    longest = config["max_position_embeddings"]
    key = "original_max_position_embeddings"
    original = int(rope.get(key) or config.get(key) or longest)
    if kind == "yarn":
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": original,
        }
    if kind in ("longrope", "su"):
        ratio = longest / original
        factor = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
        return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": factor}
    raise CannotStore(f"rope scaling {kind!r} has no form in GGUF")


def _llama3_factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Tensor:
    """Divisors of the rotary frequencies: 1 for short waves, ``factor`` for long ones, else a blend."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    wavelength = 2 * math.pi * rope["rope_theta"] ** exponents
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    blend = (context / wavelength - low) / (high - low)
    middle = 1 / ((1 - blend) / factor + blend)
    short, long = wavelength < context / high, wavelength > context / low
    return torch.where(short, 1.0, torch.where(long, float(factor), middle)).float()


def _gemma3(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    types = config.get("layer_types") or []
    wanted = [
        "full_attention" if (i + 1) % GEMMA3_PERIOD == 0 else "sliding_attention" for i in range(layers)
    ]
    if types and list(types) != wanted:
        raise CannotStore(
            f"llama.cpp gives every {GEMMA3_PERIOD}th layer full attention; this model's layer_types differ"
        )
    scalar = config.get("query_pre_attn_scalar", head_dim)
    if scalar != head_dim:
        raise CannotStore(
            f"query_pre_attn_scalar {scalar} has no key in GGUF; llama.cpp assumes the head size {head_dim}"
        )
    out: dict[str, Any] = {"attention.sliding_window": config["sliding_window"]}
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta")
    local = local or config.get("rope_local_base_freq", 10000.0)
    if local != 10000.0:
        out["rope.freq_base_swa"] = float(local)
    if config.get("final_logit_softcapping"):
        out["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    return out


def _refuse_scaling(metadata: Mapping[str, Any], tensors: Mapping[str, Any], arch: str) -> None:
    """Scaled rotary frequencies are baked into factors that config.json cannot hold."""
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind != "none":
        raise CannotRead(f"rope scaling {kind!r} of a GGUF file is not read back into config.json")
    factors = [n for n in tensors if n.startswith("rope_")]
    if factors:
        raise CannotRead(f"the file scales rotary frequencies by {factors[0]}, which config.json cannot hold")
