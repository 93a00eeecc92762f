"""Whose code a module or class is: the user's, an installed package's, or torch's and the standard library's."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import distributions
from pathlib import Path as File
from types import ModuleType

_TESTING = frozenset({"_pytest", "pluggy", "pytest"})
"""What rewrites the assertions of a test's own functions, and leads from there to every test that there is."""
_FOREIGN = (
    frozenset(sys.stdlib_module_names - {"__main__", "argparse", "types"})
    | frozenset({"torch", "hetspmd", "numpy"})
    | _TESTING
)


def is_foreign(module: object) -> bool:
    """Whether a module of this name is torch's, the standard library's or our own: no part of a user's
    model."""
    return not isinstance(module, str) or _is_foreign(module)


@functools.cache
def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


def is_own(module: object) -> bool:
    """Whether a module of this name is the user's: neither foreign nor an installed package's."""
    if is_foreign(module):
        return False
    loaded_module = sys.modules.get(str(module))
    return loaded_module is None or not is_installed(loaded_module)


@functools.cache
def is_installed(module: ModuleType) -> bool:
    """Whether a module belongs to an installed package, whose registries are no part of a model."""
    file = getattr(module, "__file__", None) or ""
    above = File(file).parents
    if any(folder.name in ("site-packages", "dist-packages") for folder in above):
        return True
    depth = module.__name__.count(".") + (File(file).stem == "__init__")
    return depth < len(above) and module.__name__.partition(".")[0] in _installed_in(above[depth])


@functools.cache
def _installed_in(folder: File) -> frozenset[str]:
    """Packages that ``pip install --target`` has put into a folder, where a user's own modules may lie too.

    What was put there has a RECORD. A user's sources that ``pip install -e .`` has linked have none; only a
    ``*.egg-info`` with their names may lie beside them.
    """
    put_there = (d for d in distributions(path=[str(folder)]) if d.read_text("RECORD"))
    files = (file.parts for d in put_there for file in d.files or ())
    return frozenset(parts[0].removesuffix(".py") for parts in files)
