"""Folder -> runnable transformers model, its linears quantized in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from quantkit import plugins
from quantkit.checkpoint import Source
from quantkit.errors import UserError
from quantkit.modelspec import spec_for
from quantkit.nn.qlinear import QuantLinear
from quantkit.plan import Names
from quantkit.qweight import QuantWeight
from quantkit.skeleton import build_skeleton, has_tied_head


def format_of(config: dict[str, Any]) -> ModuleType | None:
    """The format plug-in that reads a checkpoint with this config.json; None for an unquantized one.

    Raises UserError for a quantization that quantkit does not read.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    for name in plugins.names("formats"):
        fmt = plugins.load("formats", name)
        if hasattr(fmt, "matches") and fmt.matches(quantization):
            return fmt
    raise UserError(f"quantkit cannot read checkpoints of quant_method {quantization.get('quant_method')!r}")


def quantized_modules(source: Source, fmt: ModuleType) -> dict[str, list[str]]:
    """Quantized module (checkpoint name) -> its tensor names."""
    from quantkit.formats import modules_of

    return modules_of(fmt, source.tensors)


def read_module(
    source: Source, fmt: ModuleType, module: str, tensors: list[str], shape: tuple[int, int] | None = None
) -> QuantWeight | Tensor:
    """A module's QuantWeight, or its float weight for a format that is no integer grid."""
    parts = {name: source.tensor(name) for name in tensors}
    config = source.config["quantization_config"]
    if hasattr(fmt, "unpack"):
        return fmt.unpack(module, parts, config, shape)
    return fmt.dequantize(module, parts, config)


def iterate(folder: str | Path) -> Iterator[tuple[str, Tensor | QuantWeight]]:
    """Everything in a checkpoint: ("model...q_proj", QuantWeight) and ("model.norm.weight", Tensor) pairs."""
    source = Source(folder)
    fmt = format_of(source.config)
    taken: set[str] = set()
    if fmt is not None:
        for module, tensors in quantized_modules(source, fmt).items():
            value = read_module(source, fmt, module, tensors)
            taken.update(tensors)
            yield (module, value) if isinstance(value, QuantWeight) else (f"{module}.weight", value)
    for name in source.tensors:
        if name not in taken:
            yield name, source.tensor(name)


def load(
    folder: str | Path,
    dtype: torch.dtype | str | None = None,
    dequantize: bool = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A transformers causal language model from any folder that quantkit reads, quantized or not.

    dtype: of activations and unquantized weights; default the checkpoint's own. dequantize: plain nn.Linear with
    float weights instead of QuantLinear. Raises UserError when tensors are missing or do not fit.
    """
    from transformers import AutoConfig, GenerationConfig

    source = Source(folder)
    target = getattr(torch, dtype) if isinstance(dtype, str) else (dtype or source.dtype)
    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    fmt = format_of(source.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: Any = build_skeleton(config, dtype=target, trust_remote_code=trust_remote_code)
    model.config.use_cache = True
    names = Names(source, spec_for(config, model))
    if fmt is not None:
        _place_quantized(model, source, fmt, names, target, dequantize)
    missing = _fill(
        model,
        lambda name: names.tensor(name) in source,
        lambda name: source.tensor(names.tensor(name)),
        target,
    )
    if has_tied_head(model):
        model.tie_weights()
        missing = [n for n in missing if model.get_parameter(n).is_meta]
    if missing:
        raise UserError(
            f"{folder} lacks {len(missing)} tensors that the model needs: {', '.join(missing[:3])}"
        )
    if (source.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.folder)
    return model.eval()


def _place_quantized(
    model: nn.Module, source: Source, fmt: ModuleType, names: Names, dtype: torch.dtype, dequantize: bool
) -> None:
    stored = quantized_modules(source, fmt)
    for name, module in list(model.named_modules()):
        key = names.tensor(name + fmt.marker).removesuffix(fmt.marker)
        if key not in stored:
            continue
        transposed = not isinstance(module, nn.Linear)
        shape = tuple(module.weight.shape[::-1] if transposed else module.weight.shape)
        value = read_module(source, fmt, key, stored.pop(key), shape)  # type: ignore[arg-type]
        bias_name = f"{key}.bias"
        bias = source.tensor(bias_name).to(dtype) if bias_name in source else None
        if isinstance(value, QuantWeight) and not dequantize:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, QuantLinear(value, bias))
            continue
        weight = value.dequantize(dtype) if isinstance(value, QuantWeight) else value.to(dtype)
        module.weight = nn.Parameter(weight.T.contiguous() if transposed else weight, requires_grad=False)
    if stored:
        raise UserError(
            f"the checkpoint quantizes modules that the model lacks: {', '.join(list(stored)[:3])}"
        )


def _fill(
    model: nn.Module, present: Callable[[str], bool], read: Callable[[str], Tensor], dtype: torch.dtype
) -> list[str]:
    """Load every parameter and stored buffer that is still on the meta device; returns the absent ones."""
    missing = []
    for path, owner in model.named_modules():
        for table in (owner._parameters, owner._buffers):
            for leaf, old in table.items():
                if old is None or not old.is_meta:
                    continue
                name = f"{path}.{leaf}" if path else leaf
                if not present(name):
                    missing.append(name)
                    continue
                value = read(name)
                if tuple(value.shape) != tuple(old.shape):
                    raise UserError(
                        f"{name} has shape {tuple(value.shape)}; the model expects {tuple(old.shape)}"
                    )
                value = value.to(dtype) if value.is_floating_point() else value
                table[leaf] = (
                    nn.Parameter(value, requires_grad=False) if table is owner._parameters else value
                )
    return missing


def load_config(source: Source, trust_remote_code: bool = False) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as e:
        kind = source.config.get("model_type", "?")
        raise UserError(
            f"the installed transformers cannot read this config (model_type {kind!r}): {e}"
        ) from e


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as e:
        raise UserError(f"{folder} has no tokenizer that transformers can load: {e}") from e
