"""Where a forward draws random numbers: found by running it once more, slowly, when it is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from hetspmd.trace.frames import code_at
from hetspmd.trace.host.entropy import Draws
from hetspmd.trace.host.foreign import is_foreign


def drawing_line(draws: Draws, model: nn.Module, call: Callable[[], Any]) -> str:
    """`` at FILE:LINE: CODE, in module PATH``, "" if it cannot be found. The Python of ``call`` runs."""
    paths = {id(module): name for name, module in model.named_modules()}
    last: dict[int, int] = {}
    file_lines: list[str] = []

    def line(frame: FrameType, event: str, _argument: Any) -> Any:
        if file_lines:
            return None
        if draws.changed():
            number = last.get(id(frame), frame.f_lineno)
            file = frame.f_code.co_filename
            file_lines.append(f" at {code_at(file, number)}{_module(frame, paths, model)}")
            return None
        if event == "line":
            last[id(frame)] = frame.f_lineno
        return line

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        if file_lines or is_foreign(frame.f_globals.get("__name__")):
            return None
        last[id(frame)] = frame.f_lineno
        return line

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except Exception:  # the same call has just succeeded; the line may be known already
        return file_lines[0] if file_lines else ""
    finally:
        sys.settrace(before)
    return file_lines[0] if file_lines else ""


def _module(frame: FrameType, paths: dict[int, str], model: nn.Module) -> str:
    """The module whose method a frame runs, or is called by."""
    at: FrameType | None = frame
    while at is not None:
        for variable in ("self", *at.f_code.co_varnames[:1]):
            value = at.f_locals.get(variable)
            if isinstance(value, nn.Module) and id(value) in paths:
                return f", in module {paths[id(value)] or type(model).__name__}"
        at = at.f_back
    return ""
