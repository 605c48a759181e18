"""quantkit: make language models smaller and faster without making them worse.

The public API, imported on first use so that ``import quantkit`` is cheap:

    quantkit.quantize(model, out, recipe)    quantize into a folder that other runtimes load
    quantkit.load(folder)                    a transformers model with quantized linears
    quantkit.load_recipe(name_or_path)       a bundled or own recipe
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Recipe", "Scheme", "load", "load_recipe", "quantize"]

_WHERE = {
    "quantize": ("quantkit.quantize", "quantize"),
    "load": ("quantkit.load", "load"),
    "load_recipe": ("quantkit.recipe", "load"),
    "Recipe": ("quantkit.recipe", "Recipe"),
    "Scheme": ("quantkit.scheme", "Scheme"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    import importlib

    module, attribute = _WHERE[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value
