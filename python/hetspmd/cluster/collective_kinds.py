"""The kinds of collectives that links carry, by which curves are measured and programs are written."""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["GATHERS", "KIND_TEXT", "SCATTERS", "Kind"]

Kind = Literal[
    "all_reduce",
    "reduce_scatter",
    "grouped_reduce",
    "ring_reduce",
    "exchange_reduce",
    "all_gather",
    "grouped_broadcast",
    "ring_gather",
    "all_to_all",
    "rebalance",
]

KIND_TEXT: dict[Kind, str] = {
    "all_reduce": "All-Reduce",
    "reduce_scatter": "Reduce-Scatter",
    "grouped_reduce": "Grouped-Reduce",
    "ring_reduce": "Ring-Reduce",
    "exchange_reduce": "Exchange-Reduce",
    "all_gather": "All-Gather",
    "grouped_broadcast": "Grouped-Broadcast",
    "ring_gather": "Ring-Gather",
    "all_to_all": "All-To-All",
    "rebalance": "Rebalance",
}

SCATTERS: Final[frozenset[Kind]] = frozenset(
    ("reduce_scatter", "grouped_reduce", "ring_reduce", "exchange_reduce")
)
"""The implementations of partial to shard(dim)."""

GATHERS: Final[frozenset[Kind]] = frozenset(("all_gather", "grouped_broadcast", "ring_gather"))
"""The implementations of shard(dim) to replicated."""
