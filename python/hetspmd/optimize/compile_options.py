"""The options of a compilation, checked as soon as they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, TypeAlias, TypedDict

from hetspmd.errors import ConstraintError, OptionError
from hetspmd.optimize.synthesis import Clock
from hetspmd.placement import Placement
from hetspmd.search.constraints import nearest
from hetspmd.trace.blocks import CHECKPOINTS, Recompute, check_recompute, chooser, selective
from hetspmd.trace.graph import Graph
from hetspmd.trace.host.watch import HostRandomness, check_randomness
from hetspmd.trace.losses import Loss, as_loss
from hetspmd.trace.recompute import Block, Chooser

Segments: TypeAlias = int | Literal["auto"]
"""A number of segments, or as many as gain."""

Machines: TypeAlias = Literal["auto", "virtual", "flat"]
"""How machines with several accelerators are planned: the cheaper way, or the one that is named."""


class CompileKeywords(TypedDict, total=False):
    """The options of :class:`CompileOptions` as keyword arguments, for type checkers and editors."""

    loss: Loss | str | int | None
    strict: bool
    constraints: Mapping[str, str | Placement] | None
    time_limit: float
    loss_only: bool
    segments: Segments
    machines: Machines
    micro_batches: int | Literal["auto"]
    zero: Literal[0, 1, 2, 3] | None
    recompute: Recompute
    host_randomness: HostRandomness
    timings: MutableMapping[str, float] | None
    progress: Callable[[str], object] | None


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """What a user may ask of a compilation.

    Attributes:
        loss: Where the loss is in the model's output, by name or index (``"losses.total"``, ``1``), or a
            function ``loss(model, *args, **kwargs)``. By default the loss is the output, its ``.loss`` or its
            first item.
        strict: Raise MissingRuleError, instead of a warning, where an op has no rule.
        constraints: Globs over parameter names, input paths and ``output[i]`` to ``"replicated"`` or
            ``"shard(d)"``.
        time_limit: Seconds for one search.
        loss_only: Leave the other outputs out; they come back as None.
        segments: How many parts of the model have sharding ratios of their own; ``"auto"`` for as many as
            gain, in micro-batches for one.
        machines: How machines with several accelerators are planned: each as one ``"virtual"`` device, all
            accelerators individually (``"flat"``), or ``"auto"`` for the cheaper of the two.
        micro_batches: How many parts of the batch a training step takes one after the other, of equal numbers of
            samples as far as can be. Gradients are summed over them, so that the step computes what it computes
            of the whole batch, in less memory. Outputs with a row for each sample come back as None. ``"auto"`` for
            the number with the fastest step of those that fit the devices' memory: doubled each time, and then less
            than that where each micro-batch waits for collectives; one where memory is not short. Devices that need
            not wait for each other then have numbers of their own.
        zero: Data parallelism of all devices at this level of ZeRO, and nothing else: parameters whole (0);
            parameters and optimizer state in shards, gathered once and gradients reduced once in a step (1);
            gradients reduced to shards in each micro-batch (2); parameters gathered in each micro-batch, and again
            for the backward (3). By default the search decides, for each parameter.
        recompute: Which activations the backward computes again instead of holding them: ``"checkpoints"``, the
            model's own regions of ``torch.utils.checkpoint``; ``"none"``; ``"all"``, these and the repeating
            elements of lists of modules; ``"selective"``, these regions and what of the rest is cheap; globs over
            paths of modules (``"layers.*"``), these and the outermost modules that match; ``"auto"`` for as few as
            a program needs to fit the devices' memory, with ``micro_batches="auto"`` what of the two is faster.
        host_randomness: What becomes of random numbers that the model's Python code draws (random, numpy,
            generators): ``"refuse"`` them; ``"freeze"`` them, so that a plan keeps the outcome of its trace;
            or ``"trace_each_step"``, so that HAP traces anew in every step.
        timings: Is filled with wall seconds of the stages: ``trace``, ``rules``, ``synth``, ``balance``,
            ``total``.
        progress: Is called with the name of each of these stages as it begins.

    Raises:
        ConstraintError: ``segments`` is no number of segments.
        OptionError: Another value is one that cannot be.
    """

    loss: Loss | str | int | None = None
    strict: bool = False
    constraints: Mapping[str, str | Placement] | None = None
    time_limit: float = 600.0
    loss_only: bool = False
    segments: Segments = "auto"
    machines: Machines = "auto"
    micro_batches: int | Literal["auto"] = 1
    zero: Literal[0, 1, 2, 3] | None = None
    recompute: Recompute = CHECKPOINTS
    host_randomness: HostRandomness = "refuse"
    timings: MutableMapping[str, float] | None = None
    progress: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        if not is_seconds(self.time_limit) or not self.time_limit >= 0.0:
            raise OptionError(
                f"time_limit={self.time_limit!r}: give seconds, float('inf') for searches without an end"
            )
        for name in ("strict", "loss_only"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is True or False, not {getattr(self, name)!r}")
        check_randomness(self.host_randomness)
        number = isinstance(self.segments, int) and not isinstance(self.segments, bool) and self.segments >= 1
        if self.segments != "auto" and not number:
            raise ConstraintError(f"segments={self.segments!r}: give 'auto' or a number from 1 on")
        if self.machines not in ("auto", "virtual", "flat"):
            raise OptionError(f"machines={self.machines!r}; allowed are 'auto', 'virtual' and 'flat'")
        count = self.micro_batches
        if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise OptionError(f"micro_batches={count!r}: give 'auto' or a number from 1 on")
        if self.zero is not None and (isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3)):
            raise OptionError(f"zero={self.zero!r}: give 0, 1, 2 or 3, or None for the search to decide")
        if self.zero is not None and self.machines == "virtual":
            raise OptionError(
                f"zero={self.zero} needs machines='flat': each accelerator stores its own shards"
            )
        object.__setattr__(self, "recompute", check_recompute(self.recompute))
        object.__setattr__(self, "loss", as_loss(self.loss))

    @property
    def find_loss(self) -> Loss | None:
        """What finds the loss; None where the model's output tells it."""
        return as_loss(self.loss)

    def recomputed(self, candidates: list[Block]) -> Chooser:
        """What chooses the blocks of a trace that are computed again. For ``"auto"`` it chooses none, and fills
        ``candidates`` with those that may be."""
        if self.recompute != "auto":
            return chooser(self.recompute)

        def noted(graph: Graph, regions: Sequence[Block]) -> Sequence[Block]:
            candidates[:] = [*chooser("all")(graph, regions), *selective(graph, regions)]
            return ()

        return noted

    @property
    def asked_of_memory(self) -> frozenset[str]:
        """The options by which as little memory is used as can be, of those that say so."""
        asked = {
            "micro_batches": self.micro_batches == "auto",
            "recompute": self.recompute in ("auto", "all"),
        }
        return frozenset(name for name, so in asked.items() if so)

    def clock(self) -> Clock:
        """A clock that fills ``timings`` and tells ``progress``."""
        return Clock({} if self.timings is None else self.timings, self.progress)


def is_seconds(value: object) -> bool:
    """Whether a value can be a number of seconds."""
    return isinstance(value, Real) and not isinstance(value, bool)


def parted(
    arguments: Mapping[str, Any], names: Iterable[str], named: Iterable[str]
) -> tuple[dict[str, Any], CompileOptions]:
    """Keyword arguments as those of these ``names``, and the options of a compilation.

    ``named``: the arguments that a caller has besides. Raises OptionError, with the nearest name, for one that
    there is not, and for a value that cannot be.
    """
    own = frozenset(names)
    rest = {name: value for name, value in arguments.items() if name not in own}
    options = {field.name for field in fields(CompileOptions)}
    for name in rest:
        if name not in options:
            raise OptionError(f"there is no argument {name!r}{nearest(name, {*options, *own, *named})}")
    return {name: value for name, value in arguments.items() if name in own}, CompileOptions(**rest)
