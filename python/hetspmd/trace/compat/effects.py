"""Ops with effects in a joint graph, as plain ops.

With functionalization torch threads tokens through ops that raise errors or print, so that none is left out or
moved: ``with_effects(token, op, *args)`` gives the next token and what the op gives. The check that a matrix can be
inverted (``aten._linalg_check_errors``) is such an op. Without functionalization the op stands there itself, and a
program has no use for the tokens, which hold nothing.
"""

from __future__ import annotations

import operator
from typing import Any

from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
)
from torch._higher_order_ops.effects import with_effects
from torch.fx import GraphModule, Node

_TOKENS = (ForwardTokenAOTInput, BackwardTokenAOTInput, ForwardTokenAOTOutput, BackwardTokenAOTOutput)


def without_effects(module: GraphModule) -> None:
    """Let ops with effects stand in a joint graph themselves, and leave out its tokens."""
    graph = module.graph
    wrapped = [node for node in graph.nodes if node.target is with_effects]
    if not wrapped:
        return
    for node in wrapped:
        _unwrap(node)
    (output,) = (node for node in graph.nodes if node.op == "output")
    pairs = [
        (value, role)
        for value, role in zip(output.args[0], output.meta["desc"], strict=True)
        if not isinstance(role, _TOKENS)
    ]
    output.args = ([value for value, _ in pairs],)
    output.meta["desc"] = [role for _, role in pairs]
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.target is with_effects or isinstance(node.meta.get("desc"), _TOKENS)):
            graph.erase_node(node)
    module.recompile()


def _unwrap(node: Node) -> None:
    """Put the op before its wrapper; the items of the wrapper's result behind the token are those of the op."""
    graph = node.graph
    token, op, *args = node.args
    values: Any = node.meta.get("val") or (None, None)
    lone = len(values) == 2
    with graph.inserting_before(node):
        plain = graph.call_function(op, tuple(args), node.kwargs)  # type: ignore[arg-type]  # an op
    plain.meta = {**node.meta, "val": values[1] if lone else tuple(values[1:])}
    for item in list(node.users):
        index = item.args[1]
        assert item.target is operator.getitem
        assert isinstance(index, int)
        if index and not lone:
            item.args = (plain, index - 1)
            continue
        item.replace_all_uses_with(plain if index else token)  # type: ignore[arg-type]  # a node
        graph.erase_node(item)
