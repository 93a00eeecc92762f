"""The joint graph of a step, and the context in which a model's Python runs as it does in that trace.

The graph comes from ``aot_export_joint_with_descriptors``, which has the same signature and results on torch 2.11
to 2.15.
"""

from __future__ import annotations

import logging
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from hetspmd.errors import HetspmdError, TraceError
from hetspmd.trace.compat.effects import without_effects
from hetspmd.trace.compat.groups import forget_default_group
from hetspmd.trace.compat.roles import InputRole, OutputRole, input_role, output_role
from hetspmd.trace.compat.tensors import is_op
from hetspmd.trace.compiling import libraries_told

Decompositions = dict[Any, Callable[..., Any]]


@cache
def exporter() -> Callable[..., Any]:
    """``aot_export_joint_with_descriptors``. The first call imports torch's compiler, which takes twice as long as
    all of hetspmd: a process that only reads plans does without it."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    forget_default_group()
    return aot_export_joint_with_descriptors


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


def current_annotations() -> dict[str, Any]:
    """What torch would say of graph nodes that are created now."""
    return dict(torch.fx.traceback.current_meta.get("custom") or {})


@contextmanager
def _annotations_restored() -> Iterator[None]:
    """Leaves torch's annotations of graph nodes, which are the process's own, as they were. A trace that ends in
    the middle of a region leaves scopes that nothing closes, or closes them in another order."""
    kept = current_annotations() if "custom" in torch.fx.traceback.current_meta else None
    try:
        yield
    finally:
        if kept is None:
            torch.fx.traceback.current_meta.pop("custom", None)
        else:
            torch.fx.traceback.current_meta["custom"] = kept


def module_path(node: Node) -> str | None:
    """The path of the module whose forward created a node, as the module was named in the root."""
    custom = node.meta.get("custom")
    return custom.get("hetspmd_module") if isinstance(custom, dict) else None


def in_region(number: int) -> AbstractContextManager[None]:
    """Within it, graph nodes carry the number of a region of torch.utils.checkpoint."""
    return torch.fx.traceback.annotate({"hetspmd_region": number})


def region_of(node: Node) -> int | None:
    """The number of the region of torch.utils.checkpoint in which a node was created; None outside of one."""
    custom = node.meta.get("custom")
    return custom.get("hetspmd_region") if isinstance(custom, dict) else None


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
                joint = _export(module, inputs, table, functionalize=False)
                if not _mutates(joint[0].graph.nodes, joint[2]):
                    return joint
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
            _annotations_restored(),
            libraries_told(),
            _named_modules(module),
            _plain_recurrence(),
            _without_log_of_shapes(),
            _backward_without_autocast(),
            _before_autograd(decompositions),
        ):
            stack.enter_context(context)
        joint = exporter()(
            stack,
            module,
            tuple(inputs),
            decompositions=decompositions,
            disable_functionalization=not functionalize,
        )
        graph_module: GraphModule = joint.graph_module
    without_effects(graph_module)
    nodes = list(graph_module.graph.nodes)
    in_roles = [input_role(n.meta.get("desc")) for n in nodes if n.op == "placeholder"]
    out_roles = [output_role(d) for d in nodes[-1].meta["desc"]]
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


def assign_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value`` for two tensors of one shape and dtype, the first of the trace.

    Only the trace with functionalization can follow it; the one without ends.
    """
    if not isinstance(tensor, FunctionalTensor):
        raise _MutationError
    value = value.detach()
    if not isinstance(value, FunctionalTensor) or value.stride() != tensor.stride():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        value = copy.copy_(value)
    assert isinstance(value, FunctionalTensor)
    tensor.elem = value.elem


def _mutates(nodes: Iterable[Node], roles: Sequence[OutputRole]) -> bool:
    """Whether an op writes to an argument, or might: a target that is no plain op counts."""
    if any(role.kind.endswith("_mutation") for role in roles):
        return True
    targets = {node.target for node in nodes if node.op == "call_function"} - {operator.getitem}
    return any(not is_op(target) or target._schema.is_mutable for target in targets)


@contextmanager
def rehearsal(mode: FakeTensorMode) -> Iterator[None]:
    """Within the context a model's Python runs on fake tensors as it does in a trace, and nothing is
    traced."""
    with ExitStack() as stack:
        for context in (
            _annotations_restored(),
            libraries_told(),
            _without_log_of_shapes(),
            _backward_without_autocast(),
            warnings.catch_warnings(),
            mode,
        ):
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        yield


def decomposition_table(ops: Sequence[Any]) -> Decompositions:
    """torch's own decompositions of ``ops``."""
    return cast(Decompositions, get_decompositions(ops))
