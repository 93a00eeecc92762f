"""Random draws: alike where replicated, independent where sharded, the single device's in reference mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetspmd.dist.random import Draw, Randomness, random_op
from hetspmd.errors import RandomOpError
from hetspmd.placement import is_sharded, sharded_dim
from hetspmd.program.noise import NOISE
from hetspmd.rules.brute import case_of
from hetspmd.rules.registry import rule_for
from hetspmd.rules.rule import localize
from hetspmd.rules.samples.random import SAMPLES
from hetspmd.trace.graph import Ref
from hetspmd.trace.values import to_torch, torch_op

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


_SAMPLED = [(name, number) for name in sorted(SAMPLES) for number in range(len(SAMPLES[name]()))]


def joined(result: Any) -> torch.Tensor:
    """One tensor of the outputs of an op, alike in shape."""
    return torch.stack([r.double() for r in result], -1) if isinstance(result, tuple) else result


@pytest.mark.parametrize(("name", "number"), _SAMPLED)
def test_reference_mode_slices_what_one_device_draws(name: str, number: int) -> None:
    """Every op that draws, by every row of its rule."""
    args, kwargs = SAMPLES[name]()[number]
    case = case_of(name, args, kwargs)
    rule, shape = rule_for(case.call), case.call.out.shape
    assert rule is not None
    if not rule.random:
        return

    def drawn(randomness: Randomness, local: Any, inputs: Any, region: Any = None) -> torch.Tensor:
        target, given, named = local
        assert target == name

        def filled(value: Any) -> Any:
            return inputs[value.id] if isinstance(value, Ref) else to_torch(value, CPU)

        values = {k: filled(v) for k, v in named.items()}
        return joined(
            random_op(randomness, Draw(4, shape, region), torch_op(name), [*map(filled, given)], values)
        )

    call = (name, case.call.args, dict(case.call.kwargs))
    (one,) = ranks(1, reference=True)
    whole = drawn(one, call, case.inputs)
    assert torch.equal(drawn(one, call, case.inputs), whole), "the same step and instruction draw the same"
    plain = joined(case.outputs if len(case.outputs) > 1 else case.outputs[0])
    assert (plain.shape, plain.dtype) == (whole.shape, whole.dtype), "torch's own result has this type"
    divided = False
    for row in rule.rows(case.call):
        if row.factor is None:
            continue
        dim = sharded_dim(row.post[0])
        for start, stop in ((0, 3), (3, shape[dim])):
            local = localize(case.call, rule, row, 0, 2, start, stop)
            inputs = [
                t.narrow(sharded_dim(f), start, stop - start) if is_sharded(f) else t
                for t, f in zip(case.inputs, row.pre, strict=True)
            ]
            got = drawn(one, local, inputs, (dim, start, stop - start))
            assert torch.equal(got, whole.narrow(dim, start, stop - start)), row
            divided = True
    assert divided or name == "aten.randperm.default" or len(shape) == 0 or name == "aten.multinomial.default"
    one.begin_step()
    if whole.numel() > 8:
        assert not torch.equal(drawn(one, call, case.inputs), whole), "another step draws anew"


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _moments(values: torch.Tensor) -> tuple[float, float]:
    return float(values.double().mean()), float(values.double().std())


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten.poisson.default", (torch.full((60000,), 3.5),)),
        ("aten.poisson.default", (torch.full((60000,), 0.2),)),
        ("aten.poisson.default", (torch.full((60000,), 800.0),)),
        ("aten.binomial.default", (torch.full((60000,), 9.0), torch.full((60000,), 0.3))),
        ("aten.binomial.default", (torch.full((60000,), 200.0), torch.full((60000,), 0.02))),
        ("aten.multinomial.default", (torch.tensor([0.1, 0.0, 0.4, 0.5]).expand(60000, 4), 1)),
        ("aten.multinomial.default", (torch.tensor([0.1, 0.4, 0.5, 0.0]).expand(6000, 4), 10, True)),
        ("aten.exponential.default", (torch.zeros(60000), 2.0)),
        ("aten.geometric.default", (torch.zeros(60000), 0.3)),
        ("aten.log_normal.default", (torch.zeros(60000), 0.1, 0.5)),
        ("aten.randint.low", (3, 9, [60000])),
        ("aten.normal.Tensor_Tensor", (torch.full((60000,), 2.0), torch.full((60000,), 0.5))),
        ("aten.rrelu_with_noise_functional.default", (-torch.ones(60000), torch.zeros(60000), 0.1, 0.3, True)),
    ],
)  # fmt: skip
def test_the_distribution_is_torchs(name: str, args: tuple[Any, ...]) -> None:
    (one,) = ranks(1, reference=True)
    op = torch_op(name)
    shape = tuple(_first(op(*args)).shape)
    got = _first(random_op(one, Draw(0, shape), op, args, {}))
    (mean, deviation), (want, spread) = _moments(got), _moments(_first(op(*args)))
    assert mean == pytest.approx(want, abs=0.02 * (spread + 1e-3)), (mean, want)
    assert deviation == pytest.approx(spread, rel=0.05, abs=1e-3), (deviation, spread)


def test_poisson_and_binomial_at_their_ends() -> None:
    (one,) = ranks(1, reference=True)
    poisson, binomial = torch_op("aten.poisson.default"), torch_op("aten.binomial.default")
    assert not random_op(one, Draw(0, (50,)), poisson, (torch.zeros(50),), {}).any()
    count = torch.full((50,), 7.0)
    for p, wanted in ((0.0, 0.0), (1.0, 7.0)):
        got = random_op(one, Draw(0, (50,)), binomial, (count, torch.full((50,), p)), {})
        assert (got == wanted).all()


def test_fused_dropout_keeps_with_probability_p() -> None:
    noise = NOISE["aten._fused_dropout.default"]
    mask = torch.empty(4000, dtype=torch.uint8)
    noise.fill(mask, torch.Generator().manual_seed(0), None, 0.75)
    out, kept = noise.finish(mask, torch.ones(4000), 0.75)
    assert float(kept.double().mean()) == pytest.approx(0.75, abs=0.03)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.04)


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
    with pytest.raises(RandomOpError, match=r"aten\.randperm.*neither compared .* Keep it whole"):
        random_op(r, Draw(0, (4,), (0, 0, 2)), torch.ops.aten.randperm.default, (2,), {})


def test_state_is_saved_and_restored() -> None:
    x = torch.ones(50)
    (r,) = ranks(1)
    dropout(r, Draw(0, x.shape), x)
    state = r.get_state()
    want = dropout(r, Draw(0, x.shape), x)[1]
    other = Randomness(999, 0, CPU)
    other.set_state(state)
    assert torch.equal(dropout(other, Draw(0, x.shape), x)[1], want)
