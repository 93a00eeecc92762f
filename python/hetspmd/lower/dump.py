"""The local graphs of a plan between the passes of lowering, as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hetspmd.codec.files import write_output
from hetspmd.errors import OutputError
from hetspmd.lower.local_program import numbered
from hetspmd.lower.lowering import active_ranks, lower_plan
from hetspmd.lower.passes import Graphs, Pass
from hetspmd.lower.turn_text import local_text

if TYPE_CHECKING:
    from hetspmd.plan.plan import Plan


def dump_passes(plan: Plan, folder: Path) -> tuple[int, ...]:
    """Lower the plan for each rank that runs its program, on CPU, and write the graphs after each pass.

    The file of rank 0 after the first pass is ``folder/rank0/00-emit.txt``. Each file is written whole or not at
    all; what else there is in the folders stays. Returns the ranks. Raises OutputError if a file or folder cannot
    be written, and what :func:`~hetspmd.lower.lowering.lower_plan` raises.
    """
    ranks = active_ranks(plan)
    among = numbered("rank", ranks)
    for rank in ranks:
        own = folder / f"rank{rank}"
        _make(own)

        def write(place: int, each: Pass, graphs: Graphs, own: Path = own, rank: int = rank) -> None:
            text = f"# rank {rank} of a program on {among}\n{local_text(graphs)}"
            write_output(text, own / f"{place:02d}-{each.name}.txt")

        lower_plan(plan, rank, torch.device("cpu"), write)
    return ranks


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be made: {error.strerror}; name another folder") from error
