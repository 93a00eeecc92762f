"""Every function of torch, called on a part of a tensor: the part of what the whole gives, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetspmd.errors import ShardError
from hetspmd.lower.local_program import LocalTensor
from hetspmd.placement import shard
from hetspmd.program.layout import Region
from hetspmd.run.shard_functions import Role, role_of
from hetspmd.run.shard_tensors import Part, plain
from hetspmd.run.shards import mark


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PLACES = {
    "Tensor": torch.Tensor,
    "torch": torch,
    "functional": F,
    "linalg": torch.linalg,
    "special": torch.special,
    "fft": torch.fft,
    "init": nn.init,
}
WHOLE = torch.linspace(0.1, 0.9, 48, dtype=torch.float64).reshape(6, 8).T.contiguous().roll(3)
CUTS = [(0, (4, 2, 1, 1), 1), (0, (7, 0, 1, 0), 3), (1, (3, 2, 1, 0), 0), (1, (1, 1, 1, 3), 1)]
"""The dim that is cut, the extents of the four ranks, and the rank that calls."""

ABOUT_MEMORY = words(
    """
    const_data_ptr data_ptr dim_order is_contiguous is_set_to is_shared storage storage_offset storage_type
    stride untyped_storage is_pinned _typed_storage
    """
)
"""What differs from device to device by nature."""
LEFT_OUT = words(
    """
    compile vmap set_default_device set_default_tensor_type set_printoptions set_rng_state set_default_dtype
    set_num_threads set_num_interop_threads set_grad_enabled set_flush_denormal set_deterministic_debug_mode
    set_float32_matmul_precision set_warn_always use_deterministic_algorithms set_anomaly_enabled
    set_autocast_enabled save load backward register_hook register_post_accumulate_grad_hook manual_seed
    seed initial_seed autocast_increment_nesting autocast_decrement_nesting fork wait import_ir_module
    import_ir_module_from_buffer share_memory_ pin_memory cuda xpu mtia ipu xla hpu as_subclass
    has_torch_function has_torch_function_unary has_torch_function_variadic classproperty empty_like
    new_empty __dir__ __getstate__ __hash__ __reduce_ex__ __reduce__ __repr__ __str__ __format__ __sizeof__
    module_load sparse_coo_tensor tensor to_dlpack
    """
)
"""What changes the process, looks at none of the values, or does not ask the class of a tensor
(docs/training.md says so of ``tensor`` and ``to_dlpack``)."""
UNASKED = {2: ("new", "new_tensor", "set_"), 6: ("new",)}
"""Methods that do not ask the class of what they are given, by the number of the arguments, and what has torch
itself make a tensor of one value; docs/training.md says so of the first."""


def layout(dim: int, extents: tuple[int, ...], rank: int) -> LocalTensor:
    region = Region(dim, sum(extents[:rank]), extents[rank])
    return LocalTensor(0, shard(dim), tuple(WHOLE.shape), "float64", extents, region)


def arguments(w: Any, other: Any, column: Any) -> Iterator[tuple[Any, ...]]:
    """What a function is called with: the tensor, others of its shape or that are broadcast to it, numbers."""
    yield (w,)
    yield w, other
    yield other, w
    yield w, column
    yield w, w
    for number in (0, 1, 2.0, 0.5, -1):
        yield w, number
    yield w, 0, 1
    yield w, w, other
    yield w, other, 0.5
    yield w, (8, 6)
    yield w, 4, -1
    yield w, torch.float32
    yield ([w, other],)
    yield w > 0.5, w, other


def functions() -> list[tuple[str, str]]:
    found = []
    for place, module in PLACES.items():
        for name in sorted(dir(module)):
            function = getattr(module, name)
            operators = [*dir(int), "__matmul__", "__len__"] if place == "Tensor" else []
            if name.startswith("_") and not name.startswith("_foreach") and name not in operators:
                continue
            if callable(function) and not isinstance(function, type) and name not in LEFT_OUT:
                found.append((place, name))
    return found


def shard_of(cut: tuple[int, tuple[int, ...], int], values: torch.Tensor) -> nn.Parameter:
    where = layout(*cut)
    made = nn.Parameter(where.slice(values).clone(), requires_grad=False)
    mark(made, "w", where)
    return made


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, equal_nan=True)


def agrees(found: Any, whole: Any, where: LocalTensor) -> bool:
    """Whether what was found for a part is the part of the whole result, or a whole result."""
    if isinstance(found, Part):
        want = where.slice(whole) if tuple(whole.shape) == where.shape else whole
        values = plain([found])[0]  # type: ignore[list-item]  # a tensor
        return same(values, want)
    if isinstance(found, torch.Tensor):
        return same(found, whole)
    if isinstance(found, (list, tuple)) and not isinstance(found, torch.Size):
        return len(found) == len(whole) and all(
            agrees(f, w, where) for f, w in zip(found, whole, strict=True)
        )
    return type(found) is type(whole) and (found == whole or found is whole or repr(found) == repr(whole))


@pytest.mark.filterwarnings("ignore")  # of what is deprecated
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_every_function(place: str, cut: tuple[int, tuple[int, ...], int]) -> None:
    where, wrong, computed = layout(*cut), [], 0
    other = WHOLE.flip(0) + 0.05
    for of, name in functions():
        if of != place or name in ABOUT_MEMORY:
            continue
        function = getattr(PLACES[of], name)
        if name == "set_":  # it asks no class, but that of the object it is a method of
            function = lambda tensor, *others: tensor.set_(*others)  # noqa: E731  # one line
        for index in range(sum(1 for _ in arguments(WHOLE, other, other[0]))):
            whole, part = WHOLE.clone(), shard_of(cut, WHOLE)
            single = next(itertools.islice(arguments(whole, other.clone(), other[0].clone()), index, None))
            divided = next(itertools.islice(arguments(part, other.clone(), other[0].clone()), index, None))
            want = outcome(lambda f=function, a=single: f(*a))
            if isinstance(want, Exception) or name in UNASKED.get(index, ()):
                continue
            found = outcome(lambda f=function, a=divided: f(*a))
            values = plain([part])[0]
            if isinstance(found, Exception):
                assert torch.equal(values, where.slice(WHOLE)), (
                    f"{of}.{name} has written before it was refused"
                )
                if not isinstance(found, ShardError):
                    wrong.append(f"{of}.{name}{index}: {found!r}")
                continue
            computed += 1
            is_written = whole.shape == WHOLE.shape and same(values, where.slice(whole))
            if not (agrees(found, want, where) and is_written):
                wrong.append(f"{of}.{name} of arguments {index}")
    assert not wrong, "\n".join(wrong)
    assert computed >= {"Tensor": 500, "torch": 200, "functional": 20, "special": 20, "init": 1}.get(place, 0)


def test_functions_that_torch_calls_elementwise_are_computed() -> None:
    """Not refused: torch's own list of them, by the names that Python has."""
    for name in words(
        "add mul sub div clamp where lerp addcmul addcdiv relu gelu exp isfinite zeros_like clone"
    ):
        found = getattr(torch, name, None) or getattr(F, name)
        assert role_of(found) is Role.ELEMENTWISE, name
