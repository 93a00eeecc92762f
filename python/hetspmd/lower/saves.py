"""What a compiled step saves for its backward: the values that are least to hold.

A compiler computes an elementwise op where its result is read, at next to no cost. So the backward need not be
given what it reads: what elementwise ops compute may be computed again from less. Which values are saved is a
minimum cut between what the forward computes and what the backward reads, through the elementwise ops and views
between them; a value's capacity is its bytes. ``torch.compile`` decides so for what it compiles at once, forward
and backward (``min_cut_rematerialization_partition``); here collectives stand between, and every rank cuts its
own graphs.

A value is not computed again

- where an op that is not elementwise reads it in the backward: it would be written to memory there all the same;
- if another op that is not elementwise stands, in the forward, between its operands' first reader and itself: the
  operands of a sum of residuals would be held, or computed again, from one end of a model to the other.

Nothing changes for what is not compiled: there each op that is computed again reads and writes memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import prod
from typing import Any

import networkx as nx
import torch
from torch import fx

from hetspmd.lower.aliases import SILENT_VIEWS
from hetspmd.lower.emit import DTYPE, SHAPE, VALUE, item, take_saved
from hetspmd.lower.local_program import LocalGraphs
from hetspmd.lower.small_values import in_windows, reading_less
from hetspmd.trace.compat.compilers import POOLED_INDICES
from hetspmd.trace.compat.tensors import is_op
from hetspmd.trace.values import torch_dtype

aten = torch.ops.aten

FUSED = frozenset({"aten::_to_copy", POOLED_INDICES})
"""Elementwise ops that torch does not tag so."""

PASSED = frozenset(
    f"aten::{name}"
    for name in (
        *("sum", "mean", "amax", "amin", "max", "min", "var_mean", "prod", "any", "all"),
        "max_pool2d_with_indices_backward",
    )
)
"""Other ops that compilers join with what computes their operand."""

NEARER, FARTHEST = 1.1, 100
"""A value counts so many times more for each op between it and the nearest one that the backward reads, up to so
many ops: of values of one size the nearest is saved, from which least is computed again."""

UNKNOWN = 1 << 50
"""Bytes of what may be no tensor: it is saved where it has to be."""

WRITTEN_FOR_IT = 2
"""A value that only elementwise ops read counts so often: it is written to memory only to be saved."""


def save_least(graphs: LocalGraphs) -> None:
    """Rewrite the graphs of a rank, in place, so that the forward saves the values of a minimum cut, and the
    backward computes what it reads from those."""
    if graphs.backward is None or not (before := _results(graphs.forward)[3]):
        return
    forward, backward = graphs.forward, graphs.backward
    saved = reading_less(forward, backward, before, graphs.device)
    saved = in_windows(forward, saved, graphs.device)
    read = [saved[take.args[1]] for take in backward.nodes if take.target is take_saved]
    cut = _Cut(graphs, backward, saved, read)
    least = cut.least()
    better = cut.bytes_of(least) < cut.bytes_of(before)
    _Backward(backward, saved, set(least if better else read)).rewritten(forward)
    for node in reversed(forward.nodes):
        if is_fused(node) and not node.users:
            forward.erase_node(node)


def _results(forward: fx.Graph) -> tuple[Any, Any, Any, list[fx.Node]]:
    """The loss, outputs, buffers and saved values that a forward returns."""
    results: Any = forward.output_node().args[0]
    loss, outputs, buffers, saved = results
    return loss, outputs, buffers, saved


def is_view(node: fx.Node) -> bool:
    """Whether a call shows memory that it is given as another tensor, or may."""
    if node.target is item:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    if not is_op(node.target):
        return False
    returns = node.target._schema.returns
    aliases = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return aliases or node.target in SILENT_VIEWS - {aten.einsum.default}


def is_fused(node: fx.Node) -> bool:
    """Whether a compiler computes a call where its result is read: an elementwise op without random numbers that
    writes to no operand, a tensor that is filled, or a view."""
    if node.op == "get_attr" or is_view(node):
        return True
    if not is_op(node.target) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    schema = node.target._schema
    if schema.name in FUSED:
        return True
    if not schema.name.startswith("aten::") or schema.is_mutable or len(schema.returns) != 1:
        return False
    return torch.Tag.pointwise in node.target.tags or not node.all_input_nodes


def needs_memory(node: fx.Node) -> bool:
    """Whether what a call reads is in memory when it runs, since a compiler cannot compute it on the way."""
    if is_fused(node):
        return False
    return not is_op(node.target) or node.target._schema.name not in PASSED


class _Cut:
    """The minimum cut for what a backward reads of a forward. ``saved``: the values that it may take, by their
    places; ``read``: those that it takes."""

    def __init__(
        self, graphs: LocalGraphs, backward: fx.Graph, saved: list[fx.Node], read: list[fx.Node]
    ) -> None:
        self._order = {node: place for place, node in enumerate(graphs.forward.nodes)}
        self._reference, self._shape = graphs.reference, graphs.local_shape
        self._held = {p.tensor for p in graphs.reference.parameters}
        self._held |= {b.tensor for b in graphs.reference.buffers}
        self._saved, self._read = saved, read
        self._written = self._written_in(backward) | self._far()
        self._distance = self._distances()

    def least(self) -> list[fx.Node]:
        """The values of the cut, in the order of the forward."""
        network = nx.DiGraph()
        network.add_node("computed")
        seen: dict[fx.Node, None] = {}
        todo = list(dict.fromkeys(self._read))
        for node in todo:
            network.add_edge(self._ends(node)[1], "read")
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen[node] = None
            into, out = self._ends(node)
            network.add_edge(into, out, capacity=self._capacity(node))
            if not is_fused(node) or node in self._written:
                network.add_edge("computed", into)
                continue
            for operand in node.all_input_nodes:
                network.add_edge(self._ends(operand)[1], into)
                todo.append(operand)
        _, (before, _) = nx.minimum_cut(network, "computed", "read")
        found = [node for node in seen if self._ends(node)[0] in before and self._ends(node)[1] not in before]
        return sorted(found, key=self._order.__getitem__)

    def bytes_of(self, nodes: Iterable[fx.Node]) -> int:
        """Bytes of the memory in which values lie that does not stay anyway."""
        sizes: dict[fx.Node, int] = {}
        for node in nodes:
            owner, size = self._memory(node)
            sizes[owner] = max(size, sizes.get(owner, 0))
        return sum(sizes.values())

    def _ends(self, node: fx.Node) -> tuple[int, int]:
        return 2 * self._order[node], 2 * self._order[node] + 1

    def _memory(self, node: fx.Node) -> tuple[fx.Node, int]:
        """What has the memory in which a value lies, and the bytes of that, as far as they are known."""
        size = self._bytes(node)
        while is_view(node):
            node = node.all_input_nodes[0]
            known = self._bytes(node)
            size = size if known is None else known
        held = node.op == "placeholder" and node.meta.get(VALUE, (-1,))[0] in self._held
        if node.op == "get_attr" or held:
            return node, 0
        return node, UNKNOWN if size is None else size

    def _bytes(self, node: fx.Node) -> int | None:
        if SHAPE in node.meta:
            return _size(node.meta[SHAPE], node.meta[DTYPE])
        if VALUE not in node.meta:
            return None
        key = node.meta[VALUE]
        return _size(self._shape(key), self._reference.tensors[key[0]].dtype)

    def _capacity(self, node: fx.Node) -> int:
        """What it counts to save a value."""
        _, size = self._memory(node)
        if size in (0, UNKNOWN):
            return size
        written = not is_fused(node) or any(map(needs_memory, _users(node)))
        far = NEARER ** min(self._distance[node], FARTHEST)
        return round(size * far * (1 if written else WRITTEN_FOR_IT))

    def _written_in(self, backward: fx.Graph) -> set[fx.Node]:
        """Values that the backward has to have in memory: other ops than elementwise ones read them."""
        found = set()
        for take in backward.nodes:
            if take.target is not take_saved:
                continue
            todo = [take]
            while todo:
                users = _users(todo.pop())
                if any(map(needs_memory, users)):
                    found.add(self._saved[take.args[1]])
                    break
                todo += filter(is_view, users)
        return found

    def _far(self) -> set[fx.Node]:
        """Elementwise ops that stand behind others, in the forward, which need their operand in memory before."""
        found: set[fx.Node] = set()
        for node in self._order:
            users = _users(node)
            if len(users) > 1 and (first := self._first_written(users)) is not None:
                found.update(u for u in users if is_fused(u) and not is_view(u) and self._order[u] > first)
        return found

    def _first_written(self, users: list[fx.Node]) -> int | None:
        """The place of the first op that is not elementwise to which a value gets through elementwise ones, if it
        stands before the last of ``users``."""
        last = max(self._order[user] for user in users)
        todo = [self._order[user] for user in users]
        nodes = {self._order[user]: user for user in users}
        heapify(todo)
        while todo:
            place = heappop(todo)
            if needs_memory(nodes[place]):
                return place
            for user in _users(nodes[place]):
                if self._order[user] < last and self._order[user] not in nodes:
                    nodes[self._order[user]] = user
                    heappush(todo, self._order[user])
        return None

    def _distances(self) -> dict[fx.Node, int]:
        """Of each value, how many ops stand between it and one that the backward reads."""
        required, found = set(self._read), dict[fx.Node, int]()
        for node in reversed(self._order):
            after = (found[user] + 1 for user in _users(node))
            found[node] = 1 if node in required else min(after, default=FARTHEST)
        return found


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * torch_dtype(dtype).itemsize


def _users(node: fx.Node) -> list[fx.Node]:
    """The calls that read a value."""
    return [user for user in node.users if user.op != "output"]


class _Backward:
    """A backward that is to be given other values than it is written for. ``before``: those of the forward that it
    takes, by their places; ``saved``: those that are to be saved."""

    def __init__(self, graph: fx.Graph, before: list[fx.Node], saved: set[fx.Node]) -> None:
        self._graph, self._before, self._saved = graph, before, saved
        self._values: dict[fx.Node, fx.Node] = {}
        self._taken: dict[fx.Node, fx.Node] = {}

    def rewritten(self, forward: fx.Graph) -> None:
        """Write it, and what the forward saves."""
        for take in [node for node in self._graph.nodes if node.target is take_saved]:
            with self._graph.inserting_before(take):
                take.replace_all_uses_with(self._value(self._before[take.args[1]], take))
            self._graph.erase_node(take)
        for place, take in enumerate(self._taken.values()):
            take.args = (take.args[0], place)
        loss, outputs, buffers, _ = _results(forward)
        forward.output_node().args = ((loss, outputs, buffers, list(self._taken)),)

    def _value(self, node: fx.Node, take: fx.Node) -> fx.Node:
        """A value of the forward, taken or computed again, before ``take``."""
        if node not in self._values:
            if node in self._saved:
                made = self._graph.call_function(take_saved, (take.args[0], len(self._taken)))
                made.meta.update({key: node.meta[key] for key in (SHAPE, DTYPE, VALUE) if key in node.meta})
                self._taken[node] = made
            else:
                for operand in node.all_input_nodes:
                    self._value(operand, take)
                made = self._graph.node_copy(node, self._values.__getitem__)
            self._values[node] = made
        return self._values[node]
