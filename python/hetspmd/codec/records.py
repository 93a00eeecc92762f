"""Frozen dataclasses to JSON values and back, for plan files.

A dataclass is ``{"$": "ClassName", field: value, ...}``, a tuple a list, a mapping ``{"$map": [[k, v], ...]}``
in key order, a float that JSON lacks ``{"$float": "inf"}``, a complex number ``{"$complex": [real, imaginary]}``.
A field that is marked so is left out where it has its default (:data:`LEFT_OUT`), or is a record whose fields stand
among the others (:data:`INLINE`). Only hetspmd's own dataclasses are read back.

:func:`decode` checks every value against the annotation of its field: there is one JSON value for each tree, and
whatever else stands in a file is refused with its place. What the numbers mean is not looked at here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from itertools import pairwise, repeat
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hetspmd.codec.scalars import SCALARS, DamageError, Decoder, fail, float_of, wrong

T = TypeVar("T")

LEFT_OUT: Final = {"left out": True}
"""The metadata of a field that is written only where it differs from its default: what was added to a class later
leaves the text of what was there before as it is."""
INLINE: Final = {"inline": True}
"""The metadata of a field that holds a record, whose fields are written among its neighbours and not under its own
name. Of a tuple of records this is so where there is one of them; several are a list under the field's name. No two
fields that stand side by side so may have one name."""
_DEPTH: Final = 16
"""How deep tuples may stand in each other in the arguments of an op; torch's own have three levels."""


@cache
def _types() -> dict[str, type]:
    # By module name: ``from hetspmd.rules import rule`` is the decorator.
    names = (
        "trace.graph", "trace.host.facts", "rules.rule", "program.program", "program.schedule",
        "program.saved_tensors", "program.lengths", "cluster.cluster", "cluster.devices", "cluster.curves",
        "cluster.op_times", "cluster.step_curves", "cost.step", "plan.plan", "plan.reports", "plan.run_order",
        "plan.step_plan",
    )  # fmt: skip
    types: dict[str, type] = {}
    for module in (import_module(f"hetspmd.{name}") for name in names):
        for name, value in vars(module).items():
            if (
                isinstance(value, type)
                and dataclasses.is_dataclass(value)
                and value.__module__ == module.__name__
            ):
                types[name] = value
    return types


def encode(value: Any) -> Any:
    """The JSON value of a dataclass tree. Raises TypeError for anything else."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, complex):
        return {"$complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, Mapping):
        return {"$map": [[encode(k), encode(value[k])] for k in sorted(value)]}
    name = type(value).__name__
    cls = _types().get(name)
    if cls is type(value) and dataclasses.is_dataclass(cls):
        return {"$": name, **_fields_of(value)}
    raise TypeError(f"a {name} cannot be stored in a plan")


def _fields_of(record: Any) -> dict[str, Any]:
    """The JSON values of a record's fields, and of those that stand inline."""
    written: dict[str, Any] = {}
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        if f.metadata.get("inline") and not (isinstance(value, tuple) and len(value) != 1):
            written |= _fields_of(value[0] if isinstance(value, tuple) else value)
        elif not (_may_lack(f) and value == _default(f)):
            written[f.name] = encode(value)
    return written


def _may_lack(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("left out"))


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def decode(value: Any, cls: type[T]) -> T:
    """Inverse of :func:`encode` for a ``cls``; lists become tuples.

    Raises DamageError, naming the place, for a value that is not of its field's type, a field that is missing or
    unknown, and keys of a mapping that are out of order or stand twice; and what a class raises on being made.
    """
    kind: Any = cls
    return cast(T, _decoder(kind)(value))


@cache
def _decoder(kind: Any) -> Decoder:
    """The function that reads values of an annotation."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if kind is Any:
        return _argument
    if dataclasses.is_dataclass(kind):
        inline = any(f.metadata.get("inline") for f in dataclasses.fields(kind))
        return (_with_inline if inline else _dataclass)(cast(type, kind))
    if origin is Literal:
        return _literal(parts)
    if origin in (Union, UnionType):
        return _union(parts)
    if origin is tuple:
        return _sequence(parts[0]) if parts[-1] is Ellipsis else _row(parts)
    if origin is Mapping:
        return _mapping(*parts)
    raise TypeError(f"values of {kind} cannot be stored in a plan")


def _literal(allowed: tuple[Any, ...]) -> Decoder:
    literals = {name: name for name in allowed}

    def read(value: Any) -> Any:
        literal = literals.get(value) if type(value) is str else None
        return fail(value, "one of " + ", ".join(map(repr, allowed))) if literal is None else literal

    return read


def _sequence(item: Any) -> Decoder:
    read_item = _decoder(item)

    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong(value, "a list")
        return _elements(value, repeat(read_item))

    return read


def _row(items: tuple[Any, ...]) -> Decoder:
    readers = [_decoder(item) for item in items]

    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(readers):
            raise wrong(value, f"a list of {len(readers)}")
        return _elements(value, readers)

    return read


def _elements(values: list[Any], readers: Iterable[Decoder]) -> tuple[Any, ...]:
    """What the readers make of the values; an error says which one it is of."""
    read: list[Any] = []
    try:
        for value, reader in zip(values, readers, strict=False):  # one reader may be repeated without an end
            read.append(reader(value))
    except DamageError as error:
        raise error.under(f"[{len(read)}]") from None
    return tuple(read)


def _mapping(key: Any, item: Any) -> Decoder:
    read_rows = _sequence(tuple[key, item])

    def read(value: Any) -> dict[Any, Any]:
        if type(value) is not dict or list(value) != ["$map"]:
            raise wrong(value, 'a mapping {"$map": [[key, value], ...]}')
        rows = read_rows(value["$map"])
        for (one, _), (other, _) in pairwise(rows):
            if not one < other:
                raise DamageError(f"has the key {other!r} after {one!r}; keys are in order, each once")
        return dict(rows)

    return read


def _dataclass(cls: type) -> Decoder:
    fields: list[tuple[tuple[str, Decoder], ...]] = []  # none or one: threads see all of it or nothing
    name = cls.__name__
    defaults = {f.name: _default(f) for f in dataclasses.fields(cls) if _may_lack(f)}

    def prepare() -> tuple[tuple[str, Decoder], ...]:  # at the first value: classes may hold their own kind
        hints = get_type_hints(cls)
        return tuple((f.name, _decoder(hints[f.name])) for f in dataclasses.fields(cls))

    def read(value: Any) -> Any:
        if type(value) is not dict or value.get("$") != name:
            raise wrong(value, f"a {name}")
        if not fields:
            fields.append(prepare())
        readers = fields[0]
        if defaults:
            readers = tuple((n, r) for n, r in readers if n in value or n not in defaults)
        if len(value) != len(readers) + 1 or not all(n in value for n, _ in readers):
            raise _fields(value, [n for n, _ in readers])
        values: dict[str, Any] = {}
        n = ""
        try:
            for n, read_field in readers:  # named in the error
                values[n] = read_field(value[n])
        except DamageError as error:
            raise error.under(f".{n}") from None
        for n, default in defaults.items():
            if n in values and values[n] == default:
                raise DamageError("is written where it is left out").under(f".{n}")
        return cls(**values)

    return read


def _with_inline(cls: type) -> Decoder:
    """The reader of a record in which others stand inline."""

    def read(value: Any) -> Any:
        if type(value) is not dict or value.get("$") != cls.__name__:
            raise wrong(value, f"a {cls.__name__}")
        names = _names(cls, value)
        if len(value) != len(names) + 1 or not all(n in value for n in names):
            raise _fields(value, names)
        return _assembled(cls, value)

    return read


def _members(cls: type, value: Mapping[str, Any]) -> Iterator[tuple[str, Any, type | None]]:
    """The name and the annotation of each field of a record that ``value`` must have, and the record that stands
    inline for it, if one does."""
    hints = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        kind, inner = hints[f.name], None
        if f.metadata.get("inline"):
            several = get_origin(kind) is tuple
            if not (several and f.name in value):
                inner = get_args(kind)[0] if several else kind
        if inner is not None or f.name in value or not _may_lack(f):
            yield f.name, kind, inner


def _names(cls: type, value: Mapping[str, Any]) -> list[str]:
    """The names of the fields that ``value`` must have, inline ones too."""
    names: list[str] = []
    for name, _, inner in _members(cls, value):
        names += [name] if inner is None else _names(inner, value)
    return names


def _assembled(cls: type, value: Mapping[str, Any]) -> Any:
    """The record whose fields, and those of the records in it, stand in ``value``."""
    parts: dict[str, Any] = {}
    for name, kind, inner in _members(cls, value):
        several = get_origin(kind) is tuple
        if inner is not None:
            record = _assembled(inner, value)
            parts[name] = (record,) if several else record
            continue
        try:
            parts[name] = _decoder(kind)(value[name])
        except DamageError as error:
            raise error.under(f".{name}") from None
        (field,) = (f for f in dataclasses.fields(cls) if f.name == name)
        inline = field.metadata.get("inline") and len(parts[name]) == 1
        if inline or (_may_lack(field) and parts[name] == _default(field)):
            raise DamageError("is written where it is left out").under(f".{name}")
    return cls(**parts)


def _fields(value: Mapping[str, Any], names: list[str]) -> DamageError:
    missing = [n for n in names if n not in value]
    unknown = [n for n in value if n != "$" and n not in names]
    parts = [f"lacks {', '.join(missing)}"] if missing else []
    parts += [f"has the unknown {', '.join(map(repr, unknown))}"] if unknown else []
    return DamageError(f"is a {value['$']} that {' and '.join(parts)}")


def _union(parts: tuple[Any, ...]) -> Decoder:
    classes: list[Any] = [p for p in parts if dataclasses.is_dataclass(p)]
    tagged = {p.__name__: _decoder(p) for p in classes}
    plain = {p: _decoder(p) for p in parts if p in SCALARS}
    others = [_decoder(p) for p in parts if not dataclasses.is_dataclass(p) and p not in SCALARS]
    wanted = " or ".join(getattr(p, "__name__", str(p)).replace("NoneType", "null") for p in parts)
    if len(others) > 1:
        raise TypeError(f"values of {wanted} cannot be told apart in a plan")

    def read(value: Any) -> Any:
        reader = plain.get(type(value))
        if reader is None and type(value) is dict:
            tag = value.get("$")
            if isinstance(tag, str):
                reader = tagged.get(tag)
            elif "$float" in value:
                reader = plain.get(float)
        if reader is None and type(value) is int:
            reader = plain.get(float)
        if reader is None and others:
            reader = others[0]
        return fail(value, wanted) if reader is None else reader(value)

    return read


def _argument(value: Any, depth: int = 0) -> Any:
    """An :data:`~hetspmd.trace.graph.Argument`."""
    if type(value) is list:
        if depth == _DEPTH:
            raise DamageError(f"has more than {_DEPTH} levels of lists")
        return _elements(value, repeat(partial(_argument, depth=depth + 1)))
    if type(value) is dict and list(value) == ["$complex"]:
        return _complex(value["$complex"])
    if type(value) is dict and "$float" not in value:
        tag = value.get("$")
        if not isinstance(tag, str) or tag not in ("Ref", "DType", "Marker"):
            raise wrong(value, "an argument of an op")
        return _decoder(_types()[tag])(value)
    return _plain(value)


def _complex(value: Any) -> complex:
    if type(value) is not list or len(value) != 2 or any(type(part) is int for part in value):
        raise wrong(value, "the two parts of a complex number")
    real, imaginary = map(float_of, value)
    return complex(real, imaginary)


_plain: Final = _union((NoneType, bool, int, float, str))
