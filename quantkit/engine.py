"""From a model folder to something that decodes: the native step where it can, else transformers, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.decode import native_step
from quantkit.decode.loop import Engine, NativeEngine, TransformersEngine
from quantkit.errors import UserError
from quantkit.kernels import native
from quantkit.kvscheme import KVScheme
from quantkit.load import iterate, load, load_tokenizer
from quantkit.qweight import QuantWeight
from quantkit.resolve import resolve_model
from quantkit.scheme import SchemeError

ENGINES = ("auto", "native", "transformers")
NATIVE_CACHES = {"none": "bfloat16", "int8": "int8"}  # --kv -> cache of the native step


@dataclass(slots=True)
class Opened:
    """An engine with what stands around it.

    weight_bytes: weights that a decode step must read (single rows of an untied embedding do not count).
    cache_bits: bits per stored number of the cache, scales included (in a full page).
    notes: what a user should know: why the native step was not taken, what was rounded.
    """

    engine: Engine
    tokenizer: Any
    config: Any
    backend: str
    weight_bytes: int
    cache_bits: float
    stop_ids: tuple[int, ...]
    notes: list[str] = field(default_factory=list)


def open_engine(
    model: str | Path,
    engine: str = "auto",
    kv: str = "none",
    head: str | None = None,
    capacity: int = 2048,
    reuse: bool = False,
    trust_remote_code: bool = False,
) -> Opened:
    """Load ``model`` (folder, hub id or .gguf) for decoding.

    engine: "auto", "native" or "transformers". kv: "none" or a cache format such as "int8", "int4".
    head: "int8" or "bfloat16" for a float head on the native step; default int8 for quantized models, bfloat16
    otherwise, so that an original is run as it is. capacity: longest sequence on the native step; cut to the
    model's own limit. reuse: see NativeEngine. Raises UserError when "native" is asked for and impossible.
    """
    from transformers import AutoConfig

    if engine not in ENGINES:
        raise UserError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    folder = resolve_model(str(model))
    tokenizer = load_tokenizer(folder, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"the installed transformers cannot read the config of {folder}: {error}") from error
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or capacity
    scheme = parse_kv(kv)
    reason = None if engine != "transformers" else "transformers was asked for"
    if reason is None:
        reason = native_step.why_not(text) or _why_not_cache(kv)
    notes: list[str] = []
    opened: Opened | None = None
    if reason is None:
        try:
            opened = _native(folder, text, NATIVE_CACHES[kv], head, min(capacity, limit), reuse, notes)
        except (native_step.UnsupportedModel, native.NativeError, KeyError, TypeError) as error:
            reason = str(error.args[0] if error.args else error)
    if opened is None:
        if engine == "native":
            raise UserError(f"the native step cannot run {folder.name}: {reason}; give --engine auto")
        opened = _transformers(folder, text, scheme, trust_remote_code)
        if engine == "auto":
            notes.append(f"transformers, not the native step: {reason}")
    opened.tokenizer, opened.config, opened.notes = tokenizer, config, notes
    opened.stop_ids = stop_ids(folder, tokenizer)
    return opened


def parse_kv(kv: str) -> KVScheme:
    """A cache format by its text. Raises UserError with the nearest name."""
    try:
        return KVScheme.parse(kv)
    except (SchemeError, ValueError) as error:
        raise UserError(f"--kv {kv}: {error}") from error


def _why_not_cache(kv: str) -> str | None:
    if kv in NATIVE_CACHES:
        return None
    return f"the native step keeps its cache in 16 or 8 bits, not as {kv!r}"


def _native(
    folder: Path, config: Any, cache: str, head: str | None, capacity: int, reuse: bool, notes: list[str]
) -> Opened:
    weights = native_weights(folder)
    quantized = any(isinstance(w, QuantWeight) for w in weights.values())
    head = head or ("int8" if quantized else "bfloat16")
    decoder = native_step.NativeDecoder(config, weights, head=head, cache=cache, capacity=capacity)
    if quantized and head == "int8" and not isinstance(weights.get("lm_head"), QuantWeight):
        notes.append("the output head is rounded to 8 bits in groups of 64 (--head bfloat16 keeps it)")
    if any(
        isinstance(w, Tensor) and w.dim() == 2 and w.dtype in (torch.float32, torch.float16)
        for w in weights.values()
    ):
        notes.append("float linears are rounded to bfloat16 by the native step")
    if any(isinstance(w, QuantWeight) and w.scheme.activation for w in weights.values()):
        notes.append("activations are not rounded to int8 here, though the checkpoint's scheme says so")
    bits = 16.0 if cache == "bfloat16" else 8.0 + 8 * _native_scale_bytes(config, decoder, capacity)
    return Opened(
        NativeEngine(decoder, reuse), None, None, "native", decoder.bytes_per_token, bits, (), notes
    )


def _native_scale_bytes(config: Any, decoder: native_step.NativeDecoder, capacity: int) -> float:
    """Bytes of scales per stored number, from what the library says it allocates."""
    heads, dim = config.num_key_value_heads, native_step.head_dim(config)
    numbers = 2 * config.num_hidden_layers * heads * dim * capacity
    return max(0.0, decoder.cache_bytes / numbers - 1)


def native_weights(folder: Path) -> Mapping[str, Tensor | QuantWeight]:
    """All weights by the names of the running model: some checkpoints leave out the leading "model."."""
    found: dict[str, Tensor | QuantWeight] = {}
    for name, value in iterate(folder):
        whole = name if name.startswith(("model.", "lm_head")) else f"model.{name}"
        found[whole] = value
    return found


def _transformers(folder: Path, config: Any, scheme: KVScheme, trust_remote_code: bool) -> Opened:
    from quantkit.nn.quant_cache import QuantCache

    model = load(folder, trust_remote_code=trust_remote_code)
    make_cache = None
    bits = 16.0
    if scheme.quantizes():
        make_cache = lambda padding: QuantCache(config, scheme, padding if bool(padding.any()) else None)  # noqa: E731
        width = native_step.head_dim(config)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        bits = 8 * scheme.bytes_per_token(heads, width) / (2 * heads * width)
    engine = TransformersEngine(model, make_cache)
    return Opened(engine, None, None, "transformers", step_bytes(folder, config), bits, ())


def step_bytes(folder: Path, config: Any) -> int:
    """Bytes of weights in the files that one decode step must read."""
    from quantkit.checkpoint import Source

    source = Source(folder)
    total = source.nbytes
    if getattr(config, "tie_word_embeddings", False):
        return total
    rows = [i.nbytes for n, i in source.tensors.items() if n.endswith(("embed_tokens.weight", "wte.weight"))]
    return total - sum(rows)


def encode(tokenizer: Any, text: str, chat: bool = False) -> list[int]:
    """Token ids of a prompt; ``chat``: as a user's message in the model's chat template."""
    if chat:
        return encode_messages(tokenizer, [{"role": "user", "content": text}])
    return list(tokenizer(text)["input_ids"])


def encode_messages(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, up to where the model answers. Raises UserError without a template."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the model has no chat template (it is a base model); use `quantkit generate` without --chat"
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a text: those of generation_config.json, and the tokenizer's end-of-text."""
    from transformers import GenerationConfig

    found: list[int] = []
    if (folder / "generation_config.json").is_file():
        given = GenerationConfig.from_pretrained(folder).eos_token_id
        found += [] if given is None else [given] if isinstance(given, int) else list(given)
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found))
