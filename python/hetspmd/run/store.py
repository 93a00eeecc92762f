"""Parameters and buffers of a wrapped model: which shard of which tensor this rank stores.

A stored parameter keeps its name and its place in the module; only its data shrinks to this rank's shard, so
an optimizer sees shards whether it was made before or after the model was wrapped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetspmd.errors import DeviceError, PlanMismatchError
from hetspmd.forms import is_sharded, sharded_dim
from hetspmd.lower.program import LocalTensor
from hetspmd.run import collectives
from hetspmd.run.communicator import Communicator
from hetspmd.run.loading import local_state
from hetspmd.run.runtime import Runtime
from hetspmd.trace.compat import fake_mode
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

    def shard(self, device: torch.device) -> None:
        """Cut every parameter to its shard, on ``device``; meta tensors become uninitialised shards."""
        done: dict[int, nn.Parameter] = {}
        for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
            owner, leaf = slot(self.module, name)
            if id(parameter) in done:
                owner._parameters[leaf] = done[id(parameter)]
                continue
            layout = self.shards.get(name)
            if parameter.is_meta:
                shape = parameter.shape if layout is None else layout.local_shape
                made = nn.Parameter(
                    torch.empty(shape, dtype=parameter.dtype, device=device), parameter.requires_grad
                )
            else:
                made = parameter
                part = parameter.data if layout is None else layout.slice(parameter.data)
                if layout is not None and layout.region is not None:
                    part = part.to(device, copy=True, memory_format=torch.contiguous_format)
                made.data = part.to(device)
                made.grad = None
            owner._parameters[leaf] = done[id(parameter)] = made
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

    def synchronize(self, comm: Communicator, device: torch.device) -> None:
        """Give every rank the parameter and buffer values of rank 0 (before :meth:`shard`)."""
        if comm.world == 1:
            return
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                if tensor.is_meta or tensor.numel() == 0:
                    continue
                value = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
                comm.broadcast(collectives.movable(value), 0).wait()
                tensor.copy_(value)

    @contextmanager
    def whole_shapes(self, device: torch.device) -> Iterator[None]:
        """Within the context the module's parameters have their whole shapes and no data, for tracing."""
        mode = fake_mode()
        made: dict[int, nn.Parameter] = {}
        saved: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
                if id(parameter) not in made:
                    shape, stride = self.whole[name]
                    like = torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta")
                    fake = fake_like(mode, like, device)
                    made[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
                owner, leaf = slot(self.module, name)
                saved.append((owner, leaf, parameter))
                owner._parameters[leaf] = made[id(parameter)]
            yield
        finally:
            for owner, leaf, parameter in saved:
                owner._parameters[leaf] = parameter

    def full_state_dict(self, runtime: Runtime, *, keep: bool) -> dict[str, Any]:
        """The single-device model's state dict, on the CPU. Every rank must call this.

        ``keep``: whether this rank wants it; the others get an empty dict.
        """
        gathered: dict[int, torch.Tensor] = {}
        out: dict[str, Any] = {}
        with torch.no_grad():
            for key, value in self.module.state_dict(keep_vars=True).items():
                if not isinstance(value, torch.Tensor):
                    out[key] = value
                    continue
                if id(value) not in gathered:
                    whole = self._whole(runtime, key, value.detach())
                    gathered[id(value)] = whole.to("cpu", copy=True) if keep else whole.new_empty(0)
                out[key] = gathered[id(value)]
        return out if keep else {}

    def gather(self, runtime: Runtime, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole copies of tensors that lie as the parameters of these names do."""
        out: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor in named.items():
                out[name] = self._whole(runtime, name, tensor.detach().clone())
        return out

    def _whole(self, runtime: Runtime, name: str, part: torch.Tensor) -> torch.Tensor:
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

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Load a single-device state dict; returns torch's report of missing and unexpected keys.

        Raises RuntimeError for wrong keys or shapes, as ``Module.load_state_dict`` does.
        """
        local = OrderedDict(local_state(state, self.shards))
        if (versions := getattr(state, "_metadata", None)) is not None:
            local._metadata = versions  # type: ignore[attr-defined]  # as torch's own state dicts have it
        return self.module.load_state_dict(local, strict=strict)


def check_model(module: nn.Module, graph: Graph) -> None:
    """Raise PlanMismatchError unless the plan's parameters and buffers are the model's."""
    have = {
        name: (tuple(t.shape), dtype_name(t.dtype))
        for name, t in (
            *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
        )
    }  # fmt: skip
    wanted = [(p.tensor, p.names) for p in graph.parameters] + [(b.tensor, b.names) for b in graph.buffers]
    for tensor, names in wanted:
        meta = graph.tensors[tensor]
        for name in names:
            found = have.get(name)
            if found != (meta.shape, meta.dtype):
                text = "does not have it" if found is None else f"has {found[1]}{list(found[0])}"
                raise PlanMismatchError(
                    f"the plan is for a model with {name}: {meta.dtype}{list(meta.shape)}, this one {text}; "
                    "compile a plan for this model"
                )
