"""What each function of torch does to a tensor of which every rank holds a part, told by the function's name.

A function that is element by element computes this rank's part of what it computes on one device. torch tags its
ops so, and :mod:`hetspmd.rules.ops.pointwise` adds those that it has forgotten; here are the names by which Python
calls them, and what is neither a value nor changes one. Whatever is not listed mixes elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Final

import torch

from hetspmd.rules.ops.pointwise import is_pointwise


class Role(Enum):
    """What a function is to a part of a tensor."""

    DESCRIBES = auto()
    """It yields no values (a dtype, a hook's handle), or values that do not depend on the tensor's."""
    SIZE = auto()
    """It tells how large the tensor is."""
    ELEMENTWISE = auto()
    LIST = auto()
    """It is element by element, of lists of tensors."""
    VIEW = auto()
    """It is element by element where it leaves the shape as it is."""
    INDEX = auto()
    """It is element by element where the index takes everything."""
    GRADIENT = auto()
    """It yields gradients of what it is given."""
    MIXES = auto()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DRAWING: Final = _words(
    """
    alpha_dropout bernoulli bernoulli_ binomial cauchy_ dropout dropout_ dropout1d dropout2d dropout3d
    exponential_ feature_alpha_dropout feature_dropout geometric_ gumbel_softmax log_normal_ multinomial normal
    normal_ poisson rand_like randint_like randn_like random_ rrelu rrelu_ uniform_
    """
)
_WRITING: Final = _words(
    """
    __setitem__ addbmm_ addmm_ addmv_ addr_ as_strided_ baddbmm_ cumprod_ cumsum_ dirac_ eye eye_ fill_diagonal_
    index_add_ index_copy_ index_fill_ index_put_ index_reduce_ masked_scatter_ put_ renorm_ resize_ resize_as_
    scatter_ scatter_add_ scatter_reduce_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_ tril_ triu_ unsqueeze_
    vector_to_parameters
    """
)
_DESCRIBING: Final = _words(
    """
    __deepcopy__ __delete__ __dir__ __dlpack_device__ __format__ __getstate__ __hash__ __reduce__ __reduce_ex__
    __repr__ __set__ _has_compatible_shallow_copy_type __setstate__ __sizeof__ __str__ _fix_weakref _is_view
    _typed_storage _use_count _version as_subclass backward const_data_ptr data_ptr dense_dim dim dim_order
    element_size get_device get_overlap has_names module_load ndimension new new_empty new_empty_strided
    new_full new_ones new_tensor new_zeros q_per_channel_axis qscheme record_stream register_hook
    register_post_accumulate_grad_hook reinforce requires_grad_ retain_grad sparse_dim storage storage_offset
    storage_type stride untyped_storage
    """
)
_NOT_DESCRIBING: Final = _words("is_nonzero is_set_to is_same_size")
_SIZES: Final = _words("shape size numel nelement nbytes __len__")
_MIXING_ATTRIBUTES: Final = _words("H T mH mT")
_VIEWS: Final = _words(
    "view reshape flatten ravel view_as reshape_as unflatten contiguous_view expand expand_as broadcast_to"
)
_OF_TWO: Final = _words("amax amin max min")
"""Of two tensors these are element by element."""
_NOT_BROADCAST: Final = _words("isin prelu where")
"""They have arguments that are not broadcast to the others, or other meanings."""

_OPERATORS: Final = _words("add sub mul div truediv floordiv mod pow and or xor lshift rshift")
_SINGLE: Final = _words("neg pos abs invert eq ne lt le gt ge")
_PLACED: Final = frozenset(f"__i{name}__" for name in _OPERATORS)
_SPECIAL: Final = frozenset(
    (*(f"__{sign}{name}__" for name in _OPERATORS for sign in ("", "r", "i")), *(f"__{n}__" for n in _SINGLE))
)
_FURTHER: Final = _words(
    """
    absolute addcdiv addcmul apply arccos arccosh arcsin arcsinh arctan arctan2 arctanh bfloat16 bool byte
    cdouble cfloat chalf char clone conj constant contiguous copy cpu cuda data detach divide double empty_like
    expit exp2 fill fix float float_power floor_divide full_like gammainc gammaincc gammaln greater
    greater_equal half hardswish imag int isclose isreal less less_equal log_ndtr log_sigmoid logsigmoid long
    map map2 masked_fill mtia multigammaln multiply ndtr negative not_equal ones ones_like pin_memory positive
    psi real resolve_conj resolve_neg share_memory short softsign subtract tanhshrink to type type_as xpu zero
    zeros zeros_like
    """
)
"""Without the underscore at the end of those that write in place."""


def name_of(func: Callable[..., Any]) -> str:
    """How a function of torch is called; the read of an attribute, as which one."""
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]  # of C


def kind_of(name: str) -> str:
    """What is wrong with a function that mixes elements: it would "draw", "write" or "read"."""
    if name in _WRITING:
        return "write"
    in_init = name.endswith("_") and hasattr(torch.nn.init, name)
    return "draw" if name in _DRAWING or in_init else "read"


def writes(name: str) -> bool:
    """Whether a function writes to its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _PLACED or name == "__setitem__"


def _base_of(name: str) -> str:
    """The name without what says that it writes in place, or is of lists."""
    return name.removeprefix("_foreach_").rstrip("_")


@lru_cache(maxsize=4096)
def role_of(func: Callable[..., Any]) -> Role:
    """What ``func`` is to a part of a tensor, but for what its arguments decide."""
    name = name_of(func)
    if func is torch.autograd.grad:
        return Role.GRADIENT
    if name in _SIZES:
        return Role.SIZE
    if getattr(func, "__name__", "") == "__get__":
        if name in ("data", "real", "imag"):
            return Role.ELEMENTWISE
        if name == "grad":
            return Role.GRADIENT
        return Role.MIXES if name in _MIXING_ATTRIBUTES else Role.DESCRIBES
    if name in _DESCRIBING or (name.startswith(("is_", "q_")) and name not in _NOT_DESCRIBING):
        return Role.DESCRIBES
    if name in _DRAWING or name in _WRITING - {"__setitem__"}:
        return Role.MIXES
    if name in ("__getitem__", "__setitem__"):
        return Role.INDEX
    if name in _VIEWS:
        return Role.VIEW
    if name.startswith("_foreach_"):
        return Role.LIST if _is_elementwise(_base_of(name)) else Role.MIXES
    return Role.ELEMENTWISE if name in _SPECIAL or _is_elementwise(_base_of(name)) else Role.MIXES


def is_of_two(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function that otherwise mixes elements is called with two tensors, of which it takes the pairs."""
    return name in _OF_TWO and len(args) > 1 and isinstance(args[1], torch.Tensor)


@lru_cache
def does_as_tensors(kind: type[torch.Tensor]) -> bool:
    """Whether functions do to tensors of a class what they do to plain ones."""
    own, plain = (getattr(of.__torch_function__, "__func__", None) for of in (kind, torch.Tensor))
    return kind is torch.nn.Parameter or own is plain


def is_list(value: object) -> bool:
    """Whether an argument is a list of others."""
    return type(value) in (list, tuple)


def takes_all(index: object) -> bool:
    """Whether an index takes everything: ``[:]``, ``[...]``."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(p is Ellipsis or (type(p) is slice and p == slice(None)) for p in parts)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif is_list(value):
            yield from tensors_in(value)


def _is_elementwise(name: str) -> bool:
    if name in _FURTHER or name == "where":
        return True
    if name in _OF_TWO or name in _NOT_BROADCAST:
        return False
    if name.startswith("special_") and _is_elementwise(name.removeprefix("special_")):
        return True
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(is_pointwise(f"aten.{name}.{o}") for o in packet.overloads())
