"""What torch may change without a word is imported in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hetspmd

ROOT = Path(hetspmd.__file__).parent


def private(tree: ast.AST) -> Iterator[str]:
    """The imports of torch's with a name that begins with one underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "torch" and any(p.startswith("_") and not p.startswith("__") for p in parts):
                yield name


def test_private_imports_are_in_one_package() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in ROOT.rglob("*.py")
        for name in private(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert any(name.startswith("trace/compat/") for name in found)
    assert not [name for name in found if not name.startswith("trace/compat/")]
