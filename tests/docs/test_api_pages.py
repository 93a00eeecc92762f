"""The API pages (docs/api, ``make docs``) have every public name, and its docstring every argument and field."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hetspmd
from hetspmd import errors, rules
from hetspmd.optimize.compile_options import CompileKeywords

OF_COMPILATIONS = set(CompileKeywords.__annotations__)
"""Some of these are said where they are used, too."""
PAGES = Path(__file__).parents[2] / "docs" / "api"


def directives() -> list[str]:
    """The dotted names that the pages document, each with everything public in it if it is a module."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.rst")))
    found = re.findall(r"^\.\. auto(?:function|class|data):: (\S+)$", text, re.M)
    return [*found, *(f"hetspmd.errors.{name}" for name in errors.__all__ if "hetspmd.errors" in text)]


def documented(name: str) -> Any:
    """The object of a dotted name."""
    module, _, leaf = name.rpartition(".")
    return getattr(hetspmd if module == "hetspmd" else __import__(module, fromlist=[leaf]), leaf)


def members(made: type) -> Iterator[tuple[str, Any]]:
    """Public methods that hetspmd itself defines, in the class or a class of its own above it."""
    for above in made.__mro__:
        if above.__module__.startswith("hetspmd"):
            yield from (
                (n, m) for n, m in vars(above).items() if not n.startswith("_") and inspect.isfunction(m)
            )


def entries(text: str | None, section: str) -> set[str]:
    """The names that a section of a docstring has, as Google's style writes them."""
    found = re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", inspect.cleandoc(text or ""), re.M)
    return set(re.findall(r"^    (\w+):", found[1], re.M)) if found else set()


def arguments(function: Any) -> set[str]:
    """The arguments of a function without the first one of a method. Those of a dict of keyword arguments count
    beside the dict, but for the options of a compilation, which have a page of their own."""
    found = {
        name: p for name, p in inspect.signature(function).parameters.items() if name not in ("self", "cls")
    }
    named = set(found)
    for parameter in found.values():
        if parameter.kind is parameter.VAR_KEYWORD and "Unpack[" in str(parameter.annotation):
            keywords = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
            module = sys.modules[function.__module__]
            named |= set(vars(module)[keywords].__annotations__) - set(CompileKeywords.__annotations__)
    return named


def test_every_public_name_has_its_place() -> None:
    named = directives()
    assert len(named) == len(set(named)), "documented twice"
    public = {f"hetspmd.{name}" for name in hetspmd.__all__} - {"hetspmd.errors", "hetspmd.rules"}
    public |= {f"hetspmd.rules.{name}" for name in ("check", "registered", "unregister")}
    assert public - set(named) == {"hetspmd.HetspmdError"}  # stands among the errors
    assert {f"hetspmd.{name}" for name in rules.__all__} - public - set(named) <= {
        "hetspmd.check", "hetspmd.ops", "hetspmd.registered", "hetspmd.unregister"
    }  # fmt: skip


def test_every_error_of_the_module_is_public() -> None:
    there = {n for n, e in vars(errors).items() if inspect.isclass(e) and issubclass(e, Exception | Warning)}
    assert there == set(errors.__all__)


@pytest.mark.parametrize("name", directives())
def test_docstrings_have_every_argument_and_field(name: str) -> None:
    made = documented(name)
    assert (getattr(made, "__doc__", "") or "").strip(), f"{name} has no docstring"
    if dataclasses.is_dataclass(made) and name != "hetspmd.trace.graph.Ref":
        assert entries(made.__doc__, "Attributes") == {f.name for f in dataclasses.fields(made)}
    elif name == "hetspmd.HAP":
        assert entries(made.__doc__, "Args") - OF_COMPILATIONS == arguments(made)
    elif inspect.isfunction(made) and (asked := entries(made.__doc__, "Args")):
        assert asked - OF_COMPILATIONS == arguments(made) - OF_COMPILATIONS
    if inspect.isclass(made):
        lost = [n for n, member in members(made) if not (member.__doc__ or "").strip()]
        assert not lost, f"{name} has methods without docstrings: {lost}"


@pytest.mark.parametrize("name", directives())
def test_docstrings_raise_what_there_is(name: str) -> None:
    made = documented(name)
    texts = [getattr(made, "__doc__", "")]
    if inspect.isclass(made):
        texts += [member.__doc__ for _, member in members(made)]
    for text in texts:
        for error in entries(text, "Raises"):
            assert error in errors.__all__ or hasattr(builtins, error), f"{name} says that it raises {error}"
