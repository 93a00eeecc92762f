"""What the pages for developers name is there: files, folders, headings, classes, functions, `make` targets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "hetspmd"
INSIDE = ("", "python", "python/hetspmd", "python/hetspmd/rules/ops", "rust/core/src", "scripts/gpu")
BASES = tuple(ROOT / folder for folder in INSIDE)
"""Where a path on a page may begin."""

DEVELOPERS = ("CONTRIBUTING.md", "docs/architecture.md", "docs/extending.md")
OTHERS = ("README.md", "CHANGELOG.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
PAGES = tuple(dict.fromkeys((*DEVELOPERS, *OTHERS)))

PATH = re.compile(r"[\w.*/-]+\.(?:py|rs|toml|txt|yaml|md|jsonl|svg|sh|rst)|[\w.*-]+(?:/[\w.*-]+)+/?|\w+/")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
MADE = ("target/", "build/", ".venv")
"""Folders that commands make."""
WORDS = {"Identity", "Kind", "exchange_gather"}
"""HAP's name of a placement, an alias of types, and the kind of collectives that CONTRIBUTING adds."""
YOURS = {"cluster.yaml"}
"""Files that users write."""


def prose(page: str) -> str:
    """The page without its fenced blocks of code."""
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)


def spans(page: str) -> list[str]:
    """What the page has in backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def there(path: str) -> bool:
    return any(next(base.glob(path.rstrip("/")), None) is not None for base in BASES)


def lost_paths(page: str) -> list[str]:
    """Paths in backticks to which nothing leads. A path has a letter, and a slash or a file's ending."""
    paths = {span for span in spans(page) if PATH.fullmatch(span) and re.search("[a-z]", span)}
    return sorted(path for path in paths - YOURS if not path.startswith(MADE) and not there(path))


def members(node: ast.ClassDef) -> Iterator[str]:
    """The names of a class: methods, fields, and whatever is an attribute within it."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            yield part.name
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def identifiers(node: ast.AST) -> Iterator[str]:
    """The names that a node of code has: what it defines, imports, takes, reads or calls, and short strings."""
    for field in ("name", "id", "attr", "arg", "module", "asname"):
        found = getattr(node, field, None)
        if isinstance(found, str):
            yield from found.split(".")
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
        yield from re.findall(r"\w+", node.value)


@cache
def known() -> tuple[frozenset[str], dict[str, set[str]]]:
    """The names that the package and the corpus of cases use in code, and the names of each class."""
    words: set[str] = set()
    classes: dict[str, set[str]] = {}
    above: dict[str, list[str]] = {}
    for file in sorted([*PACKAGE.rglob("*.py"), *(Path(__file__).parents[1] / "foreign").rglob("*.py")]):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            words.update(identifiers(node))
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(members(node))
                above[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    for name, bases in above.items():
        classes[name].update(*(classes.get(base, set()) for base in bases))
    return frozenset(words), classes


def lost_names(page: str) -> list[str]:
    """Names in backticks that the sources lack, such as ``apportion``, ``Plan.timeline()``, ``local.factor``."""
    words, classes = known()
    lost = []
    for span in spans(page):
        name = re.sub(r"\(.*\)$", "", span)
        if NAME.fullmatch(name) and not PATH.fullmatch(name):
            first, *rest = name.split(".")
            if first in classes and rest:
                lost += [span] if rest[0] not in classes[first] else []
            elif re.fullmatch(r"[A-Z][a-z]\w*", name):
                lost += [span] if name not in {*classes, *WORDS} else []
            elif not {first, *rest} <= words | {"hetspmd", *WORDS}:
                lost.append(span)
    return lost


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub writes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def lost_links(page: str) -> list[str]:
    """Links to files that are not there, and to headings that no page has."""
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if path.startswith(("http:", "https:")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    return lost


def tour() -> list[str]:
    """The paths of the tour of the tree in CONTRIBUTING, each below the folder under which it is indented."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## A tour of the tree\n\n")[1]
    found, folder = [], ""
    for line in text.split("\n\n")[0].splitlines():
        names = line.removeprefix("    ").split("   ")[0] if line[4] != " " else line.strip().split("   ")[0]
        paths = [name for name in names.split() if name.endswith(("/", ".py"))]
        if line[4] != " ":
            folder = paths[0]
            found.append(folder)
        else:
            found += [folder + path for path in paths]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_paths_lead_somewhere(page: str) -> None:
    assert lost_paths(page) == []


@pytest.mark.parametrize("page", [*DEVELOPERS, "docs/how-it-decides.md"])
def test_names_are_in_the_sources(page: str) -> None:
    assert lost_names(page) == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert lost_links(page) == []


def test_the_tour_leads_somewhere() -> None:
    found = tour()
    assert len(found) > 25
    assert "python/hetspmd/errors.py" in found
    assert [path for path in found if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_has_the_targets(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"(?:^    |`)(?:sudo )?make ([a-z][a-z-]+)", prose(page), re.M))
    assert named - targets == set()


def test_what_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "# Here\n`cost/model.py` `cost/mode.py` `Plan.timeline()` `Plan.timetable`\n"
    text += "`apportion` `aporportion` `Plan` `Planned`\n"
    (tmp_path / "page.md").write_text(f"{text}[a](b.md) [c](#nowhere) [d](#here)\n", encoding="utf-8")
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert lost_paths("page.md") == ["cost/mode.py"]
    assert lost_names("page.md") == ["Plan.timetable", "aporportion", "Planned"]
    assert lost_links("page.md") == ["b.md", "#nowhere"]
