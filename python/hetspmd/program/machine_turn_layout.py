"""Where the parts of tensors lie in each micro-batch on the accelerators of machines: three levels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from hetspmd.errors import PlanError
from hetspmd.placement import REPLICATE, Placement, is_sharded, placement_text, same_dim, sharded_dim
from hetspmd.program.layout import Region
from hetspmd.program.lengths import Lengths, apportion
from hetspmd.program.level_layout import LevelKey, RankPlace, Rows, as_copied, rebalances
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.noise import divisible
from hetspmd.program.turn_layout import TurnLayout
from hetspmd.rules.nested import Level, localize_drawn, localize_nested, merged
from hetspmd.rules.rule import LocalCall, localize
from hetspmd.rules.theory import Theory


class MachineTurnLayout(TurnLayout):
    """A layout of three levels: the micro-batches, the machines, which divide them by ``lengths``, and the
    accelerators within each, which divide the machine's part evenly.

    The place of a rank is its micro-batch (``machine``), and its number among the accelerators of all active
    machines (``inside``), of which each has so many: ``of_machines``.
    """

    def __init__(
        self, theory: Theory, batches: MicroBatches, lengths: Lengths, of_machines: Sequence[int]
    ) -> None:
        super().__init__(theory, batches, lengths)
        self.levels = 3
        self.of_machines = tuple(of_machines)
        self.accelerators = (sum(self.of_machines),) * batches.count
        self._of_ranks = tuple((m, a) for m, count in enumerate(self.of_machines) for a in range(count))

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """The number of the first accelerator of each machine."""
        return tuple(accumulate(self.of_machines[:-1], initial=0))

    @cached_property
    def alike_turns(self) -> dict[int, int]:
        """The first of the turns in which all machines have as many rows, and how many of them there are."""
        axes = sorted(self.batches.loop.axes)
        rows = [tuple(self.table(axis)[turn] for axis in axes) for turn in range(self.batches.count)]
        return {rows.index(one): rows.count(one) for one in dict.fromkeys(rows)}

    def given(self, tensor: int, form: Placement = REPLICATE) -> LevelKey:
        """What a rank is given of a tensor that lies on the machines in a form; inside each all have the same."""
        return tensor, REPLICATE, form, REPLICATE

    def peers(self, level: int, at: RankPlace) -> tuple[int, int]:
        """The place of a rank among those that a level divides its part among, and their number."""
        machine, accelerator = self._of_ranks[at.inside]
        if level == 0:
            return at.machine, self.batches.count
        if level == 1:
            return machine, len(self.of_machines)
        return accelerator, self.of_machines[machine]

    def divided(self, key: LevelKey, level: int, at: RankPlace) -> tuple[int, ...]:
        """Elements along the dim that a level's form divides, of each of those that it divides the part of ``at``
        among."""
        if level < 2:
            return super().divided(key, level, at)
        tensor, time, outer, inner = key
        own = outer if same_dim(outer, inner) else inner  # as many units before a cut and behind it
        axis = self.axes.sharded(tensor, own)
        if axis is None:
            raise PlanError(f"{self.graph.tensors[tensor].name} is never divided as {placement_text(own)}")
        unit = self.graph.tensors[tensor].shape[sharded_dim(inner)] // axis.units
        machine = self._of_ranks[at.inside][0]
        units = self.outer.lengths.units[axis.id][at.machine] if same_dim(time, own) else axis.units
        if own == outer:
            units = self.inside(axis.id, units, at.machine)[machine]
        return tuple(n * unit for n in self._evenly(units, machine))

    def region(self, key: LevelKey, level: int, at: RankPlace) -> Region | None:
        """The part that a rank holds, on a level, of what the level above leaves; None for all of it."""
        form = key[1 + level]
        if not is_sharded(form):
            return None
        if level == 0:
            return self.outer.region(key[0], form, at.machine)
        extents, (place, _) = self.divided(key, level, at), self.peers(level, at)
        return Region(sharded_dim(form), sum(extents[:place]), extents[place])

    def held(self, instruction: int, rows: Rows, at: RankPlace) -> tuple[Level, ...]:
        """The row of each level with the units that a rank holds on it: those of equal rows lie in each other."""
        time, outer, inner = rows
        machine, place = self._of_ranks[at.inside]
        above = super().held(instruction, (time, outer), RankPlace(at.machine, machine))
        if inner.factor is None:
            return *above, Level(as_copied(inner), (0, 0))

        def inside(axis: int) -> tuple[int, int]:
            low, units = self.shares(axis, rows, at.machine, machine)
            start = low + sum(units[:place])
            return start, start + units[place]

        return *above, Level(as_copied(inner), self._units(instruction, inner, inside))

    def shares(self, axis: int, rows: Rows, turn: int, machine: int) -> tuple[int, tuple[int, ...]]:
        """The first unit of an axis that a machine's accelerators have in a turn by the row of each level, of which
        the innermost divides the axis, and the units of each accelerator."""
        time, outer, inner = rows
        low, high = 0, self.axes.axes[axis].units
        if inner == time:
            low, high = self.outer.lengths.range(axis, turn)
        if inner == outer:
            of_machines = self.inside(axis, high - low, turn)
            low += sum(of_machines[:machine])
            high = low + of_machines[machine]
        return low, self._evenly(high - low, machine)

    def call(self, instruction: int, rows: Rows, at: RankPlace) -> LocalCall | None:
        """What a rank calls; None where the rows of the levels cannot be had at once. Of three that divide by
        different rows it is not known."""
        theory = self.theory
        call, rule = theory.calls[instruction], theory.rules[instruction]
        rank, world = self.rank(at), self.world
        held = self.held(instruction, rows, at)
        dividing = merged(held)
        if rule.random and self.drawn_alike(instruction, rows):
            drawn = [level for level in dividing if is_sharded(level.row.post[0])]
            return localize_drawn(call, rule, drawn, rank, world) if divisible(call.op) else None
        if len(dividing) > 2:
            return None
        if len(dividing) == 2:
            return localize_nested(call, rule, dividing[0], dividing[1], rank, world)
        (level,) = dividing or held[:1]
        return localize(call, rule, level.row, rank, world, *level.units)

    def drawn_alike(self, instruction: int, rows: Rows) -> bool:
        """Whether a random instruction draws slices of which several accelerators have the same."""
        if not self.theory.rules[instruction].random or sum(self.of_machines) == 1:
            return False
        return len({is_sharded(row.post[0]) for row in rows}) > 1

    def is_nothing(self, step: object) -> bool:
        """Whether a step is a rebalance between machines of lengths that agree, there and inside: the value is
        there."""
        return rebalances(step) and self._of_devices.agrees(step.tensor, step.source, step.target)

    def _evenly(self, units: int, machine: int) -> tuple[int, ...]:
        count = self.of_machines[machine]
        key = (units, count)
        if key not in self._even:
            self._even[key] = apportion(units, (1 / count,) * count)
        return self._even[key]
