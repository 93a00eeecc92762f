"""Annotation strings: the short spelling of a rule, after einops.

Grammar, one term per tensor argument and output, in order::

    annotation := terms "->" terms
    terms      := term ("," term)*
    term       := dim*                   one dim per dimension of the tensor; empty for a scalar
    dim        := name                   a factor
                | name "!"               a blocked factor: never sharded
                | "(" name name* ")"     a dim that is the product of factors, the first varying slowest
                | "1"                    a dim of extent 1
                | "..."                  leading dims, the same in every term that has it (once per term)

A factor that an output lacks is summed there. Inside a parenthesis only the first factor can be sharded;
the others' extents are taken from terms in which they stand alone, or from the one that is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetspmd.errors import RuleError
from hetspmd.rules.rule import SUM, Call, Cut, Factor, OpRule, Place, TensorType

_TOKEN = re.compile(r"\s*(\.\.\.|\(|\)|1(?!\w)|[A-Za-z_]\w*!?|\S)")


@dataclass(frozen=True)
class _Dim:
    names: tuple[str, ...]
    ellipsis: bool = False


def check_annotation(text: str) -> None:
    """Raise RuleError if ``text`` does not follow the grammar."""
    sides = text.split("->")
    if len(sides) != 2:
        raise RuleError(f"annotation {text!r} needs exactly one '->'")
    for side in sides:
        for term in side.split(","):
            _term(term, text)


def parse_annotation(text: str, call: Call) -> OpRule:
    """The rule that ``text`` spells for ``call``. Raises RuleError where the two disagree."""
    check_annotation(text)
    sides = text.split("->")
    inputs = [_term(t, text) for t in sides[0].split(",")] if call.inputs or sides[0].strip() else []
    outputs = [_term(t, text) for t in sides[1].split(",")]
    for side, terms, types in (("inputs", inputs, call.inputs), ("outputs", outputs, call.outputs)):
        if len(terms) != len(types):
            raise RuleError(f"{call.op}: annotation {text!r} has {len(terms)} {side}, the call {len(types)}")
    present: list[TensorType] = []
    for type_ in (*call.inputs, *call.outputs):
        if type_ is None:
            raise RuleError(f"{call.op}: an annotation cannot describe an output that is None")
        present.append(type_)
    expanded = [
        _expand(term, type_, text, call.op) for term, type_ in zip((*inputs, *outputs), present, strict=True)
    ]
    sizes = _sizes(expanded, present, text, call.op)
    blocked = {n.rstrip("!") for dims in expanded for d in dims for n in d.names if n.endswith("!")}
    names = list(dict.fromkeys(n.rstrip("!") for dims in expanded for d in dims for n in d.names))
    factors = []
    for name in names:
        if name in blocked or sizes[name] < 1:
            continue
        places = [_place(dims, name, sizes) for dims in expanded]
        if "inner" in places:
            continue
        ins = tuple(p for p in places[: len(inputs)] if not isinstance(p, str))
        outs = tuple(SUM if p is None else p for p in places[len(inputs) :] if not isinstance(p, str))
        if any(p is SUM and t.dtype == "bool" for p, t in zip(outs, present[len(inputs) :], strict=True)):
            continue
        factors.append(Factor(name, sizes[name], ins, outs))
    return OpRule(tuple(factors))


def _term(text: str, annotation: str) -> list[_Dim]:
    dims: list[_Dim] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(text):
        if token == "(":
            if group is not None:
                raise RuleError(f"annotation {annotation!r}: nested parentheses")
            group = []
        elif token == ")":
            if not group:
                raise RuleError(f"annotation {annotation!r}: ')' without names before it")
            dims.append(_Dim(tuple(group)))
            group = None
        elif token == "...":
            if group is not None or any(d.ellipsis for d in dims):
                raise RuleError(f"annotation {annotation!r}: '...' once per term, outside parentheses")
            dims.append(_Dim((), ellipsis=True))
        elif token == "1":
            dims.append(_Dim(()))
        elif re.fullmatch(r"[A-Za-z_]\w*!?", token):
            if group is None:
                dims.append(_Dim((token,)))
            else:
                group.append(token)
        else:
            raise RuleError(f"annotation {annotation!r}: unexpected {token!r}")
    if group is not None:
        raise RuleError(f"annotation {annotation!r}: '(' is not closed")
    names = [n for d in dims for n in d.names]
    for n in names:
        if names.count(n) > 1 and not n.endswith("!"):
            raise RuleError(f"annotation {annotation!r}: {n!r} twice in one term; block it: '{n}!'")
    return dims


def _expand(dims: list[_Dim], type_: TensorType, text: str, op: str) -> list[_Dim]:
    named = sum(not d.ellipsis for d in dims)
    extra = type_.ndim - named
    if extra < 0 or (extra > 0 and named == len(dims)):
        raise RuleError(f"{op}: annotation {text!r} does not fit a tensor of shape {list(type_.shape)}")
    out: list[_Dim] = []
    for d in dims:
        out += [_Dim((f"_{i}",)) for i in range(extra - 1, -1, -1)] if d.ellipsis else [d]
    return out


def _sizes(expanded: list[list[_Dim]], types: list[TensorType], text: str, op: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    pending = [
        (d, extent)
        for dims, t in zip(expanded, types, strict=True)
        for d, extent in zip(dims, t.shape, strict=True)
    ]
    while pending:
        rest = []
        for d, extent in pending:
            names = [n.rstrip("!") for n in d.names]
            unknown = [n for n in names if n not in sizes]
            product = 1
            for n in names:
                product *= sizes.get(n, 1)
            if len(unknown) > 1:
                rest.append((d, extent))
            elif unknown and product and extent % product == 0:
                sizes[unknown[0]] = extent // product
            elif unknown or product != extent:
                raise RuleError(
                    f"{op}: annotation {text!r}: {' '.join(names) or '1'} is {product}, the tensor has {extent}"
                )
        if len(rest) == len(pending):
            raise RuleError(f"{op}: annotation {text!r}: extents inside parentheses cannot be told apart")
        pending = rest
    return sizes


def _place(dims: list[_Dim], name: str, sizes: dict[str, int]) -> Place | str:
    for i, d in enumerate(dims):
        names = [n.rstrip("!") for n in d.names]
        if name in names:
            if names[0] != name:
                return "inner"
            unit = 1
            for other in names[1:]:
                unit *= sizes[other]
            return Cut(i, unit)
    return None
