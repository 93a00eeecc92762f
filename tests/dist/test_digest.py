"""Digests depend on every bit and its place, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from hetspmd.dist.digest import WHOLE, digest, join, projection

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
SHAPES = ((), (1,), (3,), (7, 5), (4, 3, 2), (1000, 9))


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)


def value(tensor: torch.Tensor, **options: bool) -> int:
    return int(digest(tensor, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_counts(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = some(shape, dtype)
        assert value(x) == value(x.clone())
        for place in {0, x.numel() // 2, x.numel() - 1}:
            y = x.clone()
            flat = y.view(-1)
            flat[place] = not flat[place] if dtype == torch.bool else flat[place] + 7
            assert value(x) != value(y), (shape, place)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_does_not_count(dtype: torch.dtype) -> None:
    x = some((24, 10), dtype)
    want = value(x)
    assert value(x.t().contiguous().t()) == want
    padded = torch.cat((x.reshape(-1)[:3], x.reshape(-1)))
    assert value(padded[3:].view(24, 10)) == want, "another alignment"
    assert value(x.repeat(1, 2)[:, :10]) == want


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_often_collides_does_not(dtype: torch.dtype) -> None:
    """Signs, powers of two and orders, which only change upper bits or no sum; of all and of two elements."""
    x = some((64, 32), dtype)
    found = [x, -x, 2 * x, 4 * x, x / 2, x.flip(0), x.flip(1), x.roll(1, 0), x + 0.5, x[torch.randperm(64)]]
    for row in (3, 40):
        y = x.clone()
        y[row, :2] = -y[row, :2]
        found.append(y)
        y = x.clone()
        y[[row, row + 1]] = y[[row + 1, row]]
        found.append(y)
    assert len({value(t) for t in found}) == len(found)
    zeros = torch.zeros(8, dtype=dtype)
    assert value(zeros) != value(-zeros), "bits are compared"
    assert value(zeros / 0) == value(zeros / 0)


def test_many_batches_do_not_collide() -> None:
    """Labels of few classes, of 10,000 batches."""
    dice = torch.Generator().manual_seed(0)
    batches = torch.randint(0, 10, (10_000, 64), generator=dice)
    distinct = {tuple(b) for b in batches.tolist()}
    assert len({value(b) for b in batches}) == len(distinct)


def test_large_ones() -> None:
    """Replaced and permuted rows are met in every step, one element in time or where all is read."""
    x = some((300, 4000), torch.float32)
    assert x.numel() * 4 > 4 * WHOLE
    y = x.roll(1, 0)
    z = x.clone()
    z[7] += 1
    last = x.clone()
    last[-1, -1] += 1
    for step in range(3):
        assert len({int(digest(t, step)) for t in (x, y, z, last)}) == 4
    one = x.clone()
    one[150, 2000] += 1
    assert value(one, whole=True) != value(x, whole=True)
    assert any(int(digest(one, step)) != int(digest(x, step)) for step in range(40))
    odd = some((3 * WHOLE + 5,), torch.uint8)
    changed = odd.clone()
    changed[-1] += 1
    for whole in (True, False):
        assert value(odd, whole=whole) != value(changed, whole=whole)
        assert value(torch.cat((odd[:3], odd))[3:], whole=whole) == value(odd, whole=whole)


def test_empty_lazy_and_joined() -> None:
    assert value(torch.empty(0)) == value(torch.empty(0, 3))
    z = some((5,), torch.complex64) + 1j
    assert value(z.conj()) == value(z.conj().resolve_conj())
    assert value(z.conj()) != value(z)
    assert join([1, 2]) != join([2, 1])
    assert join([]) != join([0])
    assert -(2**63) <= join([2**63 - 1, -(2**63), -1]) < 2**63


def test_a_projection_tells_how_far_apart_two_are() -> None:
    x = some((200, 200), torch.float32)
    away = some((200, 200), torch.float32, 1) * 1e-3
    (a, square), (b, _) = projection(x), projection(x + away)
    assert float(square) == pytest.approx(float(x.double().square().sum()))
    assert 0.1 < abs(float(a - b)) / float(away.norm()) < 10
