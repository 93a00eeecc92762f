"""What to write where a tensor is read as a number that is an index: ``ptr = int(self.ptr)``, ``queue[:, ptr]``."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType

_NUMBERS = frozenset({"int", "float", "bool"})
_READING = frozenset({"item", "tolist"})
_INDEXING = frozenset({"narrow", "roll", "select"})
"""Methods whose arguments are indices."""


def index_advice(code: CodeType | None, line: int) -> str:
    """The rewrite of a line at which a tensor of a function becomes a number, "" if that is no index."""
    if code is None:
        return ""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # there is no source, or a part of an expression
        return ""
    at = [node for node in ast.walk(tree) if getattr(node, "lineno", -1) + first - 1 == line]
    names = {
        t.id: n.value for n in at if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    }
    for index in _indices(tree, at):
        for part in ast.walk(index):
            read = _read(names[part.id] if isinstance(part, ast.Name) and part.id in names else part)
            if (
                read is None
                and part in at
                and isinstance(part, ast.Attribute)
                and not _of_a_call(part, index)
            ):
                read = part
            if read is not None:
                return _mask(read) if _is_open(index, part) else _rows(read)
    return ""


def _indices(tree: ast.AST, at: list[ast.AST]) -> Iterator[ast.expr]:
    """The indices of a function: first those of the line, and then all of them."""
    for node in (*at, *ast.walk(tree)):
        if isinstance(node, ast.Subscript):
            yield from node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _INDEXING
        ):
            yield from node.args


def _read(node: ast.expr | ast.AST) -> ast.expr | None:
    """The tensor that an expression makes a number: ``int(self.ptr)``, ``self.ptr[0].item()``."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Call):
            continue
        if isinstance(part.func, ast.Name) and part.func.id in _NUMBERS and part.args:
            return _read(part.args[0]) or part.args[0]
        if isinstance(part.func, ast.Attribute) and part.func.attr in _READING:
            return part.func.value
    return None


def _of_a_call(part: ast.Attribute, index: ast.expr) -> bool:
    """Whether an attribute is what a call in an index calls, or what another attribute is of."""
    return any(
        (isinstance(n, ast.Call) and n.func is part) or (isinstance(n, ast.Attribute) and n.value is part)
        for n in ast.walk(index)
    )


def _is_open(index: ast.expr, part: ast.AST) -> bool:
    """Whether a number is the only bound of a slice, whose length depends on it."""
    if not isinstance(index, ast.Slice) or (index.lower is None) == (index.upper is None):
        return False
    return any(node is part for node in ast.walk(index))


def _mask(read: ast.expr) -> str:
    return (
        "the length of a slice must be the same in every step: keep all, and mask what is too much: "
        f"torch.where(torch.arange(len(x), device=x.device) < {ast.unparse(read)}, x, 0.0)"
    )


def _rows(read: ast.expr) -> str:
    name, owner = ast.unparse(read), read
    while isinstance(owner, ast.Subscript):
        owner = owner.value
    moves = f"; {name}.copy_(({name} + n) % k) moves on" if isinstance(owner, ast.Attribute) else ""
    return (
        "an index may stay a tensor. For n of k rows: "
        f"rows = ({name} + torch.arange(n, device={name}.device)) % k; "
        f"table.index_copy_(0, rows, new) writes them, table.index_select(0, rows) reads them{moves}"
    )
