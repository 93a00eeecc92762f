"""Where in the model's code the trace is now."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import nn

_FOREIGN = tuple(
    str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).resolve().parent.parent)
)
_PYTHON = sysconfig.get_path("stdlib") + os.sep


def here(model: nn.Module) -> str:
    """``file:line: code (in module a.b)`` of the innermost frame that is the model's own; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    line = ""
    paths = {id(module): path for path, module in model.named_modules()}
    while frame is not None:
        if not line and not _is_foreign(frame.f_code.co_filename):
            name, number = frame.f_code.co_filename, frame.f_lineno
            line = code_at(name, number)
        owner = frame.f_locals.get("self")
        if line and isinstance(owner, nn.Module) and paths.get(id(owner)):
            return f"{line} (in module {paths[id(owner)]})"
        frame = frame.f_back
    return line


def code_at(file: str, number: int) -> str:
    """``file:line: code``."""
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


def frame_line(frame: FrameType) -> str:
    """``file:line: code`` of the line that a frame runs."""
    return code_at(frame.f_code.co_filename, frame.f_lineno)


def line_of(error: BaseException) -> str:
    """``file:line: code`` of the model's own line that an error comes from; "" if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_foreign(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _is_foreign(name: str) -> bool:
    """Whether a file is torch's, hetspmd's or of Python's own library."""
    of_python = name.startswith(_PYTHON) and "site-packages" not in name and "dist-packages" not in name
    return name.startswith("<") or of_python or name.startswith(_FOREIGN)
