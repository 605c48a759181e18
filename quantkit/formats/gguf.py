"""GGUF: one file with weights, tokenizer and metadata, for llama.cpp and its relatives.

Written from our codes without new rounding: symmetric 4 bits as Q4_0, symmetric 8 bits as Q8_0, asymmetric 4
bits as Q4_K when groups are whole runs of 256 columns. Other asymmetric 4-bit groups become Q4_1, whose
offset is rounded to float16 by at most 2**-7 of a step (see _gguf_blocks). Float tensors keep their dtype,
vectors become float32; embedding and head can be rounded to Q8_0 on request.

llama.cpp quantizes activations to 8 bits while it multiplies, so its logits differ from exact arithmetic on
the same weights by a few hundredths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.formats import _gguf_arch as arch
from quantkit.formats import _gguf_blocks as blocks
from quantkit.formats._common import CannotRead, CannotStore, is_ordered
from quantkit.formats._gguf_file import Reader, Writer
from quantkit.formats._gguf_vocab import vocabulary
from quantkit.modelspec import ModelSpec
from quantkit.qweight import QuantWeight
from quantkit.scheme import Scheme

NAME = "gguf"
DESCRIPTION = "llama.cpp: 4-bit and 8-bit weights in one file with tokenizer and chat template"

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# llama.cpp's name for the mix of a file, by its commonest block type
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14, "BF16": 32}


def why_not(scheme: Scheme, rows: int, columns: int) -> str | None:
    """Why a weight ``[rows, columns]`` of this scheme cannot be stored, or None.

    Asymmetric 4-bit groups that are no multiple of 256 are stored with a rounded offset; see ``rounding``.
    """
    if columns % 32:
        return f"{columns} columns are no multiple of 32, the length of GGUF's blocks"
    if scheme.group % 32:
        return f"group {scheme.group} is no multiple of GGUF's blocks of 32; use group 32, 64 or 128"
    if scheme.activation:
        return "llama.cpp chooses its own activation format; use 8-bit weights without activation scheme"
    if blocks.kind_for(scheme, columns) is None:
        return f"GGUF has exact blocks for 4-bit and for symmetric 8-bit weights, not for {scheme}"
    return None


def rounding(scheme: Scheme, columns: int) -> float:
    """The largest error of storing such a weight, as a fraction of a step; 0.0 is exact."""
    return blocks.Q4_1_ERROR if blocks.kind_for(scheme, columns) == "Q4_1" else 0.0


def write(
    items: Iterable[tuple[str, Tensor | QuantWeight]],
    config: Mapping[str, Any],
    source_folder: Path,
    out: Path,
    *,
    embedding: str = "source",
) -> None:
    """Write a model, one tensor in memory at a time.

    items: every tensor of the model by its Hugging Face name (``model.norm.weight``), a QuantWeight by the
        name of its module (``model.layers.0.mlp.up_proj``). Order does not matter.
    config: config.json. source_folder: where the tokenizer is. out: the file; replaced only when complete.
    embedding: "source" keeps the dtype of embedding and head, "Q8_0" rounds them to 8 bits in blocks of 32.

    Raises CannotStore for what the format or llama.cpp cannot hold; nothing is left behind then.
    """
    if embedding not in ("source", "Q8_0"):
        raise CannotStore(f"embedding must be 'source' or 'Q8_0', not {embedding!r}")
    spec = arch.spec_of(config["model_type"])
    keys = arch.metadata(config, spec)
    tokenizer = vocabulary(source_folder, config["vocab_size"], config)
    tied = bool(config.get("tie_word_embeddings"))
    with Writer(out) as file:
        for name, value in items:
            if tied and name.removesuffix(".weight") == spec.head:
                continue  # llama.cpp takes the embedding when there is no output tensor
            _add(file, name, value, config, spec, embedding)
        for name, value in arch.extra_tensors(config).items():
            file.add(name, "F32", tuple(value.shape), value.numpy())
        general = {
            "general.architecture": spec.gguf_arch,
            "general.type": "model",
            "general.name": str(config.get("_name_or_path") or source_folder.name),
            "general.file_type": _file_type(file.kinds()),
            "general.quantization_version": 2,
        }
        file.finish({**general, **keys, **tokenizer})


@dataclass(frozen=True, slots=True)
class GgufModel:
    """An opened file. config: as config.json. file: metadata and tensor table."""

    config: dict[str, Any]
    file: Reader

    def items(self) -> Iterator[tuple[str, Tensor | QuantWeight]]:
        """Every tensor under its Hugging Face name, read one at a time.

        Linears whose blocks are an integer grid come as QuantWeights under the module's name (Q4_0, Q8_0;
        Q4_1 and Q4_K as quantkit writes them), everything else as float tensors.
        """
        spec = arch.spec_of(self.config["model_type"])
        for name, info in self.file.tensors.items():
            hf_name = arch.from_gguf(name, spec)
            raw = self.file.raw(name)
            module, _, suffix = hf_name.rpartition(".")
            heads = arch.heads_of(name, str(spec.gguf_arch), self.config)
            order = None if heads is None else torch.argsort(arch.permutation(info.shape[0], heads))
            if suffix == "weight" and module != spec.embed and len(info.shape) == 2:
                weight = blocks.unpack(name, info.kind, raw)
                if weight is not None:
                    yield module, weight if order is None else _rows(weight, order)
                    continue
            tensor = blocks.dequantize(name, info.kind, raw).reshape(info.shape)
            tensor = tensor - offset if (offset := arch.norm_offset(hf_name, spec)) else tensor
            yield hf_name, tensor if order is None else tensor[order]


def read(path: Path) -> GgufModel:
    """Open a file. Raises CannotRead when it is damaged, or of an architecture that is not known."""
    file = Reader(Path(path))
    if "token_embd.weight" not in file.tensors:
        raise CannotRead(f"{path} holds no token_embd.weight, so it is no language model")
    return GgufModel(arch.config_from(file.metadata, file.tensors), file)


def is_gguf(path: Path) -> bool:
    """Whether a path is a file of this format, by its first bytes."""
    if not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def _add(
    file: Writer,
    name: str,
    value: Tensor | QuantWeight,
    config: Mapping[str, Any],
    spec: ModelSpec,
    embedding: str,
) -> None:
    target = arch.to_gguf(name if isinstance(value, Tensor) else f"{name}.weight", spec)
    heads = arch.heads_of(target, str(spec.gguf_arch), config)
    order = None if heads is None else arch.permutation(value.shape[0], heads)
    if isinstance(value, QuantWeight):
        reason = why_not(value.scheme, *value.shape)
        if reason or is_ordered(value):
            raise CannotStore(f"{name}: {reason or 'GGUF has no groups that follow an act-order'}")
        kind, data = blocks.pack(name, value if order is None else _rows(value, order))
        file.add(target, kind, value.shape, data)
        return
    if value.dtype not in _FLOATS:
        raise CannotStore(f"{name} is {value.dtype}; GGUF holds float tensors and quantized weights")
    tensor = value if order is None else value[order]
    if tensor.dim() == 1:
        tensor = tensor.float() + arch.norm_offset(name, spec)  # llama.cpp's vectors are float32
    elif (
        embedding == "Q8_0" and target in ("token_embd.weight", "output.weight") and value.shape[1] % 32 == 0
    ):
        file.add(target, "Q8_0", tuple(value.shape), blocks.quantize_q8_0(tensor))
        return
    data = tensor.contiguous().view(torch.uint8).numpy()
    file.add(target, _FLOATS[tensor.dtype], tuple(tensor.shape), data)


def _rows(weight: QuantWeight, order: Tensor) -> QuantWeight:
    zero = None if weight.zero is None else weight.zero[order]
    return QuantWeight(weight.scheme, weight.codes[order], weight.scale[order], zero, weight.order)


def _file_type(kinds: list[str]) -> int:
    """Commonest type of the file; vectors are always F32 and do not count unless all is."""
    counts = Counter(k for k in kinds if k != "F32")
    return _FILE_TYPES[counts.most_common(1)[0][0]] if counts else _FILE_TYPES["F32"]
