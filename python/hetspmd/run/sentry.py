"""What stands at the modules of a wrapped model while their parameters lie in shards.

A model under HAP can still be reached as ``hap.module``, and its parts by their names. Called there, or asked for
its state dict, it would take shards for whole parameters. Each of its modules therefore refuses that, and says what
to write instead; loading takes this rank's part of whole tensors. The sentry is lifted whenever hetspmd itself
traces, copies or reads the model, so that none of this is met there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from hetspmd.dist.doings import Loaded
from hetspmd.errors import ShardError
from hetspmd.lower.local_program import LocalTensor
from hetspmd.placement import is_sharded
from hetspmd.run.parameter_registry import living
from hetspmd.run.shards import FULL, divided, marked
from hetspmd.trace.host.stand_ins import InPlaceOf


@dataclass(frozen=True)
class Post:
    """A module and what is known of it: ``here`` whether this rank's part of it is divided, ``own`` the layouts of
    its own divided parameters by attribute, ``outside`` whether it is no part of the wrapped model."""

    module: nn.Module
    path: str
    here: bool
    own: Mapping[str, LocalTensor]

    outside: bool = False

    @property
    def name(self) -> str:
        if self.outside:
            return f"a {type(self.module).__name__} outside of the model, which shares parameters with it,"
        return (
            f"module {self.path} of the model" if self.path else f"the model, {type(self.module).__name__},"
        )


class _Handle(Protocol):
    def remove(self) -> None: ...


class _Hook:
    """Something on a module that cannot be copied or saved."""

    def __init__(self, post: Post) -> None:
        self.post = post

    def __deepcopy__(self, _memo: object) -> NoReturn:
        raise ShardError(
            f"{self.post.name} lies in shards over the ranks and cannot be copied by itself. Write "
            "copy.deepcopy(hap) for a second model in the same shards (an EMA, a target network; "
            f"AveragedModel(hap) does), or, {FULL}"
        )

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise ShardError(
            f"{self.post.name} lies in shards over the ranks and cannot be pickled. Write "
            "state = hap.full_state_dict() on every rank, then torch.save(state, FILE) on one"
        )


class _StateHook(_Hook):
    """In front of ``state_dict()``."""

    def __call__(self, *_: Any) -> NoReturn:
        raise ShardError(
            f"state_dict() of {self.post.name} would hold this rank's shards. Write "
            "state = hap.full_state_dict() on every rank (it is what one device has), then torch.save(state, FILE) "
            "or other.load_state_dict(state) where it is wanted; HAP(..., gather_state=True) lets hap.state_dict() "
            "do so"
        )


class _CallHook(_Hook, InPlaceOf):
    """In front of a call, and in the place of ``forward``, whose signature it keeps."""

    def __init__(self, post: Post, forward: Callable[..., Any]) -> None:
        super().__init__(post)
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.refuse()
        return self.__wrapped__(*args, **kwargs)

    def refuse(self) -> None:
        """Raise ShardError unless the module has been given other parameters than its shards."""
        if any(marked(parameter) is not None for parameter in self.post.module.parameters()):
            raise ShardError(
                f"{self.post.name} lies in shards over the ranks and cannot be called by itself. Write hap(...) "
                f"for the step or the evaluation; for anything else (a part, generate, a method of yours), {FULL}; "
                "then call that"
            )


class _BeforeCall(_Hook):
    """The forward pre-hook of a :class:`_CallHook`."""

    def __init__(self, call: _CallHook) -> None:
        super().__init__(call.post)
        self._call = call

    def __call__(self, *_: Any) -> None:
        self._call.refuse()


class _Apply(_Hook, InPlaceOf):
    """In the place of ``apply``."""

    def __call__(self, function: Callable[[nn.Module], None]) -> nn.Module:
        module = self.post.module
        before = _random_states(module)
        nn.Module.apply(module, function)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(module), strict=True)):
            raise ShardError(
                f"apply() on {self.post.name} drew random numbers for parameters that lie in shards, where every "
                "rank draws others than one device. Initialize the model before HAP(...)"
            )
        return module


def _random_states(module: nn.Module) -> list[torch.Tensor]:
    """The states from which torch would draw for the module's parameters."""
    places = {p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")}
    others = sorted(places, key=str)
    return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in others)]


class _LoadHook(_Hook):
    """In front of ``load_state_dict``: of whole tensors this rank's part is loaded. What they are is said at the
    next step, since no rank has what another one loads."""

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
    ) -> None:
        loaded = Loaded()
        for leaf, layout in self.post.own.items():
            key = prefix + leaf
            value = state.get(key)
            if not isinstance(value, torch.Tensor):
                continue
            if tuple(value.shape) == layout.shape:
                if metadata.get("assign_to_params_buffers"):
                    raise ShardError(
                        f"load_state_dict(assign=True) would put the whole {key} into the place of this rank's "
                        "shard; write assign=False"
                    )
                state[key] = layout.slice(value)
                if is_sharded(layout.form):  # others are in parts on idle ranks alone
                    loaded.add(key, value)
            elif tuple(value.shape) == layout.local_shape:
                raise ShardError(
                    f"{key} of {list(value.shape)} is a shard, whose rank and plan nobody knows; load whole "
                    "tensors, as hap.full_state_dict() returns them"
                )
            else:
                raise RuntimeError(
                    f"the state dict does not fit the model: {key} has shape {list(value.shape)}, the model's is "
                    f"{list(layout.shape)}"
                )
        if loaded.keys:
            for hap in living():
                if any(part is module for part in hap.module.modules()):
                    hap.did(loaded.doing())


class Sentry:
    """Stands at the modules of ``posts`` from :meth:`stand` to :meth:`lift`."""

    def __init__(self, posts: list[Post]) -> None:
        self.posts = posts
        self._handles: list[_Handle] = []
        self._set: list[tuple[nn.Module, str, object, object]] = []
        self._lifted = 0

    def stand(self) -> None:
        """Begin, or go on after :meth:`lift`."""
        self._lifted = max(0, self._lifted - 1)
        if self._lifted:
            return
        for post in self.posts:
            module = post.module
            self._handles.append(module.register_state_dict_pre_hook(_StateHook(post)))  # type: ignore[no-untyped-call]  # torch's
            if post.own:
                self._handles.append(module.register_load_state_dict_pre_hook(_LoadHook(post)))  # type: ignore[no-untyped-call]  # torch's
            if post.here:
                call = _CallHook(post, module.forward)
                self._handles.append(module.register_forward_pre_hook(_BeforeCall(call), prepend=True))
                self._put(module, "forward", call)
                self._put(module, "apply", _Apply(post))

    def lift(self) -> None:
        """Leave the modules until :meth:`stand`; what others have put there in the meantime stays."""
        self._lifted += 1
        for handle in self._handles:
            handle.remove()
        for module, name, ours, before in reversed(self._set):
            if module.__dict__.get(name) is ours:
                del module.__dict__[name]
                if before is not None:
                    module.__dict__[name] = before
        self._handles, self._set = [], []

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """A context without it."""
        self.lift()
        try:
            yield
        finally:
            self.stand()

    def _put(self, module: nn.Module, name: str, value: InPlaceOf) -> None:
        value.before = getattr(module, name)
        self._set.append((module, name, value, module.__dict__.get(name)))
        module.__dict__[name] = value


def posts(model: nn.Module, shards: Mapping[str, LocalTensor], *, idle: bool) -> list[Post]:
    """Where a sentry must stand: at every module with a parameter that some rank does not hold whole.

    ``idle``: whether a rank holds nothing at all.
    """
    cut = {name for name, layout in shards.items() if divided(layout)}
    if not cut and not idle:
        return []
    places: list[Post] = []
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        here = any(name.startswith(dot) for name in cut)
        if not here and not (idle and any(True for _ in module.parameters())):
            continue
        own = {leaf: shards[dot + leaf] for leaf in module._parameters if dot + leaf in cut}
        places.append(Post(module, path, here, own))
    return places


def outside_posts(
    modules: Sequence[tuple[nn.Module, Mapping[str, str]]], shards: Mapping[str, LocalTensor]
) -> list[Post]:
    """The same for modules that are no part of the model, given with the names of its parameters that they have."""
    places: list[Post] = []
    for module, names in modules:
        own = {leaf: shards[n] for leaf, n in names.items() if n in shards and divided(shards[n])}
        if own:
            places.append(Post(module, "", True, own, outside=True))
    return places
