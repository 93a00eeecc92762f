"""Which parts of a model are blocks, whose activations may be computed again.

A block is a module, by its path, or a region of ``torch.utils.checkpoint``, ``checkpoint 0`` being the first that
the forward meets. A region inside of another block stays one of its own, which is computed again in that block's
run and in its own (:mod:`hetspmd.trace.recompute`). What ``recompute=`` may ask for:

- ``"checkpoints"``: the model's own regions (the default);
- ``"none"``: nothing;
- ``"all"``: the regions, and the elements of lists of modules (``nn.ModuleList``, ``nn.Sequential``) in which two
  elements run nearly the same ops, of lists inside of others the outermost;
- ``"selective"``: the regions, and of the rest what is cheap: of the same elements, and of what lies outside of
  them (the loss), all but products with parameters, convolutions, lookups and fused attention, whose results are
  held;
- a glob over paths of modules, or several: the regions, and the outermost modules that match.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Final, TypeAlias

from hetspmd.errors import OptionError
from hetspmd.trace.graph import Graph
from hetspmd.trace.recompute import Block, Chooser, own_regions

Recompute: TypeAlias = str | Sequence[str]
"""``"checkpoints"``, ``"none"``, ``"all"``, ``"selective"``, ``"auto"``, or globs over paths of modules."""

_ALIKE: Final = 0.75
"""The part of their ops that two modules have in common which repeat: the first layer often makes a mask for
all."""
CHECKPOINTS: Final = "checkpoints"
WORDS: Final = (CHECKPOINTS, "none", "all", "selective", "auto")
SELECTIVE: Final = " (selective)"
"""What follows the name of a block of which only what is cheap is computed again."""
_REST: Final = "the rest"
_PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
_DEAR: Final = (
    "convolution",
    "embedding",
    "_scaled_dot_product",
    "_flash",
    "_efficient",
    "sort",
    "topk",
    "_fft",
    "linalg",
)
"""The beginnings of names of ops whose results are held."""


def check_recompute(asked: object) -> str | tuple[str, ...]:
    """What is asked for, as a word or a tuple of globs. Raises OptionError for what can be neither."""
    if isinstance(asked, str) and asked in WORDS:
        return asked
    globs = (asked,) if isinstance(asked, str) else tuple(asked) if isinstance(asked, (list, tuple)) else ()
    if not globs or not all(isinstance(g, str) and g and g not in WORDS for g in globs):
        raise OptionError(
            f"recompute={asked!r}: give 'checkpoints', 'none', 'all', 'selective', 'auto', or globs over paths of "
            "modules such as 'layers.*'"
        )
    return globs


def region_name(number: int) -> str:
    """The name of a region of torch.utils.checkpoint as a block; no module's path has a space."""
    return f"checkpoint {number}"


def is_own_region(name: str) -> bool:
    """Whether a block that is computed again is a region of the model's own."""
    return name.startswith("checkpoint ") and not name.endswith(SELECTIVE)


def chooser(recompute: Recompute) -> Chooser:
    """What chooses the blocks of a graph that are asked for; ``"auto"`` is for who plans.

    Raises OptionError for what can not be asked for, and in the chooser, with the nearest paths, for a glob that no
    module matches.
    """
    asked = check_recompute(recompute)

    def choose(graph: Graph, regions: Sequence[Block]) -> Sequence[Block]:
        if asked == "none":
            return ()
        if asked == CHECKPOINTS:
            return regions
        if asked == "selective":
            return with_regions([*regions, *selective(graph, regions)])
        return with_regions([*regions, *(repeating(graph) if asked == "all" else matching(graph, asked))])

    return choose


def as_in(graph: Graph) -> Chooser:
    """What chooses the blocks that another graph of the model computes again, as far as they are there; the model's
    own regions for one without a backward."""
    if graph.tangent is None:
        return own_regions
    names = [block.block for block in graph.recomputed]

    def choose(other: Graph, regions: Sequence[Block]) -> Sequence[Block]:
        found = {block.name: block for block in regions}
        if not found.keys() >= set(names):
            found |= {path: Block(path, frozenset(tensors)) for path, tensors in _modules(other).items()}
            found |= {block.name: block for block in selective(other, regions)}
        return [found[name] for name in names if name in found]

    return choose


def outermost(blocks: Sequence[Block]) -> list[Block]:
    """The blocks that lie in no other one, in their order; of equal ones that which holds least, or the first."""
    kept: list[Block] = []
    for block in sorted(blocks, key=lambda b: (-len(b.tensors), len(b.held))):
        if not any(block.tensors <= other.tensors for other in kept):
            kept.append(block)
    return [block for block in blocks if any(block is other for other in kept)]


def with_regions(blocks: Sequence[Block]) -> list[Block]:
    """Those of :func:`outermost`, and the model's own regions that lie inside of them."""
    outer = outermost(blocks)
    kept = {id(block) for block in outer}
    for block in blocks:
        if is_own_region(block.name) and any(block.tensors < other.tensors for other in outer):
            kept.add(id(block))
    return [block for block in blocks if id(block) in kept]


def matching(graph: Graph, globs: Sequence[str]) -> list[Block]:
    """The outermost modules whose path matches one of the globs. Raises OptionError for a glob without any."""
    modules = _modules(graph)
    found: dict[str, frozenset[int]] = {}
    for glob in globs:
        paths = [path for path in modules if fnmatchcase(path, glob)]
        if not paths:
            near = difflib.get_close_matches(glob, [*WORDS, *modules], n=3, cutoff=0.4)
            hint = f"; near are {', '.join(near)}" if near else ""
            raise OptionError(
                f"recompute={glob!r}: no module of the model that computes something matches it{hint}"
            )
        found |= {path: frozenset(modules[path]) for path in paths}
    return outermost([Block(path, found[path]) for path in modules if path in found])


def repeating(graph: Graph) -> list[Block]:
    """The outermost elements of lists of modules in which two elements run nearly the same ops."""
    modules = _modules(graph)
    lists: dict[str, list[str]] = {}
    for path in modules:
        parent, _, name = path.rpartition(".")
        if name.isdigit():
            lists.setdefault(parent, []).append(path)
    ops = {
        path: Counter(graph.producer(t).op for t in modules[path])
        for paths in lists.values()
        for path in paths
    }
    repeated = [
        path
        for paths in lists.values()
        if any(_alike(ops[one], ops[other]) for one, other in combinations(paths, 2))
        for path in paths
    ]
    blocks = [Block(path, frozenset(modules[path])) for path in repeated if not _is_inside(path, repeated)]
    return outermost(blocks)


def selective(graph: Graph, regions: Sequence[Block]) -> list[Block]:
    """Of the regions and of repeating modules, and of what lies in none of them, what is cheap to compute again. Of
    a module it is what lies in no region inside of it."""
    blocks = outermost([*regions, *repeating(graph)])
    own = frozenset[int]().union(*(region.tensors for region in regions))
    inside = frozenset[int]().union(*(block.tensors for block in blocks))
    forward = (i for i in graph.instructions if i.phase == "forward" and not i.is_source)
    rest = frozenset(t for i in forward for t in i.outputs if t >= 0) - inside
    dear = _dear(graph)
    of_blocks = ((b.name, b.tensors if is_own_region(b.name) else b.tensors - own) for b in blocks)
    every = (*of_blocks, (_REST, rest))
    return [Block(name + SELECTIVE, tensors, tensors & dear) for name, tensors in every if tensors]


def _dear(graph: Graph) -> frozenset[int]:
    """Tensors of the forward that take long to compute for their bytes: what multiplies a parameter, and what
    comes of
    the ops that are named."""
    of_parameters = {p.tensor for p in graph.parameters}
    dear: set[int] = set()
    for instruction in graph.instructions:
        if instruction.phase != "forward" or instruction.is_source:
            continue
        name = instruction.op.split(".")[1]
        product = name in _PRODUCTS and not of_parameters.isdisjoint(instruction.inputs)
        if product or name.startswith(_DEAR):
            dear.update(instruction.outputs)
        elif instruction.inputs and of_parameters.issuperset(instruction.inputs):
            of_parameters.update(instruction.outputs)
    return frozenset(dear)


def _alike(one: Counter[str], other: Counter[str]) -> bool:
    return (one & other).total() >= _ALIKE * (one | other).total()


def _is_inside(path: str, others: Sequence[str]) -> bool:
    return any(path.startswith(other + ".") for other in others)


def _modules(graph: Graph) -> Mapping[str, list[int]]:
    """The paths of modules that compute something in the forward, with the tensors that they make."""
    modules: dict[str, list[int]] = {}
    for instruction in graph.instructions:
        if instruction.phase == "forward" and not instruction.is_source and instruction.source:
            for path in _paths(instruction.source):
                modules.setdefault(path, []).extend(t for t in instruction.outputs if t >= 0)
    return modules


def _paths(source: str) -> Iterator[str]:
    """The paths of a module and of those that it is in, the outermost first."""
    names = source.split(".")
    for count in range(1, len(names) + 1):
        yield ".".join(names[:count])
