"""Accuracy of a folder, measured block by block: perplexity, and divergence from a reference folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

from quantkit.evals import Recorded, Side, divergence, perplexity
from quantkit.evals._rows import Row
from quantkit.evals.corpus import Windows
from quantkit.streamed import StreamedModel


def side(model: StreamedModel) -> Side:
    """A streamed model as the measures see it; its head must be loaded when logits are asked for."""
    return Side(lambda ids: model.hidden_states(ids), model.logits)


def measure_folder(
    folder: Path, windows: Windows, reference: Path | None = None, trust_remote_code: bool = False
) -> list[Row]:
    """Rows of perplexity, and of divergence when a reference is given. See evals for their fields."""
    model = StreamedModel(folder, trust_remote_code)
    with tempfile.TemporaryDirectory() as scratch:
        recorded = Recorded(side(model), windows.ids, Path(scratch) / "model.bin", batch=None)
        model.load_head()
        own = recorded.side(model.logits)
        rows = perplexity.measure(own, windows, batch=None)
        if reference is not None:
            original = StreamedModel(reference, trust_remote_code)
            theirs = Recorded(side(original), windows.ids, Path(scratch) / "reference.bin", batch=None)
            original.load_head()
            rows += divergence.measure(theirs.side(original.logits), own, windows, batch=None)
            theirs.close()
        recorded.close()
    return rows


def measure_memory(folder: Path, trust_remote_code: bool = False) -> list[Row]:
    """Rows of the weights' bytes by tensor class, from headers, and of the 16-bit cache's bytes per token."""
    from transformers import AutoConfig

    from quantkit.evals import memory, row

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    per_token = memory.cache_bytes_per_token(config)
    return [*memory.from_folder(folder).rows(), row("cache_bytes_per_token", per_token, "bytes")]


def measure_cache(folder: Path, kv: str, windows: Windows, trust_remote_code: bool = False) -> list[Row]:
    """Rows "kv_kl" and "kv_top1_agreement": decoding with a quantized cache against a full-precision one, and
    "kv_bytes_per_token". The model is loaded whole, in float32. Raises UserError for an unknown format, and
    for windows so short that nothing would be quantized."""
    from quantkit.errors import UserError
    from quantkit.evals import decode_kv, row
    from quantkit.kvscheme import KVScheme
    from quantkit.load import load
    from quantkit.scheme import SchemeError

    try:
        scheme = KVScheme.parse(kv)
    except SchemeError as error:
        raise UserError(f"--kv {kv}: {error}") from error
    length = windows.ids.shape[1]
    start = scheme.page + scheme.window
    if length <= start + 1:
        raise UserError(
            f"windows of {length} tokens never fill a page of {scheme.page} tokens, so --kv {kv} would measure "
            f"nothing; give --seq-len {4 * start} or more"
        )
    model = load(folder, "float32", trust_remote_code=trust_remote_code)
    score = decode_kv.compare(model, list(windows.ids), {kv: decode_kv.cache_maker(kv)}, start)[kv]
    found = score.metrics()
    held = decode_kv.measured_bytes(model.config, decode_kv.cache_maker(kv), length)
    about = {**windows.about, "kv": kv, "tokens": found["tokens"]}
    return [
        row("kv_kl", found["kl"], "nats/token", by_quarter=found["kl_by_quarter"], **about),
        row("kv_top1_agreement", found["top1_agreement"], "fraction", **about),
        row("kv_bytes_per_token", held / length, "bytes", **about),
    ]
