"""Add to tests/slow.txt what takes long in the quick run: ``python scripts/slow_tests.py JUNIT.xml``.

The file is of ``pytest -n 2 -m "not slow" --junitxml=JUNIT.xml``. A case is slow from ``CASE`` seconds on if
it is not the quickest of its function, and the quickest, or only, one from ``ONLY`` seconds on.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

CASE, ONLY = 0.8, 4.0
"""Seconds from which a case of several is slow, and the only or quickest one of its function."""
LISTED = Path(__file__).parents[1] / "tests" / "slow.txt"


def slow(junit: Path) -> set[str]:
    """The node ids of tests that took long."""
    cases: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for case in ElementTree.parse(junit).iter("testcase"):
        file, name = case.attrib["classname"].replace(".", "/") + ".py", case.attrib["name"]
        cases[f"{file}::{name.partition('[')[0]}"].append((float(case.attrib["time"]), f"{file}::{name}"))
    found: set[str] = set()
    for of_function in cases.values():
        quickest, *others = sorted(of_function)
        found |= {test for seconds, test in others if seconds > CASE}
        found |= {quickest[1]} if quickest[0] > ONLY else set()
    return found


if __name__ == "__main__":
    before = set(LISTED.read_text(encoding="utf-8").splitlines())
    added = slow(Path(sys.argv[1])) - before
    LISTED.write_text("".join(f"{test}\n" for test in sorted(before | added)), encoding="utf-8")
    print(f"{len(added)} added", *sorted(added), sep="\n")
