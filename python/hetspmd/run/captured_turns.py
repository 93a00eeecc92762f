"""``HAP(..., cuda_graphs="auto")`` of a step in micro-batches: the stretches of each turn are captured.

Turns that are alike share a graph, and so its captures: a step repeats them once for each of these turns.

- What a turn has for itself, its rows above all, lies elsewhere in each turn. It is copied to where the captures
  read it.
- What the first turn leaves for the others, gathered parameters above all, is copied once a step to a place that
  stays, where the stretches of all turns read it.
- The sums are outputs of the first turn's stretches, to which those of the others add in place.
- Where a turn draws random numbers is written into its graph, as far as turns that share it draw alike. What draws
  a slice of its own of numbers that several ranks draw runs between the stretches then.

The backward of the step only multiplies the gradients by the one that comes in, and stays as it is: captured, it
would hold them twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from hetspmd.lower import calls
from hetspmd.run.stretches import Make, Taken, cut
from hetspmd.run.turn_graphs import calls_of_turns, sum_of, with_sums_as_ops, with_turns


class Stretch(nn.Module):
    """What stands for a stretch."""

    moves: frozenset[int] = frozenset()
    """Which of its values lie elsewhere from one run to the next."""


@dataclass(frozen=True)
class TurnsCut:
    """The forward of a step in micro-batches with its turns in stretches. ``turns``: what each turn of the device
    runs, in their order."""

    forward: fx.GraphModule
    turns: tuple[fx.GraphModule, ...]


def cut_turns(forward: fx.GraphModule, taken: Taken, make: Make, keep: Callable[[], nn.Module]) -> TurnsCut:
    """A copy of the forward whose turns are cut into stretches, which are what ``make`` makes of them, a
    :class:`Stretch` each. ``keep`` makes what copies a value that later turns read to where it stays."""
    turns = calls_of_turns(forward)
    first, last = turns[0], turns[-1]

    def of(turn: fx.GraphModule, nodes: list[fx.Node]) -> fx.GraphModule:
        with_ops = with_sums_as_ops(turn, first=first in nodes, last=last in nodes, moving=True)
        _write_out_draws(with_ops, nodes)
        name = f"Captured{type(turn).__name__}"
        found = cut(with_ops, name, taken, make, reads=lambda node: node.target is sum_of)
        if first in nodes and first is not last:
            _keep_what_is_left(found, first, keep)
        _mark_what_moves(found, nodes)
        return found

    copy = with_turns(forward, f"Captured{type(forward).__name__}", of)
    return TurnsCut(copy, tuple(getattr(copy, str(node.target)) for node in turns))


def constants_of_turns(forward: fx.GraphModule) -> list[fx.GraphModule]:
    """The graphs that hold the constants of a step: the forward, and each turn's."""
    return [forward, *dict.fromkeys(getattr(forward, str(n.target)) for n in calls_of_turns(forward))]


def _write_out_draws(turn: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Write into a turn in which regions it draws, where they are given to it and make no difference between the
    turns that ``nodes`` call: they are the same, or as large, of what each rank draws for itself."""
    given = [node for node in turn.graph.nodes if node.op == "placeholder"]
    for node in turn.graph.nodes:
        if node.target is not calls.draw or not isinstance(node.args[3], fx.Node):
            continue
        regions: list[Any] = [call.args[given.index(node.args[3])] for call in nodes]
        alike = node.args[4]
        sizes = [[(dim, extent) for dim, _, extent in one] for one in regions]
        if all(one == regions[0] for one in regions) or (
            not alike and all(size == sizes[0] for size in sizes)
        ):
            node.update_arg(3, regions[0])
    turn.recompile()


def _keep_what_is_left(turn: fx.GraphModule, call: fx.Node, keep: Callable[[], nn.Module]) -> None:
    """Let what the first turn, which ``call`` calls, leaves for the others be copied as soon as it is there, where
    it is not the output of a stretch."""
    graph = turn.graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    results: Any = output.args[0]
    wanted = {user.args[1] for user in call.users if user.target is operator.getitem}
    left: dict[Any, None] = dict.fromkeys(value for place, value in enumerate(results) if place in wanted)
    for number, node in enumerate(left):
        if node.op != "call_function" or (
            node.target is operator.getitem and node.args[0].op == "call_module"
        ):
            continue
        setattr(turn, f"kept_{number}", keep())
        with graph.inserting_after(node):
            kept = graph.call_module(f"kept_{number}", (node,))
        node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    graph.lint()
    turn.recompile()


def _mark_what_moves(turn: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Tell the stretches of a turn which of their values are not the same in all the turns that ``nodes`` call."""
    given = [node for node in turn.graph.nodes if node.op == "placeholder"]
    moving: set[Any] = {
        placeholder
        for place, placeholder in enumerate(given)
        if any(node.args[place] != nodes[0].args[place] for node in nodes)
    }
    for node in turn.graph.nodes:
        if node.op == "call_module":
            stretch = getattr(turn, str(node.target))
            if isinstance(stretch, Stretch):
                stretch.moves = frozenset(i for i, value in enumerate(node.args) if value in moving)
        elif any(value in moving for value in node.all_input_nodes):
            moving.add(node)
