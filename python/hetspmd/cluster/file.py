"""Reading a cluster description: YAML, JSON or a dict, with the place of every mistake.

Both kinds of source become a tree of :class:`Node`, which knows where it stands (``cluster.yaml:3:12`` or
``cluster['devices'][0]``); :mod:`hetspmd.cluster.cluster` reads that tree. Every error names the place, the key,
what is allowed and how to mend it.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from hetspmd.codec.quantities import Kind, parse_quantity
from hetspmd.errors import ClusterError

EXAMPLE = (
    "{devices: [{name: v100, count: 2, flops: 12e12, memory: 16GiB, memory_bandwidth: 800GB/s}], "
    "network: {bandwidth: 10.4Gbit/s, latency: 50us}}"
)
"""A cluster file in one line of YAML."""


@dataclass(frozen=True)
class Node:
    """A mapping, a sequence or a scalar, and where it stands.

    ``mapping`` is keyed by name; ``keys`` holds the place of each key.
    """

    where: str
    mapping: Mapping[str, Node] | None = None
    keys: Mapping[str, str] | None = None
    sequence: tuple[Node, ...] | None = None
    scalar: object = None

    @property
    def what(self) -> str:
        """What the node is, in words."""
        if self.mapping is not None:
            return "a mapping"
        if self.sequence is not None:
            return "a list"
        return "nothing" if self.scalar is None or self.scalar == "" else f"{self.scalar!r}"

    def fail(self, message: str) -> NoReturn:
        """Raise ClusterError at this place."""
        raise ClusterError(f"{self.where}: {message}")

    def entries(self, name: str, allowed: Sequence[str], required: Sequence[str]) -> Mapping[str, Node]:
        """The mapping, whose keys must be among ``allowed`` and hold all of ``required``."""
        if self.mapping is None or self.keys is None:
            self.fail(f"{name} is {self.what}; write a mapping with the keys {_list(allowed)}")
        for key in self.mapping:
            if key not in allowed:
                raise ClusterError(
                    f"{self.keys[key]}: {name} has the unknown key {key!r}{_suggest(key, allowed)}; "
                    f"allowed are {_list(allowed)}"
                )
        for key in required:
            if key not in self.mapping:
                self.fail(f"{name} lacks the key {key!r}; required are {_list(required)}")
        return self.mapping

    def items(self, name: str) -> tuple[Node, ...]:
        """The list, which must not be empty."""
        if self.sequence is None:
            self.fail(f"{name} is {self.what}; write a list of devices, such as {EXAMPLE}")
        if not self.sequence:
            self.fail(f"{name} is empty; list at least one device, such as {EXAMPLE}")
        return self.sequence

    def quantity(self, name: str, kind: Kind) -> float:
        """A positive quantity in the base unit of its kind."""
        if self.mapping is not None or self.sequence is not None:
            self.fail(f"{name} is {self.what}; write a number of {kind}")
        try:
            return parse_quantity(self.scalar, kind)
        except ValueError as error:
            self.fail(f"{name}: {error}")

    def count(self, name: str) -> int:
        """A whole number from 1 to 65536."""
        value = self.scalar
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                value = None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
            self.fail(f"{name} is {self.what}; write a whole number from 1 to 65536")
        return value

    def elements(self, name: str) -> tuple[Node, ...]:
        """The list, which may be empty."""
        if self.sequence is None:
            self.fail(f"{name} is {self.what}; write a list")
        return self.sequence

    def cells(self, name: str, columns: Sequence[str]) -> dict[str, Node]:
        """The values of a list that has one for each column."""
        row = self.elements(name)
        if len(row) != len(columns):
            self.fail(f"{name} has {len(row)} numbers; write {', '.join(columns)}")
        return dict(zip(columns, row, strict=True))

    def number(self, name: str, *, positive: bool = False, negative: bool = False) -> float:
        """A finite number without a unit: ``positive``, or not below 0, or ``negative`` ones too."""
        try:
            value = float(self.scalar) if isinstance(self.scalar, (int, float, str)) else math.nan
        except (ValueError, OverflowError):
            value = math.nan
        kind = "positive" if positive else "finite" if negative else "non-negative"
        low = value > 0 if positive else negative or value >= 0
        if isinstance(self.scalar, bool) or not math.isfinite(value) or not low:
            self.fail(f"{name} is {self.what}; write a {kind} number")
        return value

    def whole(self, name: str, least: int) -> int:
        """A whole number of at least ``least``."""
        value = self.number(name, negative=True)
        if value != int(value) or value < least:
            self.fail(f"{name} is {self.what}; write a whole number from {least}")
        return int(value)

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """One of a few names."""
        if self.scalar not in allowed:
            hint = _suggest(self.scalar, allowed) if isinstance(self.scalar, str) else ""
            self.fail(f"{name} is {self.what}{hint}; allowed are {_list(allowed)}")
        return str(self.scalar)

    def text(self, name: str) -> str:
        """A name."""
        if not isinstance(self.scalar, str) or not self.scalar:
            self.fail(f"{name} is {self.what}; write a name, such as v100")
        return self.scalar


def read_file(path: str | os.PathLike[str]) -> Node:
    """The tree of a YAML or JSON file. Raises ClusterError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(
            f"cannot read the cluster file {os.fspath(path)}: {error.strerror or error}; "
            f"write one with the content {EXAMPLE}"
        ) from error
    except UnicodeDecodeError as error:
        raise ClusterError(
            f"{os.fspath(path)}: the cluster file is not UTF-8 text: {error}; save it as UTF-8"
        ) from error
    except ValueError as error:
        raise ClusterError(f"{os.fspath(path)!r} is no path of a cluster file: {error}") from error
    return read_text(text, os.fspath(path))


def read_text(text: str, name: str) -> Node:
    """The tree of YAML or JSON text; ``name`` stands in messages. Raises ClusterError."""
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON allows tabs between tokens (and nowhere else); YAML does not
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = name if mark is None else f"{name}:{mark.line + 1}:{mark.column + 1}"
        if mark is not None and _has_tab(text, mark.line, mark.column):
            raise ClusterError(
                f"{where}: line {mark.line + 1} has a tab, and YAML takes spaces there: put spaces in the tab's "
                "place, as many as before the entries beside it"
            ) from error
        raise ClusterError(f"{where}: not YAML: {error.problem or error.context}; write {EXAMPLE}") from error
    except yaml.YAMLError as error:
        raise ClusterError(f"{name}: not YAML: {' '.join(str(error).split())}; write {EXAMPLE}") from error
    except RecursionError:
        raise ClusterError(f"{name}: the cluster file is nested too deeply; write {EXAMPLE}") from None
    except (ValueError, TypeError, IndexError) as error:  # the parser's own, of text that is no YAML
        raise ClusterError(f"{name}: not YAML: {error}; write {EXAMPLE}") from error
    if root is None:
        raise ClusterError(f"{name}:1:1: the cluster file is empty; write {EXAMPLE}")
    try:
        return _from_yaml(root, name, (), {})
    except RecursionError:
        raise ClusterError(f"{name}: the cluster file is nested too deeply; write {EXAMPLE}") from None


def _has_tab(text: str, line: int, column: int) -> bool:
    """Whether a tab stands before or at a place, in what the line begins with."""
    lines = text.splitlines()
    return line < len(lines) and "\t" in lines[line][: column + 1]


def read_object(value: object) -> Node:
    """The tree of a dict of dicts, lists, numbers and strings. Raises ClusterError."""
    try:
        return _from_object(value, "cluster")
    except RecursionError:
        raise ClusterError(f"cluster: it is nested too deeply, or holds itself; write {EXAMPLE}") from None


def _from_object(value: object, where: str) -> Node:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ClusterError(f"{where}: the key {key!r} is no string")
        places = {k: f"{where}[{k!r}]" for k in value}
        return Node(where, {k: _from_object(v, places[k]) for k, v in value.items()}, places)
    if isinstance(value, (list, tuple)):
        return Node(where, sequence=tuple(_from_object(v, f"{where}[{i}]") for i, v in enumerate(value)))
    if value is None or isinstance(value, (bool, int, float, str)):
        return Node(where, scalar=value)
    raise ClusterError(f"{where}: a {type(value).__name__} is no mapping, list, number or string")


def _from_yaml(node: yaml.Node, name: str, above: tuple[yaml.Node, ...], nodes: dict[int, Node]) -> Node:
    """The tree below a node. ``nodes``: by id, what was read before, which aliases name again."""
    if id(node) not in nodes:
        nodes[id(node)] = _read_node(node, name, above, nodes)
    return nodes[id(node)]


def _read_node(node: yaml.Node, name: str, above: tuple[yaml.Node, ...], nodes: dict[int, Node]) -> Node:
    where = _place(node, name)
    if node in above:
        raise ClusterError(f"{where}: an alias refers to what it is part of; write the value out")
    above = (*above, node)
    if isinstance(node, yaml.ScalarNode):
        null = node.tag == "tag:yaml.org,2002:null"
        return Node(where, scalar=None if null else node.value)
    if isinstance(node, yaml.SequenceNode):
        return Node(where, sequence=tuple(_from_yaml(n, name, above, nodes) for n in node.value))
    mapping: dict[str, Node] = {}
    keys: dict[str, str] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ClusterError(f"{_place(key, name)}: a key must be a name")
        if key.value in mapping:
            raise ClusterError(
                f"{_place(key, name)}: the key {key.value!r} stands twice "
                f"(first at {keys[key.value]}); remove one"
            )
        keys[key.value] = _place(key, name)
        mapping[key.value] = _from_yaml(value, name, above, nodes)
    return Node(where, mapping, keys)


def _place(node: yaml.Node, name: str) -> str:
    mark = node.start_mark
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _suggest(key: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
