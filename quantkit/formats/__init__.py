"""File formats of other runtimes, written from and read into QuantWeights.

A file here defines these functions (Hugging Face style folders; whole-file formats such as gguf define ``write``
and ``read`` instead of ``pack``/``unpack``):

    NAME: str; DESCRIPTION: str
    why_not(scheme, rows, columns) -> str | None        sentence why this weight cannot be stored exactly, or None
    layout(module, rows, columns, scheme, bias=False) -> dict[tensor name, (torch dtype, shape)]
                                                         exact, from shapes alone (used by `plan`)
    pack(module, qweight) -> dict[tensor name, Tensor]   the tensors that replace "<module>.weight"
    config(quantized: Mapping[str, Scheme], unquantized: Sequence[str]) -> dict   config.json's quantization_config
    side_files(config) -> dict[file name, bytes]         extra files this format's loaders expect
    matches(quantization_config) -> bool                 does this format read such a checkpoint
    unpack(module, tensors, quantization_config, shape) -> QuantWeight
    suffixes: tuple[str, ...]                            tensor-name endings that belong to a quantized module
"""
