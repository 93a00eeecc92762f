"""Named errors. Each message says what is wrong, where, and how to mend it."""

from __future__ import annotations

import copyreg
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Self

__all__ = [
    "BatchMismatchError",
    "BatchSizeError",
    "CheckError",
    "ClockWarning",
    "ClusterError",
    "CollectiveMismatchError",
    "ConstraintError",
    "CudaGraphsWarning",
    "DeviceError",
    "DroppedOutputWarning",
    "ExampleError",
    "FileWarning",
    "FollowerWarning",
    "GradientError",
    "GradientHookWarning",
    "HetspmdError",
    "InfeasibleError",
    "KeptRowsWarning",
    "MemoryBoundError",
    "MemoryLimitError",
    "MicroBatchError",
    "MissingRuleError",
    "MissingRuleWarning",
    "NanError",
    "OptimizerError",
    "OptionError",
    "OutputError",
    "OutsideParameterWarning",
    "ParameterMismatchError",
    "PlanError",
    "PlanMismatchError",
    "PlanPerValueWarning",
    "ProfileError",
    "ProofError",
    "RandomOpError",
    "RankFailedError",
    "RetraceWarning",
    "RuleError",
    "SearchError",
    "ShardError",
    "StepMemoryError",
    "TargetError",
    "TensorTypeWarning",
    "TraceError",
    "WorldSizeError",
]


class HetspmdError(Exception):
    """Base of every error that hetspmd raises on purpose (exit status 2 of the CLI). Each can be pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # Made without __init__, which may take other arguments. The type stubs lack this function of pickle.
        return copyreg.__newobj__, (type(self), *self.args), dict(vars(self))  # type: ignore[attr-defined]


class ClusterError(HetspmdError):
    """The cluster description is missing, malformed or impossible."""


class TargetError(HetspmdError):
    """The TARGET of a command cannot be found or does not return ``(model, example)``."""


class ExampleError(HetspmdError):
    """The example batch does not fit the model."""


class TraceError(HetspmdError):
    """The model cannot be traced to one static graph."""


class DeviceError(HetspmdError):
    """The model lies on several devices, or on one that cannot be used."""


class RuleError(HetspmdError):
    """A rule is malformed or registered twice."""


class MicroBatchError(HetspmdError):
    """The training step cannot be computed in micro-batches exactly."""


class MissingRuleError(RuleError):
    """Under ``strict=True``: an op has no rule."""


class MissingRuleWarning(UserWarning):
    """An op has no rule and runs replicated on every device."""


class RetraceWarning(UserWarning):
    """Every step is traced anew, since the model's Python code draws random numbers."""


class PlanPerValueWarning(UserWarning):
    """Each value of a plain argument of the batch (a number, a string) makes another plan."""


class CudaGraphsWarning(UserWarning):
    """``HAP(..., cuda_graphs=)``: something runs without CUDA graphs."""


class ClockWarning(UserWarning):
    """The model's forward reads a clock; the plan keeps one reading."""


class FileWarning(UserWarning):
    """The model's forward looks at a file; the plan keeps one reading."""


class TensorTypeWarning(UserWarning):
    """The model's forward asks whether a value's class is exactly the class of tensors, and a trace says no."""


class FollowerWarning(UserWarning):
    """A module that is a copy of a trained one is stored in other shards."""


class OutsideParameterWarning(UserWarning):
    """The loss depends on a tensor that requires a gradient and is no parameter of the model."""


class DroppedOutputWarning(UserWarning):
    """A part of the model's output does not come back; it is None."""


class KeptRowsWarning(UserWarning):
    """The model's forward leaves a tensor on the model that has only this rank's rows."""


class ConstraintError(HetspmdError):
    """A file of constraints is missing or malformed."""


class OptimizerError(HetspmdError):
    """An optimizer or its state does not fit parameters that lie in shards."""


class OptionError(HetspmdError):
    """An argument of a function is not among the values that it takes."""


class OutputError(HetspmdError):
    """A file that was asked for cannot be written."""


class InfeasibleError(HetspmdError):
    """No program satisfies the constraints."""


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.4g} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.4g} MiB"


_MENDS: Final = (
    "divide the batch in time (micro_batches='auto')",
    "compute activations again (recompute='auto')",
    "take a smaller batch",
    "loosen constraints",
    "add devices",
    "correct `memory` in the cluster description",
)
"""What helps where no program fits the memory."""


class MemoryLimitError(HetspmdError):
    """No program that was found fits the devices' memory.

    Attributes:
        lacking: Of the program that comes nearest, rank (across machines: number of the machine) to bytes that
            are missing and bytes that the device has.
        names: The name of each device.
    """

    def __init__(
        self,
        lacking: Mapping[int, tuple[int, int]],
        names: Sequence[str],
        word: str = "rank",
        message: str | None = None,
        mends: Sequence[str] = _MENDS,
    ) -> None:
        self.lacking = dict(lacking)
        self.names = tuple(names)
        parts = [
            f"{word} {rank} ({names[rank]}) lacks {_size(missing)} of memory beyond its {_size(capacity)}"
            for rank, (missing, capacity) in self.lacking.items()
        ]
        self._problem = message or (
            f"no program was found that fits the devices; in the nearest one {'; '.join(parts)}."
        )
        self._mends = tuple(mends)
        super().__init__(self._text())

    def _text(self) -> str:
        first, *others = self._mends
        return f"{self._problem} {', '.join([first[0].upper() + first[1:], *others[:-1]])}, or {others[-1]}"

    def leave_out(self, asked: Collection[str]) -> Self:
        """The same error, which does not name what was ``asked`` for already as a mend."""
        kept = tuple(mend for mend in self._mends if not any(f"({what}=" in mend for what in asked))
        self._mends = kept
        self.args = (self._text(),)
        return self


class MemoryBoundError(MemoryLimitError):
    """No program fits the devices' memory: any holds more than all devices together have.

    It is known before any search, by the sum of what must be there at one moment of the step.

    Attributes:
        total: Bytes that any program holds at least, over all devices, at the moment at which most is missing.
        room: Bytes that the devices have for them.
        parts: ``total`` by what it is of: ``"parameters"``, ``"optimizer state"``, ``"gradients"``,
            ``"activations"`` (with inputs and buffers).
        micro_batches: The same total for other numbers of micro-batches, where they were asked for.
        lacking: What is missing, in proportion to the devices' memory: rank to its part and to the bytes that it
            has.
        names: The name of each device.
    """

    def __init__(
        self,
        parts: Mapping[str, int],
        room: int,
        devices: Sequence[tuple[str, int]],
        *,
        micro_batches: Mapping[int, int],
        enough: int | None,
        word: str = "rank",
    ) -> None:
        self.parts = dict(parts)
        self.total, self.room = sum(parts.values()), room
        self.micro_batches = dict(micro_batches)
        missing = self.total - room
        have = sum(memory for _, memory in devices)
        lacking = {
            rank: (missing * memory // max(have, 1), memory) for rank, (_, memory) in enumerate(devices)
        }
        held = ", ".join(f"{_size(nbytes)} of {what}" for what, nbytes in self.parts.items() if nbytes)
        if enough is not None:
            least = _size(self.micro_batches[enough])
            other = f" With micro_batches={enough} at least {least} are needed, which may fit."
        elif self.micro_batches:
            count, total = min(self.micro_batches.items(), key=lambda item: (item[1], item[0]))
            other = f" Even with micro_batches={count} at least {_size(total)} are needed."
        else:
            other = ""
        # Fewer activations help only where all the rest has room.
        fewer = ("compute activations again (recompute='auto')", "take a smaller batch")
        helps = self.total - self.parts.get("activations", 0) <= room
        super().__init__(
            lacking,
            [name for name, _ in devices],
            word,
            f"no program fits the devices: any holds at least {_size(self.total)} on all of them together "
            f"({held}), and they have {_size(room)}.{other}",
            (
                *(fewer if helps else ()),
                f"add devices or memory for {_size(missing)}",
                "loosen constraints",
                "correct `memory` in the cluster description",
            ),
        )


class SearchError(HetspmdError):
    """A limit of the search struck before any program was found."""


class ProofError(HetspmdError):
    """The independent checker could not prove that a program computes the graph."""


class PlanError(HetspmdError):
    """A plan file is malformed or of another version."""


class PlanMismatchError(PlanError):
    """The ranks hold different plans, or the plan belongs to another model or cluster."""


class CollectiveMismatchError(PlanMismatchError):
    """Two ranks issued different collectives, or called HAP for different things: they do not run the same
    program."""


class ProfileError(HetspmdError):
    """A device or the network could not be measured."""


class BatchSizeError(ProfileError):
    """A model cannot be given more or fewer rows than its example has."""


class StepMemoryError(ProfileError):
    """A step that is measured needs more memory than it is given.

    Attributes:
        needed: Bytes of the tensors that were there when it failed.
        memory: Bytes that it was given.
    """

    def __init__(self, needed: int, memory: int) -> None:
        self.needed, self.memory = needed, memory
        super().__init__(
            f"a step needs more than {_size(memory)}: {_size(needed)} of tensors are there; give it fewer rows, or "
            "more with --memory"
        )


class GradientError(HetspmdError):
    """A gradient was asked for that the plan does not compute."""


class ShardError(HetspmdError):
    """Something was asked of this rank's shards that only whole parameters can answer."""


class GradientHookWarning(UserWarning):
    """A hook is on a parameter that lies in shards, of which a rank holds only a part."""


class NanError(HetspmdError):
    """An instruction made NaN of inputs without any, while ``torch.autograd.detect_anomaly`` looks for them.

    The message names the instruction, the module and line of the model, and the ranges of the inputs.
    """


class RandomOpError(HetspmdError):
    """A random op cannot draw its numbers as the program or a verification asks."""


class RankFailedError(HetspmdError):
    """Another rank died, hangs or raised an error, so that a collective cannot be completed.

    Attributes:
        ranks: The ranks that failed, as far as it could be found out.
        reason: How they failed.
        rank: This rank.
        waited: Seconds that this rank waited.
        seen: What this rank saw itself.
        where: The collective of the program and the model's module; ``""`` outside of a program.
        call: What this rank had been called for (``"step 17"``, ``"full_state_dict()"``); ``""`` where ranks
            are not compared (``HAP(..., check_batches=False)``).
    """

    def __init__(
        self,
        ranks: Sequence[int],
        reason: str,
        rank: int,
        waited: float,
        seen: str = "",
        where: str = "",
        call: str = "",
    ) -> None:
        self.ranks, self.reason, self.rank = tuple(ranks), reason, rank
        self.waited, self.seen, self.where, self.call = waited, seen, where, call
        super().__init__(self.ranks, reason, rank, waited, seen, where, call)

    def __str__(self) -> str:
        place = ",".join(f" in {known}" for known in (self.where, self.call) if known)
        return (
            f"{self.reason}; rank {self.rank} waited {self.waited:.1f} s{place} ({self.seen}). Restart all ranks "
            "from the last checkpoint; if a rank may be busy for so long between two steps, raise HAP(timeout=...)"
        )


class WorldSizeError(HetspmdError):
    """The size of the process group is not the number of ranks of the cluster."""


class BatchMismatchError(HetspmdError):
    """A batch differs in structure, shape or dtype from the one that was planned for, or from that of another
    rank."""


class ParameterMismatchError(HetspmdError):
    """The ranks hold different copies of a replicated tensor."""


class CheckError(HetspmdError):
    """A verification failed. The CLI exits with status 1 on it."""
