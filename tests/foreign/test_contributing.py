"""CONTRIBUTING's worked example of a case is a case."""

from __future__ import annotations

import re
from pathlib import Path

import cases_forward
from harness import CASES, check

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_worked_example() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## A case from a bug report")[1].split("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    before = set(CASES)
    code = "from __future__ import annotations\n" + re.sub(r"^   ", "", block, flags=re.MULTILINE)
    exec(compile(code, str(PAGE), "exec"), dict(vars(cases_forward)))
    (name,) = set(CASES) - before
    check(CASES.pop(name))
