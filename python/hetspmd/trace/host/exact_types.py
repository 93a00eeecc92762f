"""Comparisons of a value's class with that of tensors, in the Python of a forward.

The tensors of a trace are of classes of their own: ``type(x) is torch.Tensor`` is False there, and a plan keeps
what the model does then. Nothing can be put in the place of ``type``; so the code is read.
"""

from __future__ import annotations

import ast
import functools
import linecache
import warnings
from types import CodeType
from typing import Final

from hetspmd.errors import TensorTypeWarning
from hetspmd.trace.frames import code_at
from hetspmd.trace.host.names import names_in

_ASKING: Final = frozenset(("type", "__class__"))
_TENSORS: Final = frozenset(
    ("Tensor", "Parameter", "FloatTensor", "LongTensor", "HalfTensor", "DoubleTensor")
)


@functools.cache
def comparison_in(code: CodeType) -> str:
    """``file:line: code`` of the first comparison in a function that asks for just the class of tensors, or ""."""
    names = names_in(code)
    if not (names & _ASKING and names & _TENSORS):
        return ""
    lines = {number for _, _, number in code.co_lines()}
    numbers = [number for number in _comparisons(code.co_filename) if number in lines]
    return code_at(code.co_filename, min(numbers)) if numbers else ""


def warn_of_comparison(line: str) -> None:
    """Warn of a comparison, if there is one."""
    if line:
        warnings.warn(
            f"the forward compares the class of a value with that of tensors, at {line}: the tensors of a trace "
            "are of other classes, so that the plan keeps the other outcome. Write isinstance(value, torch.Tensor)",
            TensorTypeWarning,
            stacklevel=5,
        )


@functools.cache
def _comparisons(file: str) -> tuple[int, ...]:
    """The lines of a file that compare so."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # it is not what has been compiled
        return ()
    return tuple(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(map(_asks, (node.left, *node.comparators)))
        and any(map(_names_tensors, (node.left, *node.comparators)))
    )


def _asks(side: ast.expr) -> bool:
    """Whether an expression is ``type(x)``, ``x.__class__``, or an attribute of one."""
    while isinstance(side, ast.Attribute) and side.attr != "__class__":
        side = side.value
    if isinstance(side, ast.Call):
        return isinstance(side.func, ast.Name) and side.func.id == "type" and len(side.args) == 1
    return isinstance(side, ast.Attribute)


def _names_tensors(side: ast.expr) -> bool:
    for node in ast.walk(side):
        name = getattr(node, "attr", getattr(node, "id", getattr(node, "value", None)))
        if isinstance(name, str) and name.rpartition(".")[2] in _TENSORS:
            return True
    return False
