"""``recompute="auto"``: as few activations are computed again as a program needs to fit the devices' memory.

Of each block there are two candidates: what of it is cheap (:func:`hetspmd.trace.blocks.selective`), and all of it.
Candidates are ordered by the seconds that computing them again takes for each byte that it saves, of a whole block
those beyond its cheap part; those that are alike stand in the order of the forward: the last one saves least,
since its activations are there when the most is held. The fewest that fit are found by bisection, so that so many
candidates take about log2 of them compilations; where one of these with more is faster, it is taken. A step of
many instructions is compiled once: whether one fits with so many candidates is asked of ZeRO-3 alone, which each
compilation considers and which is among the programs that hold least.

With ``micro_batches="auto"`` there are two ways to fit. The fewest micro-batches with which a program fits when all
blocks are computed again are one candidate, with as few blocks as fit; the fewest with which it fits without are
the other. The one of fewer predicted seconds is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.model import CostModel
from hetspmd.errors import MemoryLimitError, MicroBatchError
from hetspmd.optimize.considered import memory_is_short
from hetspmd.optimize.in_micro_batches import Planned, in_micro_batches
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.plan.plan import Plan
from hetspmd.program.micro_batches import MicroBatches, samples
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.blocks import SELECTIVE, outermost, with_regions
from hetspmd.trace.graph import Graph
from hetspmd.trace.recompute import Block, recomputed
from hetspmd.trace.recompute_savings import copying_instructions, saved_bytes

Fits = Callable[[Theory, MicroBatches | None], bool]


def fewest_recomputed(
    theory: Theory,
    blocks: Sequence[Block],
    cluster: Cluster,
    count: int | Literal["auto"],
    planned: Planned,
    lean: Fits,
    quickly: Planned | None = None,
) -> Plan:
    """The plan of a step that computes nothing again, or of one that computes as few of the blocks again as a
    program needs to fit, in ``count`` micro-batches.

    ``theory`` is of the graph that computes nothing again; ``lean`` says whether ZeRO-3 fits. ``quickly``: as for
    :func:`~hetspmd.optimize.in_micro_batches.best_number`. Raises MemoryLimitError where no program fits with all
    blocks computed again either, and what ``planned`` raises besides.
    """
    ranked = _ranked(theory.graph, blocks, cluster)
    if count == "auto" and quickly is not None:
        try:
            return _Fitting(theory, ranked, quickly, lean).run(count)
        except MemoryLimitError:
            count = max(samples(theory, theory.batch_axes), 1)
    return _Fitting(theory, ranked, planned, lean).run(count)


class _Fitting:
    def __init__(self, theory: Theory, blocks: Sequence[Block], planned: Planned, lean: Fits) -> None:
        self.theory, self.blocks, self.planned, self.lean = theory, blocks, planned, lean
        self._theories: dict[int, Theory] = {0: theory}

    def run(self, count: int | Literal["auto"]) -> Plan:
        most = max(samples(self.theory, self.theory.batch_axes), 1) if count == "auto" else 1
        number, found = 1 if count == "auto" else count, None
        while True:
            try:
                plan = self._faster(self._plan(0, number), number)
                break
            except MemoryLimitError as error:
                if found is None:
                    found = self._fewest(number)
                if number >= most:
                    if found is None:
                        raise
                    return found
                lacking = error
            except MicroBatchError as error:
                if found is None and number > 1 and count == "auto":
                    raise MicroBatchError(f"{error}. In one it does not fit: {lacking}") from lacking
                if found is None:
                    raise
                return found
            number = min(2 * number, most)
        return plan if found is None or plan.cost.step_seconds <= found.cost.step_seconds else found

    def _plan(self, blocks: int, number: int) -> Plan:
        """The plan that computes the first so many blocks again, in so many micro-batches."""
        return self.planned(*self._step(blocks, number))

    def _step(self, blocks: int, number: int) -> tuple[Theory, MicroBatches | None]:
        if blocks not in self._theories:
            graph = recomputed(self.theory.graph, with_regions(self.blocks[:blocks]))
            self._theories[blocks] = derive(graph, quiet=True)
        return in_micro_batches(self._theories[blocks], number)

    def _faster(self, plan: Plan, number: int) -> Plan:
        """The plan, or one that computes all blocks again, half or a quarter of them, whichever is fastest, where
        memory is short."""
        if not memory_is_short(plan.considered, plan.cost.step_seconds):
            return plan
        for blocks in dict.fromkeys(len(self.blocks) // part for part in (1, 2, 4)):
            try:
                other = self._plan(blocks, number) if blocks else plan
            except MemoryLimitError:
                continue
            plan = min(plan, other, key=lambda each: each.cost.step_seconds)
        return plan

    def _fewest(self, number: int) -> Plan | None:
        """The plan with the fewest blocks computed again that fits, or the fastest of those with more that were
        compiled to find it: at the edge of the memory a program may wait longer than it computes again. None if
        none fits."""
        enough, few = len(self.blocks), 0
        if not enough:
            return None
        many = len(self.theory.graph.instructions) >= THRESHOLDS.many_instructions
        if many and self.lean(*self._step(enough, number)):
            while enough - few > 1:
                middle = (enough + few) // 2
                enough, few = (middle, few) if self.lean(*self._step(middle, number)) else (enough, middle)
            return self._plan(enough, number)
        try:
            best = self._plan(enough, number)
        except MemoryLimitError:
            return None
        while enough - few > 1:
            middle = (enough + few) // 2
            try:
                plan, enough = self._plan(middle, number), middle
            except MemoryLimitError:
                few = middle
            else:
                best = min(plan, best, key=lambda each: each.cost.step_seconds)
        return best


def _ranked(graph: Graph, blocks: Sequence[Block], cluster: Cluster) -> list[Block]:
    """The candidates that save bytes, those with the fewest seconds for each byte first. ``blocks`` has whole ones
    and, by the same name and :data:`SELECTIVE`, their cheap parts. Regions inside of others come last: they save
    nothing that the forward holds for the backward, only what the backward holds of the others."""
    parts = [block for block in blocks if block.name.endswith(SELECTIVE)]
    every = [block for block in blocks if not block.name.endswith(SELECTIVE)]
    whole = outermost(every)
    worth = _worth(graph, parts, cluster)
    prices = {name: seconds / nbytes for name, (seconds, nbytes) in worth.items() if nbytes > 0}
    for name, (seconds, nbytes) in _worth(graph, whole, cluster).items():
        less, fewer = worth.get(name + SELECTIVE, (0.0, 0))
        if nbytes > max(fewer, 0):
            prices[name] = max(seconds - less, 0.0) / (nbytes - max(fewer, 0))
    candidates = [block for block in (*parts, *whole) if block.name in prices]
    inside = [block for block in every if block not in whole]
    return [*sorted(candidates, key=lambda block: float(f"{prices[block.name]:.2g}")), *inside]


def _worth(graph: Graph, blocks: Sequence[Block], cluster: Cluster) -> dict[str, tuple[float, int]]:
    """For each block that is computed again the seconds that this takes, on the device that computes the step
    fastest,
    with the whole batch, and the bytes that it saves."""
    everything = recomputed(graph, blocks)
    costs = CostModel(derive(everything, quiet=True), cluster)
    whole, fastest = costs.whole(), int(costs.alone().argmin())
    saved = saved_bytes(everything)
    seconds = dict.fromkeys(saved, 0.0)
    for instruction, block in copying_instructions(everything).items():
        seconds[block] += float(whole[instruction, fastest])
    return {name: (seconds[name], saved[name]) for name in saved}
