"""Save the cache of a prompt to one safetensors file and load it again: the codes, not dequantized states.

Pages that sequences share are written once and shared again after loading. A loaded cache continues
exactly as the
saved one would have.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, contiguous_format
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from quantkit.errors import UserError
from quantkit.kv.sequence import Page, Sequence
from quantkit.kvscheme import KVScheme

if TYPE_CHECKING:
    from quantkit.nn.quant_cache import QuantCache, QuantLayer

FORMAT = "quantkit-kv-1"


def save(cache: QuantCache, path: str | Path) -> None:
    """Write ``cache`` to ``path``. Raises UserError for layers with recurrent or indexer state."""
    from quantkit.nn.quant_cache import QuantLayer

    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    layer: Any
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, QuantLayer):
            layers.append(_write_quantized(layer, f"{index}.", tensors))
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            layers.append({"plain": type(layer).__name__, "length": layer.get_seq_length()})
            if layer.is_initialized:
                tensors[f"{index}.keys"] = layer.keys.contiguous()
                tensors[f"{index}.values"] = layer.values.contiguous()
        else:
            raise UserError(
                f"layer {index} is a {type(layer).__name__}; saving its state is not supported. "
                "Process the prompt again instead of loading it."
            )
    note = {
        "format": FORMAT,
        "scheme": asdict(cache.scheme),
        "padding": cache.padding,
        "layers": layers,
        "layer_types": cache.layer_types,
        "kv_heads": getattr(cache.config, "num_key_value_heads", None),
    }
    save_file(tensors, str(path), metadata={"quantkit": json.dumps(note)})


def _write_quantized(layer: QuantLayer, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    order: dict[int, int] = {}  # pool slot -> place in the file
    sequences = []
    for number, sequence in enumerate(layer.sequences):
        pages = [[order.setdefault(page.slot, len(order)), page.skip, page.count] for page in sequence.pages]
        sequences.append({"length": sequence.length, "pages": pages})
        for kind, pair in (("sinks", sequence.sinks), ("tail", sequence.tail)):
            if pair is not None:
                for side, t in zip("kv", pair):
                    tensors[f"{prefix}{number}.{kind}.{side}"] = t.clone(
                        memory_format=contiguous_format
                    )  # forks share storage; a file cannot
    if order:
        for side, fields in zip("kv", layer.pool.read(list(order))):
            tensors |= {f"{prefix}pages.{side}.{name}": t for name, t in fields.items()}
    state = {"length": layer.cumulative_length, "pads": layer.pads, "sequences": sequences}
    return state | ({"dtype": str(layer.dtype)[6:]} if layer.is_initialized else {})


def load(path: str | Path, config: Any) -> QuantCache:
    """The cache that :func:`save` wrote, on CPU. config: the config of the model that will continue it.

    Raises UserError when the file is none of ours, or was made for a model with other layers or heads.
    """
    import torch

    from quantkit.nn.quant_cache import QuantCache, QuantLayer

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = (file.metadata() or {}).get("quantkit")
            tensors = {name: file.get_tensor(name) for name in file.keys()} if metadata else {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as a saved cache: {error}") from error
    note = json.loads(metadata) if metadata else {}
    if note.get("format") != FORMAT:
        raise UserError(f"{path} is no saved cache of this version ({FORMAT}); save the prompt's cache again")
    scheme = dict(note["scheme"])
    scheme["overrides"] = tuple(tuple(o) for o in scheme["overrides"])
    cache = QuantCache(config, KVScheme(**scheme), note["padding"])
    found = (note["layer_types"], note["kv_heads"])
    want = (cache.layer_types, getattr(cache.config, "num_key_value_heads", None))
    if found != want:
        raise UserError(
            f"{path} belongs to a model with {len(found[0])} layers and {found[1]} kv heads; "
            f"this one has {len(want[0])} and {want[1]}, or other layer types"
        )
    layer: Any
    for index, (layer, state) in enumerate(zip(cache.layers, note["layers"])):
        if isinstance(layer, QuantLayer):
            if "dtype" in state:
                layer.device, layer.dtype = torch.device("cpu"), getattr(torch, state["dtype"])
                _read_quantized(layer, f"{index}.", state, tensors)
        elif f"{index}.keys" in tensors:
            keys, values = tensors[f"{index}.keys"], tensors[f"{index}.values"]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = state["length"]
    return cache


def _read_quantized(
    layer: QuantLayer, prefix: str, state: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    pages = f"{prefix}pages."
    fields = {name[len(pages) :]: t for name, t in tensors.items() if name.startswith(pages)}
    slots = layer.pool.insert(fields) if fields else []
    layer.pads, layer.cumulative_length, layer.is_initialized = tuple(state["pads"]), state["length"], True
    for number, held in enumerate(state["sequences"]):
        sequence: Sequence = layer.new_sequence()
        sequence.length = held["length"]
        sequence.pages = [Page(slots[place], skip, count) for place, skip, count in held["pages"]]
        layer.pool.retain([page.slot for page in sequence.pages])
        for kind in ("sinks", "tail"):
            names = [f"{prefix}{number}.{kind}.{side}" for side in "kv"]
            if names[0] in tensors:
                setattr(sequence, kind, (tensors[names[0]], tensors[names[1]]))
        layer.sequences.append(sequence)
    layer.pool.release(slots)  # the hold that insert took; the sequences hold them now
