"""Where rules live: one per op name, or one for a family of ops.

``@rule("aten.mm.default")`` registers a function from a :class:`~hetspmd.rules.rule.Call` to an
:class:`~hetspmd.rules.rule.OpRule`; ``rule("mylib::op", "b s h, h -> b s h")`` registers an annotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, overload

from hetspmd.errors import RuleError
from hetspmd.rules.annotation import check_annotation, parse_annotation
from hetspmd.rules.rule import Call, OpRule, Rewrite

RuleFunction = Callable[[Call], OpRule]
Family = tuple[str, Callable[[str], bool], RuleFunction]

_RULES: dict[str, RuleFunction] = {}
_FAMILIES: list[Family] = []


def op_name(name: str) -> str:
    """``mylib::op``, ``mylib::op.overload`` or ``mylib.op.overload`` as ``mylib.op.overload``."""
    dotted = name.replace("::", ".")
    parts = dotted.split(".")
    if len(parts) == 2:
        parts.append("default")
    if len(parts) != 3 or not all(parts):
        raise RuleError(f"{name!r} is no op name; write namespace::op or namespace.op.overload")
    return ".".join(parts)


@overload
def rule(*ops: str) -> Callable[[RuleFunction], RuleFunction]: ...
@overload
def rule(
    op: str, annotation: str, /, *, linear: Iterable[Sequence[int]] = (), rewrite: Rewrite | None = None
) -> RuleFunction: ...


def rule(*ops: str, linear: Iterable[Sequence[int]] = (), rewrite: Rewrite | None = None) -> Any:
    """Register the rule of an op.

    ``@rule(op, ...)`` decorates a function ``Call -> OpRule``, for one or more ops. With an annotation no
    function is needed: ``rule(op, "m k, k n -> m n", linear=[[0], [1]])``.

    Args:
        ops: Op names (``mylib::op``, ``mylib.op.overload``), or one op name and an annotation: one term per
            tensor argument, then one per output.
        linear: Of an annotation, sets of tensor arguments (by index) in which the op is linear.
        rewrite: Of an annotation, the function that makes the local call from a :class:`Local`.

    Raises:
        RuleError: The annotation is malformed, or an op already has a rule.
    """
    if len(ops) == 2 and "->" in ops[1]:
        annotation = ops[1]
        check_annotation(annotation)
        groups = tuple(frozenset(group) for group in linear)

        def annotated(call: Call) -> OpRule:
            return replace(parse_annotation(annotation, call), linear=groups, rewrite=rewrite)

        _add(ops[0], annotated)
        return annotated

    def register(function: RuleFunction) -> RuleFunction:
        for op in ops:
            _add(op, function)
        return function

    return register


def family(name: str, member: Callable[[str], bool], function: RuleFunction) -> None:
    """Register one rule for all ops for which ``member(op name)`` holds and that have none of their own."""
    if any(existing == name for existing, _, _ in _FAMILIES):
        raise RuleError(f"the family {name!r} is registered already")
    _FAMILIES.append((name, member, function))


def _add(op: str, function: RuleFunction) -> None:
    key = op_name(op)
    if key in _RULES:
        raise RuleError(f"{key} has a rule already; remove it first with hetspmd.rules.unregister({key!r})")
    _RULES[key] = function


def unregister(op: str) -> None:
    """Remove the rule of an op.

    Raises:
        RuleError: The op has no rule of its own.
    """
    if _RULES.pop(op_name(op), None) is None:
        raise RuleError(f"{op_name(op)} has no rule of its own")


def registered() -> tuple[str, ...]:
    """The names of all ops that have a rule of their own, sorted."""
    return tuple(sorted(_RULES))


def families() -> tuple[str, ...]:
    """Names of the families, in the order in which they are asked."""
    return tuple(name for name, _, _ in _FAMILIES)


def rule_function(op: str) -> RuleFunction | None:
    """The function that gives the rule of an op, None if there is none."""
    exact = _RULES.get(op)
    if exact is not None:
        return exact
    for _, member, function in _FAMILIES:
        if member(op):
            return function
    return None


def rule_for(call: Call) -> OpRule | None:
    """The verified rule of a call, None if the op has none.

    Raises RuleError if the registered rule does not fit the call.
    """
    function = rule_function(call.op)
    if function is None:
        return None
    op_rule = function(call)
    op_rule.verify(call)
    return op_rule
