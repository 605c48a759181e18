"""Recipes: YAML in, a checked Recipe out. Unknown keys and names are refused with the nearest known ones."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from quantkit import plugins
from quantkit.errors import UserError
from quantkit.scheme import Scheme, SchemeError

RECIPE_FOLDERS = (Path(__file__).parent / "recipes", Path(__file__).parent.parent / "recipes")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WeightFormat(_Strict):
    """Number format of a rule; ``fit`` says what happens when the group does not divide a layer's width:
    "shrink" takes the largest smaller group that divides, "ragged" keeps a shorter last group."""

    bits: int = 4
    symmetric: bool = True
    group: int = 64
    scale_dtype: str = "bfloat16"
    activation: str | None = None
    fit: str = "shrink"

    @field_validator("fit")
    @classmethod
    def _fit(cls, v: str) -> str:
        if v not in ("shrink", "ragged"):
            raise ValueError("fit must be 'shrink' or 'ragged'")
        return v

    def scheme(self) -> Scheme:
        return Scheme(self.bits, self.symmetric, self.group, self.scale_dtype, self.activation)


class Rule(_Strict):
    """First matching rule wins. ``match`` is a shell pattern over full module names ("*.down_proj",
    "model.layers.0.*") or a regular expression after "re:" (matched from the start). ``weights: null`` keeps
    the original floats."""

    match: str = "*"
    weights: WeightFormat | None = WeightFormat()
    solver: str = "gptq"
    options: dict[str, Any] = Field(default_factory=dict)

    def matches(self, module: str) -> bool:
        if self.match.startswith("re:"):
            return re.match(self.match[3:], module) is not None
        return fnmatch.fnmatchcase(module, self.match)


class CalibSpec(_Strict):
    """Calibration data: source (see docs/calibration.md), windows, tokens per window, seed."""

    source: str = "default"
    samples: int = Field(128, gt=0)
    seq_len: int = Field(512, gt=0)
    seed: int = 0


class RewriteSpec(_Strict):
    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class TuneSpec(_Strict):
    """End-to-end tuning of scales and norms by KL to the original; see quantkit/tune.py."""

    steps: int = Field(60, gt=0)
    lr: float = Field(2e-3, gt=0)
    batch: int = Field(1, gt=0)
    held: int = Field(4, gt=0)
    every: int = Field(10, gt=0)


class ExportSpec(_Strict):
    format: str = "compressed-tensors"
    runtime: str | None = None


class Recipe(_Strict):
    """What to do to a model, completely: the same recipe, model and seed give the same bytes."""

    name: str = "custom"
    about: str = ""
    calib: CalibSpec = CalibSpec()
    rewrites: tuple[RewriteSpec, ...] = ()
    rules: tuple[Rule, ...] = (Rule(),)
    tune: TuneSpec | None = None
    export: ExportSpec = ExportSpec()

    @property
    def needs_data(self) -> bool:
        quantizing = [r for r in self.rules if r.weights is not None]
        return bool(self.rewrites) or self.tune is not None or any(solver_needs(r) for r in quantizing)

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def make_solver(rule: Rule):
    """The rule's solver with its options. Raises UserError for an unknown solver or option."""
    return _make("solvers", "Solver", rule.solver, rule.options)


def make_rewrite(spec: RewriteSpec):
    """The rewrite with its options. Raises UserError for an unknown rewrite or option."""
    return _make("rewrites", "Rewrite", spec.name, spec.options)


def solver_needs(rule: Rule) -> frozenset[str]:
    return frozenset(make_solver(rule).needs)


def _make(kind: str, cls: str, name: str, options: dict[str, Any]):
    try:
        factory = getattr(plugins.load(kind, name), cls)
    except plugins.UnknownName as e:
        raise UserError(str(e)) from e
    known = list(getattr(factory, "__dataclass_fields__", {}))
    for key in options:
        if key not in known:
            raise UserError(
                f"{kind[:-1]} {name!r} has no option {key!r}: {plugins.suggest(key, known or ['(none)'])}"
            )
    try:
        return factory(**options)
    except (TypeError, ValueError) as e:
        raise UserError(f"{kind[:-1]} {name!r}: {e}") from e


def check(recipe: Recipe) -> Recipe:
    """Everything that can be wrong without a model: schemes, solvers, rewrites, format, shadowed rules."""
    for i, rule in enumerate(recipe.rules):
        if rule.weights is not None:
            try:
                rule.weights.scheme()
            except SchemeError as e:
                raise UserError(f"rule {i + 1} ({rule.match!r}): {e}") from e
            make_solver(rule)
        if rule.match == "*" and i + 1 < len(recipe.rules):
            raise UserError(
                f"rule {i + 1} matches everything, so rule {i + 2} ({recipe.rules[i + 1].match!r}) can never apply; "
                "put the general rule last"
            )
    for rewrite in recipe.rewrites:
        make_rewrite(rewrite)
    try:
        plugins.load("formats", recipe.export.format)
    except plugins.UnknownName as e:
        raise UserError(str(e)) from e
    return recipe


def parse(data: Any, where: str) -> Recipe:
    """A Recipe from parsed YAML. Raises UserError naming the key and, for a typo, the nearest known key."""
    if not isinstance(data, dict):
        raise UserError(f"{where}: a recipe is a mapping of keys, not {type(data).__name__}")
    try:
        return check(Recipe.model_validate(data))
    except ValidationError as e:
        first = e.errors()[0]
        path = ".".join(str(p) for p in first["loc"])
        if first["type"] == "extra_forbidden":
            key = str(first["loc"][-1])
            known = _known_keys(first["loc"][:-1])
            raise UserError(f"{where}: unknown key {path!r}: {plugins.suggest(key, known)}") from e
        raise UserError(f"{where}: {path}: {first['msg']}") from e


def _known_keys(loc: tuple) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in loc:
        if isinstance(part, str):
            children: dict[str, type[BaseModel]] = {
                "calib": CalibSpec, "rewrites": RewriteSpec, "rules": Rule, "export": ExportSpec, "tune": TuneSpec, "weights": WeightFormat,
            }  # fmt: skip
            model = children.get(part, model)
    return list(model.model_fields)


def recipe_files() -> dict[str, Path]:
    """Bundled recipes by name."""
    found: dict[str, Path] = {}
    for folder in RECIPE_FOLDERS:
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def load(name_or_path: str) -> Recipe:
    """A bundled recipe by name or a YAML file. Raises UserError (did you mean …)."""
    bundled = recipe_files()
    path = Path(name_or_path)
    if name_or_path in bundled:
        path = bundled[name_or_path]
    elif not path.is_file():
        raise UserError(
            f"no recipe {name_or_path!r} (neither a file nor a bundled name): {plugins.suggest(name_or_path, list(bundled))}"
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid YAML: {e}") from e
    return parse(data, path.name)


def dump(recipe: Recipe) -> str:
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
