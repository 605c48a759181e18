"""Is a checkpoint what it claims to be, and does a runtime compute from it what we compute?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit import runtimes
from quantkit.checks import Finding, Model, check
from quantkit.convert import export
from quantkit.errors import UserError
from quantkit.load import load_tokenizer, read_module
from quantkit.opened import open_any
from quantkit.plugins import suggest
from quantkit.qweight import QuantWeight
from quantkit.streamed import StreamedModel

RUNTIMES = ("transformers", "vllm", "llama.cpp")
# Largest mean KL(ours || runtime) in nats per token. Runtimes compute in bfloat16 or with 8-bit activations.
GATE = 1e-3
# vLLM is asked in float16 first: its rounding costs 3e-5 nats (SmolLM2-135M, W4A16), while bfloat16 alone
# costs 1.5e-3 there (in transformers, the unquantized model in bfloat16 is 7e-4 to 1e-3 from float32). Where float16 is refused or overflows, bfloat16 answers and
# this gate holds.
BFLOAT16_GATE = 5e-3
# Activations rounded to 8 bits (llama.cpp always, W8A8) make every tiny difference a different rounding: two
# correct implementations differ by about what that rounding costs in itself. It is measured each time and
# allowed this often.
FLOORS = 2.0
TOKENS = 40  # a prompt
PASSAGES = (
    "The water cycle describes how water moves between the oceans, the air and the land. Heat from the sun "
    "turns water "
    "into vapour, which rises, cools and condenses into clouds, and returns to the ground as rain or snow. "
    "Rivers carry it back.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return "
    "a\n\nprint([fibonacci(i) for i in "
    "range(10)])\n# prints the first ten numbers of the sequence, beginning with zero and one\n",
    "In 1905 the workshop had 12 machines; by 1912 it had 48, and each of them produced 250 parts a day. "
    "That is 12,000 parts "
    "a day, or 3.6 million in a year of 300 working days. The price of a part fell from 15 cents to 9 cents "
    "in that time.",
    "Der Zug nach Hamburg fährt um acht Uhr ab. La bibliothèque est ouverte jusqu'à six heures. El museo "
    "está cerrado los lunes, "
    "pero la tienda abre a las diez de la mañana. We met at the station and walked along the river to the "
    "old bridge together.",
)


@dataclass(slots=True)
class Report:
    """findings: what is wrong. facts: measured numbers, for people and for rows of results."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        return not any(f.severe for f in self.findings)


def verify(
    path: Path,
    runtime: str | None = None,
    against: Path | None = None,
    *,
    gate: float = GATE,
    trust_remote_code: bool = False,
) -> Report:
    """Check a folder or .gguf file; with ``runtime`` load it there and compare; with ``against`` hold it to a
    base model.

    Raises UserError only for a request that makes no sense (an unknown runtime, a path that does not exist).
    """
    path = Path(path)
    if runtime is not None and runtime not in RUNTIMES:
        raise UserError(f"cannot verify in {runtime!r}: {suggest(runtime, list(RUNTIMES))}")
    if not path.exists():
        raise UserError(f"{path} does not exist; give a model folder or a .gguf file")
    report = Report()
    if path.is_file():
        report.findings += _check_file(path)
    else:
        report.findings += check(path, trust_remote_code)
        if against is not None and report.sound:
            report.findings += resemblance(path, Path(against), report.facts, trust_remote_code)
    if runtime is not None and report.sound:
        try:
            _in_runtime(path, runtime, report, gate, trust_remote_code)
        except UserError as e:
            report.findings.append(Finding("runtime", str(e)))
    return report


def _check_file(path: Path) -> list[Finding]:
    """A .gguf file opens, every tensor decodes to finite values."""
    try:
        for name, value in open_any(path).items():
            numbers = value.scale if isinstance(value, QuantWeight) else value
            if not bool(torch.isfinite(numbers.float()).all()):
                return [Finding("tensors", f"{name} holds NaN or infinite values")]
    except UserError as e:
        return [Finding("files", str(e))]
    return []


def resemblance(
    folder: Path, base: Path, facts: dict[str, Any], trust_remote_code: bool = False
) -> list[Finding]:
    """Weights against those of the model that they came from: cosine of each quantized module with its
    original.

    Quantization leaves 0.9 and more even at 2 bits; exchanged nibbles, wrong zero points or permuted rows do
    not. Rotated or rescaled models differ by intent, so for a recipe with rewrites the finding is not severe.
    """
    from quantkit.checkpoint import read_manifest
    from quantkit.load import format_of, quantized_modules

    mine, theirs = Model(folder, trust_remote_code), Model(base, trust_remote_code)
    fmt = format_of(mine.source.config)
    if fmt is None:
        return []
    recipe = (read_manifest(folder) or {}).get("recipe") or {}
    worst, culprit = 1.0, ""
    for module, tensors in quantized_modules(mine.source, fmt).items():
        name = theirs.names.tensor(f"{module}.weight")
        if name not in theirs.source:
            return [Finding("base", f"{base.name} has no {module}.weight; is it the right base model?")]
        value = read_module(mine.source, fmt, module, tensors)
        weight = value.dequantize() if isinstance(value, QuantWeight) else value.float()
        original = theirs.source.tensor(name).float()
        if original.shape != weight.shape:
            original = original.T
        if original.shape != weight.shape:
            return [
                Finding(
                    "base",
                    f"{module} is {tuple(weight.shape)} here and {tuple(original.shape)} in {base.name}",
                )
            ]
        cosine = float(torch.nn.functional.cosine_similarity(weight.flatten(), original.flatten(), 0))
        if cosine < worst or not culprit:
            worst, culprit = cosine, module
    facts["least cosine with the base"] = worst
    if worst >= 0.8:
        return []
    return [
        Finding(
            "base",
            f"{culprit} does not resemble {base.name}: cosine {worst:.3f}, where "
            "quantization leaves more than 0.8; "
            "exchanged nibbles, a wrong zero-point convention or another "
            "model",
            severe=not recipe.get("rewrites"),
        )
    ]


# ---------------------------------------------------------------------------------------- in a runtime


def prompts(folder: Path, trust_remote_code: bool = False) -> Tensor:
    """The fixed prompts as int64 ``[prompts, tokens]``, cut to one length."""
    tokenizer = load_tokenizer(folder, trust_remote_code)
    ids = [tokenizer(text).input_ids for text in PASSAGES]
    length = min(TOKENS, *(len(i) for i in ids))
    return torch.tensor([i[:length] for i in ids])


def eight_bit_blocks(x: Tensor) -> Tensor:
    """Activations as llama.cpp multiplies them with Q4_0, Q4_1 and Q8_0 weights: 8 bits in blocks of 32
    (Q8_0).

    d = absmax / 127, codes rounded with the float32 d, d stored in float16; returned dequantized.
    """
    blocks = x.float().unflatten(-1, (-1, 32))
    d = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.round(blocks / d.where(d > 0, 1.0))
    return (codes * d.half().float()).flatten(-2).to(x.dtype)


class ExactActivations(StreamedModel):
    """Our arithmetic on the stored weights, activations never rounded."""

    def _activation_hooks(self, block: nn.Module, prefix: str) -> list:
        return []


class LlamaCppModel(StreamedModel):
    """Our arithmetic with llama.cpp's rounding of activations: what that rounding alone costs.

    Inputs of quantized linears are rounded as by :func:`eight_bit_blocks`, those of a bfloat16 head to
    bfloat16.
    """

    def _activation_hooks(self, block: nn.Module, prefix: str) -> list:
        quantized = [
            module
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear)
            and module.in_features % 32 == 0
            and self._is_quantized(f"{prefix}.{name}")
        ]
        return [m.register_forward_pre_hook(lambda _, args: (eight_bit_blocks(args[0]),)) for m in quantized]

    def _is_quantized(self, name: str) -> bool:
        marker = self._format.marker if self._format is not None else ""
        return self._names.tensor(name + marker).removesuffix(marker) in self._stored

    def logits(self, hidden: Tensor) -> Tensor:
        rounds = self.source.dtype == torch.bfloat16
        return super().logits(hidden.bfloat16().float() if rounds else hidden)


def our_logprobs(
    folder: Path, ids: Tensor, trust_remote_code: bool = False, kind: type[StreamedModel] = StreamedModel
) -> Tensor:
    """float32 log-probabilities ``[prompts, tokens, vocabulary]`` by our own arithmetic."""
    model = kind(folder, trust_remote_code)
    hidden = model.hidden_states(ids, batch=len(ids))
    model.load_head()
    return torch.stack([model.logits(h).log_softmax(-1) for h in hidden])


def _in_runtime(path: Path, runtime: str, report: Report, gate: float, trust_remote_code: bool) -> None:
    """Adds a finding when the runtime refuses the model or disagrees. Raises UserError with its words."""
    with tempfile.TemporaryDirectory(prefix="quantkit-verify-") as scratch:
        folder, subject = path, path
        if path.is_file():
            folder = Path(scratch) / "folder"
            export(path, "compressed-tensors", folder, keep_floats=True)
        elif runtime == "llama.cpp":
            subject = Path(scratch) / "model.gguf"
            done = export(path, "gguf", subject, allow_rounding=True)
            if done.rounding:
                report.facts["export to gguf"] = done.rounding
        ids = prompts(folder, trust_remote_code)
        ours = our_logprobs(folder, ids, trust_remote_code)
        dtype = ""
        if runtime == "transformers":
            report.facts["version"] = version("transformers")
            agreement = compare_full(ours, _transformers_logprobs(subject, ids, trust_remote_code))
        else:
            answer, dtype = _answer(runtime, subject, ids)
            report.facts["version"] = answer["version"]
            agreement = compare_answers(ours, answer["prompts"], ids)
        floor = _rounding_floor(folder, runtime, ids, ours, trust_remote_code)
    if dtype:
        report.facts["computed in"] = dtype
    if floor:
        report.facts["KL of rounded activations"] = floor
    gate = max(gate, FLOORS * floor, BFLOAT16_GATE if dtype == "bfloat16" else 0.0)
    report.facts.update({**agreement, "allowed KL": gate})
    if not agreement["kl"] < gate:
        report.findings.append(
            Finding(
                "runtime",
                f"{runtime} loads it and computes something else: KL {agreement['kl']:.3g} "
                "nats a token against our own "
                f"arithmetic (allowed {gate:g}), same top token at {agreement['same top token']:.1%}",
            )
        )


def _rounding_floor(folder: Path, runtime: str, ids: Tensor, ours: Tensor, trust_remote_code: bool) -> float:
    """What rounding activations to 8 bits costs by itself, in nats a token: KL between our own arithmetic
    with and without it. 0.0 where nothing rounds them."""
    if runtime == "llama.cpp":
        rounded = our_logprobs(folder, ids, trust_remote_code, LlamaCppModel)
        return compare_full(ours, rounded)["kl"]
    opened = open_any(folder)
    first = next((v for _, v in opened.items() if isinstance(v, QuantWeight)), None)
    if first is None or first.scheme.activation is None:
        return 0.0
    return compare_full(our_logprobs(folder, ids, trust_remote_code, ExactActivations), ours)["kl"]


def _answer(runtime: str, subject: Path, ids: Tensor) -> tuple[dict[str, Any], str]:
    """The runtime's answer and the dtype it computed in ("" where it has no choice). Raises Refused."""
    if runtime != "vllm":
        return runtimes.ask(runtime, subject, ids.tolist()), ""
    try:
        answer = runtimes.ask(runtime, subject, ids.tolist(), ("--dtype", "float16"))
        if all(math.isfinite(x) for a in answer["prompts"] for x in a["logprobs"]):
            return answer, "float16"
    except runtimes.Refused as first:
        try:
            return runtimes.ask(runtime, subject, ids.tolist(), ("--dtype", "bfloat16")), "bfloat16"
        except runtimes.Refused:
            raise first from None
    return runtimes.ask(runtime, subject, ids.tolist(), ("--dtype", "bfloat16")), "bfloat16"


def _transformers_logprobs(path: Path, ids: Tensor, trust_remote_code: bool) -> Tensor:
    """float32 log-probabilities of plain transformers. Raises Refused with its own words."""
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    where = path
    if path.is_file():
        where, options["gguf_file"] = path.parent, path.name
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(where, **options).eval()
        with torch.no_grad():
            return model(ids).logits.float().log_softmax(-1)
    except Exception as e:  # whatever transformers says is the result
        words = (str(e).strip().splitlines() or ["nothing"])[0][:400]
        raise runtimes.Refused(
            f"transformers {transformers.__version__} does not load it: {type(e).__name__}: {words}"
        ) from e


def compare_full(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Mean KL(ours || theirs) over all positions, largest difference of a true token's log-probability,
    top-1."""
    if ours.shape != theirs.shape:
        raise UserError(
            f"the runtime has {theirs.shape[-1]} logits, the checkpoint {ours.shape[-1]}; its vocabulary "
            "was read wrongly"
        )
    kl = (ours.exp() * (ours - theirs)).sum(-1)
    return {
        "kl": float(kl.double().mean()),
        "largest difference": float((ours - theirs)[ours > -10].abs().max()),
        "same top token": float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
    }


def compare_answers(ours: Tensor, answers: Sequence[dict[str, Any]], ids: Tensor) -> dict[str, float]:
    """As :func:`compare_full` for a runtime that tells its likeliest tokens only.

    The KL is that over these tokens and one bin for all others, a lower bound that misses only how the rest
    of the probability is spread within the bin.
    """
    kls, differences, same = [], [], []
    for row, answer, prompt in zip(ours, answers, ids, strict=True):
        for position, (chosen, values) in enumerate(zip(answer["ids"], answer["values"], strict=True)):
            p, q = row[position, chosen].double(), torch.tensor(values, dtype=torch.float64)
            rest_p = (1 - p.exp().sum()).clamp_min(1e-12)
            rest_q = (1 - q.exp().sum()).clamp_min(1e-12)
            kls.append(float((p.exp() * (p - q)).sum() + rest_p * (rest_p.log() - rest_q.log())))
            same.append(float(int(row[position].argmax()) == answer["top"][position]))
            differences.append(abs(float(row[position, prompt[position + 1]]) - answer["logprobs"][position]))
    return {
        "kl": sum(kls) / len(kls),
        "largest difference": max(differences),
        "same top token": sum(same) / len(same),
    }
