"""What the lines of docs/training.md for libraries call and give, the scripts that the tests run do too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "Accelerate": "script_accelerate", "Hugging Face Trainer": "script_trainer", "PEFT / LoRA": "script_lora",
    "Lightning": "script_lightning",
}  # fmt: skip


def section(title: str) -> str:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^##)", text, re.M | re.S)
    assert isinstance(found, str)
    return found


def calls(code: str) -> dict[str, set[str]]:
    """The functions that are called, by their last names, and their keywords: ``lr``, or ``gather_state=True``
    of a flag. A dict's keys count as keywords where the call has ``**``."""
    tree = ast.parse(code)
    keys = {
        k.value
        for d in ast.walk(tree)
        if isinstance(d, ast.Dict)
        for k in d.keys
        if isinstance(k, ast.Constant)
    }
    found: dict[str, set[str]] = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute | ast.Name):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
            said = found.setdefault(name, set())
            for given in call.keywords:
                flag = isinstance(given.value, ast.Constant) and isinstance(given.value.value, bool)
                if given.arg is None:
                    said |= keys
                else:
                    said.add(f"{given.arg}={ast.unparse(given.value)}" if flag else given.arg)
    return found


def missing(page: str, script: str) -> list[str]:
    """What the page's lines call, or give, and the script does not."""
    has = calls(script)
    return [
        f"{name}({', '.join(sorted(given - has.get(name, set())))})"
        for name, given in calls(page).items()
        if name not in has or given - has[name]
    ]


@pytest.mark.parametrize("title", SCRIPTS)
def test_the_page_has_the_scripts_calls(title: str) -> None:
    script = (ROOT / "tests" / "scripts" / f"{SCRIPTS[title]}.py").read_text(encoding="utf-8")
    page = "".join(re.findall(r"^```py\n(.*?)^```$", section(title), re.M | re.S))
    assert len(calls(page)) >= 4
    assert "hetspmd.HAP(" in page
    assert missing(page, script) == []


def test_what_a_script_does_not_do_is_named() -> None:
    script = "model = HAP(model, gather_state=True)\noptions = {'rate': 1}\nf(**options)"
    assert missing("HAP(net, gather_state=True)\nf(rate=2)", script) == []
    assert missing("HAP(net, gather_state=False)", script) == ["HAP(gather_state=False)"]
    assert missing("x.g()\nf(speed=2)", script) == ["g()", "f(speed)"]
