"""QuantCache: a transformers cache whose full-attention layers hold packed pages.

    cache = QuantCache(model.config, "int4")
    model.generate(**inputs, cache=cache)
    print(cache.report())

A token is attended to unquantized until the step after its page filled: the update that completes a page
returns
it as it was and packs it then. So a prompt attends to itself exactly, and decoding token by token equals
decoding
in chunks that end where pages end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from quantkit.kernels.attention.handle import Handle, wrap
from quantkit.kernels.attention.hf import NAME as FUSED
from quantkit.kv.pool import PagePool
from quantkit.kv.sequence import Sequence
from quantkit.kvscheme import KVScheme


@dataclass(frozen=True, slots=True)
class LayerNote:
    """One line of :meth:`QuantCache.report`. reason: why a layer is not quantized, else empty."""

    layer: int
    kind: str
    stored: str
    reason: str = ""


NO_OFFLOAD = "pages of a quantized cache stay on their device; build the cache without offloading"


class QuantLayer(CacheLayerMixin):
    """Full attention, or (with ``sliding_window``) sliding attention whose pages are freed once out of sight.

    scheme, index: format and layer number; pool: pages, shared with forks.
    pads: left-padding tokens of each sequence; they are masked, so they are not stored.
    fused: says whether attention reads the pages itself (then update returns handles, not states).
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        scheme: KVScheme,
        index: int,
        pool: PagePool | None = None,
        sliding_window: int | None = None,
        pads: tuple[int, ...] | None = None,
        fused: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.scheme = scheme
        self.index = index
        self.pool = pool or PagePool(scheme.keys_at(index), scheme.values_at(index))
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.given_pads = pads
        self.fused = fused
        self.record_past = False
        self.sequences: list[Sequence] = []
        self.pads: tuple[int, ...] = ()
        self.cumulative_length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch = key_states.shape[0]
        self.pads = (0,) * batch
        if self.given_pads is not None:
            repeats, rest = divmod(batch, len(self.given_pads))
            if rest or not repeats:
                raise ValueError(
                    f"padding was given for {len(self.given_pads)} sequences, but the batch has {batch}"
                )
            self.pads = tuple(pad for pad in self.given_pads for _ in range(repeats))  # beams are neighbours
            if max(self.pads) >= key_states.shape[-2]:
                raise ValueError(
                    f"padding of {max(self.pads)} tokens, but the first states hold {key_states.shape[-2]}"
                )
        self.sequences = [self.new_sequence() for _ in range(batch)]
        self.device, self.dtype = key_states.device, key_states.dtype
        self.is_initialized = True

    def new_sequence(self) -> Sequence:
        """An empty sequence of this layer's format. A sliding window forgets its first tokens, so it has
        no sinks."""
        dtype = None if self.scheme.window_dtype == "auto" else getattr(torch, self.scheme.window_dtype)
        sinks = 0 if self.is_sliding else self.scheme.sinks
        return Sequence(self.pool, self.scheme.page, self.scheme.window, sinks, dtype)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[batch, kv_heads, tokens, dim]``; return all visible keys and values, dequantized or as
        handles."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        visible, offset = self.get_mask_sizes(key_states.shape[-2])
        first = self.cumulative_length == 0
        for row, sequence in enumerate(self.sequences):
            if self.sliding_window is not None and not self.record_past:
                sequence.drop_before(self.cumulative_length - self.sliding_window + 1 - self.pads[row])
            pad = self.pads[row] if first else 0
            try:
                sequence.append(key_states[row, :, pad:], value_states[row, :, pad:])
            except RuntimeError as error:
                raise RuntimeError(f"layer {self.index}: {error}") from error
        self.cumulative_length += key_states.shape[-2]
        pads = tuple(max(0, pad - offset) for pad in self.pads)
        views = tuple(sequence.view() for sequence in self.sequences)
        if self.fused() and any(view.pages for view in views):
            handle = Handle(views, pads, visible)
            keys = wrap(handle, key_states.shape[1], key_states.shape[3], key_states)
            values = wrap(handle, value_states.shape[1], value_states.shape[3], value_states)
        else:
            keys = key_states.new_zeros((*key_states.shape[:2], visible, key_states.shape[3]))
            values = value_states.new_zeros((*value_states.shape[:2], visible, value_states.shape[3]))
            for row, view in enumerate(views):
                k, v = view.dense(key_states.dtype)
                shown = visible - pads[row]
                keys[row, :, pads[row] :] = k[:, k.shape[1] - shown :]
                values[row, :, pads[row] :] = v[:, v.shape[1] - shown :]
        if not self.record_past:
            self._pack()
        return keys, values

    def _pack(self) -> None:
        for sequence in self.sequences:
            try:
                sequence.pack()
            except ValueError as error:
                raise ValueError(f"KV cache of layer {self.index}: {error}") from error

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(visible keys, position of the first of them) for the next ``query_length`` queries."""
        if self.sliding_window is None:
            return self.cumulative_length + query_length, 0
        offset = max(self.cumulative_length - self.sliding_window + 1, 0)
        return self.cumulative_length - offset + query_length, offset

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def activate_past_recording(self) -> None:
        """Keep new tokens unquantized (and old ones alive) until the next :meth:`crop` has settled them."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens, as transformers calls it: zero or negative.

        A page that is cut keeps its codes; nothing is quantized again. Raises ValueError for a positive
        number,
        and when more tokens shall go than there are; RuntimeError when a sliding window has dropped tokens
        that
        would come back into sight.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number"
            )
        if not self.is_initialized:
            return
        remove = -tokens_to_remove
        remaining = self.cumulative_length - remove
        for row, sequence in enumerate(self.sequences):
            if remaining < self.pads[row]:
                raise ValueError(f"crop({tokens_to_remove}) would cut into the padding of sequence {row}")
            if self.sliding_window is not None:
                needed = min(remaining - self.pads[row], self.sliding_window - 1)
                if sequence.held - remove < needed:
                    raise RuntimeError(
                        "the sliding window has already dropped tokens that crop would bring back; call "
                        "activate_past_recording before the steps to be undone"
                    )
        for sequence in self.sequences:
            sequence.crop(remove)
        self.cumulative_length = remaining
        self._pack()

    def _select(self, indices: list[int]) -> None:
        fresh = [self.sequences[i].fork() for i in indices]
        for sequence in self.sequences:
            sequence.release()
        self.sequences, self.pads = fresh, tuple(self.pads[i] for i in indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams exchange page lists; no page is copied."""
        if self.is_initialized:
            self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._select([i for i in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            chosen = torch.arange(len(self.sequences))[indices.cpu()]
            self._select(chosen.tolist())

    def reset(self) -> None:
        """Forget everything and give the pages back."""
        for sequence in self.sequences:
            sequence.release()
        self.sequences, self.is_initialized, self.cumulative_length = [], False, 0

    # transformers calls these two when a cache is built with offloading. Inheriting them would move two tensors that
    # a quantized layer does not have and report success.

    def offload(self) -> None:
        raise NotImplementedError(NO_OFFLOAD)

    def prefetch(self) -> None:
        raise NotImplementedError(NO_OFFLOAD)

    def fork(self) -> QuantLayer:
        """A layer with the same content that shares all pages."""
        twin = QuantLayer(
            self.scheme, self.index, self.pool, self.sliding_window, self.given_pads, self.fused
        )
        twin.sequences = [sequence.fork() for sequence in self.sequences]
        twin.pads, twin.cumulative_length, twin.record_past = (
            self.pads,
            self.cumulative_length,
            self.record_past,
        )
        twin.is_initialized = self.is_initialized
        if self.is_initialized:
            twin.device, twin.dtype = self.device, self.dtype
        return twin

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that the layer holds, for counting bytes."""
        yield from self.pool.tensors().values()
        for sequence in self.sequences:
            yield from sequence.sinks or ()
            yield from sequence.tail or ()


class QuantCache(Cache):
    """A quantized cache for any decoder that transformers gives a DynamicCache.

    config: the model's config; scheme: a KVScheme, or its text (``"int4"``, ``"int8,window=64"``).
    padding: left-padding tokens per sequence, int ``[batch]`` (``(attention_mask == 0).sum(1)``).
    Optional: without
        it padding is stored like any token, and the sinks of a padded sequence are padding.

    Full-attention layers are quantized; sliding-window layers whose window is longer than
    ``scheme.full_window`` too. Everything else is kept as transformers keeps it, and :meth:`report` says so.
    Attention reads packed pages directly if the model was loaded with ``attn_implementation="quantkit_kv"``.
    """

    def __init__(
        self,
        config: Any,
        scheme: KVScheme | str = "int8",
        padding: Tensor | list[int] | tuple[int, ...] | None = None,
    ) -> None:
        self.scheme = KVScheme.parse(scheme) if isinstance(scheme, str) else scheme
        self.config = config.get_text_config(decoder=True)
        pads = None if padding is None else tuple(int(p) for p in padding)
        self.padding = pads
        types, kwargs = get_layer_types_and_kwargs(self.config)
        self.layer_types = list(types)
        for layer, *_ in self.scheme.overrides:
            if not 0 <= layer < len(types):
                raise ValueError(
                    f"the cache format overrides layer {layer}, but the model has {len(types)} layers"
                )
        layers: list[Any] = []
        self._notes: list[LayerNote] = []
        for index, (kind, kw) in enumerate(zip(types, kwargs)):
            reason = self._why_not(kind, kw, index)
            if reason:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**kw))
                self._notes.append(LayerNote(index, kind, "as the model computes it", reason))
            else:
                layers.append(
                    QuantLayer(self.scheme, index, None, kw.get("sliding_window"), pads, self._fused)
                )
                k, v = self.scheme.keys_at(index), self.scheme.values_at(index)
                self._notes.append(LayerNote(index, kind, f"K{k.bits} {k.layout}, V{v.bits} {v.layout}"))
        super().__init__(layers=layers)

    def _fused(self) -> bool:
        return getattr(self.config, "_attn_implementation", None) == FUSED

    def _why_not(self, kind: str, kw: dict, index: int) -> str:
        if kind not in ("full_attention", "sliding_attention"):
            return "nothing to quantize in it" if kind == "dummy" else f"no quantized form of {kind} exists"
        if not self.scheme.quantizes(index):
            return "the format asks for 16 bits here"
        window = kw.get("sliding_window")
        if window is not None and window <= self.scheme.full_window:
            return f"sliding window {window} <= {self.scheme.full_window} (full_window)"
        return ""

    def report(self) -> list[LayerNote]:
        """One note per layer: how it is stored, or why it is not quantized."""
        return list(self._notes)

    @property
    def quantized_layers(self) -> list[int]:
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, QuantLayer)]

    def fork(self) -> QuantCache:
        """A second cache with the same content, for another continuation. Pages are shared, not copied.

        Raises NotImplementedError for layers with recurrent state, whose copy transformers does not offer.
        """
        twin = QuantCache(self.config, self.scheme, self.padding)
        for index, layer in enumerate(self.layers):
            twin.layers[index] = layer.fork() if isinstance(layer, QuantLayer) else _copy_plain(layer)
        return twin

    def __deepcopy__(self, memo: dict) -> QuantCache:
        return self.fork()

    def nbytes(self) -> int:
        """Bytes of all tensors held, measured on their storage: pages (free slots included), window,
        sinks."""
        seen: dict[int, int] = {}
        for layer in self.layers:
            for t in layer.tensors() if isinstance(layer, QuantLayer) else _plain_tensors(layer):
                storage = t.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

    def save(self, path: str | Path) -> None:
        """Write the cache of a prompt to one safetensors file (see :mod:`quantkit.kv.store`)."""
        from quantkit.kv.store import save

        save(self, path)

    @staticmethod
    def load(path: str | Path, config: Any) -> QuantCache:
        """Read what :meth:`save` wrote; raises UserError when it belongs to another kind of model."""
        from quantkit.kv.store import load

        return load(path, config)


def _plain_tensors(layer: Any) -> Iterator[Tensor]:
    for value in (getattr(layer, "keys", None), getattr(layer, "values", None)):
        if isinstance(value, Tensor):
            yield value
    for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        yield from (t for t in states.values() if isinstance(t, Tensor))


def _copy_plain(layer: Any) -> Any:
    """A copy of a transformers layer; its tensors may be shared, since dynamic layers never change in
    place."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) and not getattr(
        layer, "is_croppable", False
    ):
        raise NotImplementedError(
            f"fork: {type(layer).__name__} holds state that changes in place and cannot be shared; process the prefix again"
        )
    twin = object.__new__(type(layer))
    twin.__dict__.update(layer.__dict__)
    return twin
