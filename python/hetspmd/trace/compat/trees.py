"""Nested containers as torch takes them apart, among them those that it does not know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from hetspmd.errors import PlanError
from hetspmd.trace.containers import ApartContainer, unwrap, wrap


class _Below:
    """Whether something is not ``root``. It is forgotten when that is known: torch's function that asks refers to
    itself, and would hold a step's outputs until such circles are looked for."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def __call__(self, value: Any) -> bool:
        return value is not self.root


def _is_container(value: Any) -> bool:
    """Whether torch takes an object apart: a container, a registered class, or a named tuple."""
    return not _children(value)[1].is_leaf()


def _children(value: Any) -> tuple[list[Any], Any]:
    below = _Below(value)
    try:
        return pytree.tree_flatten(value, is_leaf=below)
    finally:
        below.root = None


def _rebuilt(parts: list[Any], spec: Any) -> Any:
    return pytree.tree_unflatten(parts, spec)


def _held_parts(held: ApartContainer) -> tuple[list[Any], tuple[Any, ...]]:
    return list(held.parts), (held.kind, held.name, held.keys, held.items)


def _held_keys(held: ApartContainer) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    parts, context = _held_parts(held)
    by_attribute = held.kind in ("object", "dataclass", "namedtuple")
    names: list[Any] = [
        pytree.GetAttrKey(str(k)) if by_attribute or n >= held.items else pytree.MappingKey(k)
        for n, k in enumerate(held.keys)
    ]
    return list(zip(names, parts, strict=True)), context


def _held_again(parts: Iterable[Any], context: tuple[Any, ...]) -> ApartContainer:
    kind, name, keys, items = context
    return ApartContainer(kind, name, tuple(keys), items, tuple(parts))


def _held_text(context: tuple[Any, ...]) -> Any:
    return [context[0], context[1], list(context[2]), context[3]]


def _held_context(text: Any) -> tuple[Any, ...]:
    kind, name, keys, items = text
    return kind, name, tuple(keys), items


pytree.register_pytree_node(
    ApartContainer,
    _held_parts,
    _held_again,
    serialized_type_name="hetspmd.Held",
    to_dumpable_context=_held_text,
    from_dumpable_context=_held_context,
    flatten_with_keys_fn=_held_keys,
)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and spec of nested containers (:mod:`hetspmd.trace.containers`)."""
    leaves, spec = pytree.tree_flatten(wrap(tree, _is_container, _children, _rebuilt))
    return leaves, spec


def flatten_with_names(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with readable paths such as ``['input_ids']``."""
    wrapped = wrap(tree, _is_container, _children, _rebuilt)
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(wrapped)[0]]


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """Inverse of :func:`flatten`. Raises MissingClassError where a class is not found here."""
    return unwrap(pytree.tree_unflatten(list(leaves), spec), _is_container, _children, _rebuilt)


def parts_of(leaves: Sequence[Any], spec: Any) -> Any:
    """As :func:`unflatten`, with containers that torch does not know left apart."""
    return pytree.tree_unflatten(list(leaves), spec)


def spec_to_text(spec: Any) -> str:
    """A spec as text. Raises NotImplementedError for a container class that torch cannot name."""
    return pytree.treespec_dumps(spec)


def spec_from_text(text: str) -> Any:
    """Inverse of :func:`spec_to_text`. Raises PlanError for text that is no spec; for a container whose class this
    process has not met, the error's cause is a NotImplementedError."""
    try:
        return pytree.treespec_loads(text)
    except RecursionError:
        raise PlanError("a plan's containers are nested too deeply; compile the plan again") from None
    except NotImplementedError as error:
        said = str(error).partition(" failed because")[0].removeprefix("Deserializing ")
        raise PlanError(
            f"a container of the plan's batch or outputs is not known here ({said}); import the library that "
            "defines it before the plan is used"
        ) from error
    except Exception as error:  # torch's parser raises what comes
        raise PlanError(
            f"a plan's containers cannot be read ({type(error).__name__}: {error}); compile the plan again"
        ) from error
