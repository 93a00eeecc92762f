"""From torch.fx's joint graph to a draft: instructions over symbolic tensors, simplified and folded.

The draft is mutable and keyed by fx nodes; :func:`hetspmd.trace.assemble.assemble` numbers it. What is done
here keeps values exactly:

- no-ops (detach, alias, clone, views and copies to the same shape and dtype) disappear: in a functional
  graph a copy is the value itself;
- ``cat`` loses inputs of shape [0], which torch allows for history's sake;
- a call that was made before in the same phase is not made again;
- a view of a view is a view, a transpose of a transpose the tensor itself;
- dropout with probability 0 is the identity.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hetspmd.errors import TraceError
from hetspmd.trace.compat.joint import module_path, region_of
from hetspmd.trace.compat.tensors import is_op
from hetspmd.trace.graph import Argument
from hetspmd.trace.values import dtype_name, from_torch

Value = tuple[Node, int]
"""An output of a node: (node, index)."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A tensor inside draft arguments."""

    value: Value


@dataclass
class DraftInstruction:
    """An op call whose arguments hold :class:`Hole` for tensors. ``region``: the number of the region of
    torch.utils.checkpoint that it is in."""

    node: Node
    op: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[Value | None, ...]
    source: str
    random: bool
    region: int | None = None


@dataclass
class Draft:
    """The simplified graph: ``types`` gives shape and dtype of every value, ``data`` the real tensors met."""

    placeholders: list[Value]
    results: list[Value | None]
    instructions: list[DraftInstruction] = field(default_factory=list)
    types: dict[Value, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    data: dict[Value, torch.Tensor] = field(default_factory=dict)


def holes(value: Argument) -> Iterator[Value]:
    """Tensors in a draft argument, in order of appearance."""
    if isinstance(value, Hole):
        yield value.value
    elif isinstance(value, tuple):
        for item in value:
            yield from holes(item)


def instruction_inputs(instruction: DraftInstruction) -> list[Value]:
    """Tensors that a draft instruction reads, in order of appearance."""
    return [*holes(instruction.args), *(v for _, a in instruction.kwargs for v in holes(a))]


def import_graph(module: GraphModule) -> Draft:
    """The draft of a joint graph. Raises TraceError for nodes that a static graph cannot have."""
    return _Importer(module).run()


class _Importer:
    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.alias: dict[Value, Value] = {}
        self.draft = Draft([], [])
        self.sources: dict[int, str] = {}
        self.zero_dropout_masks: set[Value] = set()
        self.calls: dict[tuple[object, ...], tuple[Value | None, ...]] = {}
        self.view_of: dict[Value, Value] = {}
        self.transpose_of: dict[Value, Value] = {}
        self.numbers: dict[Value, int] = {}

    def run(self) -> Draft:
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self._declare(node)
                self.draft.placeholders.append((node, 0))
            elif node.op == "get_attr":
                self._attribute(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                flat = node.args[0]
                self.draft.results = [None if n is None else self._resolve((n, 0)) for n in flat]
            else:
                raise TraceError(
                    f"the traced graph has a {node.op} node ({node.name}), which is not supported"
                )
        return self.draft

    def _resolve(self, value: Value) -> Value:
        while value in self.alias:
            value = self.alias[value]
        return value

    def _declare(self, node: Node) -> tuple[Value | None, ...]:
        meta: Any = node.meta.get("val")
        outputs: list[Value | None] = []
        for i, tensor in enumerate(meta if isinstance(meta, (tuple, list)) else [meta]):
            if tensor is None:
                outputs.append(None)
                continue
            if type(tensor) is int:  # of shapes alone, such as the longest sequence of an attention kernel
                self.numbers[(node, i)] = tensor
                outputs.append(None)
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TraceError(
                    f"{node.name} yields a {type(tensor).__name__}: a value that depends on data or on a "
                    f"dynamic shape{_at(self._source(node))}"
                )
            if tensor.layout != torch.strided:
                layout = str(tensor.layout).removeprefix("torch.")
                raise TraceError(
                    f"{node.name} is a {layout} tensor{_at(self._source(node))}; programs are of dense tensors: "
                    "say sparse=False where an embedding has it, or call .to_dense()"
                )
            shape = tuple(tensor.shape)
            if not all(isinstance(extent, int) for extent in shape):
                raise TraceError(f"{node.name} has a dynamic shape {list(shape)}{_at(self._source(node))}")
            self.draft.types[(node, i)] = (shape, dtype_name(tensor.dtype))
            outputs.append((node, i))
        return tuple(outputs)

    def _attribute(self, node: Node) -> None:
        tensor: Any = self.module
        for part in str(node.target).split("."):
            tensor = getattr(tensor, part)
        if not isinstance(tensor, torch.Tensor):
            user = next((n for n in node.users if n.op == "call_function" and not is_op(n.target)), node)
            raise TraceError(
                f"the graph calls {user.target} with functions of the model's{_at(self._source(user))}, and a plan "
                "has no control flow; compute both sides and choose: torch.where(condition, a, b), or loop a fixed "
                "number of times"
            )
        self.draft.types[(node, 0)] = (tuple(tensor.shape), dtype_name(tensor.dtype))
        self.draft.data[(node, 0)] = tensor.detach()

    def _source(self, node: Node) -> str:
        sequence = node.meta.get("seq_nr")
        path = module_path(node)
        if path is not None:
            path = path.removeprefix("model").removeprefix(".")
            if sequence is not None and path:
                self.sources.setdefault(sequence, path)
            return path
        return self.sources.get(sequence, "") if sequence is not None else ""

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, Node):
            origin = self._resolve((value, 0))
            return self.numbers[origin] if origin in self.numbers else Hole(origin)
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise TraceError("the graph has a dynamic shape; trace it with a batch of fixed shape")
        return from_torch(value)

    def _call(self, node: Node) -> None:
        if node.target is operator.getitem:
            base, index = node.args
            assert isinstance(base, Node)
            assert isinstance(index, int)
            self.alias[(node, 0)] = (base, index)
            return
        if not is_op(node.target):
            raise TraceError(
                f"the graph calls {node.target}, which is no plain op{_at(self._source(node))}; "
                "control flow and dynamic shapes are not supported"
            )
        op = str(node.target)
        if node.meta.get("val") is None and op.startswith("aten._assert"):
            return  # checks of data run on one device only
        if op.startswith(("aten.quantize_per", "quantized.")):
            raise TraceError(
                f"{node.name} makes a quantized tensor{_at(self._source(node))}, which cannot be divided; use "
                "torch.fake_quantize_per_tensor_affine, which keeps floating-point numbers"
            )
        first = node.args[0] if node.args else None
        if (
            op.startswith("aten.as_strided")
            and isinstance(first, Node)
            and not first.meta["val"].is_contiguous()
        ):
            raise TraceError(
                f"as_strided of a tensor that is not contiguous{_at(self._source(node))} depends on its memory "
                "layout; use views, or call .contiguous() first"
            )
        args = tuple(self._argument(a) for a in node.args)
        kwargs = tuple((k, self._argument(v)) for k, v in node.kwargs.items() if v is not None)
        outputs = self._declare(node)
        simplified = self._simplify(op, args, outputs)
        if simplified is not None:
            args = simplified
            random = torch.Tag.nondeterministic_seeded in node.target.tags
            if not random and self._seen_before(node, op, args, kwargs, outputs):
                return
            self.draft.instructions.append(
                DraftInstruction(node, op, args, kwargs, outputs, self._source(node), random, region_of(node))
            )

    def _seen_before(
        self,
        node: Node,
        op: str,
        args: tuple[Argument, ...],
        kwargs: tuple[tuple[str, Argument], ...],
        outputs: tuple[Value | None, ...],
    ) -> bool:
        """Whether the same call was made before in the same phase; then its outputs are aliases.

        Calls of the backward are not merged with equal ones of the forward: recomputing is how activation
        checkpointing saves memory.
        """
        key = (node.meta.get("partitioner_tag"), op, _typed(args), _typed(kwargs))
        before = self.calls.setdefault(key, outputs)
        if before is outputs:
            return False
        for value, earlier in zip(outputs, before, strict=True):
            if value is not None and earlier is not None:
                self.alias[value] = earlier
        return True

    def _simplify(
        self, op: str, args: tuple[Argument, ...], outputs: tuple[Value | None, ...]
    ) -> tuple[Argument, ...] | None:
        """The arguments to keep, None if the call is the identity (then its output is an alias)."""
        _, name, overload = op.split(".")
        out = outputs[0]
        if out is None or not args:
            return args
        if name == "cat" and isinstance(args[0], tuple):
            tensors = tuple(a for a in args[0] if self.draft.types[a.value][0] != (0,))
            if len(tensors) == 1 and self.draft.types[tensors[0].value] == self.draft.types[out]:
                self.alias[out] = tensors[0].value
                return None
            return (tensors, *args[1:]) if tensors else args
        first = args[0]
        if not isinstance(first, Hole):
            return args
        is_view = name in _VIEWS and overload == "default"
        if is_view and first.value in self.view_of:
            first = Hole(self.view_of[first.value])
            args = (first, *args[1:])
        same = self.draft.types[first.value] == self.draft.types[out]
        if name == "copy" and isinstance(args[1], Hole):
            if self.draft.types[args[1].value] == self.draft.types[out]:
                self.alias[out] = args[1].value
                return None
            return args
        if name in _ALIASES or (same and name in _IDENTITIES_OF_SAME_SHAPE):
            self.alias[out] = first.value
            return None
        if is_view:
            self.view_of[out] = first.value
        if name == "t":
            if first.value in self.transpose_of:
                self.alias[out] = self.transpose_of[first.value]
                return None
            self.transpose_of[out] = first.value
        if name == "native_dropout" and (args[1] == 0 or args[2] is False):
            self.alias[out] = first.value
            if outputs[1] is not None:
                self.zero_dropout_masks.add(outputs[1])
        if (
            name == "native_dropout_backward"
            and isinstance(args[1], Hole)
            and args[1].value in self.zero_dropout_masks
        ):
            self.alias[out] = first.value
            return None
        return args


_ALIASES = frozenset({"detach", "alias", "lift_fresh", "lift_fresh_copy", "lift", "clone", "contiguous"})
_VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
_IDENTITIES_OF_SAME_SHAPE = frozenset(
    {"view", "_unsafe_view", "reshape", "expand", "_to_copy", "slice", "to"}
)


def _typed(value: Argument) -> object:
    """The argument with the types of its numbers, since 1, 1.0 and True are equal in Python."""
    if isinstance(value, tuple):
        return tuple(map(_typed, value))
    return value if isinstance(value, Hole) else (type(value), repr(value))


def _at(source: str) -> str:
    return f" (in {source})" if source else ""
