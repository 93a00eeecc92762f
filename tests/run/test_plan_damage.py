"""Plan files damaged at random: named errors, or the same plan; behind a right checksum also one that runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from plan_files import plans, resealed, texts

from damage import damaged_bytes, damaged_tree
from hetspmd.codec.records import encode
from hetspmd.errors import PlanError
from hetspmd.lower import lower_plan
from hetspmd.plan.plan import Plan

CHUNK = 50


def lower_everywhere(plan: Plan) -> None:
    for rank in range(plan.cluster.ranks):
        lower_plan(plan, rank, torch.device("cpu"))


def check_damaged_bytes(seeds: range, folder: Path) -> None:
    path, refused = folder / "plan.json", 0
    for seed in seeds:
        which = seed % len(plans())
        path.write_bytes(damaged_bytes(texts()[which].encode(), random.Random(seed)))
        try:
            found = Plan.load(path)
        except PlanError:
            refused += 1
        else:
            assert found == plans()[which], f"seed {seed}: another plan was read"
            assert found.digest == plans()[which].digest, seed
    assert refused > 0.9 * len(seeds)


def check_damaged_trees(seeds: range) -> None:
    refused = 0
    for seed in seeds:
        which = seed % len(plans())
        tree = encode(plans()[which])
        tree["considered"] = []  # what was compared is told, and nothing runs by it
        text = resealed(damaged_tree(tree, random.Random(seed)))
        try:
            found = Plan.from_json(text)
        except PlanError:
            refused += 1
            continue
        assert found.to_json() == text, seed
        if found != plans()[which]:  # a number or a name that nothing in the file contradicts
            lower_everywhere(found)
            assert str(found), seed
    assert refused > 0.6 * len(seeds)  # of fifty seeds it is between 0.64 and 0.84


@pytest.mark.parametrize("first", range(0, 150, CHUNK))
def test_damaged_files_are_refused(first: int, tmp_path: Path) -> None:
    check_damaged_bytes(range(first, first + CHUNK), tmp_path)


@pytest.mark.parametrize("first", range(0, 150, CHUNK))
def test_damage_behind_a_right_checksum_is_refused_or_runs(first: int) -> None:
    check_damaged_trees(range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_many_damaged_files_are_refused(first: int, tmp_path: Path) -> None:
    check_damaged_bytes(range(first, first + 250), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_much_damage_behind_a_right_checksum_is_refused_or_runs(first: int) -> None:
    check_damaged_trees(range(first, first + 250))
