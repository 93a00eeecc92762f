"""Random draws: alike where replicated, independent where sharded, the single device's in reference mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetspmd.errors import RandomOpError
from hetspmd.run.random import _NOISE, Draw, Randomness, random_op
from hetspmd.trace.values import torch_op

CPU = torch.device("cpu")
DROPOUT = torch.ops.aten.native_dropout.default


def dropout(randomness: Randomness, draw: Draw, x: torch.Tensor, p: float = 0.4) -> Any:
    return random_op(randomness, draw, DROPOUT, (x, p, True), {})


def ranks(world: int, *, reference: bool = False) -> list[Randomness]:
    found = [Randomness(11, r, CPU, reference=reference) for r in range(world)]
    for r in found:
        r.begin_step()
    return found


def test_replicated_draws_are_the_same_on_every_rank_and_differ_between_calls() -> None:
    x = torch.ones(8, 100)
    first, second = (
        torch.stack([dropout(r, Draw(0, x.shape), x)[1] for r in ranks_]) for ranks_ in [ranks(3)] * 2
    )
    assert (first == first[0]).all()
    assert (second == second[0]).all()
    assert not torch.equal(first, second)


def test_replicated_draws_stay_alike_when_shards_of_different_sizes_are_drawn_between() -> None:
    x = torch.ones(8, 100)
    found = ranks(2)
    for r, extent in zip(found, (1, 7), strict=True):
        dropout(r, Draw(0, x.shape, (0, 0, extent)), x[:extent])
    masks = [dropout(r, Draw(1, x.shape), x)[1] for r in found]
    assert torch.equal(*masks)


def test_sharded_draws_differ_between_ranks() -> None:
    x = torch.ones(4, 200)
    masks = [dropout(r, Draw(0, (8, 200), (0, 4 * i, 4)), x)[1] for i, r in enumerate(ranks(2))]
    agreement = (masks[0] == masks[1]).float().mean().item()
    assert 0.4 < agreement < 0.65


def test_dropout_has_torchs_meaning() -> None:
    (r,) = ranks(1)
    x = torch.rand(200, 200, dtype=torch.float64) + 1
    out, mask = dropout(r, Draw(0, x.shape), x, 0.25)
    assert mask.dtype == torch.bool
    assert mask.double().mean().item() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(out, torch.where(mask, x / 0.75, torch.zeros_like(x)))
    out, mask = dropout(r, Draw(0, x.shape), x, 1.0)
    assert not out.any()
    assert not mask.any()
    out, mask = random_op(r, Draw(0, x.shape), DROPOUT, (x, 0.5, False), {})
    assert torch.equal(out, x)
    assert mask.all()


@pytest.mark.parametrize("name", sorted(_NOISE))
def test_reference_mode_slices_what_one_device_draws(name: str) -> None:
    op = torch_op(name)
    x = torch.rand(7, 5)

    def arguments(part: torch.Tensor) -> tuple[Any, ...]:
        args: tuple[Any, ...] = (part,)
        if name == "aten.native_dropout.default":
            args = (part, 0.3, True)
        elif name == "aten.bernoulli.p":
            args = (part, 0.3)
        elif name == "aten.bernoulli.Tensor":
            args = (part, part)
        elif name in ("aten.rand.default", "aten.randn.default"):
            args = (list(part.shape),)
        return args

    def call(randomness: Randomness, region: tuple[int, int, int] | None) -> torch.Tensor:
        args = arguments(x if region is None else x.narrow(*region))
        result = random_op(randomness, Draw(4, (7, 5), region), op, args, {})
        return result[0] if isinstance(result, tuple) else result

    whole, other = call(ranks(1, reference=True)[0], None), ranks(3, reference=True)
    for r, (start, extent) in zip(other, ((0, 3), (3, 0), (3, 4)), strict=True):
        assert torch.equal(call(r, (0, start, extent)), whole.narrow(0, start, extent))
    assert torch.equal(call(other[0], None), whole), "the same step and instruction draw the same"
    other[0].begin_step()
    assert not torch.equal(call(other[0], None), whole), "another step draws anew"
    plain = op(*arguments(x))
    plain = plain[0] if isinstance(plain, tuple) else plain
    assert (plain.shape, plain.dtype) == (whole.shape, whole.dtype), "torch's own result has this type"


def test_other_random_ops_draw_alike_and_leave_the_default_generator_alone() -> None:
    state = torch.get_rng_state()
    found = ranks(2)
    op = torch.ops.aten.randperm.default
    a = [random_op(r, Draw(0, (20,)), op, (20,), {}) for r in found]
    b = [random_op(r, Draw(0, (20,)), op, (20,), {}) for r in found]
    assert torch.equal(*a)
    assert torch.equal(*b)
    assert not torch.equal(a[0], b[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sharded_op_that_cannot_be_sliced_is_refused_in_reference_mode() -> None:
    (r,) = ranks(1, reference=True)
    with pytest.raises(RandomOpError, match=r"aten\.poisson"):
        random_op(r, Draw(0, (4,), (0, 0, 2)), torch.ops.aten.poisson.default, (torch.ones(2),), {})


def test_state_is_saved_and_restored() -> None:
    x = torch.ones(50)
    (r,) = ranks(1)
    dropout(r, Draw(0, x.shape), x)
    state = r.get_state()
    want = dropout(r, Draw(0, x.shape), x)[1]
    other = Randomness(999, 0, CPU)
    other.set_state(state)
    assert torch.equal(dropout(other, Draw(0, x.shape), x)[1], want)
