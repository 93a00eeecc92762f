"""A plan: what :func:`hetspmd.compile` decides, what a plan file stores, what the runtime executes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import has_machines
from hetspmd.codec.files import write_atomically
from hetspmd.codec.records import INLINE, encode
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StepCost, StepModel, idle_seconds
from hetspmd.errors import PlanError
from hetspmd.placement import Placement
from hetspmd.plan.check import checked_theory
from hetspmd.plan.reports import Considered, Inside, Iteration, SearchReport
from hetspmd.plan.step_plan import StepPlan
from hetspmd.plan.text import content, content_digest, file_text, read_content, value_of
from hetspmd.plan.update import Update, update_of
from hetspmd.program.lengths import Lengths, Matrix
from hetspmd.program.micro_batches import MicroBatches, micro_batches
from hetspmd.program.program import Program
from hetspmd.program.schedule import Schedule
from hetspmd.rules.theory import Theory, derive, report_missing
from hetspmd.trace.graph import Graph

if TYPE_CHECKING:
    from typing import Self

    from hetspmd.cost.timeline import Timeline
    from hetspmd.plan.explanation import Explanation
    from hetspmd.search.search import Limits


@dataclass(frozen=True)
class Plan:
    """Graph, program, ratios and predicted cost of one training step.

    The program runs on the devices ``active``; its ranks are their places in that list. The other devices are
    idle: they hold no parameters, compute nothing, and only get the results of forward. ``print(plan)`` shows
    what was decided and what it costs.

    Attributes:
        graph: The training step of the single-device model.
        step_plan: What a step is: its micro-batches, its fragments (programs on groups of devices), in which order
            devices run them, and the update. The attributes of its only fragment (``program``, ``schedule``,
            ``ratios``, ``lengths``, ``active``, ``inside``) and of its micro-batches (``micro_batches``,
            ``repeated``, ``own_turns``) are the plan's as well.
        cluster: All devices, idle devices included.
        cost: The prediction for the program at these lengths, in seconds and bytes.
        search: What the search says of the program: cost, lower bound, gap and stop reason.
        baselines: Name to predicted seconds of a step in the same cost model, for well-known kinds of
            programs. Those that the constraints rule out, or that do not exist, are missing.
            ``data_parallel_even`` has whole parameters and the batch in equal shares (DDP);
            ``data_parallel_proportional`` the same in shares proportional to the devices' speed;
            ``zero_like`` these shares with parameters in shards (ZeRO-3, FSDP); ``zero_1``, ``zero_2`` and
            ``zero_3`` are these shares at a level of ZeRO, of plans in micro-batches and where memory is short;
            ``tensor_parallel`` is the
            best program that does not divide the batch; ``fastest_device_alone`` uses one device and
            communicates nothing; ``all_devices`` is the best program without idle devices, where the plan has
            some; ``one_segment`` is the best program of one segment, where the plan has several.
        iterations: The trace of the alternation between search and ratios on the active devices.
        constraints: What the user asked for: globs to placements.
        over_memory: Names of baselines that need more memory than the devices have.
        considered: The candidates that were compared, the plan's own first, each with why it is not the plan.

    Raises:
        PlanError: These do not fit each other.
    """

    graph: Graph
    step_plan: StepPlan = field(metadata=INLINE)
    cluster: Cluster
    cost: StepCost
    search: SearchReport
    baselines: Mapping[str, float]
    iterations: tuple[Iteration, ...]
    constraints: Mapping[str, str] = field(default_factory=dict)
    over_memory: tuple[str, ...] = ()
    considered: tuple[Considered, ...] = ()

    def __post_init__(self) -> None:
        everyone, split = range(len(self.cluster.devices)), self.step_plan.split
        for fragment in self.step_plan.fragments:
            if fragment.inside is None and has_machines(self.cluster):
                raise PlanError("a plan for machines says nothing of their accelerators; compile it again")
            if not set(fragment.active) <= set(everyone):
                raise PlanError(f"active devices {list(fragment.active)} of a cluster of {len(everyone)}")
            if split.own_turns and fragment.inside:
                raise PlanError("turns of their own of the machines of a plan across them; compile it again")
            if len(fragment.ratios) != self.graph.segment_count:
                raise PlanError(
                    f"ratios of {len(fragment.ratios)} segments, the graph has {self.graph.segment_count}"
                )

    @property
    def program(self) -> Program:
        """The instructions, by one triple each, and the collectives between them.

        Raises:
            PlanError: The step has several fragments, each with a program of its own; so of all that is one
                fragment's.
        """
        return self.step_plan.only.program

    @property
    def schedule(self) -> Schedule:
        """When the steps of the program run, that is in the forward or the backward, in which order and buckets."""
        return self.step_plan.only.schedule

    @property
    def ratios(self) -> Matrix:
        """For each segment of the graph the share of each active device. Each row sums to 1."""
        return self.step_plan.only.ratios

    @property
    def lengths(self) -> Lengths:
        """Whole units per logical axis and active device."""
        return self.step_plan.only.lengths

    @property
    def active(self) -> tuple[int, ...]:
        """Ranks in the cluster of the devices that take part, ascending; of machines in a plan across them."""
        return self.step_plan.active

    @property
    def inside(self) -> Inside | None:
        """What the accelerators inside machines do, for a plan across machines. ``active`` and ``ratios`` are then
        of machines. None for any other plan."""
        return self.step_plan.only.inside

    @property
    def micro_batches(self) -> int:
        """How many parts of the batch a step takes one after the other."""
        return self.step_plan.split.micro_batches

    @property
    def repeated(self) -> tuple[int, ...]:
        """Tensors whose collectives run once for each micro-batch, though they could run once before the loop over
        them (parameters, and what is computed of them alone) or after it (gradients)."""
        return self.step_plan.split.repeated

    @property
    def own_turns(self) -> tuple[int, ...]:
        """How many turns each active device takes for its rows, where the devices do not wait for each other in
        the loop; the most is ``micro_batches``. Empty where each device runs all of them."""
        return self.step_plan.split.own_turns

    def with_step(self, **parts: Any) -> Self:
        """The plan with other parts of its step (:meth:`hetspmd.plan.step_plan.StepPlan.with_parts`).

        Raises:
            PlanError: They do not fit each other.
        """
        return replace(self, step_plan=self.step_plan.with_parts(**parts))

    @cached_property
    def update(self) -> Update:
        """What the update of each parameter reads and leaves, and where the optimizer's state for it is.

        Raises:
            PlanError: A parameter is stored nowhere.
        """
        return update_of(self.step_plan, self.theory)

    @cached_property
    def theory(self) -> Theory:
        """All triples of the graph, derived again from it."""
        return derive(self.graph)

    def __str__(self) -> str:
        """What was decided and what it costs, for people."""
        text: str = hetspmd.attached("plan_text")(self)
        return text

    @property
    def world(self) -> int:
        """Number of devices of the cluster, idle ones too."""
        return len(self.cluster.devices)

    @property
    def idle(self) -> tuple[int, ...]:
        """Ranks of the devices that do not take part."""
        return tuple(rank for rank in range(self.world) if rank not in self.active)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each device of the cluster, from 0 (idle) to 1. Where the plan has several segments, the
        mean of their ratios, weighted with their FLOPs.
        """
        if len(self.ratios) == 1:
            return self.segment_shares[0]
        weights = [0.0] * len(self.ratios)
        for i, rule in self.theory.rules.items():
            weights[self.graph.segments[i]] += rule.flops
        total = sum(weights)
        parts = [w / total for w in weights] if total > 0 else [1 / len(weights)] * len(weights)
        return tuple(
            sum(p * row[rank] for p, row in zip(parts, self.segment_shares, strict=True))
            for rank in range(self.world)
        )

    @property
    def segment_shares(self) -> Matrix:
        """For each segment the share of each device of the cluster, from 0 (idle) to 1."""
        shares = []
        for row in self.ratios:
            ratios = dict(zip(self.active, row, strict=True))
            shares.append(tuple(ratios.get(rank, 0.0) for rank in range(self.world)))
        return tuple(shares)

    @cached_property
    def batches(self) -> MicroBatches | None:
        """The loop over micro-batches; None for a single one."""
        if self.micro_batches == 1:
            return None
        return micro_batches(self.theory, self.micro_batches, frozenset(self.repeated), self.own_turns)

    @cached_property
    def costs(self) -> CostModel:
        """The cost model of the active devices."""
        return CostModel(self.theory, self.cluster.part(self.active), self.batches)

    @cached_property
    def step(self) -> StepModel:
        """The cost model of the step, as it is scheduled, on the active devices."""
        idle = idle_seconds(self.graph, self.program, self.cluster, self.active)
        return StepModel(self.costs, self.program, idle=idle, schedule=self.schedule)

    def timeline(self) -> Timeline:
        """The simulated step, with overlap: when each device computes, communicates and waits, in seconds.

        The timeline of a plan across machines leaves out what their accelerators add (``inside.seconds``).
        """
        from hetspmd.cost.timeline import timeline

        return timeline(self.step, self.lengths, self.cluster, self.active)

    def parameter_layout(self) -> dict[str, tuple[Placement, tuple[int, ...]]]:
        """Parameter name to the placement in which it is stored, and its elements per active device along the
        sharded dim (empty for a whole parameter).
        """
        return dict(self.update.stored)

    def explain(
        self,
        name: str,
        *,
        constraints: Mapping[str, str | Placement] | None = None,
        limits: Limits | None = None,
    ) -> Explanation:
        """Why a tensor has its placement: what every other placement would cost, with one search for each.

        Args:
            name: A parameter, an input or ``output[i]``.
            constraints: Those the plan was compiled with; other tensors keep to them.
            limits: The limits of each search.

        Returns:
            The alternatives, cheapest first, in seconds; ``print`` shows them.

        Raises:
            ConstraintError: There is no such tensor.
        """
        explanation: Explanation = hetspmd.attached("explain")(
            self, name, constraints=constraints, limits=limits
        )
        return explanation

    def to_json(self) -> str:
        """The plan file's text; the same plan gives the same text, byte for byte."""
        return file_text(self._content)

    @classmethod
    def from_json(cls, text: str, *, trial: bool = True) -> Self:
        """The plan of a plan file's text, which may come from anywhere.

        The checksum, the types and the order of the text are checked, and the program is proved again.

        Args:
            text: What :meth:`to_json` returned.
            trial: Try each op once, without data. A plan that another rank has just made does not need it.

        Raises:
            PlanError: The text is no whole plan of this version, or does not fit torch or the rules.
        """
        tree, digest = read_content(text)
        plan = value_of(tree, cls)
        theory = checked_theory(plan, trial=trial)
        report_missing(theory)
        plan.__dict__.update(theory=theory, digest=digest)
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file. It is never half written: a new file takes the place of the old one.

        Raises:
            OSError: The file cannot be written.
        """
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan file; its text is checked as :meth:`from_json` does.

        Raises:
            PlanError: The file cannot be read or holds no whole plan. The message names it.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan file {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{path}: not a plan file: it is no UTF-8 text ({error.reason})") from error
        except (TypeError, ValueError) as error:
            raise PlanError(f"{path!r} is no path of a plan file: {error}") from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    @property
    def _content(self) -> str:
        return content(encode(self))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan's content. Ranks compare it before the first step, and a plan file holds it."""
        return content_digest(self._content)
