"""Native decoding: a whole forward pass of a Llama-, Qwen-, Gemma- or Mistral-shaped model in one C call.

At 135 M parameters a decode step is about 2 ms of memory traffic; PyTorch's modules alone would spend more
than that on dispatch. Here Python packs the weights once and then makes one call per token, or one per text.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections.abc import Mapping, Sequence
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels import native
from quantkit.plugins import suggest
from quantkit.qweight import QuantWeight, round_scale
from quantkit.scheme import Scheme

# model_type -> (module of transformers, its rotary embedding, activation the C side knows it by)
FAMILIES = {
    "llama": ("llama", "LlamaRotaryEmbedding"),
    "mistral": ("mistral", "MistralRotaryEmbedding"),
    "qwen2": ("qwen2", "Qwen2RotaryEmbedding"),
    "qwen3": ("qwen3", "Qwen3RotaryEmbedding"),
    "gemma3_text": ("gemma3", "Gemma3RotaryEmbedding"),
}
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
STATIC_ROPES = (
    "default",
    "linear",
    "llama3",
    "yarn",
)  # those whose angles do not depend on the sequence length
PRECISIONS = {"exact": native.INT16, "bf16": native.BF16_DOT, "fp32": native.FP32, "int8": native.INT8}

# where the linears and norms of a block stand in a state dict
LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {
    "input_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
}
GEMMA_NORMS = {
    "input_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

HEAD_SCHEME = Scheme(bits=8, symmetric=True, group=64, scale_dtype="bfloat16")

Weights = Mapping[str, "QuantWeight | Tensor"]


class UnsupportedModel(ValueError):
    """The native step cannot run this architecture; the message says why."""


def _rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Rope parameters by layer type; one entry named "" when all layers share them."""
    parameters = config.rope_parameters
    return {"": parameters} if "rope_type" in parameters else dict(parameters)


def why_not(config: Any) -> str | None:
    """None when a transformers text config can be run natively, else a sentence."""
    if reason := native.why_unavailable():
        return reason
    kind = config.model_type
    if kind not in FAMILIES:
        return f"model type {kind!r} has no native step; it knows {', '.join(FAMILIES)}"
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in ACTIVATIONS:
        return f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}"
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            return f"{name} is not implemented in the native step"
    if getattr(config, "use_bidirectional_attention", None):
        return "bidirectional attention has no decode step"
    for parameters in _rope_parameters(config).values():
        if parameters["rope_type"] not in STATIC_ROPES:
            return f"rope type {parameters['rope_type']!r} is not one of {', '.join(STATIC_ROPES)}"
    if head_dim(config) % 16 or head_dim(config) > 256:
        return f"head_dim {head_dim(config)} is not a multiple of 16 up to 256"
    if config.hidden_size % 16:
        return f"hidden size {config.hidden_size} is not a multiple of 16"
    return None


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def layer_types(config: Any) -> list[str]:
    """ "full_attention" or "sliding_attention" for every layer."""
    named = getattr(config, "layer_types", None)
    if named:
        return list(named)
    sliding = config.model_type == "mistral" and config.sliding_window
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def rope_tables(config: Any, capacity: int) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin ``[capacity, rotary_dim / 2]`` by layer type, made by the model's own rotary embedding."""
    module, name = FAMILIES[config.model_type]
    rotary = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)(config)
    position = torch.arange(capacity)[None]
    like = torch.zeros(1)
    tables = {}
    for kind in _rope_parameters(config):
        cos, sin = rotary(like, position, kind) if kind else rotary(like, position)
        half = cos.shape[-1] // 2  # transformers repeats the angles for the second half
        tables[kind] = (cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
    return tables


def quantize_head(weight: Tensor, scheme: Scheme = HEAD_SCHEME) -> QuantWeight:
    """Round a float ``[vocab, hidden]`` head to nearest, symmetric, largest magnitude to the largest code."""
    weight = weight.detach().float()
    rows, columns = weight.shape
    groups = scheme.groups(columns)
    padded = torch.zeros(rows, groups * (scheme.group or columns))
    padded[:, :columns] = weight
    peak = padded.view(rows, groups, -1).abs().amax(-1)
    scale = round_scale(peak / (scheme.midpoint - 1), scheme)
    return QuantWeight.from_float(weight, scale, None, scheme)


class NativeDecoder:
    """One sequence on the native engine.

    config: a transformers text config (Llama, Mistral, Qwen2, Qwen3 or Gemma 3).
    weights: by the names of the state dict (``model.layers.0.self_attn.q_proj.weight``; the name of a
        QuantWeight may stand without ``.weight``). QuantWeights are run as they are; float linears as bf16.
    precision: of the activations; weights are exact and sums fp32 in all of them. "exact" rounds activations
        to 2^-16 of the largest in their group, a hundredth of what bf16 loses; "bf16" uses the bf16 dot where
        the CPU has one; "fp32" rounds nothing and is the slowest; "int8" rounds to int8 per group and has the
        fastest prefill.
    head: "int8" rounds a float head to 8 bits in groups of 64, "bfloat16" keeps it. A QuantWeight head stays.
    cache: "int8", "bfloat16" or "float32". capacity: longest sequence. chunk: tokens per prefill pass.

    Raises UnsupportedModel with a sentence, KeyError naming a missing weight, native.NativeError when the
    layout cannot hold a weight.
    """

    def __init__(
        self,
        config: Any,
        weights: Weights,
        *,
        precision: str = "exact",
        head: str = "int8",
        cache: str = "int8",
        capacity: int = 2048,
        chunk: int = 128,
    ) -> None:
        if reason := why_not(config):
            raise UnsupportedModel(reason)
        for value, known in ((precision, PRECISIONS), (cache, native.CACHES), (head, ("int8", "bfloat16"))):
            if value not in known:
                raise ValueError(f"unknown setting {value!r}: {suggest(value, list(known))}")
        self.config = config
        self.capacity = capacity
        self.vocab = config.vocab_size
        self.length = 0
        self._weights = weights
        self._keep: list[Any] = []  # whatever C points into
        self._packed: dict[str, native.Packed] = {}
        self._pack_all(head)
        c_config = self._c_config(precision, cache, capacity, chunk)
        handle = native.library().qk_model_create(byref(c_config))
        if not handle:
            raise native.NativeError(native.last_error())
        self._handle = handle
        weakref.finalize(self, native.library().qk_model_free, handle)
        del self._weights

    # ---- weights ---------------------------------------------------------------------------------

    def _find(self, name: str) -> QuantWeight | Tensor | None:
        found = self._weights.get(f"{name}.weight")
        return self._weights.get(name) if found is None else found

    def _require(self, name: str) -> QuantWeight | Tensor:
        found = self._find(name)
        if found is None:
            raise KeyError(f"the weights have no {name}.weight")
        return found

    def _require_tensor(self, name: str) -> Tensor:
        found = self._require(name)
        if not isinstance(found, Tensor):
            raise TypeError(f"{name} must be a float tensor, not a QuantWeight")
        return found

    def _pack_all(self, head: str) -> None:
        """Pack every linear into one buffer in the order of a step's reads: huge pages for all of it."""
        names = [
            f"model.layers.{i}.{part}"
            for i in range(self.config.num_hidden_layers)
            for part in LINEARS.values()
        ]
        jobs = [(name, self._require(name), self._weights.get(f"{name}.bias")) for name in names]
        embed = self._require("model.embed_tokens")
        output = embed if self.config.tie_word_embeddings else self._find("lm_head")
        if output is None:
            output = embed
        if isinstance(output, Tensor) and head == "int8":
            output = quantize_head(output)
        jobs.append(("lm_head", output, None))
        if isinstance(embed, QuantWeight) and embed is not output:
            jobs.append(("embed", embed, None))
        sizes = [native.packed_bytes(weight, bias is not None) for _, weight, bias in jobs]
        arena = native.aligned_empty(sum(sizes))
        offset = 0
        for (name, weight, bias), size in zip(jobs, sizes):
            if bias is not None and not isinstance(bias, Tensor):
                raise TypeError(f"the bias of {name} must be a tensor")
            self._packed[name] = native.pack(weight, bias, arena[offset : offset + size])
            offset += size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one decode step reads (the embedding row aside)."""
        return sum(packed.data.numel() for name, packed in self._packed.items() if name != "embed")

    @property
    def cache_bytes(self) -> int:
        """Size of the key/value cache at full capacity."""
        return int(native.library().qk_model_cache_bytes(self._handle))

    # ---- the C configuration ---------------------------------------------------------------------

    def _floats(self, tensor: Tensor) -> int:
        """Address of a float32 copy that lives as long as the decoder, padded with a vector of zeros."""
        flat = tensor.detach().float().reshape(-1)
        kept = torch.cat([flat, torch.zeros(16)])
        self._keep.append(kept)
        return kept.data_ptr()

    def _norm(self, name: str) -> int | None:
        weight = self._find(name)
        if weight is None:
            return None
        if not isinstance(weight, Tensor):
            raise TypeError(f"{name} must be a float tensor, not a QuantWeight")
        offset = 1.0 if self.config.model_type == "gemma3_text" else 0.0
        return self._floats(weight.float() + offset)

    def _c_layers(self, capacity: int) -> ctypes.Array[native.CLayer]:
        config = self.config
        gemma = config.model_type == "gemma3_text"
        tables = {
            kind: (self._floats(cos), self._floats(sin))
            for kind, (cos, sin) in rope_tables(config, capacity).items()
        }
        layers = (native.CLayer * config.num_hidden_layers)()
        for i, kind in enumerate(layer_types(config)):
            prefix = f"model.layers.{i}"
            for field, part in LINEARS.items():
                setattr(layers[i], field, self._packed[f"{prefix}.{part}"].c_weight())
            for field, part in (GEMMA_NORMS if gemma else NORMS).items():
                setattr(layers[i], field, self._norm(f"{prefix}.{part}"))
            for field in ("input_norm", "mlp_norm"):
                if not getattr(layers[i], field):
                    raise KeyError(f"the weights have no {prefix}.{NORMS[field]}.weight")
            layers[i].cos, layers[i].sin = tables.get(kind) or tables[""]
            layers[i].window = config.sliding_window if kind == "sliding_attention" else 0
        return layers

    def _c_config(self, precision: str, cache: str, capacity: int, chunk: int) -> native.CModelConfig:
        config = self.config
        gemma = config.model_type == "gemma3_text"
        c = native.CModelConfig()
        c.layers, c.hidden, c.intermediate = (
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
        )
        c.heads, c.kv_heads, c.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim(config),
        )
        c.vocab, c.capacity, c.chunk = config.vocab_size, capacity, chunk
        c.activation = ACTIVATIONS[getattr(config, "hidden_activation", None) or config.hidden_act]
        c.cache, c.precision = native.CACHES[cache], PRECISIONS[precision]
        # the head is memory-bound and its argmax decides the token: never rounded activations
        c.head_precision = native.INT16 if precision == "int8" else PRECISIONS[precision]
        c.eps = config.rms_norm_eps
        scalar = config.query_pre_attn_scalar if gemma else c.head_dim
        c.attn_scale = scalar**-0.5
        layers = self._c_layers(capacity)
        c.blocks = layers
        tables = rope_tables(config, 1)
        c.rotary_dim = 2 * next(iter(tables.values()))[0].shape[-1]
        c.final_norm = self._norm("model.norm")
        if not c.final_norm:
            raise KeyError("the weights have no model.norm.weight")
        self._set_embedding(c, gemma)
        c.head = self._packed["lm_head"].c_weight()
        return c

    def _set_embedding(self, c: native.CModelConfig, gemma: bool) -> None:
        embed = self._require("model.embed_tokens")
        scale = torch.tensor(self.config.hidden_size**0.5) if gemma else torch.tensor(1.0)
        if isinstance(embed, Tensor):
            table = embed.detach().contiguous()
            self._keep.append(table)
            c.embed_type, c.embed_table = native.DTYPES[table.dtype], table.data_ptr()
            scale = scale.to(table.dtype)  # Gemma rounds the factor to the dtype of the table
        else:
            c.embed = self._packed.get("embed", self._packed["lm_head"]).c_weight()
        c.embed_scale = float(scale)

    # ---- running ---------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget the sequence."""
        self.length = 0

    def crop(self, length: int) -> None:
        """Keep only the first ``length`` tokens (what speculative decoding does to rejected ones)."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} of {self.length} tokens")
        self.length = length

    def _forward(self, ids: Sequence[int] | Tensor, everything: bool) -> Tensor:
        tokens = torch.as_tensor(ids, dtype=torch.int32).reshape(-1).contiguous()
        rows = len(tokens) if everything else 1
        logits = torch.empty(rows, self.vocab)
        status = native.library().qk_model_forward(
            self._handle, tokens.data_ptr(), len(tokens), self.length, everything, logits.data_ptr()
        )
        native.check(status)
        self.length += len(tokens)
        return logits

    def prefill(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Append ``ids``; logits float32 ``[vocab]`` behind the last one."""
        return self._forward(ids, False)[0]

    def logits(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Append ``ids``; logits float32 ``[len(ids), vocab]`` behind each of them."""
        return self._forward(ids, True)

    def step(self, token: int) -> Tensor:
        """Append one token; logits float32 ``[vocab]``."""
        return self._forward([token], False)[0]

    def generate_greedy(
        self,
        ids: Sequence[int] | Tensor,
        count: int,
        stops: Sequence[int] = (),
        seconds: list[float] | None = None,
    ) -> list[int]:
        """Append ``ids`` and then up to ``count`` greedy tokens, which are returned.

        stops: ids that end the text (the one met is kept). seconds: receives the duration of each step after
        the first token, which comes out of the prefill.
        """
        if count < 1:
            return []
        self._forward(ids, False)
        first = int(native.library().qk_model_argmax(self._handle))
        if count == 1 or first in stops:
            return [first]
        stop_ids = torch.tensor(list(stops) or [-1], dtype=torch.int32)
        out = torch.empty(count - 1, dtype=torch.int32)
        times = torch.empty(count - 1, dtype=torch.float64)
        made = native.library().qk_model_generate(
            self._handle,
            first,
            self.length,
            count - 1,
            stop_ids.data_ptr(),
            len(stop_ids),
            out.data_ptr(),
            times.data_ptr(),
        )
        if made < 0:
            raise native.NativeError(native.last_error())
        self.length += made
        if seconds is not None:
            seconds.extend(times[:made].tolist())
        return [first, *out[:made].tolist()]
