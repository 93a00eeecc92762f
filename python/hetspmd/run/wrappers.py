"""Another wrapper around a HAP module is refused when it is made.

``DistributedDataParallel`` broadcasts rank 0's parameters, which are rank 0's shards; FSDP cuts shards again;
``DataParallel`` copies a module that is tied to its ranks. Accelerate and Trainer make them by themselves. From the
first HAP module on, the wrappers look for one inside before they change anything. So does ``AveragedModel`` look at
what it averages.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final, NoReturn

from torch import nn
from torch.optim.swa_utils import AveragedModel

from hetspmd.errors import ExampleError, ShardError
from hetspmd.run.parameter_registry import living, places
from hetspmd.run.shards import marked

_LOCK = threading.Lock()
_REACHED: list[type] = []
"""The wrappers that look."""


def reach_wrappers() -> None:
    """Let torch's wrappers look for HAP modules, from the first call on."""
    with _LOCK:
        if not _REACHED:
            for kind in (nn.parallel.DistributedDataParallel, nn.DataParallel):
                _REACHED.append(kind)
                kind.__init__ = _looking(kind.__init__, kind.__name__)  # type: ignore[method-assign]  # it knows no HAP
            update = AveragedModel.update_parameters
            AveragedModel.update_parameters = _comparing(update)  # type: ignore[method-assign]  # it knows no HAP


_GPUS: Final = (
    "DataParallel around a HAP module would copy this rank's shards to further GPUs. HAP has one GPU for each "
    "rank: leave DataParallel out. Hugging Face Trainer makes it where a process sees several GPUs. Let each rank "
    'see its own alone, before anything uses CUDA: os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"], '
    "above init_process_group(...) and hetspmd.hide_ranks(); it is cuda:0 then"
)


def refuse_wrapper(wrapper: str) -> NoReturn:
    """Raise ShardError: ``wrapper`` cannot be around a HAP module."""
    if wrapper == nn.DataParallel.__name__:
        raise ShardError(_GPUS)
    raise ShardError(
        f"{wrapper} around a HAP module would take this rank's shards for the whole model. HAP stands in its "
        "place: call, step and save the HAP module itself. Accelerate, Hugging Face Trainer and Lightning make "
        "this wrapper where they see several processes. Write rank = hetspmd.hide_ranks() after "
        "init_process_group(...) and before Accelerator(), TrainingArguments(...) or lightning.Trainer(...): each "
        "rank then runs them as one device does; docs/training.md has the whole of it"
    )


class RefusesWrappers(nn.Module):
    """The part of :class:`hetspmd.run.module.HAP` that refuses what other wrappers do with it."""

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: ``HAP(..., compile=True)`` compiles what lies between communications."""
        raise ExampleError("a HAP module is compiled by HAP(model, cluster, example=batch, compile=True)")

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """What FSDP sets on the modules that it wraps."""
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, _value: bool) -> None:
        refuse_wrapper("FSDP")


def _looking(make: Callable[..., None], name: str) -> Callable[..., None]:
    @functools.wraps(make)
    def looking_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        module = args[0] if args else kwargs.get("module")
        if isinstance(module, nn.Module) and _has_shards(module):
            refuse_wrapper(name)
        make(self, *args, **kwargs)

    return looking_init


def _comparing(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def updated(self: AveragedModel, model: nn.Module) -> None:
        pairs = zip(self.module.parameters(), model.parameters(), strict=False)
        registry = places()
        whole = ((a, registry.get(id(p))) for a, p in pairs if id(a) not in registry and marked(a) is None)
        if any(place is not None and place.in_parts for _, place in whole):
            raise ShardError(
                f"this AveragedModel has the whole parameters of {type(self.module).__name__}, and is given this "
                "rank's shards. Make it after HAP(...): average = AveragedModel(hap), which lies in the same shards"
            )
        update(self, model)

    return updated


def _has_shards(module: nn.Module) -> bool:
    """Whether a HAP module of several ranks, or what lies in its shards, is in the module; alike on every rank."""
    inside = {id(m) for m in module.modules()}
    shared = (hap for hap in living() if hap.everyone.world > 1)
    registry = places()
    return any(id(hap) in inside or id(hap.module) in inside for hap in shared) or any(
        marked(p) is not None or (id(p) in registry and registry[id(p)].in_parts) for p in module.parameters()
    )
