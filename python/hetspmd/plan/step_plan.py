"""What one update of the optimizer takes: micro-batches, fragments, the order in which they run, and the update.

A :class:`StepPlan` is what a plan says of the step itself, beside the graph, the cluster, and how it was found:

- in how many micro-batches the batch is taken (:class:`TimeSplit`);
- of which fragments the step consists (:class:`Fragment`): parts of the graph, each an SPMD program on a group of
  devices. Without a pipeline there is one fragment, on all active devices;
- what each device runs one after the other: a fragment, forward or backward, for a micro-batch
  (:attr:`StepPlan.runs`);
- what the update reads and leaves, and where the optimizer's state is (:mod:`hetspmd.plan.update`), which follows
  from the programs.

What lowers a step, simulates it, proves it or reports it reads it here. This release runs steps of one fragment,
one micro-batch after the other. Records of others can be made, and are refused by name where they are to be run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hetspmd.codec.records import INLINE, LEFT_OUT
from hetspmd.errors import PlanError
from hetspmd.plan.reports import Inside
from hetspmd.plan.run_order import FragmentRun, RunPhase, Runs, check_runs, plain_runs
from hetspmd.program.lengths import Lengths, Matrix
from hetspmd.program.program import Compute, Program
from hetspmd.program.schedule import Schedule

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class TimeSplit:
    """How the batch is divided in time.

    The rows that a device takes each time follow from its lengths
    (``MicroBatches.table``).

    Attributes:
        micro_batches: How many parts of the batch a step takes one after the other.
        repeated: Tensors whose collectives run once for each micro-batch, though they could run once before the
            loop over them (parameters, and what is computed of them alone) or after it (gradients).
        own_turns: How many turns each active device takes for its rows, where the devices do not wait for each
            other in the loop; the most is ``micro_batches``. Empty where each device runs all of them.

    Raises:
        PlanError: There is less than one micro-batch.
    """

    micro_batches: int = 1
    repeated: tuple[int, ...] = ()
    own_turns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise PlanError(f"{self.micro_batches} micro-batches; there is at least one")

    def turns_of(self, world: int) -> tuple[int, ...]:
        """How many micro-batches each of ``world`` active devices takes.

        Raises:
            PlanError: Devices have turns of their own, and are of another number.
        """
        turns = self.own_turns or (self.micro_batches,) * world
        if len(turns) != world:
            raise PlanError(f"turns of their own {list(turns)} for {world} active devices")
        return turns


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A part of the graph, and the group of devices that runs it as one SPMD program.

    The ranks of the program are places in ``active``.

    Attributes:
        program: The instructions, by one triple each, and the collectives between them.
        schedule: When the steps of the program run: forward or backward, in which order, in which buckets.
        ratios: For each segment of the graph the share of each device of the group. Each row sums to 1.
        lengths: Whole units per logical axis and device of the group.
        active: The group: ranks in the cluster, ascending.
        inside: What the accelerators inside machines do, for a plan across machines. ``active`` and ``ratios``
            are then of machines. None for any other plan.

    Raises:
        PlanError: No device is active, or ratios or lengths are of another number of devices than the group has.
    """

    program: Program
    schedule: Schedule
    ratios: Matrix
    lengths: Lengths
    active: tuple[int, ...]
    inside: Inside | None = None

    def __post_init__(self) -> None:
        if not self.active:
            raise PlanError("no device is active; compile the plan again")
        if list(self.active) != sorted(set(self.active)) or self.active[0] < 0:
            raise PlanError(f"active devices {list(self.active)} are no ranks in ascending order")
        for row in self.ratios:
            if not len(row) == self.lengths.world == len(self.active):
                raise PlanError(
                    f"ratios of {len(row)} and lengths of {self.lengths.world} devices for {len(self.active)} "
                    "active ones"
                )

    @property
    def instructions(self) -> frozenset[int]:
        """The part of the graph, as the numbers of the instructions that the program computes."""
        return frozenset(step.instruction for step in self.program.steps if isinstance(step, Compute))

    @property
    def phases(self) -> tuple[RunPhase, ...]:
        """What runs of the fragment for each micro-batch, which is its forward, and its backward if it has one."""
        if self.program.gradients or self.schedule.backward:
            return ("forward", "backward")
        return ("forward",)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one update of the optimizer takes.

    Attributes:
        fragments: The parts of the graph, in the order of the forward. One without a pipeline.
        split: The micro-batches.
        order: What each active device runs one after the other, in the order of the devices' ranks. ``()`` for the
            plain order: one micro-batch after the other, each through the device's fragments forward, and back.
            :attr:`runs` has the order in either case.

    Raises:
        PlanError: There is no fragment, or the order does not fit the fragments and the micro-batches.
    """

    fragments: tuple[Fragment, ...] = field(metadata=INLINE)
    split: TimeSplit = field(default=TimeSplit(), metadata=INLINE)
    order: tuple[Runs, ...] = field(default=(), metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        if not self.fragments:
            raise PlanError("a step has no fragment")
        if self.order:
            check_runs(self._plain(), self.order, alike=not self.split.own_turns)

    @cached_property
    def active(self) -> tuple[int, ...]:
        """The devices that run any fragment, as ranks in the cluster, ascending."""
        return tuple(sorted({rank for fragment in self.fragments for rank in fragment.active}))

    @property
    def only(self) -> Fragment:
        """The fragment of a step that has one.

        Raises:
            PlanError: The step has several.
        """
        if len(self.fragments) > 1:
            raise PlanError(
                f"a step of {len(self.fragments)} fragments, and this release runs steps of one; compile the plan "
                "again"
            )
        return self.fragments[0]

    @cached_property
    def runs(self) -> Mapping[int, Runs]:
        """For each active device, by its rank in the cluster, what it runs one after the other.

        Raises:
            PlanError: Devices have turns of their own, and are of another number.
        """
        return dict(zip(self.active, self.order, strict=True)) if self.order else self._plain()

    def turns(self, rank: int) -> tuple[int, ...]:
        """The micro-batches of an active device, in the order in which it takes them.

        A turn is all that a device does for one micro-batch: the forward and, at once, the backward.

        Raises:
            PlanError: The step has several fragments, or the device runs something else between the forward and
                the backward of a micro-batch.
        """
        runs, phases = self.runs[rank], self.only.phases
        turns = tuple(run.micro_batch for run in runs if run.phase == "forward")
        if turns != tuple(range(len(turns))) or runs != tuple(
            FragmentRun(turn, 0, phase) for turn in turns for phase in phases
        ):
            raise PlanError(
                f"device {rank} does not run one micro-batch after the other, forward and at once backward, which "
                "is all that this release does; compile the plan again"
            )
        return turns

    def with_parts(self, **parts: Any) -> Self:
        """The step with other parts: fields of this record, of ``split``, or of the only fragment, by name.

        Raises:
            PlanError: They do not fit each other, or a fragment's part is given and there are several.
            TypeError: There is no such part.
        """
        own, split, fragment = (
            {f.name: parts.pop(f.name) for f in fields(record) if f.name in parts}
            for record in (StepPlan, TimeSplit, Fragment)
        )
        if parts:
            raise TypeError(f"a step has no part {min(parts)!r}")
        if split:
            own["split"] = replace(self.split, **split)
        if fragment:
            own["fragments"] = (replace(self.only, **fragment),)
        return replace(self, **own)

    def _plain(self) -> dict[int, Runs]:
        turns = zip(self.active, self.split.turns_of(len(self.active)), strict=True)
        return {
            rank: plain_runs({n: f.phases for n, f in enumerate(self.fragments) if rank in f.active}, count)
            for rank, count in turns
        }
