"""Parameters that lie in shards, as code that takes them for whole ones meets them.

A shard is an ``nn.Parameter``, so that optimizers, hooks and everything elementwise work on it at no cost. What
would be wrong in silence is refused by the parameter itself: a copy or a pickle of it, random numbers (each rank
would draw others than one device), and reductions, which would be of this rank's elements alone. Its class
(:mod:`hetspmd.run.shard_tensors`) refuses them; the words are here.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, NoReturn

import torch
from torch import nn

from hetspmd.errors import ShardError
from hetspmd.lower.local_program import LocalTensor
from hetspmd.placement import is_sharded
from hetspmd.run.shard_tensors import MARK, Shard, refuse_transform, shard_class
from hetspmd.trace.compat.func_transforms import before_transforms

FULL: Final = "on every rank: model = hap.full_module(), a single-device copy"
"""How to get at a model that can be called, copied and saved as it is."""


class ShardMark:
    """Says of a parameter that it is a shard of ``name``, and refuses what needs the whole."""

    def __init__(self, name: str, layout: LocalTensor) -> None:
        self.name, self.layout = name, layout

    @property
    def whole(self) -> ShardMark:
        """The mark of the parameter."""
        return self

    def of_gradient(self, parameter: torch.Tensor) -> GradientMark:
        """The mark of the gradient of ``parameter``, which this is the mark of."""
        return GradientMark(self, parameter)

    def gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter's gradient, if ``tensor`` is another name for it: values are not."""
        return None

    def copied(self, *_: Any) -> NoReturn:
        """In the place of ``__deepcopy__``."""
        raise ShardError(
            f"{self} and cannot be copied by itself. Write copy.deepcopy(hap) for a second model in the same "
            f"shards (an EMA, a target network), hap.full_tensors()[{self.name!r}] (every rank calls it) for the "
            f"whole parameter, or, {FULL}"
        )

    def pickled(self, *_: Any) -> NoReturn:
        """In the place of ``__reduce_ex__``."""
        raise ShardError(
            f"{self} and cannot be saved by itself. Write state = hap.full_state_dict() on every rank, then "
            "torch.save(state, FILE) on one"
        )

    def refusal(self, what: str, kind: str) -> ShardError:
        """The error of an op that would "read" no more than the shard, "write" to other elements than on one
        device, "draw" other numbers or "send" it."""
        whole = f"hap.full_tensors()[{self.name!r}]"
        if kind == "send":
            return self._sent(what)
        if kind == "draw":
            return ShardError(
                f"{self}: .{what}() would draw other numbers than one device does. Initialize the model before "
                "HAP(...), or load values: hap.load_state_dict({name: whole, ...}, strict=False)"
            )
        if kind == "write":
            return ShardError(
                f"{self}: {what} would write to other elements than on one device. Write, on every rank, "
                f"whole = {whole}, change it, then hap.load_state_dict({{{self.name!r}: whole}}, strict=False)"
            )
        text = _written(what)
        return ShardError(
            f"{self}: {text or what} would see no more. Write {whole}{text} (every rank calls it) to "
            "look at it; what is differentiated, as a penalty, belongs into the model or into loss= (a sum of "
            "squares: weight_decay of the optimizer)"
        )

    def transformed(self, what: str) -> ShardError:
        """The error of a transform of torch.func, or of ``what`` else hands on a tensor that knows of no shard."""
        whole = "full_gradients" if isinstance(self, GradientMark) else "full_tensors"
        return ShardError(
            f"{self}: {what} would see no more. Write, on every rank, hap.{whole}()"
            f"[{self.name!r}] in its place, or model = hap.full_module(), and transform that"
        )

    def _sent(self, name: str) -> ShardError:
        return ShardError(
            f"{self}: {name} would mix it with the parts of other ranks, which are no copies of it. Leave it out: "
            "HAP reduces gradients, and keeps parameters alike"
        )

    def into(self, name: str) -> ShardError:
        """The error of a function that would write the part to a whole tensor."""
        return ShardError(
            f"{self}: .{name}() would write it to a tensor of another size. Make that of the same shards: of the "
            "HAP module (copy.deepcopy(hap), for an average of weights) or of the parameter (torch.zeros_like(p)); "
            f"or write hap.full_tensors()[{self.name!r}] (every rank calls it) in the place of the shard"
        )

    def lies_as(self, other: ShardMark) -> bool:
        """Whether every rank has the same part of both."""
        one, two = self.layout, other.layout
        return (one.shape, one.form, one.extents, one.region) == (
            two.shape,
            two.form,
            two.extents,
            two.region,
        )

    def cut(self, source: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that can be broadcast to the whole; any other as it is."""
        shape, whole = tuple(source.shape), self.layout.shape
        if shape == self.layout.local_shape or source.numel() == 1 or not _broadcasts(shape, whole):
            return source
        return self.layout.slice(source.expand(whole))

    def part_of(self, source: Any) -> Any:
        """This rank's part of what ``copy_`` is given: a whole tensor is cut."""
        if not isinstance(source, torch.Tensor):
            return source
        part = self.cut(source)
        if not _broadcasts(tuple(part.shape), self.layout.local_shape):
            raise ShardError(f"{self}; copy_ takes the whole parameter, not a tensor of {list(source.shape)}")
        return part

    def __str__(self) -> str:
        return (
            f"parameter {self.name} of {list(self.layout.shape)} lies in shards, of which this rank holds "
            f"{list(self.layout.local_shape)}"
        )


class GradientMark(ShardMark):
    """Says of a tensor that it is the gradient of a shard, or was computed from one element by element."""

    def __init__(self, of: ShardMark, parameter: torch.Tensor) -> None:
        super().__init__(of.name, of.layout)
        self._of, self._parameter = of, weakref.ref(parameter)

    @property
    def whole(self) -> ShardMark:
        """The mark of the parameter."""
        return self._of

    def gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The parameter's gradient, if ``tensor`` is another name for it."""
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None or tensor.shape != gradient.shape or tensor.data_ptr() != gradient.data_ptr():
            return None
        return gradient

    def pickled(self, *_: Any) -> NoReturn:
        raise ShardError(
            f"{self} and cannot be saved by itself. Write gradients = hap.full_gradients() on every rank, then "
            "torch.save(gradients, FILE) on one"
        )

    def refusal(self, what: str, kind: str) -> ShardError:
        whole = f"hap.full_gradients()[{self.name!r}]"
        if kind == "send":
            return self._sent(what)
        if kind == "draw":
            return ShardError(
                f"{self}: .{what}() would draw other numbers than one device does. Write, on every rank, "
                f"torch.manual_seed(step), noise = torch.randn({list(self.layout.shape)}), and "
                "hetspmd.on_full_gradient(hap, NAME, lambda gradient: gradient + noise) before the backward"
            )
        if kind == "write":
            return ShardError(
                f"{self}: {what} would write to other elements than on one device. Write "
                "hetspmd.on_full_gradient(hap, NAME, function): it is given the whole gradient and returns another"
            )
        text = _written(what)
        return ShardError(
            f"{self}: {text or what} would see no more. Write {whole}{text} (every rank calls it) to look at it; "
            "the norm of all gradients is hetspmd.get_total_norm(hap), or what "
            "torch.nn.utils.clip_grad_norm_(...) returns"
        )

    def __str__(self) -> str:
        return (
            f"the gradient of {self.name} of {list(self.layout.shape)} lies in shards, of which this rank holds "
            f"{list(self.layout.local_shape)}"
        )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    ends = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, other) for size, other in ends)


def _written(what: str) -> str:
    """An attribute or method of a tensor as it is written after one, or nothing for what is none."""
    if not what.isidentifier() or what.startswith("_") or not hasattr(torch.Tensor, what):
        return ""
    return f".{what}()" if callable(getattr(torch.Tensor, what)) else f".{what}"


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter of which ``tensor`` is another name (``p.grad`` makes one), or ``tensor``."""
    own = tensor.__dict__.get(MARK)
    gradient = own.gradient(tensor) if isinstance(own, GradientMark) else None
    return tensor if gradient is None else gradient


def divided(layout: LocalTensor) -> bool:
    """Whether no rank, or not this one, holds the whole tensor."""
    return layout.local_shape != layout.shape or (is_sharded(layout.form) and len(layout.extents) > 1)


def mark(parameter: nn.Parameter, name: str, layout: LocalTensor) -> None:
    """Let a shard say what it is."""
    shard_mark = ShardMark(name, layout)
    own = parameter.__dict__
    own[MARK] = shard_mark
    own["__deepcopy__"], own["__reduce_ex__"] = shard_mark.copied, shard_mark.pickled
    before_transforms(refuse_transform)
    if not isinstance(parameter, Shard):
        parameter.__class__ = shard_class(type(parameter))


def parameter_like(values: torch.Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """A parameter with these values, which has the class and the attributes that ``parameter`` had before it was
    cut."""
    twin = nn.Parameter(values, parameter.requires_grad)
    twin.__class__ = parameter.plain_class if isinstance(parameter, Shard) else type(parameter)
    twin.__dict__.update(attributes(parameter))
    return twin


def marked(parameter: torch.Tensor) -> ShardMark | None:
    """What a parameter is a shard of, if it is one."""
    shard_mark: ShardMark | None = parameter.__dict__.get(MARK)
    return shard_mark


def attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """What others have set on a parameter."""
    ours = {MARK, "__deepcopy__", "__reduce_ex__"}
    return {
        key: value
        for key, value in parameter.__dict__.items()
        if key not in ours or marked(parameter) is None
    }
