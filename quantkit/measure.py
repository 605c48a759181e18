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
