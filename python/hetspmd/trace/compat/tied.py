"""One placeholder and one gradient of a joint graph for what is one tensor under several names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from hetspmd.trace.compat.roles import InputRole, OutputRole


def merge_tied(
    module: GraphModule, inputs: list[InputRole], outputs: list[OutputRole], first_names: dict[str, str]
) -> tuple[list[InputRole], list[OutputRole]]:
    """Make one placeholder of those that are one tensor under several names, and one gradient, their sum.

    ``first_names`` maps every traced name to the first name of its tensor. The export gives each name of a
    tied parameter a placeholder and a partial gradient of its own. Returns the remaining roles; the graph is
    changed in place.
    """
    graph = module.graph
    nodes = list(graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    first_nodes: dict[tuple[str, str], Node] = {}
    in_roles: list[InputRole] = []
    for node, in_role in zip(placeholders, inputs, strict=True):
        key = (in_role.kind, first_names.get(in_role.name, in_role.name))
        if in_role.kind in ("parameter", "buffer") and key in first_nodes:
            node.replace_all_uses_with(first_nodes[key])
            graph.erase_node(node)
            continue
        if in_role.kind in ("parameter", "buffer"):
            first_nodes[key] = node
        in_roles.append(replace(in_role, name=key[1]))
    output = nodes[-1]
    values: list[Any] = []
    out_roles: list[OutputRole] = []
    position: dict[tuple[str, str], int] = {}
    for value, role in zip(cast(Any, output.args[0]), outputs, strict=True):
        key = (role.kind, first_names.get(role.name, role.name))
        mutation = role.kind.endswith("_mutation")
        if (role.kind == "gradient" or mutation) and role.name and key in position:
            before = values[position[key]]
            if before is None or (mutation and value is not None):
                values[position[key]] = value
            elif value is not None:
                with graph.inserting_before(output):
                    total = graph.call_function(torch.ops.aten.add.Tensor, (before, value))
                    total.meta["val"] = before.meta["val"]
                values[position[key]] = total
            continue
        position[key] = len(values)
        values.append(value)
        out_roles.append(replace(role, name=key[1]))
    output.args = (values,)
    return _without_tangents_of_updates(graph, in_roles), out_roles


def _without_tangents_of_updates(graph: Graph, roles: list[InputRole]) -> list[InputRole]:
    """Take away the incoming gradients of parameters that the forward changes: only the loss has one. What is left
    of a sum of such a tangent and a gradient is the gradient."""
    rest: list[InputRole] = []
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, role in zip(placeholders, roles, strict=True):
        if role.kind != "tangent" or not role.name:
            rest.append(role)
            continue
        _erase_zero(graph, node)
    return rest


def _erase_zero(graph: Graph, node: Node) -> None:
    """Erase a placeholder that is zero."""
    output = next(n for n in graph.nodes if n.op == "output")
    for user in list(node.users):
        if user is output:
            output.args = ([None if v is node else v for v in cast(Any, output.args[0])],)
        elif user.target is torch.ops.aten.add.Tensor and len(user.args) == 2 and not user.kwargs:
            left, right = user.args
            other = right if left is node else left
            if isinstance(other, Node) and other is not node and _same_type(other, user):
                user.replace_all_uses_with(other)
                graph.erase_node(user)
    if node.users:
        meta = node.meta["val"]
        with graph.inserting_before(next(iter(node.users))):
            kwargs = {"dtype": meta.dtype, "device": meta.device}
            zero = graph.call_function(torch.ops.aten.zeros.default, (list(meta.shape),), kwargs)
        zero.meta["val"] = meta
        node.replace_all_uses_with(zero)
    graph.erase_node(node)


def _same_type(one: Node, other: Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype)
