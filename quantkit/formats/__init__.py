"""File formats of other runtimes, written from and read into QuantWeights.

A file here that describes Hugging Face style folders defines::

    NAME: str; DESCRIPTION: str
    marker: str                   the tensor-name ending that marks a quantized module
    suffixes: tuple[str, ...]     all tensor-name endings that belong to a quantized module
    why_not(scheme, rows, columns) -> str | None
        sentence why this weight cannot be stored exactly, or None
    layout(module, rows, columns, scheme) -> dict[tensor name, (torch dtype, shape)]
        exact, from shapes alone (used by `plan`); a bias keeps its name and dtype and is no part of it
    pack(module, qweight, config=None) -> dict[tensor name, Tensor]
        the tensors that replace "<module>.weight". ``config`` is what ``config()`` returned; give it whenever
        the checkpoint is planned as a whole, because conventions are per checkpoint (GPTQ's zero points).
        Raises CannotStore.
    config(quantized: Mapping[str, Scheme], unquantized: Sequence[str], *, order=None) -> dict
        config.json's quantization_config. order: how columns were ordered while solving; None, "static"
        (no effect on storage) or "dynamic" (groups follow the order, QuantWeight.order is set).
    side_files(config) -> dict[file name, bytes]      extra files this format's loaders expect
    matches(quantization_config) -> bool              does this format read such a checkpoint
    unpack(module, tensors, config, shape=None) -> QuantWeight
        exact inverse of pack; tensors by full name, shape (out, in) where the caller knows it.
        Raises CannotRead.
    dequantize(module, tensors, config) -> Tensor     instead of unpack, for formats that are no integer grid

A whole-file format (gguf) defines instead::

    why_not as above; rounding(scheme, columns) -> float   largest error as a fraction of a step, 0.0 is exact
    write(items: Iterable[tuple[str, Tensor | QuantWeight]], config: dict, source_folder: Path, out: Path)
        items: every tensor by its HF name, a QuantWeight by its module's name; one in memory at a time
    read(path) -> object with ``config`` (as config.json) and ``items()`` (the same pairs)
    is_gguf(path) -> bool
"""

from quantkit.formats._common import CannotRead, CannotStore, modules_of

__all__ = ["CannotRead", "CannotStore", "modules_of"]
