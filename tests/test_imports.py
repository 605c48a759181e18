"""Imports run one way, and importing quantkit is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "quantkit"

# A file may import from its own floor or a lower one. Names are modules or packages directly under quantkit.
FLOORS = [
    {
        "__init__",
        "errors",
        "heap",
        "scheme",
        "packing",
        "plugins",
        "sizes",
        "activations",
        "kvscheme",
        "calib",
    },
    {"qweight", "modelspec", "checkpoint", "runtime_rules", "roofline", "resolve", "regroup", "runtimes"},
    {"skeleton", "models", "stages", "default_model", "kv"},
    {"solvers", "rewrites", "kernels", "offgrid"},
    {"recipe", "nn", "formats"},
    {"plan", "walk", "workdir", "decode", "model_card"},
    {"pipeline", "load", "allocate", "tune", "opened", "checks"},
    {"streamed"},
    {"tune_model"},
    {"quantize", "convert", "engine"},
    {
        "evals",
        "measure",
        "comparison",
        "report",
        "bench_kernels",
        "bench",
        "bench_worker",
        "verify",
        "repair",
        "push",
    },
    {"doctor", "fit", "serve"},
    {"commands", "cli"},
]
LEVEL = {name: i for i, names in enumerate(FLOORS) for name in names}
PLUGINS = (
    "solvers",
    "rewrites",
    "formats",
)  # a model that differs from another in a line or two is made from its SPEC


def imported(path: Path) -> set[str]:
    """quantkit modules that a file imports when it is imported (not inside functions), as dotted names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "quantkit":
            found |= {f"{node.module}.{a.name}" for a in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "quantkit"}
    return found


FILES = sorted(p for p in ROOT.rglob("*.py"))


def top(dotted: str) -> str | None:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_never_climb(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert own in LEVEL, f"{own} stands on no floor: add it to FLOORS"
    climbing = [name for name in imported(path) if (t := top(name)) and LEVEL[t] > LEVEL[own]]
    assert not climbing


@pytest.mark.parametrize("kind", PLUGINS)
def test_plugin_files_do_not_import_each_other(kind):
    for path in (ROOT / kind).glob("[!_]*.py"):
        for name in imported(path):
            parts = name.split(".")
            sibling = len(parts) > 2 and parts[1] == kind and not parts[2].startswith("_")
            assert not (sibling and (ROOT / kind / f"{parts[2]}.py").exists()), f"{path.name} imports {name}"


def test_pipeline_knows_no_kernel_and_no_format():
    names = imported(ROOT / "pipeline.py") | imported(ROOT / "walk.py")
    assert not [n for n in names if n.split(".")[1:2] in (["kernels"], ["formats"])]
    for path in (ROOT / "formats").glob("*.py"):
        assert not [n for n in imported(path) if n.split(".")[1:2] == ["nn"]]


def test_importing_quantkit_is_cheap():
    code = "import sys, quantkit; assert not {'torch', 'transformers', 'click'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
