"""Rules say, op by op, what may be sharded, and which triples follow."""

from __future__ import annotations

from typing import Any

from hetspmd.rules import ops, registry
from hetspmd.rules.registry import registered, unregister
from hetspmd.rules.rule import SUM, Call, Cut, Factor, Local, OpRule

rule = registry.rule


def check(op: str, samples: Any = None, *, missing: bool = True) -> Any:
    """Test the rule of an op by brute force.

    Each row of the rule is tried on inputs that are split unevenly over one to three devices, and the joined
    results are compared with the op on the whole tensors. Dims of three to eight elements, all different,
    test most; so do several values of each option.

    Args:
        op: The op's name.
        samples: Calls ``(args, kwargs)`` with concrete tensors, or a function that returns a list of them; by
            default the samples that come with hetspmd.
        missing: Look as well for rows that hold and that the rule lacks.

    Returns:
        An :class:`~hetspmd.rules.oracle.OracleReport`.

    Raises:
        RuleError: The op has no rule or no samples.
    """
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
