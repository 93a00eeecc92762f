"""The text of a rank's local graphs for a step in micro-batches: those of its turns, one after the other, written
as :mod:`hetspmd.lower.graph_text` writes a forward.

A value has two forms, what the micro-batch has of the step's and what the device has of that. ``sums`` is the list
of what is summed over the micro-batches.

::

    micro-batch 1, with what is after the loop
      %value0_up_weight: float32[2, 8] | replicated, shard(0) = up.weight, from the first turn
      ...
      %add_mm_1_2 = accumulate(%sums, 0, %mm_1: float32[2, 8])
      return gradient of up.weight = %mm_1: float32[2, 8]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import fx

from hetspmd.lower.emit import VALUE
from hetspmd.lower.graph_text import GraphText, graphs_text
from hetspmd.lower.local_program import LocalGraphs
from hetspmd.lower.passes import Graphs
from hetspmd.lower.turn_writer import TurnGraph
from hetspmd.lower.turns import TurnGraphs
from hetspmd.placement import is_sharded
from hetspmd.program.level_layout import LevelKey


def local_text(graphs: Graphs) -> str:
    """The text of a rank's graphs, whatever they are."""
    if isinstance(graphs, TurnGraphs):
        texts = ["\n".join(_TurnText(graphs, turn).lines()) for turn in graphs.turns]
        return "\n\n".join(texts) + "\n"
    assert isinstance(graphs, LocalGraphs), graphs
    return graphs_text(graphs)


class _TurnText(GraphText):
    def __init__(self, graphs: TurnGraphs, turn: TurnGraph) -> None:
        super().__init__(turn)
        self.turn, self.steps = turn, graphs.steps

    def lines(self) -> Iterator[str]:
        turn = self.turn
        if turn.of != turn.number:
            yield f"micro-batch {turn.number}, by the graph of micro-batch {turn.of}, of other rows"
            return
        around = [word for word, there in (("before", turn.first), ("after", turn.last)) if there]
        with_ = f", with what is {' and '.join(around)} the loop" if around else ""
        yield f"micro-batch {turn.number}{with_}"
        given = [node for node in turn.forward.nodes if node.op == "placeholder"]
        yield from self.calls(turn.forward, list(map(self._source, given)), self._results)

    def _source(self, placeholder: fx.Node) -> str:
        key = placeholder.meta.get(VALUE)
        own = re.match(r"own\d+_", placeholder.name) is not None
        if key is None:
            return "where this micro-batch draws" if own else placeholder.name
        if own:
            return f"{self._of(key)}, of this micro-batch"
        if not self.turn.first:
            return f"{self._of(key)}, from the first turn"
        kinds = (
            ("parameter", self.reference.parameters),
            ("buffer", self.reference.buffers),
            ("input", self.reference.inputs),
        )
        kind = next(
            (kind for kind, tensors in kinds for t in tensors if t.tensor == key[0]), "the loss's gradient"
        )
        return f"{kind} {self._of(key)}"

    def _results(self, returned: Any) -> Iterator[tuple[str, Any]]:
        steps = self.steps
        joined = [key for key in steps.leaving if is_sharded(key[1])]
        if not self.turn.last:
            handed = [f"{self._of(key)}, for later turns" for key in (*steps.read, *steps.carried)]
            names = [*(f"rows of {self._of(key)}" for key in joined), *(handed if self.turn.first else ())]
            yield from zip(names, returned, strict=True)
            return
        rows, (loss, outputs, holders, gradients) = returned
        yield from ((f"rows of {self._of(key)}", value) for key, value in zip(joined, rows, strict=True))
        if loss is not None:
            yield "loss", loss
        reference = self.reference
        names = [f"output[{i}]" for i, key in enumerate(steps.outputs) if not is_sharded(key[1])]
        yield from zip(names, outputs, strict=True)
        updated = [f"buffer {b.name}" for b in reference.buffers if b.updated is not None]
        updated += [f"parameter {p.name}" for p in reference.parameters if p.updated is not None]
        yield from zip(updated if steps.buffers else (), holders, strict=True)
        learned = [p.name for p in reference.parameters if p.gradient is not None]
        for name, value in zip(learned if steps.gradients else (), gradients, strict=True):
            yield f"gradient of {name}", value

    def _of(self, key: LevelKey) -> str:
        return self.reference.tensors[key[0]].name
