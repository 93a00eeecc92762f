"""Fused attention with dropout, of a model on a GPU, as ops that may be divided.

What a fused kernel draws is of the whole call (:mod:`hetspmd.trace.dropout_attention`), so that a device could not
compute some samples or heads of it. :func:`with_divisible_dropout` puts the project's own ops in its place,
forward and backward, with seeds that are drawn before. A kernel stays as it is, and then runs whole on every
device, where a gradient of its bias is wanted, or where something else reads the state of its generator.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch.fx import Graph, GraphModule, Node

from hetspmd.trace.compat.tensors import OpOverload
from hetspmd.trace.dropout_attention import NAMESPACE, STATE

aten = torch.ops.aten

_FORWARDS: Final = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
_BACKWARDS: Final = frozenset(
    {
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    }
)
_SAME: Final = frozenset({aten.detach.default, aten.alias.default})
_TENSORS: Final = ("query", "key", "value", "attn_bias")
_OPTIONS: Final = ("dropout_p", "is_causal", "scale")


def with_divisible_dropout(module: GraphModule) -> GraphModule:
    """The joint graph, in which the kernels are exchanged."""
    graph = module.graph
    for node in [n for n in graph.nodes if n.target in _FORWARDS]:
        arguments = _arguments(node)
        backward = list(_backwards(node))
        if arguments["dropout_p"] > 0.0 and _is_known(node, backward):
            _exchange(graph, node, arguments, backward)
    graph.lint()
    return module


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by their names, with the defaults of those that it leaves out."""
    arguments, op = {}, cast(OpOverload, node.target)
    for place, argument in enumerate(op._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        value = node.kwargs.get(argument.name, default)
        arguments[argument.name] = node.args[place] if place < len(node.args) else value
    return arguments


def _users(node: Node) -> Iterator[Node]:
    """Who reads a result, itself or a copy that shares its memory."""
    for user in node.users:
        if user.target in _SAME:
            yield from _users(user)
        else:
            yield user


def _results(node: Node) -> Mapping[int, Sequence[Node]]:
    """The nodes that take each result of a call with several."""
    found: dict[int, list[Node]] = {}
    for user in node.users:
        if user.target is operator.getitem:
            found.setdefault(cast(int, user.args[1]), []).append(user)
    return found


def _backwards(node: Node) -> Iterator[Node]:
    """The calls that compute the gradient of a forward: who reads its log-sum-exps. Its output may be the query of
    another attention, whose gradient reads it, too."""
    found = (u for t in _results(node).get(1, ()) for u in _users(t) if u.target in _BACKWARDS)
    return iter(dict.fromkeys(found))


def _is_known(node: Node, backward: Sequence[Node]) -> bool:
    """Whether nothing but its gradient reads of a forward what the project's op does not have."""
    if any(_arguments(b).get("grad_input_mask", (False,) * 4)[3] for b in backward):
        return False
    if len(cast(Node, node.args[0]).meta["val"].shape) != 4:
        return False
    others = [t for place, taken in _results(node).items() if place >= STATE for t in taken]
    return all(user in backward for t in others for user in _users(t))


def _exchange(graph: Graph, node: Node, arguments: dict[str, Any], backward: Sequence[Node]) -> None:
    ops = getattr(torch.ops, NAMESPACE)
    query = arguments["query"].meta["val"]
    samples_and_heads = list(query.shape[:2])
    with graph.inserting_before(node):
        seeds = graph.call_function(
            aten.rand.default,
            (samples_and_heads,),
            {"dtype": torch.float64, "device": query.device, "pin_memory": False},
        )
        seeds.meta = {**node.meta, "val": query.new_empty(samples_and_heads, dtype=torch.float64)}
        args = *(arguments.get(n) for n in _TENSORS), seeds, *(arguments[n] for n in _OPTIONS)
        forward = _call(graph, node, ops.dropout_attention.default, args)
        state = graph.call_function(operator.getitem, (forward, STATE))
        state.meta = {**node.meta, "val": forward.meta["val"][STATE]}
    of_forward = _results(node)
    for place in range(STATE):
        for result in of_forward.get(place, ()):
            result.replace_input_with(node, forward)
            result.meta["val"] = forward.meta["val"][place]
    for call in backward:
        _exchange_backward(graph, call, arguments.get("attn_bias"), state)
    for place, taken in of_forward.items():
        for result in taken if place >= STATE else ():
            _erase(graph, result)
    for unread in (state, node):
        if not unread.users:
            graph.erase_node(unread)


def _exchange_backward(graph: Graph, call: Node, bias: Node | None, state: Node) -> None:
    of = _arguments(call)
    gradient = of.get("grad_out", of.get("grad_out_"))
    args = gradient, *(of[n] for n in _TENSORS[:3]), bias, of["out"], of["logsumexp"], state
    with graph.inserting_before(call):
        op = getattr(torch.ops, NAMESPACE).dropout_attention_backward.default
        own = _call(graph, call, op, (*args, *(of[n] for n in _OPTIONS)))
    for place, taken in _results(call).items():
        for result in taken:
            if place < len(own.meta["val"]):
                result.replace_input_with(call, own)
            else:  # of the bias, whose gradient is not wanted
                graph.erase_node(result)
    graph.erase_node(call)


def _call(graph: Graph, of: Node, target: Any, args: tuple[Any, ...]) -> Node:
    """A call in the place of another one, of the same module and phase, with its fake results."""
    node = graph.call_function(target, args)
    with args[0].meta["val"].fake_mode:
        value = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
    node.meta = {**of.meta, "val": value}
    return node


def _erase(graph: Graph, node: Node) -> None:
    """Erase a node that nothing reads, and copies of it that nothing reads."""
    for user in list(node.users):
        if user.target in _SAME:
            _erase(graph, user)
    if not node.users:
        graph.erase_node(node)
