"""Rows of results, and where they come from: command, versions, machine, date, commit."""

from __future__ import annotations

import math
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PACKAGES = ("quantkit", "torch", "transformers", "lm_eval", "numpy")


def row(metric: str, value: float, unit: str, stderr: float | None = None, **more: Any) -> Row:
    """One result. NaN and infinity become None: JSON has neither, and a table must not hide them as numbers.

    ``more``: what the value needs to be understood (corpus, tokens, windows, per_window, dtype, task, …).
    """
    return {"metric": metric, "value": _plain(value), "stderr": _plain(stderr), "unit": unit, **more}


def _plain(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def provenance(seed: int | None = None, data_sha256: str | None = None, **more: Any) -> Row:
    """What is needed to repeat a measurement. Paths of this machine are left out of the command."""
    import torch

    return {
        "command": command_line(sys.argv),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": processor(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "memory_bytes": total_memory(),
        "seed": seed,
        "data_sha256": data_sha256,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git_commit(),
        **more,
    }


def command_line(argv: list[str]) -> str:
    """The command as typed; absolute paths are shortened to their last part, they mean nothing elsewhere."""
    words = [
        "quantkit" if i == 0 and Path(w).name in ("cli.py", "__main__.py") else w for i, w in enumerate(argv)
    ]
    return shlex.join(Path(w).name if os.path.isabs(w) else w for w in words)


def processor() -> str:
    """The processor's name, with the vector extension that matters for integer kernels."""
    name, flags = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = value
    present = [f for f in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if f in flags.split()]
    return f"{name} ({', '.join(present)})" if present else name


def available_cores() -> int:
    """Cores that this process may use, not those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int | None:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed took no part
    return found


def git_commit() -> str | None:
    """The commit of quantkit's own source with "+" when it was changed; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout

    try:
        commit = git("rev-parse", "--short=12", "HEAD").strip()
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "quantkit").strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")
