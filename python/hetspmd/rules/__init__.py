"""Rules: what may be sharded, op by op, and the Hoare triples that follow."""

from __future__ import annotations

from typing import Any

from hetspmd.rules import ops, registry
from hetspmd.rules.registry import registered, unregister
from hetspmd.rules.rule import SUM, Call, Cut, Factor, Local, OpRule

rule = registry.rule


def check(op: str, samples: Any = None, *, missing: bool = True) -> Any:
    """Test the rule of an op by brute force; see :func:`hetspmd.rules.oracle.check`."""
    from hetspmd.rules import oracle

    return oracle.check(op, samples, missing=missing)


__all__ = [
    "SUM",
    "Call",
    "Cut",
    "Factor",
    "Local",
    "OpRule",
    "check",
    "ops",
    "registered",
    "rule",
    "unregister",
]
