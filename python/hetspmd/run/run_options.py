"""The options of :class:`hetspmd.HAP`: how it runs, beside how its plans are compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from hetspmd.dist.communicator import Communicator
from hetspmd.errors import OptionError
from hetspmd.optimize.compile_options import CompileKeywords, CompileOptions, is_seconds, parted
from hetspmd.run.capturer import Capturer
from hetspmd.run.capturing import CudaGraphs


class HapKeywords(CompileKeywords, total=False):
    """The options of :class:`hetspmd.HAP` as keyword arguments, for type checkers and editors."""

    gather_outputs: bool
    gather_state: bool
    device: torch.device | str | None
    process_group: dist.ProcessGroup | Communicator | None
    sync_module_states: bool
    check_batches: bool
    check_plan: bool
    timeout: float
    compile: bool | Mapping[str, Any]
    cuda_graphs: CudaGraphs
    batch: Literal["whole", "own"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a HAP module runs; :class:`hetspmd.HAP` says what each option means."""

    gather_outputs: bool = False
    gather_state: bool = False
    device: torch.device | str | None = None
    process_group: dist.ProcessGroup | Communicator | None = None
    sync_module_states: bool = True
    check_batches: bool = True
    check_plan: bool = True
    timeout: float = 600.0
    compile: bool | Mapping[str, Any] = False
    cuda_graphs: CudaGraphs = False
    batch: Literal["whole", "own"] = "whole"

    def __post_init__(self) -> None:
        for name in ("gather_outputs", "gather_state", "sync_module_states", "check_batches", "check_plan"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is True or False, not {getattr(self, name)!r}")
        if not is_seconds(self.timeout) or not self.timeout > 0.0:
            raise OptionError(f"timeout is a positive number of seconds, not {self.timeout!r}")
        if self.batch not in ("whole", "own"):
            raise OptionError(
                "batch is 'whole' (every rank is given the whole batch) or 'own' (its own rows, by "
                f"hetspmd.loader), not {self.batch!r}"
            )
        if not (isinstance(self.cuda_graphs, bool | Capturer) or self.cuda_graphs == "auto"):
            raise OptionError(f"cuda_graphs is True, False or 'auto', not {self.cuda_graphs!r}")

    @classmethod
    def of(cls, options: Mapping[str, Any], named: Iterable[str]) -> tuple[Self, CompileOptions]:
        """The options of HAP as those of a run and those of a compilation.

        ``named``: the arguments that are named besides. Raises OptionError, with the nearest name, for one that
        there is not, and for a value that cannot be.
        """
        own, compilation = parted(options, [field.name for field in fields(cls)], named)
        return cls(**own), compilation
