"""The classes of what lies in shards: parameters, and values that are computed from them element by element.

A parameter that is cut becomes a :class:`Shard`, an ``nn.Parameter`` whose methods that write in place are torch's
own, so that optimizers step it at no cost. Its other methods, operators and properties go through
:class:`ShardValues`, which is also what ``p.data``, ``p.detach()`` and ``p * 2`` are: a tensor that knows of which
parameter it is a part. Whatever is of its own shape is computed element by element and stays one. What mixes
elements (norms, products, indices, random numbers), and what has another shape, is refused with the line to write.

Optimizers, which are looked at by themselves (:mod:`hetspmd.run.optimizer_guard`), and hetspmd are served as ever.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from hetspmd.trace.compat import as_plain

if TYPE_CHECKING:
    from hetspmd.run.shards import ShardMark

__all__ = [
    "MARK", "Shard", "ShardValues", "begin_step", "end_step", "no_step", "outside_steps", "values_of", "words",
]  # fmt: skip

MARK: Final = "hetspmd_shard"
"""The attribute that says of which parameter a tensor is a shard."""


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


_DRAWING: Final = frozenset(
    words(
        """
        bernoulli bernoulli_ binomial cauchy_ dropout dropout_ alpha_dropout feature_dropout exponential_
        geometric_ log_normal_ multinomial normal normal_ poisson random_ uniform_ rand_like randn_like
        randint_like rrelu rrelu_
        """
    )
)
_WRITING: Final = frozenset(
    words(
        """
        __setitem__ addbmm_ addmm_ addmv_ addr_ baddbmm_ cumprod_ cumsum_ eye fill_diagonal_ index_add_
        index_copy_ index_fill_ index_put_ index_reduce_ masked_scatter_ put_ renorm_ resize_ resize_as_
        scatter_ scatter_add_ scatter_reduce_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_ tril_ triu_
        unsqueeze_ as_strided_
        """
    )
)
_MIXING: Final = frozenset(
    words(
        """
        H T mH mT __getitem__ __iter__ __matmul__ __rmatmul__ __array__ __float__ __int__ __bool__ __index__
        adjoint addmm addmv addbmm baddbmm bmm all any amax amin aminmax argmax argmin argsort as_strided
        as_strided_scatter batch_norm cdist cholesky chunk corrcoef cosine_similarity count_nonzero cov cross
        cummax cummin cumprod cumsum det diagonal diff dist dot dsplit einsum embedding flip fliplr flipud
        gather group_norm histc histogram hsplit index_add index_copy index_fill index_put index_reduce
        index_select inner instance_norm inverse item kron kthvalue l1_loss layer_norm linear log_softmax
        logcumsumexp logdet logsumexp matmul matrix_exp matrix_power max mean median min mm mode moveaxis
        movedim mse_loss msort mv nanmean nanmedian nanquantile nansum narrow narrow_copy norm normalize
        nuclear_norm numpy outer pdist permute pinverse prod qr quantile renorm rms_norm roll rot90 scatter
        scatter_add scatter_reduce select slogdet smooth_l1_loss softmax softmin sort split split_with_sizes std
        std_mean sum svd swapaxes swapdims t take take_along_dim tensor_split tensordot tolist topk trace
        transpose tril triu unbind unique unsafe_chunk unsafe_split var var_mean vdot vector_norm view_as vsplit
        _foreach_norm _foreach_max
        """
    )
)
_OF_TWO: Final = frozenset(("amax", "amin", "max", "min"))
"""Of two tensors these are element by element."""
_DESCRIBING: Final = frozenset(
    words(
        """
        as_subclass backward const_data_ptr data_ptr dense_dim detach dim dim_order element_size get_device
        has_names module_load ndimension nelement new new_empty new_empty_strided new_full new_ones new_tensor
        new_zeros numel q_per_channel_axis qscheme record_stream register_hook
        register_post_accumulate_grad_hook reinforce retain_grad size sparse_dim storage storage_offset
        storage_type stride type untyped_storage
        """
    )
)
"""Methods that are neither values nor change them, and ``detach``, which is defined below."""

_HERE: Final = (__file__, str(Path(__file__).with_name("functions.py")))
_IN_PLACE: Final = frozenset(
    getattr(torch.Tensor, name)
    for name in words("add_ addcdiv_ addcmul_ clamp_ div_ fill_ lerp_ mul_ sub_ zero_")
)
"""What changes values element by element, and returns what it has changed."""

_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
_TORCH: Final = str(Path(torch.__file__).parent) + os.sep
_SERVED: Final = tuple(
    str(Path(_TORCH) / part)
    for part in ("optim", "testing", "_tensor_str.py", "_dynamo", "_inductor", "_subclasses")
)


class _Stepping(threading.local):
    """How many steps of optimizers this thread is in, one within the other, and the shards that are plain
    parameters as long."""

    def __init__(self) -> None:
        self.depth = 0
        self.shards: list[torch.Tensor] = []

    def plain(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if type(parameter) is Shard:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # which it is a case of
                self.shards.append(parameter)

    def over(self) -> None:
        self.depth = 0
        for parameter in self.shards:
            parameter.__class__ = Shard
        self.shards = []


_STEPPING: Final = _Stepping()


def begin_step(parameters: Iterable[torch.Tensor]) -> None:
    """Say that an optimizer's step begins in this thread, for which its parameters are plain ones."""
    if _STEPPING.depth and not _is_within_a_step():
        no_step()  # it failed
    _STEPPING.depth += 1
    _STEPPING.plain(parameters)


def _is_within_a_step() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


def end_step() -> None:
    """Say that the innermost step is over."""
    if _STEPPING.depth <= 1:
        no_step()
    else:
        _STEPPING.depth -= 1


def no_step() -> None:
    """Say that no optimizer steps in this thread, whatever has ended its step."""
    if _STEPPING.depth:
        _STEPPING.over()


@contextmanager
def outside_steps() -> Iterator[None]:
    """Within the context no optimizer steps in this thread; those that did go on afterwards, unless it fails."""
    depth, shards = _STEPPING.depth, _STEPPING.shards
    no_step()
    yield
    _STEPPING.depth = depth
    _STEPPING.plain(shards)


class ShardValues(torch.Tensor):
    """This rank's part of what lies as a parameter does."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IN_PLACE and type(args[0]) is ShardValues:
            with as_plain():
                return func(*args, **kwargs)
        if not all(issubclass(cls, kind) or issubclass(kind, nn.Parameter) for kind in types):
            return NotImplemented
        own = next((mark for mark in map(_mark_of, _tensors((*args, *kwargs.values()))) if mark), None)
        name = _name(func)
        if own is None or name == "grad":
            with as_plain():
                return func(*args, **kwargs)
        if _is_refused(name, args, kwargs) and _is_asked_by_user():
            raise own.refusal(name, _kind(name))
        if name == "copy_":
            args = (args[0], *(own.part_of(a) for a in args[1:]))
        with as_plain():
            found = func(*args, **kwargs)
            return _marked(found, own, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardValues:
        made: Any = self.detach().clone()
        memo[id(self)] = made
        made.requires_grad_(self.requires_grad)
        return made  # type: ignore[no-any-return]  # torch says Tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = _mark_of(self)
        if own is not None and _is_asked_by_user():
            own.pickled()
        with as_plain():
            plain: Any = self.as_subclass(torch.Tensor)
            return plain.__reduce_ex__(protocol)


def values_of(parameter: torch.Tensor) -> ShardValues:
    """A shard's values, as a part of the autograd graph."""
    return _as_values(parameter, parameter.__dict__[MARK])


_data: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # of C
_grad: Final = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # of C
_detach: Final = torch.Tensor.detach
_as_subclass: Final = torch.Tensor.as_subclass


def _as_values(tensor: torch.Tensor, mark: ShardMark) -> ShardValues:
    made = _as_subclass(tensor, ShardValues)
    made.__dict__[MARK] = mark
    return made


class Shard(nn.Parameter):
    """A parameter of which this rank holds a part."""

    @property
    def data(self) -> torch.Tensor:
        found: torch.Tensor = _data(self)
        return found if _is_served() else _as_values(found, self.__dict__[MARK])

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if sys._getframe(1).f_code.co_name == "vector_to_parameters":
            raise self.__dict__[MARK].refusal("vector_to_parameters", "write")
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # of C

    def detach(self) -> torch.Tensor:
        found = _detach(self)
        if _is_served():
            return found
        if sys._getframe(1).f_code.co_filename.startswith(_TORCH + "nn/parameter"):
            made = found.as_subclass(Shard)  # nn.Parameter(shard) wants its class
            made.__dict__[MARK] = self.__dict__[MARK]
            return made
        return _as_values(found, self.__dict__[MARK])

    @property
    def grad(self) -> torch.Tensor | None:
        """As values are: torch's own functions take it as it is, others learn that it is a part."""
        found: torch.Tensor | None = _grad(self)
        if (
            found is None
            or _STEPPING.depth
            or sys._getframe(1).f_code.co_filename.startswith((_PACKAGE, _TORCH))
        ):
            return found
        return _as_values(found, self.__dict__[MARK].of_gradient(self))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if type(value) is ShardValues:
            value = _as_subclass(value, torch.Tensor)
        torch.Tensor.grad.__set__(self, value)  # type: ignore[union-attr]  # of C

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__delete__(self)  # type: ignore[union-attr]  # of C

    T = property(lambda self: _property(self, "T"))
    H = property(lambda self: _property(self, "H"))
    mT = property(lambda self: _property(self, "mT"))
    mH = property(lambda self: _property(self, "mH"))


def _property(shard: Shard, name: str) -> Any:
    plainly = _STEPPING.depth > 0
    return getattr(torch.Tensor, name).__get__(shard) if plainly else getattr(values_of(shard), name)


def _method(name: str) -> Callable[..., Any]:
    original = getattr(torch.Tensor, name)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_served() or MARK not in self.__dict__:
            return original(self, *args, **kwargs)
        return getattr(values_of(self), name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, getattr(original, "__doc__", None)
    return method


def _methods() -> Iterator[str]:
    """The methods of a tensor that a shard hands to its values."""
    for name in dir(torch.Tensor):
        if name.startswith("_") or not callable(getattr(torch.Tensor, name)):
            continue
        ours = name in _DRAWING or name in _WRITING or name == "copy_"
        left = name.endswith("_") or name in _DESCRIBING or name.startswith(("is_", "q_", "to_sparse"))
        if ours or not left:
            yield name
    arithmetic = words("add sub mul truediv floordiv mod pow matmul")
    for name in (*arithmetic, *(f"r{name}" for name in arithmetic), "neg", "abs", "lt", "le", "gt", "ge",
                 "eq", "ne", "getitem", "setitem", "iter", "float", "int", "bool", "array"):  # fmt: skip
        if hasattr(torch.Tensor, f"__{name}__"):
            yield f"__{name}__"


for _each in _methods():
    setattr(Shard, _each, _method(_each))


def _name(func: Callable[..., Any]) -> str:
    """How a function of torch is called; a property, as which attribute."""
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]  # of C


def _kind(name: str) -> str:
    return "draw" if name in _DRAWING else "write" if name in _WRITING else "read"


def _is_refused(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in ("__getitem__", "__setitem__"):
        return not _is_all(args[1])
    if name in _OF_TWO and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return False
    if name == "eye":
        return kwargs.get("out") is not None
    return name in _MIXING or name in _WRITING or name in _DRAWING or name.startswith(("linalg_", "fft_"))


def _is_all(index: Any) -> bool:
    """Whether an index takes everything: ``[:]``, ``[...]``."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(p is Ellipsis or (type(p) is slice and p == slice(None)) for p in parts)


def _mark_of(tensor: torch.Tensor) -> ShardMark | None:
    found: ShardMark | None = tensor.__dict__.get(MARK)
    return found


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _marked(found: Any, own: ShardMark, name: str) -> Any:
    """The result as what it is: of the shard's shape, its part as well; plain, if the shape says nothing."""
    if isinstance(found, torch.Tensor):
        if MARK in found.__dict__ or isinstance(found, nn.Parameter):
            return found
        if tuple(found.shape) == own.layout.local_shape:
            return _as_values(found, own)
        if found.dim() == 0 and name.endswith("_"):
            return found
        if name.startswith("new_") or not _is_asked_by_user():
            return found
        raise own.refusal(name, _kind(name))
    if type(found) in (list, tuple) and any(isinstance(f, torch.Tensor) for f in found):
        return type(found)(_marked(f, own, name) for f in found)
    return found


def _is_served() -> bool:
    """Whether the caller of a shard's method is an optimizer's step, or hetspmd itself."""
    return _STEPPING.depth > 0 or sys._getframe(2).f_code.co_filename.startswith(_PACKAGE)


def _is_asked_by_user() -> bool:
    """Whether it is neither hetspmd nor an optimizer's step that asks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _HERE:
            if file.startswith((_PACKAGE, *_SERVED)):
                return False
            if not file.startswith(_TORCH):
                break
        frame = frame.f_back
    passed = set()
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            closure = frame.f_locals.get("closure")
            return getattr(closure, "__code__", None) in passed
        passed.add(frame.f_code)
        frame = frame.f_back
    return True
