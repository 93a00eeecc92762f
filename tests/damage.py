"""Damaged files: bytes that were flipped, lost or doubled, and JSON trees in which something is another thing."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[Any, ...]

NUMBERS: list[Any] = [
    -1, 0, 1, 2, 3, 7, 10**6, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.5, 1e300, 1e-300,
    float("inf"), float("nan"),
]  # fmt: skip
THINGS: list[Any] = [
    None, True, False, "", "x", "\ud800", "0", [], [[]], {}, {"$": "Ref", "id": 0}, {"$": "Plan"}, {"$": 3},
    {"$float": "inf"}, {"$float": "x"}, {"$float": 1.0}, {"$map": []}, {"$map": [[1, 2, 3]]}, {"$map": 0},
    {"$": "DType", "name": "float32"}, {"$": "DType", "name": "x"}, {"$": "Marker", "kind": "device", "name": ""},
    {"$": "Marker", "kind": "layout", "name": "x"}, [1, 2], ["a"], [None], 1.5, -3,
]  # fmt: skip


def damaged_bytes(text: bytes, chance: random.Random) -> bytes:
    """A copy of a file that went wrong on its way."""
    kind = chance.choice(_BYTE_DAMAGES)
    return kind(text, chance)


def _flip(text: bytes, chance: random.Random) -> bytes:
    found = bytearray(text)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    return bytes(found)


def _lose(text: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(text))
    return text[:start] + text[start + chance.choice((1, 1, 2, 10, 1000)) :]


def _truncate(text: bytes, chance: random.Random) -> bytes:
    return text[: chance.randrange(len(text))]


def _double(text: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(text))
    stop = start + chance.choice((1, 3, 30, 300))
    return text[:stop] + text[start:]


def _insert(text: bytes, chance: random.Random) -> bytes:
    what = chance.choice(
        [b"\x00", b"\xff", b"\t", b"NaN", b"-Infinity", b"1e999", b"{", b"[" * 20000, b"]", b'"', b",", b"0", b"-",
         b"\xef\xbb\xbf", b"9" * 5000, b"\n", b" ", b"null", b"&a ", b"*a ", b"? ", b"!!python/object:os.x ", b"%"]
    )  # fmt: skip
    start = chance.choice([0, chance.randrange(len(text)), len(text)])
    return text[:start] + what + text[start:]


def _digits(text: bytes, chance: random.Random) -> bytes:
    places = [m.span() for m in re.finditer(rb"\d+", text)]
    if not places:
        return b""
    start, stop = chance.choice(places)
    return text[:start] + str(chance.choice(NUMBERS)).encode() + text[stop:]


def _words(text: bytes, chance: random.Random) -> bytes:
    words = [m.span() for m in re.finditer(rb"[A-Za-z_$]+", text)]
    (a, b), (c, d) = chance.choice(words), chance.choice(words)
    return text[:a] + text[c:d] + text[b:]


def _lines(text: bytes, chance: random.Random) -> bytes:
    parts = re.split(rb"(?<=[\n,])", text)
    one, other = chance.randrange(len(parts)), chance.randrange(len(parts))
    parts[one], parts[other] = parts[other], parts[one]
    return b"".join(parts)


def _encode(text: bytes, chance: random.Random) -> bytes:
    there = text.decode()
    return chance.choice(
        [there.encode("utf-16"), there.encode("utf-32-le"), (there + "é").encode("latin-1"), b"\xef\xbb\xbf" + text,
         b"", b"\x00" * 30, text[::-1], text.swapcase(), text.replace(b'"', b"'"), b"\x1f\x8b" + text]
    )  # fmt: skip


_BYTE_DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    _flip, _flip, _lose, _lose, _truncate, _double, _insert, _insert, _digits, _digits, _words, _lines, _encode,
]  # fmt: skip


def places(tree: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every value of a JSON tree, below the root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def damaged_tree(tree: Any, chance: random.Random) -> Any:
    """A copy of a JSON tree with one or two values changed, lost, doubled or exchanged."""
    found = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2))):
        everywhere = _deep(found, chance)
        if everywhere:
            _damage(found, everywhere, chance)
    return found


def _deep(tree: Any, chance: random.Random) -> Path:
    """A path, every key of the way as likely as its neighbours, so that short lists count as long ones do."""
    path: list[Any] = []
    while isinstance(tree, (dict, list)) and tree:
        key = chance.choice(sorted(tree) if isinstance(tree, dict) else range(len(tree)))
        path.append(key)
        tree = tree[key]
        if chance.random() < 0.12:
            break
    return tuple(path)


def at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _damage(tree: Any, path: Path, chance: random.Random) -> None:
    parent, key = at(tree, path[:-1]), path[-1]
    value = parent[key]
    kind = chance.randrange(8)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(value))
    elif kind == 2:
        parent[key] = chance.choice(THINGS)
    elif kind == 3:
        other = _deep(tree, chance)
        parent[key] = copy.deepcopy(at(tree, other))
    elif kind == 4 and isinstance(parent, list):
        other = chance.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif kind == 5 and isinstance(parent, dict):
        parent[chance.choice(["x", "$", "$map", "$float", str(key) + "s"])] = value
    elif isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, (int, float)):
        near = [value + 1, value - 1, value * 2, -value, float(value), str(value)]
        parent[key] = chance.choice([*near, chance.choice(NUMBERS)])
    elif isinstance(value, str):
        parent[key] = chance.choice(
            [value[1:], value + "x", value.upper(), value[: len(value) // 2], 2 * value]
        )
    elif isinstance(value, list):
        parent[key] = chance.choice([value[1:], value[:-1], value[::-1], [value], value + value])
    elif isinstance(value, dict):
        parent[key] = chance.choice([list(value.values()), [value], dict(list(value.items())[:-1])])
    else:
        parent[key] = chance.choice(THINGS)


def to_text(tree: Any) -> str:
    """JSON text as a careless writer leaves it: with NaN and the like."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))
