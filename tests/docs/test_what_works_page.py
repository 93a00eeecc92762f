"""docs/what-works.md: its sums are those of its rows, and nothing in it is wrong, crashed or hung."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "what-works.md"
PACKAGES = (
    "transformers", "timm", "torchvision", "diffusers", "peft", "torch_geometric", "torchaudio", "accelerate",
    "lightning",
)  # fmt: skip
LEAST = {"Models": ("models", 150), "Training loops": ("loops", 30)}


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    table = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[1:]]


@pytest.mark.parametrize("title", LEAST)
def test_every_row_is_equal_or_refused_and_the_sum_is_theirs(title: str) -> None:
    found = rows(title)
    outcomes = Counter(outcome for _, _, outcome, *_ in found)
    assert set(outcomes) == {"equal", "refused"}
    called, least = LEAST[title]
    assert len(found) >= least
    assert len({tuple(row[:2]) for row in found}) == len(found), "each once"
    said = f"{len(found)} {called}: {outcomes['equal']} equal, {outcomes['refused']} refused, 0 wrong, "
    assert f"{said}0 crashed, 0 hung." in PAGE.read_text(encoding="utf-8")


def test_refusals_are_named_errors_and_packages_are_those_that_people_use() -> None:
    found = rows("Models") + rows("Training loops")
    assert set(PACKAGES) <= {package for _, package, *_ in found}
    for name, _, outcome, *_, text in found:
        if outcome == "refused":
            assert re.match(r"\w+Error: \S", text), name
