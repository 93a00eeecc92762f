"""Every private torch import of the project, with version checks.

The joint graph comes from ``aot_export_joint_with_descriptors`` (same signature and results on torch 2.11 to
2.15). Nothing else in hetspmd imports a module of torch whose name begins with an underscore.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node

from hetspmd.errors import HetspmdError, PlanError, TraceError
from hetspmd.trace.compiling import libraries_told
from hetspmd.trace.containers import Held, unwrap, wrap

OLDEST, NEWEST = (2, 11), (2, 15)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


VERSION = _version()
if VERSION < OLDEST:
    raise HetspmdError(
        f"torch {torch.__version__} is too old: hetspmd needs torch {OLDEST[0]}.{OLDEST[1]} or newer"
    )
if VERSION > NEWEST:
    warnings.warn(
        f"torch {torch.__version__} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that hetspmd was tested "
        "with; run hetspmd verify on your model first",
        stacklevel=2,
    )

import torch._functorch.config as functorch_config  # noqa: E402  # after the version check
import torch._functorch.eager_transforms as eager_transforms  # noqa: E402  # after the version check
from torch._C import DispatchKey  # noqa: E402  # after the version check
from torch._decomp import get_decompositions  # noqa: E402  # after the version check
from torch._functorch._aot_autograd.descriptors import (  # noqa: E402  # after the version check
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # noqa: E402  # after the version check
from torch._ops import OpOverload  # noqa: E402  # after the version check
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402  # after the version check
from torch._subclasses.functional_tensor import FunctionalTensor  # noqa: E402  # after the version check
from torch.fx._lazy_graph_module import _use_lazy_graph_module  # noqa: E402  # after the version check
from torch.utils import _pytree as pytree  # noqa: E402  # after the version check
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402  # after the version check

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "FakeTensorMode",
    "InputRole",
    "OpOverload",
    "OutputRole",
    "TorchDispatchMode",
    "as_plain",
    "assign_data",
    "before_transforms",
    "decomposition_table",
    "export_joint",
    "fake_mode",
    "flatten",
    "flatten_with_names",
    "graph_is_kept",
    "has_kernel",
    "is_class_of_trace",
    "is_op",
    "is_traced",
    "memory_of",
    "merge_tied",
    "module_path",
    "outside_modes",
    "parts_of",
    "rehearsal",
    "replace_node_registration",
    "same_content",
    "spec_from_text",
    "spec_to_text",
    "transform_around",
    "unflatten",
]

Decompositions = dict[Any, Callable[..., Any]]

_LOOKED_AT = "hetspmd_looked_at"
"""The attribute of a function of torch whose arguments are looked at first."""


@dataclass(frozen=True)
class InputRole:
    """What a placeholder of the joint graph is: ``parameter``, ``buffer``, ``input`` or ``tangent``;
    ``name`` for the first two, ``index`` for the others."""

    kind: str
    name: str = ""
    index: int = -1


@dataclass(frozen=True)
class OutputRole:
    """What an output of the joint graph is: ``output`` (index), ``gradient`` (name of the parameter) or
    ``buffer`` (name of the mutated buffer)."""

    kind: str
    name: str = ""
    index: int = -1


def _input_role(descriptor: Any) -> InputRole:
    if isinstance(descriptor, ParamAOTInput):
        return InputRole("parameter", name=descriptor.target)
    if isinstance(descriptor, BufferAOTInput):
        return InputRole("buffer", name=descriptor.target)
    if isinstance(descriptor, PlainAOTInput):
        return InputRole("input", index=descriptor.idx)
    if isinstance(descriptor, TangentAOTInput):
        output = _output_role(descriptor.output)
        return InputRole("tangent", name=output.name, index=output.index)
    return InputRole("unknown", name=repr(descriptor))


def _output_role(descriptor: Any) -> OutputRole:
    if isinstance(descriptor, PlainAOTOutput):
        return OutputRole("output", index=descriptor.idx)
    if isinstance(descriptor, GradAOTOutput):
        of = _input_role(descriptor.grad_of)
        kind = "gradient" if of.kind == "parameter" else "input_gradient"
        return OutputRole(kind, name=of.name, index=of.index)
    if isinstance(descriptor, InputMutationAOTOutput):
        mutated = _input_role(descriptor.mutated_input)
        return OutputRole(f"{mutated.kind}_mutation", name=mutated.name, index=mutated.index)
    return OutputRole("unknown", name=repr(descriptor))


def _plain_recurrence() -> AbstractContextManager[None]:
    """Recurrent layers as matrix products and pointwise ops: autograd would record oneDNN's fused layer, whose
    backward no rule can cut."""
    return cast(AbstractContextManager[None], torch.backends.mkldnn.flags(enabled=False))


@contextmanager
def _backward_without_autocast() -> Iterator[None]:
    """A trace under autocast: only the forward is cast, and nothing is kept in autocast's cache, whose entries
    would outlive the trace."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with functorch_config.patch(backward_pass_autocast="off"):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


@contextmanager
def _without_log_of_shapes() -> Iterator[None]:
    """torch logs a traceback for shapes that do not fit; the error that follows says the same."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _named_modules(root: nn.Module) -> Iterator[None]:
    """While it lasts, graph nodes carry the path of the module whose forward creates them."""
    paths = {id(m): name for name, m in root.named_modules()}
    open_scopes: list[Any] = []

    def enter(module: nn.Module, _args: Any) -> None:
        scope = torch.fx.traceback.annotate({"hetspmd_module": paths.get(id(module), "")})
        scope.__enter__()
        open_scopes.append(scope)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if open_scopes:
            open_scopes.pop().__exit__(None, None, None)

    handles = []
    for module in root.modules():
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_scopes:
            open_scopes.pop().__exit__(None, None, None)


def module_path(node: Node) -> str | None:
    """The path of the module whose forward created a node, as the module was named in the root."""
    found = node.meta.get("custom")
    return found.get("hetspmd_module") if isinstance(found, dict) else None


class _MutationError(Exception):
    """An op that changes its argument in place was met where none is allowed."""


_USUAL_MUTATIONS = (
    "add_", "as_strided_", "bernoulli_", "clamp_", "copy_", "div_", "elu_", "fill_", "hardsigmoid_", "hardswish_",
    "hardtanh_", "index_add_", "index_copy_", "index_put_", "leaky_relu_", "masked_fill_", "mul_", "normal_",
    "relu_", "resize_", "scatter_", "scatter_add_", "set_", "sigmoid_", "silu_", "squeeze_", "sub_", "t_", "tanh_",
    "transpose_", "tril_", "triu_", "uniform_", "unsqueeze_", "zero_",
)  # fmt: skip


@cache
def _refused_mutations() -> Decompositions:
    """Entries of a decomposition table that end a trace at the first mutation, so that little of it is lost."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise _MutationError

    packets = [getattr(torch.ops.aten, name) for name in _USUAL_MUTATIONS]
    return {getattr(packet, overload): refuse for packet in packets for overload in packet.overloads()}


def export_joint(
    module: nn.Module, inputs: Sequence[torch.Tensor], decompositions: Decompositions
) -> tuple[GraphModule, list[InputRole], list[OutputRole]]:
    """The joint graph of ``module(*inputs)``: forward, and backward from its first output if that requires
    a gradient; with the roles of placeholders and outputs, in their order.

    Functionalization, which turns mutations into values, takes about an eighth of a large trace. A training step
    without mutations needs none, so the step is traced without it first; if an op of that graph mutates, or
    anything else goes wrong, it is traced again with it. A forward alone is traced with it at once: without
    autograd between, some ops would come with their default arguments spelt out.
    """
    with warnings.catch_warnings(), _use_lazy_graph_module(True):
        warnings.simplefilter("ignore")
        if torch.is_grad_enabled():
            try:
                table = {**decompositions, **_refused_mutations()}
                found = _export(module, inputs, table, functionalize=False)
                if not _mutates(found[0].graph.nodes, found[2]):
                    return found
            except HetspmdError:
                raise
            except Exception:
                pass  # The second trace says what is wrong, if anything is.
        try:
            return _export(module, inputs, decompositions, functionalize=True)
        except AssertionError as error:
            if "Encountered a set_ on a graph input" not in str(error):
                raise
            raise TraceError(
                "forward calls set_ on a parameter, a buffer or an input, which cannot be followed; write "
                "tensor.data = value, or tensor.copy_(value) under torch.no_grad()"
            ) from error


def _export(
    module: nn.Module, inputs: Sequence[torch.Tensor], decompositions: Decompositions, *, functionalize: bool
) -> tuple[GraphModule, list[InputRole], list[OutputRole]]:
    with ExitStack() as stack:
        for context in (
            libraries_told(),
            _named_modules(module),
            _plain_recurrence(),
            _without_log_of_shapes(),
            _backward_without_autocast(),
            _before_autograd(decompositions),
        ):
            stack.enter_context(context)
        joint = aot_export_joint_with_descriptors(
            stack,
            module,
            tuple(inputs),
            decompositions=decompositions,
            disable_functionalization=not functionalize,
        )
        graph_module: GraphModule = joint.graph_module
    nodes = list(graph_module.graph.nodes)
    in_roles = [_input_role(n.meta.get("desc")) for n in nodes if n.op == "placeholder"]
    out_roles = [_output_role(d) for d in nodes[-1].meta["desc"]]
    return graph_module, in_roles, out_roles


@contextmanager
def _before_autograd(decompositions: Decompositions) -> Iterator[None]:
    """Let own decompositions of a table stand where torch has one of its own, which it takes before the table."""
    own = {
        op: function
        for op, function in decompositions.items()
        if DispatchKey.Autograd in op.py_kernels and function.__module__.startswith("hetspmd.")
    }
    with _KERNELS_LOCK:
        for op, function in own.items():
            before, users = _KERNELS.get(op, (op.py_kernels[DispatchKey.Autograd], 0))
            _KERNELS[op] = before, users + 1
            _set_kernel(op, function)
    try:
        yield
    finally:
        with _KERNELS_LOCK:
            for op in own:
                before, users = _KERNELS.pop(op)
                if users > 1:
                    _KERNELS[op] = before, users - 1
                else:
                    _set_kernel(op, before)


def _set_kernel(op: Any, function: Callable[..., Any]) -> None:
    op.py_kernels[DispatchKey.Autograd] = function
    op._dispatch_cache.clear()


_KERNELS_LOCK = threading.Lock()
_KERNELS: dict[Any, tuple[Callable[..., Any], int]] = {}
"""torch's own kernels of ops that a trace computes in another way, and how many traces do so now."""


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of the trace, so that what is done to it becomes part of the graph."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def is_class_of_trace(kind: type) -> bool:
    """Whether tensors of this class are there only while a model is traced."""
    return issubclass(kind, (FakeTensor, FunctionalTensor))


def memory_of(tensor: torch.Tensor) -> int:
    """What identifies the memory of a tensor: views have that of their base."""
    inner = tensor.elem if isinstance(tensor, FunctionalTensor) else tensor
    return int(inner.untyped_storage()._cdata)


def assign_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value`` for two tensors of one shape and dtype, the first of the trace.

    Only the trace with functionalization can follow it; the one without ends.
    """
    if not isinstance(tensor, FunctionalTensor):
        raise _MutationError
    value = value.detach()
    if not isinstance(value, FunctionalTensor) or value.stride() != tensor.stride():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        value = made.copy_(value)
    assert isinstance(value, FunctionalTensor)
    tensor.elem = value.elem


def _mutates(nodes: Iterable[Node], roles: Sequence[OutputRole]) -> bool:
    """Whether an op writes to an argument, or might: a target that is no plain op counts."""
    if any(role.kind.endswith("_mutation") for role in roles):
        return True
    targets = {node.target for node in nodes if node.op == "call_function"} - {operator.getitem}
    return any(not is_op(target) or target._schema.is_mutable for target in targets)


def merge_tied(
    module: GraphModule, inputs: list[InputRole], outputs: list[OutputRole], first_names: dict[str, str]
) -> tuple[list[InputRole], list[OutputRole]]:
    """Make one placeholder of those that are one tensor under several names, and one gradient, their sum.

    ``first_names`` maps every traced name to the first name of its tensor. The export gives each name of a
    tied parameter a placeholder and a partial gradient of its own. Returns the remaining roles; the graph is
    changed in place.
    """
    graph = module.graph
    nodes = list(graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    kept: dict[tuple[str, str], Node] = {}
    in_roles: list[InputRole] = []
    for node, given in zip(placeholders, inputs, strict=True):
        key = (given.kind, first_names.get(given.name, given.name))
        if given.kind in ("parameter", "buffer") and key in kept:
            node.replace_all_uses_with(kept[key])
            graph.erase_node(node)
            continue
        if given.kind in ("parameter", "buffer"):
            kept[key] = node
        in_roles.append(replace(given, name=key[1]))
    output = nodes[-1]
    values: list[Any] = []
    out_roles: list[OutputRole] = []
    position: dict[tuple[str, str], int] = {}
    for value, role in zip(cast(Any, output.args[0]), outputs, strict=True):
        key = (role.kind, first_names.get(role.name, role.name))
        mutation = role.kind.endswith("_mutation")
        if (role.kind == "gradient" or mutation) and role.name and key in position:
            before = values[position[key]]
            if before is None or (mutation and value is not None):
                values[position[key]] = value
            elif value is not None:
                with graph.inserting_before(output):
                    total = graph.call_function(torch.ops.aten.add.Tensor, (before, value))
                    total.meta["val"] = before.meta["val"]
                values[position[key]] = total
            continue
        position[key] = len(values)
        values.append(value)
        out_roles.append(replace(role, name=key[1]))
    output.args = (values,)
    return _without_tangents_of_updates(graph, in_roles), out_roles


def _without_tangents_of_updates(graph: Graph, roles: list[InputRole]) -> list[InputRole]:
    """Take away the incoming gradients of parameters that the forward changes: only the loss has one. What is left
    of a sum of such a tangent and a gradient is the gradient."""
    kept: list[InputRole] = []
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, role in zip(placeholders, roles, strict=True):
        if role.kind != "tangent" or not role.name:
            kept.append(role)
            continue
        _erase_zero(graph, node)
    return kept


def _erase_zero(graph: Graph, node: Node) -> None:
    """Erase a placeholder that is zero."""
    output = next(n for n in graph.nodes if n.op == "output")
    for user in list(node.users):
        if user is output:
            output.args = ([None if v is node else v for v in cast(Any, output.args[0])],)
        elif user.target is torch.ops.aten.add.Tensor and len(user.args) == 2 and not user.kwargs:
            left, right = user.args
            other = right if left is node else left
            if isinstance(other, Node) and other is not node and _same_type(other, user):
                user.replace_all_uses_with(other)
                graph.erase_node(user)
    if node.users:
        meta = node.meta["val"]
        with graph.inserting_before(next(iter(node.users))):
            kwargs = {"dtype": meta.dtype, "device": meta.device}
            zero = graph.call_function(torch.ops.aten.zeros.default, (list(meta.shape),), kwargs)
        zero.meta["val"] = meta
        node.replace_all_uses_with(zero)
    graph.erase_node(node)


def _same_type(one: Node, other: Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made the module."""
    found = sys.modules.get("torch._dynamo.eval_frame")  # imported when torch.compile is first called
    return found is not None and isinstance(module, found.OptimizedModule)


def is_sharded_wrapper(module: nn.Module) -> bool:
    """Whether FSDP holds the module: torch's first kind wraps it, the second (fully_shard) changes its class."""
    return any(kind.__module__.startswith("torch.distributed.fsdp") for kind in type(module).__mro__)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data; real tensors met inside become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def rehearsal(mode: FakeTensorMode) -> Iterator[None]:
    """Within the context a model's Python runs on fake tensors as it does in a trace, and nothing is
    traced."""
    with ExitStack() as stack:
        for context in (
            libraries_told(), _without_log_of_shapes(), _backward_without_autocast(),
            warnings.catch_warnings(), mode,
        ):  # fmt: skip
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        yield


def outside_modes() -> AbstractContextManager[object]:
    """A context in which real tensors are computed with, also while a step is traced."""
    return cast(AbstractContextManager[object], _disable_current_modes())


def decomposition_table(ops: Sequence[Any]) -> Decompositions:
    """torch's own decompositions of ``ops``."""
    return cast(Decompositions, get_decompositions(ops))


def _is_container(value: Any) -> bool:
    """Whether torch takes an object apart: a container, a registered class, or a named tuple."""
    return not pytree.tree_flatten(value, is_leaf=lambda v: v is not value)[1].is_leaf()


def _children(value: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(value, is_leaf=lambda v: v is not value)


def _rebuilt(parts: list[Any], spec: Any) -> Any:
    return pytree.tree_unflatten(parts, spec)


def _held_parts(held: Held) -> tuple[list[Any], tuple[Any, ...]]:
    return list(held.parts), (held.kind, held.name, held.keys, held.items)


def _held_keys(held: Held) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    parts, context = _held_parts(held)
    by_attribute = held.kind in ("object", "dataclass", "namedtuple")
    names: list[Any] = [
        pytree.GetAttrKey(str(k)) if by_attribute or n >= held.items else pytree.MappingKey(k)
        for n, k in enumerate(held.keys)
    ]
    return list(zip(names, parts, strict=True)), context


def _held_again(parts: Iterable[Any], context: tuple[Any, ...]) -> Held:
    kind, name, keys, items = context
    return Held(kind, name, tuple(keys), items, tuple(parts))


def _held_text(context: tuple[Any, ...]) -> Any:
    return [context[0], context[1], list(context[2]), context[3]]


def _held_context(text: Any) -> tuple[Any, ...]:
    kind, name, keys, items = text
    return kind, name, tuple(keys), items


pytree.register_pytree_node(
    Held, _held_parts, _held_again, serialized_type_name="hetspmd.Held", to_dumpable_context=_held_text,
    from_dumpable_context=_held_context, flatten_with_keys_fn=_held_keys,
)  # fmt: skip


def has_kernel(op: Any, kind: str) -> bool:
    """Whether an op overload can run on devices of this kind (``cuda``), by a kernel of its own or in parts."""
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, kind.upper()))


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


@contextmanager
def checkpoints_replaced(
    begin: Callable[..., Callable[[], None]], reentrant: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
) -> Iterator[None]:
    """Within it, what this thread gives ``torch.utils.checkpoint`` is called once and not recomputed.

    ``reentrant(function, args)`` stands for the reentrant kind; ``begin(function, args, kwargs)`` is called before
    a region of the other kind, and what it returns after it.
    """
    module: Any = torch.utils.checkpoint
    names = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    before = {name: getattr(module, name) for name in ("CheckpointFunction", *names) if hasattr(module, name)}
    thread = threading.get_ident()

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            if threading.get_ident() != thread:
                return before["CheckpointFunction"].apply(function, preserve, *args)
            return reentrant(function, args)

    def implementation(
        function: Callable[..., Any], args: Any, kwargs: Any, **options: Any
    ) -> Iterator[None]:
        if threading.get_ident() != thread:
            yield from before[names[0]](function, args, kwargs, **options)
            return
        end = begin(function, args, kwargs)
        yield
        end()

    def flat(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        """As torch 2.14 and older call it: five options stand before the arguments."""
        if threading.get_ident() != thread:
            yield from before[names[1]](function, *args, **kwargs)
            return
        end = begin(function, args[5:], kwargs)
        yield
        end()

    replaced = {"CheckpointFunction": Plain, names[0]: implementation, names[1]: flat}
    try:
        for name in before:
            setattr(module, name, replaced[name])
        yield
    finally:
        for name, original in before.items():
            setattr(module, name, original)


def group_store() -> Store:
    """A connection of its own to the store by which the default process group's ranks found each other."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store().clone()


def forget_default_group() -> None:
    """Let go of the default process group where torch's own modules hold it.

    ``torch.distributed.nn``, if it is first imported after ``init_process_group``, has the group as a default of
    its functions. After ``destroy_process_group`` the group's threads would then run on, until one of them asks for
    the GIL of an interpreter that is gone, which ends the process by SIGABRT. The default is None where the module
    was imported before; both mean the default group.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        if isinstance(function, FunctionType) and function.__defaults__ is not None:
            function.__defaults__ = tuple(
                None if isinstance(default, torch.distributed.ProcessGroup) else default
                for default in function.__defaults__
            )


def replace_node_registration(made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let ``made`` replace the method of Python by which the nodes of autograd's graph, of C, register a hook."""
    mixin: Any = torch.autograd.function._HookMixin
    mixin._register_hook = staticmethod(made(mixin._register_hook))


def same_content(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one, or views of the same elements in the same order."""

    def view(tensor: torch.Tensor) -> tuple[object, ...]:
        of = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        return *of, tensor.is_conj(), tensor.is_neg(), memory_of(tensor)

    return one is other or view(one) == view(other)


def hosted_by_a_rank(store: Store) -> bool:
    """Whether the first rank of the default group hosts the store; not so where a launcher or a file does."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def graph_is_kept() -> bool:
    """Whether the running backward was called with ``retain_graph=True`` (assumed where torch cannot tell)."""
    probe = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if probe is None else bool(probe())


def is_op(target: object) -> TypeGuard[OpOverload]:
    """Whether a node's target is a plain op overload (not a higher-order op or a Python function)."""
    return isinstance(target, OpOverload)


def as_plain() -> AbstractContextManager[None]:
    """A context in which tensors of a class of their own are plain tensors for torch's functions."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def before_transforms(look: Callable[[object], None]) -> None:
    """Call ``look`` with each value that a transform of torch.func (``grad``, ``vjp``, ``jacrev``, ...) wraps."""
    for name in ("_wrap_tensor_for_grad", "_maybe_wrap_functional_tensor"):
        wrap = getattr(eager_transforms, name)
        if not hasattr(wrap, _LOOKED_AT):

            def looked_at(value: Any, *args: Any, _wrap: Any = wrap, **kwargs: Any) -> Any:
                look(value)
                return _wrap(value, *args, **kwargs)

            setattr(looked_at, _LOOKED_AT, True)
            setattr(eager_transforms, name, looked_at)


def transform_around() -> str:
    """Which transform of torch the running code is under; "" if under none."""
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch.compiler.is_dynamo_compiling():  # which reads this code, and then calls it
        return ""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func (vmap, grad, jvp)"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    return ""
