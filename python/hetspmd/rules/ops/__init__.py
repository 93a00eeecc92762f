"""The built-in rules, one module per kind of op. Importing this package registers all of them.

Every module in the package is imported, in alphabetical order; a new file needs no entry here.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

MODULES: Final = tuple(sorted(module.name for module in iter_modules(__path__)))

for _name in MODULES:
    import_module(f"{__name__}.{_name}")
