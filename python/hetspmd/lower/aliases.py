"""Which calls of a local graph give memory of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hetspmd.lower.emit import item
from hetspmd.trace.compat.tensors import is_op

aten = torch.ops.aten

SILENT_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.conj_physical.default,
        aten.einsum.default,
        aten.lift.default,
        aten.lift_fresh.default,
        aten.unsafe_chunk.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    }
)
"""Ops whose result may be their operand's memory although their schema does not say so."""


def allocates(node: Any) -> bool:
    """Whether what a call gives, each of its results apart, is in memory that no other tensor has.

    Only ATen ops are believed: what rules and kernels' authors write may return its arguments.
    """
    if not isinstance(node, fx.Node) or not is_op(node.target) or node.target in SILENT_VIEWS:
        return False
    schema = node.target._schema
    return schema.name.startswith("aten::") and all(r.alias_info is None for r in schema.returns)


def allocates_each(node: fx.Node) -> bool:
    """The same, of a call or of one result of it."""
    return allocates(node.args[0]) if node.target is item else allocates(node)
