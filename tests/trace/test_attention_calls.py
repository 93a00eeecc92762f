"""Attention that torch would take apart in a trace stays one op on a GPU; here the CPU stands for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hetspmd.lower import attention as lowering
from hetspmd.optimize.compiler import plan_for
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.program.levels import one_level
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import constraints as known
from hetspmd.trace import attention_calls
from hetspmd.trace.dropout_attention import BACKWARD, FORWARD
from hetspmd.trace.trace import trace
from hetspmd.verify.comparison import largest_error
from nets import Net
from workbench import cluster, simulated_error, single_device

SAMPLES, TOKENS, WIDTH = 6, 5, 32


TAKEN_APART = attention_calls._taken_apart


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_calls, "DEVICES", {"cpu"})
    monkeypatch.setattr(attention_calls, "_taken_apart", lambda *args, **options: True)


def net(attend: Callable[..., torch.Tensor], groups: int = 4) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    width = WIDTH // 4

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        query = model.query(x).view(SAMPLES, TOKENS, 4, width).transpose(1, 2)
        key, value = model.rest(x).view(SAMPLES, TOKENS, 2, groups, width).permute(2, 0, 3, 1, 4)
        return model.out(attend(query, key, value).transpose(1, 2).reshape(x.shape)).square().mean()

    query, out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model = Net(forward, query=query, rest=nn.Linear(WIDTH, 2 * groups * width), out=out)
    return model, torch.randn(SAMPLES, TOKENS, WIDTH)


sdpa = F.scaled_dot_product_attention
MASK = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(1)
BIAS = torch.linspace(-1, 1, SAMPLES * TOKENS).view(SAMPLES, 1, 1, TOKENS)
CASES: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "plain": (sdpa, 4),
    "causal": (lambda *t: sdpa(*t, is_causal=True), 4),
    "mask": (lambda *t: sdpa(*t, attn_mask=MASK), 4),
    "bias and scale": (lambda *t: sdpa(*t, BIAS, scale=0.2), 4),
    "groups": (lambda *t: sdpa(*t, enable_gqa=True), 2),
    "one key head": (lambda *t: sdpa(*t, enable_gqa=True), 1),
}


def attentions(theory: Theory) -> list[str]:
    return [i.op for i in theory.graph.instructions if "attention" in i.op]


@pytest.mark.parametrize("name", CASES)
def test_a_call_stays_one_op(name: str) -> None:
    model, x = net(*CASES[name])
    theory = derive(trace(model, (x,), {}))
    assert attentions(theory) == [FORWARD, BACKWARD]
    got = single_device(theory, model, [x])
    loss = model(x)
    loss.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert got.loss is not None
    assert largest_error({**got.gradients, "loss": got.loss}, {**want, "loss": loss.detach()}, 1e-4)[0] < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_devices_divide_it(name: str) -> None:
    model, x = net(*CASES[name])
    theory = derive(trace(model, (x,), {}))
    plan = plan_for(theory, cluster(5, 1, 3), known.data_parallel(theory), (0.5, 0.2, 0.3))
    want = single_device(theory, model, [x])
    assert simulated_error(theory, plan.program, plan.lengths, model, [x], want) < 1e-4
    steps = one_level(theory, plan.program, plan.schedule)
    layout = LevelLayout(theory, plan.lengths)
    assert len(lowering.fused_attentions(layout, RankPlace(1), (*steps.forward, *steps.backward))) == 2


def test_without_dropout_every_placement_takes_kernels() -> None:
    model, x = net(sdpa)
    theory = derive(trace(model, (x,), {}))

    def allowed(instruction: int, row: Any, axis: int | None) -> bool:
        return row.name == "always" or theory.graph.instructions[instruction].op not in (FORWARD, BACKWARD)

    plan = plan_for(theory, cluster(5, 1, 3), known.Constraints({}, allowed), (0.5, 0.2, 0.3))
    steps = one_level(theory, plan.program, plan.schedule)
    layout = LevelLayout(theory, plan.lengths)
    assert len(lowering.fused_attentions(layout, RankPlace(1), (*steps.forward, *steps.backward))) == 2


def test_dropout_is_drawn_by_seeds() -> None:
    model, x = net(lambda *t: sdpa(*t, dropout_p=0.25))
    theory = derive(trace(model, (x,), {}))
    assert attentions(theory) == [FORWARD, BACKWARD]
    assert [i.op for i in theory.graph.instructions if "rand" in i.op] == ["aten.rand.default"]


def test_it_has_the_dtype_that_autocast_gives_it() -> None:
    model, x = net(sdpa)
    with torch.autocast("cpu", torch.bfloat16):
        theory = derive(trace(model, (x,), {}))
    assert attentions(theory) == [FORWARD, BACKWARD]
    graph = theory.graph
    (forward,) = (i for i in graph.instructions if i.op == FORWARD)
    assert {graph.tensors[t].dtype for t in forward.inputs} == {"bfloat16"}


def vmapped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.vmap(lambda *t: sdpa(*(x[None] for x in t))[0])(query, key, value)
    return found


STAYS: dict[str, Callable[..., torch.Tensor]] = {
    "heads that kernels refuse": lambda *t: sdpa(*(x[..., :7] for x in t)).repeat(1, 1, 1, 2)[..., :8],
    "under vmap": vmapped,
    "float64": lambda *t: sdpa(*(x.double() for x in t)).float(),
    "three dims": lambda *t: sdpa(*(x[:, 0] for x in t))[:, None].expand(-1, 4, -1, -1),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_no_kernel_takes_stays_as_it_is(name: str) -> None:
    model, x = net(STAYS[name])
    theory = derive(trace(model, (x,), {}))
    assert FORWARD not in attentions(theory)


def test_a_mask_with_a_gradient_stays_as_it_is() -> None:
    model, x = net(lambda *t: sdpa(*t, model.mask))
    model.mask = nn.Parameter(torch.zeros(TOKENS, TOKENS))
    assert FORWARD not in attentions(derive(trace(model, (x,), {})))


def test_torch_is_asked_in_a_trace_as_it_asks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_calls, "_taken_apart", TAKEN_APART)

    def without_flash(*tensors: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):  # a CPU has none of the latter
            return sdpa(*tensors)

    assert attentions(derive(trace(*traceable(without_flash)))) == [FORWARD, BACKWARD]
    kernel = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert attentions(derive(trace(*traceable(sdpa)))) == [f"{kernel}.default", f"{kernel}_backward.default"]


def traceable(attend: Callable[..., torch.Tensor]) -> Any:
    model, x = net(attend)
    return model, (x,), {}


def test_a_model_may_turn_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tensors = [torch.randn(2, 2, 4, 8) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        assert not attention_calls._taken_apart(*tensors)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        assert attention_calls._taken_apart(*tensors)  # a CPU has none of the latter
    assert not attention_calls._taken_apart(*tensors)
