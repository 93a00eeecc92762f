"""The rule of the copy at a cut between segments: the identity, in every form (HAP 5.2).

The theory gives the copy lengths of its own (:func:`hetspmd.rules.theory.derive`): where the factor of a dim is
divided, the copy is ``shard(d)'``, which an all-to-all turns into ``shard(d)``.
"""

from __future__ import annotations

from hetspmd.rules.factor_places import Factors
from hetspmd.rules.registry import rule
from hetspmd.rules.rule import Call, OpRule
from hetspmd.rules.terms import linear_sets
from hetspmd.trace.graph import REBALANCE


@rule(REBALANCE)
def rebalance(call: Call) -> OpRule:
    """(x): linear."""
    factors = Factors(call)
    for d in range(call.out.ndim):
        factors.add(f"d{d}", {0: d}, {0: d})
    return OpRule(factors.done(), linear_sets(call, [(0,)]), alias=True)
