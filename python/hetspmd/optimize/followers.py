"""Modules that follow others: target networks, momentum encoders, averages of weights in the model itself.

Such a module has no gradients and the parameters of one that is trained, by name and shape. What moves it is
written outside of the step, element by element (``target.lerp_(online, 0.01)``), and needs both in the same shards.
So the follower is stored as the module that it follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import TypeVar

from hetspmd.program.stored import Stored
from hetspmd.trace.graph import Graph

T = TypeVar("T")
_Signature = tuple[tuple[str, tuple[int, ...]], ...]


def stored_as_followed(graph: Graph, stored: Stored, user_stored: frozenset[int]) -> Stored | None:
    """The storage with every follower in the shards of what it follows; None where it is so already.

    ``user_stored``: the tensors of parameters whose storage the user has said.
    """
    fixed = {p.name for p in graph.parameters if p.tensor in user_stored}
    changed = {
        f: stored[of] for f, of in followers(graph).items() if f not in fixed and stored[f] != stored[of]
    }
    return {**stored, **changed} if changed else None


def followers(graph: Graph) -> dict[str, str]:
    """Parameters of modules that follow to those that they follow."""
    idle = {p.name for p in graph.parameters if p.gradient is None}
    if not idle or len(idle) == len(graph.parameters):
        return {}
    shapes = {p.name: tuple(graph.tensors[p.tensor].shape) for p in graph.parameters}
    below = _below(shapes)
    leaders: dict[_Signature, list[str]] = {}
    for prefix, names in below.items():
        if not idle.issuperset(names):
            leaders.setdefault(_signature(prefix, names), []).append(prefix)
    alike = Counter((_parent(prefix), _signature(prefix, names)) for prefix, names in below.items())

    def one_of_many(prefix: str) -> bool:
        """Whether a module is a layer among others like it."""
        number = prefix.rpartition(".")[2].isdigit()
        return number and alike[_parent(prefix), _signature(prefix, below[prefix])] > 2

    def leader(prefix: str) -> str | None:
        of = leaders.get(_signature(prefix, below[prefix]), [])
        return max(of, key=lambda p: SequenceMatcher(None, p, prefix).ratio(), default=None)

    def follow(prefix: str) -> dict[str, str] | None:
        """What all parameters of a module without gradients follow; None unless all do."""
        if one_of_many(prefix):
            return None
        of = leader(prefix)
        if of is not None:
            return {name: of + name.removeprefix(prefix) for name in below[prefix]}
        parts = [follow(p) for p in below if _parent(p) == prefix]
        pairs = {f: of for part in parts if part is not None for f, of in part.items()}
        return pairs if len(pairs) == len(below[prefix]) else None

    followed: dict[str, str] = {}
    for prefix, names in below.items():
        if idle.issuperset(names) and not idle.issuperset(below.get(_parent(prefix), shapes)):
            followed.update(follow(prefix) or {})
    return followed


def _below(shapes: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """The parameters in each module that has a name, by the module's."""
    modules: dict[str, dict[str, T]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")[:-1]
        for n in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:n]), {})[name] = shape
    return modules


def _signature(prefix: str, names: Mapping[str, tuple[int, ...]]) -> _Signature:
    return tuple((name.removeprefix(prefix), shape) for name, shape in names.items())


def _parent(prefix: str) -> str:
    return prefix.rpartition(".")[0]
