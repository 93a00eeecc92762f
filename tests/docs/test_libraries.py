"""The lines of docs/training.md for libraries are those of the scripts that the tests run."""

from __future__ import annotations

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


@pytest.mark.parametrize("title", SCRIPTS)
def test_the_page_has_the_scripts_calls(title: str) -> None:
    script = (ROOT / "tests" / "scripts" / f"{SCRIPTS[title]}.py").read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```$", section(title), re.M | re.S)
    calls = re.findall(r"hetspmd\.hide_ranks\(\)|gather_\w+=True|label_names=\[.labels.\]", "".join(blocks))
    assert blocks
    assert "hetspmd.HAP(" in "".join(blocks)
    assert "hetspmd.HAP(" in script
    assert all(call in script or call.replace("=", '": ') in script for call in calls)
