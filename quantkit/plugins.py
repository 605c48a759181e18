"""A plug-in is a file in its folder: the file's name is the registration, and it is imported on demand."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType

KINDS = ("solvers", "rewrites", "formats", "models", "evals")


class UnknownName(LookupError):
    """No plug-in of that name; the message lists the nearest ones."""


def suggest(name: str, known: list[str]) -> str:
    """' Did you mean x?' or the list of what exists."""
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    return (
        f"did you mean {' or '.join(map(repr, near))}?"
        if near
        else f"choose one of {', '.join(sorted(known))}"
    )


def names(kind: str) -> list[str]:
    """Names of all plug-ins of a kind, as users write them (dashes, not underscores)."""
    package = importlib.import_module(f"quantkit.{kind}")
    return sorted(
        m.name.replace("_", "-") for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")
    )


def load(kind: str, name: str) -> ModuleType:
    """Import ``quantkit/<kind>/<name>.py``. Raises UnknownName with the nearest names."""
    known = names(kind)
    if name.replace("_", "-") not in known:
        raise UnknownName(f"unknown {kind[:-1]} {name!r}: {suggest(name.replace('_', '-'), known)}")
    return importlib.import_module(f"quantkit.{kind}.{name.replace('-', '_')}")
