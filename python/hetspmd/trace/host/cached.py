"""What ``functools.cache`` and ``lru_cache`` hold: the results of calls, which may change in place.

A result is told by the call that gives it, with numbers and strings as arguments: whoever looks for it makes that
call, as the forward does, so that every rank has the result whether or not it was asked for before. A method is
called where the object lies whose method it is.
"""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, Final

from torch import nn

from hetspmd.trace.host.content import own_attributes
from hetspmd.trace.host.plain import is_scalar, tensors_behind, tensors_in

CALL: Final = "("
"""How a step begins that calls a cached function: it ends in the arguments, as JSON."""
_CACHE: Final = type(functools.cache(lambda: None))

_ELEMENT: Final = "_lru_list_elem"
"""The class of the elements of the list in which a cache of limited size holds its results."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a function is called with: by position, and by name."""


Place = tuple[str, tuple[str, ...]]
Owner = Callable[[Any], Place | None]
"""Where an object lies, None if no one knows."""


class Caches:
    """The cached functions that a forward may call, with the places where they lie. ``owner`` tells where the
    objects lie whose methods they are."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._known: dict[int, tuple[str, tuple[str, ...], Any]] = {}

    def know(self, root: str, path: tuple[str, ...], function: Any) -> None:
        """A cached function was found."""
        self._known.setdefault(id(function), (root, path, function))

    def places(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Where the results lie that they hold now and that may change in place."""
        for root, path, function in self._known.values():
            yield from ((root, (*path, call)) for call in calls_to(function))
            for key, result in entries_of(function):
                if _may_change(result) and not tensors_behind(result) and step_of(function, key) is None:
                    place = place_of(root, path, function, key, self._owner)
                    yield from () if place is None else (place,)


def is_cache(value: object) -> bool:
    """Whether a value is a function whose results are cached."""
    return type(value) is _CACHE


def cache_of(value: object) -> Any:
    """The function whose results are cached that a value is, or of which it is a method; None for anything else."""
    function = value.__func__ if type(value) is MethodType else value
    return function if is_cache(function) else None


def calls_to(function: Any) -> Iterator[str]:
    """The calls, as steps, of which a cached function holds results that may change in place.

    Left out are calls with other arguments than numbers and strings, and results with tensors in them: these are
    computed anew in each trace, as part of the graph.
    """
    for key, result in entries_of(function):
        if _may_change(result) and (step := step_of(function, key)) is not None:
            yield step


def _may_change(result: Any) -> bool:
    return not (
        is_scalar(result) or (callable(result) and not isinstance(result, nn.Module)) or tensors_in(result)
    )


def is_call(step: str) -> bool:
    """Whether a step calls, with arguments that can be read."""
    try:
        return step.startswith(CALL) and _step_of(*_arguments(step)) == step
    except (ValueError, TypeError, AttributeError):
        return False


def call(function: Any, step: str) -> Any:
    """The result of a call. Raises what the function raises, and TypeError for what is no cached function."""
    if cache_of(function) is None:
        raise TypeError(f"a {type(function).__name__} is no function whose results are cached")
    positional, named = _arguments(step)
    return function(*positional, **named)


def prepared(function: Any, step: str) -> Any:
    """What makes a call without reading its arguments again."""
    positional, named = _arguments(step)
    return functools.partial(function, *positional, **named)


def _arguments(step: str) -> Arguments:
    """The arguments of a step that calls."""
    positional, named = json.loads(step[len(CALL) : -1])
    return tuple(map(_read, positional)), {name: _read(value) for name, value in named.items()}


def spoken_call(step: str) -> str:
    """A step that calls, as people write it."""
    positional, named = _arguments(step)
    return f"({', '.join([*map(repr, positional), *(f'{n}={v!r}' for n, v in named.items())])})"


def results_of(function: Any) -> dict[Any, Any]:
    """The table of a cached function: of each key the result, or what holds it. Who takes a key out of it lets the
    function forget the result, as ``functools`` expects of other threads."""
    tables = (r for r in gc.get_referents(function) if type(r) is dict and r is not vars(function))
    if function.cache_parameters()["maxsize"] is None:
        return next(tables, {})
    return next((table for table in tables if table and all(map(_is_element, table.values()))), {})


def entries_of(function: Any) -> list[tuple[Any, Any]]:
    """The keys and results that a cached function holds."""
    table = results_of(function)
    if function.cache_parameters()["maxsize"] is None:
        return list(table.items())
    references = gc.get_referents(function)
    entries: dict[Any, Any] = {}
    for key, result, holder in zip(references, references[1:], references[2:], strict=False):
        if isinstance(holder, type) and holder.__name__ == _ELEMENT and _is_key(key, table):
            entries[key] = result  # of a key that was taken out an older one is there as well, before it
    return list(entries.items())


def _is_element(value: object) -> bool:
    return type(value).__name__ == _ELEMENT


def _is_key(value: Any, table: Mapping[Any, Any]) -> bool:
    try:
        return value in table
    except TypeError:  # it has no hash
        return False


def step_of(function: Any, key: Any) -> str | None:
    """The step to the result with this key in the table of a cache, None if its arguments cannot be written."""
    return None if function.cache_parameters()["typed"] else _step_of(*arguments_of(function, key))


def place_of(root: str, path: tuple[str, ...], function: Any, key: Any, owner: Owner) -> Place | None:
    """The place of the result with this key in the table of a cache that lies at ``path``; None if no rank could
    make the call: with arguments that cannot be written, or as a method of an object that is not followed."""
    step = step_of(function, key)
    if step is not None:
        return root, (*path, step)
    (of, *positional), named = (arguments_of(function, key)[0] or (None,)), arguments_of(function, key)[1]
    name = getattr(function, "__name__", "")
    held = getattr(type(of), name, None) is function and name not in own_attributes(of)
    place = owner(of) if held and not function.cache_parameters()["typed"] else None
    step = _step_of(tuple(positional), named)
    return None if place is None or step is None else (place[0], (*place[1], f".{name}", step))


def arguments_of(function: Any, key: Any) -> Arguments:
    """The arguments of the call whose result has this key in the table of a cache."""
    parts = list(key) if isinstance(key, tuple) else [key]
    typed = function.cache_parameters()["typed"]
    marks = [position for position, part in enumerate(parts) if part is _MARK]
    if not marks:
        return tuple(parts[: len(parts) // 2] if typed else parts), {}
    count, rest = marks[0], parts[marks[0] + 1 :]
    if typed:  # behind the values of all arguments stand their classes
        rest = rest[: (len(rest) - count) // 3 * 2]
    return tuple(parts[:count]), dict(zip(rest[::2], rest[1::2], strict=True))


def _step_of(positional: tuple[Any, ...], named: dict[str, Any]) -> str | None:
    if not all(map(_is_written, (*positional, *named.values()))):
        return None
    return f"{CALL}{json.dumps([positional, named])})"


def _mark() -> object:
    """What stands in every key between positional and named arguments. Arguments may be bare objects as well."""
    asked = functools.cache(lambda **_: None)
    asked(name=None)
    ((mark, *_),) = results_of(asked)
    return mark


_MARK: Final = _mark()


def _is_written(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_written, value))
    return type(value) in (int, str, bool, type(None)) or (type(value) is float and value == value)


def _read(value: Any) -> Any:
    return tuple(map(_read, value)) if isinstance(value, list) else value
