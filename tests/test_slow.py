"""The list of slow tests names tests that there are."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_what_is_listed_exists() -> None:
    listed = (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    assert listed == sorted(set(listed))
    functions: dict[str, set[str]] = {}
    for line in listed:
        file, _, name = line.partition("::")
        if file not in functions:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            functions[file] = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert name.partition("[")[0].rpartition("::")[2] in functions[file], line
