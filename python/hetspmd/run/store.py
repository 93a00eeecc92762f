"""Parameters and buffers of a wrapped model: which shard of which tensor this rank stores.

A stored parameter keeps its name and its place in the module; only its data shrinks to this rank's shard, so
an optimizer sees shards whether it was made before or after the model was wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from hetspmd.dist import collectives
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.slices import movable
from hetspmd.errors import DeviceError, PlanMismatchError
from hetspmd.lower.local_program import LocalTensor
from hetspmd.placement import is_sharded, sharded_dim
from hetspmd.run.cutting import check_memory, cut, made_from_meta
from hetspmd.run.holders import Holders, held_elsewhere, localize_state
from hetspmd.run.loaded_states import LoadedStates, check_states
from hetspmd.run.sentry import Sentry, outside_posts, posts
from hetspmd.run.shards import attributes, divided, mark
from hetspmd.trace.compat.tensors import fake_mode
from hetspmd.trace.fake import fake_like
from hetspmd.trace.graph import Graph
from hetspmd.trace.values import dtype_name

Slot = tuple[nn.Module, str]
"""(module, attribute name) that holds a tensor."""


def slot(module: nn.Module, name: str) -> Slot:
    """Where the tensor called ``name`` hangs."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


class Store:
    """This rank's parameters and buffers.

    ``shards`` maps each name (tied ones included) to its layout; parameters that no plan mentions are whole. On
    an idle rank every shard is empty, and buffers stay as they were when the module was wrapped or loaded.
    ``sentry`` stands at the modules once parameters are cut.
    """

    def __init__(self, module: nn.Module, graph: Graph, parameters: tuple[LocalTensor, ...]) -> None:
        self.module = module
        self.shards: dict[str, LocalTensor] = {}
        for parameter, layout in zip(graph.parameters, parameters, strict=True):
            for name in parameter.names:
                self.shards[name] = layout
        self.whole: dict[str, tuple[torch.Size, tuple[int, ...]]] = {
            name: (p.shape, p.stride()) for name, p in module.named_parameters(remove_duplicate=False)
        }
        self.sentry = Sentry([])
        self.held = Holders()

    def shard(self, device: torch.device, comm: Communicator) -> None:
        """Cut every parameter to its shard, on ``device``; meta tensors become uninitialised shards.

        Raises ShardError where a shard would part from memory that it shares, and OptimizerError, on every rank,
        where optimizers remember other things of the whole parameters on some ranks than on others."""
        check_memory(self.module, self.shards)
        self.held = held_elsewhere(self.module)
        done: dict[int, nn.Parameter] = {}
        for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
            owner, leaf = slot(self.module, name)
            if id(parameter) in done:
                owner._parameters[leaf] = done[id(parameter)]
                continue
            layout, shard = self.shards.get(name), parameter
            if parameter.is_meta:
                shard = made_from_meta(parameter, layout, device)
            else:
                cut(parameter, layout, device)
            if layout is not None and divided(layout):
                mark(shard, name, layout)
            owner._parameters[leaf] = done[id(parameter)] = shard
        named, states = self.module.named_parameters(), LoadedStates()
        layouts = {id(p): (n, self.shards[n]) for n, p in named if n in self.shards}
        for optimizer in self.held.optimizers:
            localize_state(optimizer, layouts, states)
        check_states(comm, states)
        for name, buffer in list(self.module.named_buffers()):
            owner, leaf = slot(self.module, name)
            if buffer.is_meta:
                if leaf in owner._non_persistent_buffers_set:
                    raise DeviceError(
                        f"buffer {name} is on the meta device and no state dict restores it; "
                        "build it on a real one"
                    )
                owner._buffers[leaf] = torch.empty_like(buffer, device=device)
            elif buffer.device != device:
                owner._buffers[leaf] = buffer.to(device)

    def guard(self, *, idle: bool) -> None:
        """Let the sentry stand. ``idle``: whether a rank holds nothing."""
        outside = outside_posts(self.held.modules, self.shards)
        self.sentry = Sentry([*posts(self.module, self.shards, idle=idle), *outside])
        self.sentry.stand()

    def synchronize(self, comm: Communicator, device: torch.device) -> None:
        """Give every rank the parameters, gradients and buffers of rank 0 (before :meth:`shard`)."""
        if comm.world == 1:
            return
        parameters = list(self.module.parameters())
        presence = comm.exchange([p.grad is not None for p in parameters])
        if any(map(any, presence)):
            for parameter, has in zip(parameters, presence[0], strict=True):
                gradient = parameter.grad if has else None
                if has and (gradient is None or gradient.layout != torch.strided):
                    gradient = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
                parameter.grad = gradient
        gradients = (p.grad for p in parameters if p.grad is not None)
        with torch.no_grad():
            for tensor in (*parameters, *self.module.buffers(), *gradients):
                if tensor.is_meta or tensor.numel() == 0:
                    continue
                value = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
                comm.broadcast(movable(value), 0).wait()
                tensor.copy_(value)

    @contextmanager
    def whole_shapes(self, device: torch.device) -> Iterator[None]:
        """Within the context the module's parameters have their whole shapes and no data, for tracing."""
        mode = fake_mode()
        substitutes: dict[int, nn.Parameter] = {}
        saved: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.sentry.lift()
        try:
            for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
                if id(parameter) not in substitutes:
                    shape, stride = self.whole.get(name, (parameter.shape, parameter.stride()))
                    like = torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta")
                    fake = fake_like(mode, like, device)
                    substitutes[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
                    substitutes[id(parameter)].__dict__.update(attributes(parameter))
                owner, leaf = slot(self.module, name)
                saved.append((owner, leaf, parameter))
                owner._parameters[leaf] = substitutes[id(parameter)]
            yield
        finally:
            for owner, leaf, parameter in saved:
                owner._parameters[leaf] = parameter
            self.sentry.stand()

    def gather(self, runtime: Runtime, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole copies of tensors that lie as the parameters of these names do."""
        out: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor in named.items():
                out[name] = self.whole_of(runtime, name, tensor.detach().clone())
        return out

    def whole_of(self, runtime: Runtime, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that lies as the parameter or buffer ``name`` does, on every rank."""
        layout = self.shards.get(name)
        if layout is not None and runtime.idle:
            part = part.new_empty(layout.shape)
        elif layout is not None and is_sharded(layout.form):
            dim = sharded_dim(layout.form)
            # Of the accelerators of one machine, which store the same, the first one's counts.
            part = part.narrow(dim, 0, layout.extents[runtime.communicator.rank])
            part = collectives.start_all_gather(runtime, part, dim, layout.extents).wait()
        return runtime.share(part)

    def strides_of(self, name: str) -> tuple[int, ...] | None:
        """The strides of a parameter before it was cut; None for a buffer."""
        whole = self.whole.get(name)
        return None if whole is None else whole[1]


def check_model(module: nn.Module, graph: Graph) -> None:
    """Raise PlanMismatchError unless the plan's parameters and buffers are the model's."""
    have = {
        name: (tuple(t.shape), dtype_name(t.dtype))
        for name, t in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }
    wanted = [(p.tensor, p.names) for p in graph.parameters] + [(b.tensor, b.names) for b in graph.buffers]
    for tensor, names in wanted:
        meta = graph.tensors[tensor]
        for name in names:
            own = have.get(name)
            if own != (meta.shape, meta.dtype):
                text = "does not have it" if own is None else f"has {own[1]}{list(own[0])}"
                raise PlanMismatchError(
                    f"the plan is for a model with {name}: {meta.dtype}{list(meta.shape)}, this one {text}; "
                    "compile a plan for this model"
                )
