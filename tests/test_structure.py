"""Packages lie in the order of the data's way: none imports a later one, and no files import each other in a
circle.

Imports inside functions and those for types alone count, too. What a later package does with an object of an
earlier one (it prints a plan, records a module) is attached in ``hetspmd/__init__.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "hetspmd"
ORDER = (
    "errors", "placement", "codec", "trace", "rules", "cluster", "program", "cost", "search", "ratios", "plan",
    "optimize", "lower", "dist", "run", "record", "verify", "tune", "profile", "report", "cli", "__main__",
)  # fmt: skip
"""What comes from another package comes from one that stands before."""


def modules(root: Path) -> dict[str, ast.Module]:
    """The modules under ``root`` by dotted name, without that of the root itself."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def named(tree: ast.Module, package: str) -> Iterator[str]:
    """The dotted names below ``package`` that a module imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix(f"{package}.") for a in node.names if a.name.startswith(f"{package}.")
            )
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == package:
                yield from (a.name for a in node.names)
            elif node.module.startswith(f"{package}."):
                module = node.module.removeprefix(f"{package}.")
                yield module
                yield from (f"{module}.{a.name}" for a in node.names)


def imports(root: Path, package: str) -> nx.DiGraph:
    """Which module imports which. A package that is named with one of its modules stands for that module."""
    known = modules(root)
    found: nx.DiGraph = nx.DiGraph()
    found.add_nodes_from(known)
    for module, tree in known.items():
        targets = {name for name in named(tree, package) if name in known and name != module}
        found.add_edges_from(
            (module, t) for t in targets if not any(other.startswith(f"{t}.") for other in targets)
        )
    return found


def against(found: nx.DiGraph) -> list[str]:
    """Imports from a later package, and packages that have no place in the order."""
    place = {name: index for index, name in enumerate(ORDER)}
    rooms = {module: module.partition(".")[0] for module in found}
    lost = sorted({room for room in rooms.values() if room not in place})
    late = (
        f"{a} imports {b}" for a, b in found.edges
        if rooms[a] in place and rooms[b] in place and place[rooms[b]] > place[rooms[a]]
    )  # fmt: skip
    return [*(f"{room} has no place in the order" for room in lost), *sorted(late)]


def circles(found: nx.DiGraph) -> list[list[str]]:
    return sorted(sorted(part) for part in nx.strongly_connected_components(found) if len(part) > 1)


def test_no_package_imports_a_later_one() -> None:
    assert against(imports(PACKAGE, "hetspmd")) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(imports(PACKAGE, "hetspmd")) == []


def test_both_would_be_found(tmp_path: Path) -> None:
    files = {
        "codec/one.py": "def f():\n    from house.cost import two\n",
        "cost/two.py": "from house.codec.one import f\n",
        "cost/three.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.cli.four\n",
        "cli/four.py": "",
        "attic/five.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).with_name("__init__.py").touch()
    found = imports(tmp_path, "house")
    assert against(found) == [
        "attic has no place in the order", "codec.one imports cost.two", "cost.three imports cli.four"
    ]  # fmt: skip
    assert circles(found) == [["codec.one", "cost.two"]]


def test_the_architecture_page_has_the_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    places = [
        page.find(f"`{name}/`") if (PACKAGE / name).is_dir() else page.find(f"`{name}.py`")
        for name in ORDER[:-1]
    ]
    assert min(places) >= 0
    assert places == sorted(places), "first named in the order of the data's way"


def test_the_tour_of_the_tree_has_every_package() -> None:
    tour = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .split("python/hetspmd/\n")[1]
        .split("tests/")[0]
    )
    named_parts = set(re.findall(r"(\w+(?:\.py)?)/? ", tour)) | set(re.findall(r"(\w+)/", tour))
    there = {p.name for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert there <= named_parts, sorted(there - named_parts)
