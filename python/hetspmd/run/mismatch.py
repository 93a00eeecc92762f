"""Says of torch's errors about sizes that a shard may be the cause.

Code outside of the model that takes a parameter for the whole one (an average of weights that was made before
``HAP(...)``, an op between two parameters) ends in an error of torch about sizes, which names neither the parameter
nor the mend. An error that ends the process is given both as a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from hetspmd.errors import HetspmdError
from hetspmd.run.shards import ShardMark, marked

_ABOUT_SIZES: Final = re.compile(r"\b(sizes?|shapes?|dimensions?|broadcast|elements)\b", re.IGNORECASE)

_NOT_THE_USERS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

_MOST_MEMBERS: Final = 1000
"""Members of a list or dict that are looked at, so that a message does not take long."""


def explain(error: BaseException) -> None:
    """Add a note to an error about sizes that was raised where a shard is at hand."""
    if isinstance(error, HetspmdError) or not isinstance(error, (RuntimeError, ValueError, IndexError)):
        return
    if _ABOUT_SIZES.search(str(error)) is None:
        return
    for frame in _innermost(error):
        mark = _shard(frame)
        if mark is not None:
            error.add_note(
                f"hetspmd: {mark}. If it met a whole tensor here: an average of weights (EMA) or a target network "
                "that was made before HAP(...) holds whole ones; make it of the HAP module, average = "
                "copy.deepcopy(hap), and its parameters lie in the same shards. An op between whole parameters "
                f"belongs into the model or into loss=, or takes hap.full_tensors()[{mark.name!r}] (every rank "
                "calls it)"
            )
            return


def _innermost(error: BaseException) -> list[FrameType]:
    """The frames in which it was raised, from the inside to the first that is neither torch's nor hetspmd's."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    innermost = []
    for frame in reversed(frames):
        innermost.append(frame)
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            break
    return innermost


def _shard(frame: FrameType) -> ShardMark | None:
    """A shard among what a function's names refer to, or of a module that it speaks of."""
    for value in frame.f_locals.values():
        for tensor in (*_tensors(value), *_of_module(frame, value)):
            mark = marked(tensor)
            if mark is not None and mark.layout.local_shape != mark.layout.shape:
                return mark
    return None


def _of_module(frame: FrameType, value: Any) -> Iterator[torch.Tensor]:
    """The parameters of a module whose method runs, or those that the function names."""
    if isinstance(value, torch.nn.Module):
        own = frame.f_locals.get("self") is value
        for name, parameter in value.named_parameters():
            if own or name.rpartition(".")[2] in frame.f_code.co_names:
                yield parameter


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The value, if it is a tensor, or the tensors that a plain container holds."""
    members: Iterator[Any] = iter(())
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple):
        members = iter(value)
    elif type(value) is dict:
        members = iter(value.values())
    for _, member in zip(range(_MOST_MEMBERS), members, strict=False):
        if isinstance(member, torch.Tensor):
            yield member
