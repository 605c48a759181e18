"""README.md of a quantized folder: what it is, how good it is, who loads it, how to make it again.

Made from the manifest, the config and measured rows alone. It holds no time and no path, so that the same run
gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from quantkit import plugins
from quantkit.checkpoint import Source, read_manifest
from quantkit.errors import UserError
from quantkit.runtime_rules import lint
from quantkit.scheme import Scheme
from quantkit.sizes import show_size

CARD = "README.md"
Modules = dict[str, tuple[Scheme | None, tuple[int, int]]]

# runtime -> how to load {name}, for the runtimes that accept the folder
LOADING: Mapping[str, str] = {
    "transformers": (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("{name}"{options})\n'
        'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n{needs}'
    ),
    "vllm": "```\nvllm serve {name}\n```",
    "sglang": "```\npython -m sglang.launch_server --model-path {name}\n```",
    "llama.cpp": "```\nllama-cli -m {name}\n```",
}
NEEDS = {
    "compressed-tensors": "Needs `pip install compressed-tensors`.",
    "gptq": "Needs `pip install optimum gptqmodel`.",
    "awq": "Needs `pip install gptqmodel`.",
}
# metric of a measured row -> (heading, digits)
MEASURED = {
    "perplexity": ("perplexity", 4),
    "kl": ("KL to the original (nats/token)", 4),
    "top1_agreement": ("same top token", 4),
    "decode_tokens_per_second": ("decode (tokens/s)", 1),
    "tokens_per_second": ("decode (tokens/s)", 1),
    "ttft": ("time to first token (s)", 3),
    "itl": ("time per token (s)", 4),
}


def write_card(folder: Path, rows: Iterable[dict[str, Any]] = ()) -> Path:
    """Write README.md into ``folder``, which holds a manifest. rows: measured ones (evals), for the table.

    Raises UserError when the folder has no manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(
            f"{folder} has no quantkit.json, so what to say of it is unknown; a card is for quantkit's own "
            "output"
        )
    config = Source(folder).config
    (folder / CARD).write_text(card(manifest, config, list(rows)), encoding="utf-8")
    return folder / CARD


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file. Raises UserError naming the line that is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as e:
            raise UserError(f"{path}, line {number} is no JSON: {e}") from e
        if not isinstance(found, dict) or "metric" not in found or "value" not in found:
            raise UserError(f"{path}, line {number} is no measured row: it needs 'metric' and 'value'")
        rows.append(found)
    return rows


def card(manifest: Mapping[str, Any], config: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    """The text of the card."""
    base = manifest["base_model"] or (manifest.get("converted_from") or {}).get("name") or "an unnamed model"
    name = (manifest["recipe"] or {}).get("name", "unknown")
    bits = sorted({m["scheme"]["bits"] for m in manifest["plan"] if m["scheme"]})
    head = {
        **({"base_model": base} if "/" in base else {}),
        "library_name": "transformers",
        "tags": ["quantkit", manifest["format"], *(f"{b}-bit" for b in bits)],
    }
    parts = [
        "---\n" + yaml.safe_dump(head, sort_keys=False) + "---",
        f"# {base}, quantized",
        f"{base} at {manifest['bits_per_weight']} bits per weight in its quantized linears, "
        f"{show_size(manifest['bytes'])} on disk, format {manifest['format']}. Made by "
        f"quantkit {manifest['quantkit']}, recipe `{name}`.",
        *_origin(manifest),
        "## Weights\n\n" + _schemes(manifest),
        *_calibration(manifest),
        *_measured(rows),
        "## Loading\n\n" + _loading(manifest, config),
        "## Making it again\n\n" + _again(manifest, base),
    ]
    return "\n\n".join(parts) + "\n"


def modules_of_plan(manifest: Mapping[str, Any]) -> Modules:
    """Every linear of a manifest's plan with its scheme (None: kept) and shape."""
    return {
        m["module"]: (None if m["scheme"] is None else Scheme(**m["scheme"]), tuple(m["shape"]))
        for m in manifest["plan"]
    }


def fused_sets(model_type: str) -> tuple[tuple[str, ...], ...]:
    """Sets of linears that serving engines fuse, of an architecture that has a file; () for others."""
    if model_type.replace("_", "-") not in plugins.names("models"):
        return ()
    return plugins.load("models", model_type).SPEC.fused


def _origin(manifest: Mapping[str, Any]) -> list[str]:
    origin = manifest.get("converted_from")
    if not origin:
        return []
    return [
        f"Converted from `{origin['name']}` ({origin['format']}); every weight was read back and compared."
    ]


def _schemes(manifest: Mapping[str, Any]) -> str:
    counts: dict[tuple[str, str], list[int]] = {}
    for m in manifest["plan"]:
        kind = m["module"].rpartition(".")[2]
        scheme = str(Scheme(**m["scheme"])) if m["scheme"] else "kept in the original precision"
        entry = counts.setdefault((kind, scheme), [0, 0])
        entry[0] += 1
        entry[1] += m["shape"][0] * m["shape"][1]
    lines = ["| linears | count | parameters | scheme |", "|---|--:|--:|---|"]
    lines += [f"| {kind} | {n} | {size:,} | {scheme} |" for (kind, scheme), (n, size) in counts.items()]
    kept = "Everything else (embedding, head, norms) keeps its precision."
    return "\n".join(lines) + f"\n\n{kept}" + "".join(f"\n\nNote: {w}." for w in manifest.get("warnings", []))


def _calibration(manifest: Mapping[str, Any]) -> list[str]:
    audit, recipe = manifest.get("calibration"), manifest.get("recipe")
    if not recipe:
        return []
    if not audit:
        return ["## Calibration\n\nNone: the method needs no data."]
    calib = recipe["calib"]
    return [
        f"## Calibration\n\nSource `{Path(calib['source']).name}`, {calib['samples']} windows of "
        f"{calib['seq_len']} tokens, "
        f"seed {calib['seed']}; sha256 of the tokens `{str(audit.get('sha256', ''))[:16]}`."
    ]


def _measured(rows: list[dict[str, Any]]) -> list[str]:
    """One line a model, one column a metric; which data, in words below."""
    wanted = [r for r in rows if r["metric"] in MEASURED and r["value"] is not None]
    if not wanted:
        return []
    metrics = [m for m in MEASURED if any(r["metric"] == m for r in wanted)]
    models = list(dict.fromkeys(str(r.get("model", "this model")) for r in wanted))
    lines = [
        "| model | " + " | ".join(MEASURED[m][0] for m in metrics) + " |",
        "|---|" + "--:|" * len(metrics),
    ]
    for model in models:
        cells = []
        for metric in metrics:
            found = [
                r for r in wanted if str(r.get("model", "this model")) == model and r["metric"] == metric
            ]
            cells.append(_cell(found[-1], MEASURED[metric][1]) if found else "–")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    about = dict.fromkeys(
        f"{r['corpus']}, {r.get('windows', '?')} windows, {r.get('tokens', '?')} tokens"
        for r in wanted
        if "corpus" in r
    )
    machines = dict.fromkeys(
        str(r["hardware"])
        for r in wanted
        if r.get("hardware") and MEASURED[r["metric"]][0].startswith(("decode", "time"))
    )
    said = [f"Text: {t}." for t in about] + [f"Speed measured on {m}." for m in machines]
    return ["## Measured\n\n" + "\n".join(lines) + ("\n\n" + "\n".join(said) if said else "")]


def _cell(row: Mapping[str, Any], digits: int) -> str:
    error = f" ± {row['stderr']:.{digits}f}" if row.get("stderr") is not None else ""
    return f"{row['value']:.{digits}f}{error}"


def _loading(manifest: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    modules, fmt = modules_of_plan(manifest), manifest["format"]
    fused = fused_sets(str(config.get("model_type", "")))
    out = []
    for runtime, how in LOADING.items():
        against = lint(runtime, fmt, modules, fused)
        if not against:
            out.append(
                f"**{runtime}**\n\n"
                + how.format(name="FOLDER", options="", needs=NEEDS.get(fmt, "")).rstrip()
            )
        elif runtime == "llama.cpp" and fmt != "gguf":
            gguf = lint(runtime, "gguf", modules, fused)
            out.append(
                "**llama.cpp** reads GGUF: `quantkit export FOLDER --format gguf -o model.gguf`"
                + (f" (refused: {gguf[0]})" if gguf else "")
            )
        else:
            out.append(f"**{runtime}** does not load it: {against[0]}")
    return "\n\n".join(out)


def _again(manifest: Mapping[str, Any], base: str) -> str:
    origin, recipe = manifest.get("converted_from"), manifest.get("recipe")
    text = ""
    if origin:
        text = f"```\nquantkit export {origin['name']} --format {manifest['format']} -o FOLDER\n```"
    if not recipe:
        return text
    how = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    first = "The recipe of the model it was converted from" if origin else "With this recipe as `recipe.yaml`"
    command = "" if origin else f"```\nquantkit quantize {base} --recipe recipe.yaml -o FOLDER\n```\n\n"
    marks = manifest.get("fingerprint") or {}
    tools = ", ".join(f"{k} {marks[k]}" for k in ("torch", "transformers", "machine") if k in marks)
    tail = f"\n\nThe same versions ({tools}) give the same bytes." if tools and not origin else ""
    return "\n\n".join(p for p in (text, f"{command}{first}:\n\n```yaml\n{how}```{tail}") if p)
