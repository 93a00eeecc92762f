"""Plans to be written to files and damaged, and files with another value at a place."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from machine_plans import machine_plan
from small_models import case
from small_plans import ahead_plan, cluster, random_plan, segmented_plan

import hetspmd
from damage import at
from hetspmd.codec.records import encode
from hetspmd.plan.plan import Plan
from hetspmd.plan.text import VERSION, content_digest


@cache
def compiled() -> Plan:
    c = case("mlp")
    return hetspmd.compile(c.model, c.batch, cluster(4, 2, 1))


@cache
def plans() -> tuple[Plan, ...]:
    mlp, attention = case("mlp"), case("attention")
    return (
        compiled(), random_plan(mlp, 3, 1), random_plan(attention, 3, 5), segmented_plan(mlp, 3),
        ahead_plan(mlp, 3, 2), machine_plan(mlp, (2, 1, 2), 2), random_plan(case("conv"), 2, 3),
    )  # fmt: skip


@cache
def texts() -> tuple[str, ...]:
    found = tuple(plan.to_json() for plan in plans())
    assert [Plan.from_json(text) for text in found] == list(plans())
    return found


def resealed(tree: Any) -> str:
    """The file of a tree that may be damaged, with the checksum that it then has."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return f'{{"plan":{text},"sha256":"{content_digest(text)}","version":{VERSION}}}'


def edited(path: tuple[Any, ...], value: Any, plan: Plan | None = None) -> str:
    """The file of a plan with another value at a place, and the checksum that it then has."""
    tree = encode(plan or compiled())
    at(tree, path[:-1])[path[-1]] = value(at(tree, path)) if callable(value) else value
    return resealed(tree)
