"""Fused attention with dropout: an op whose samples and heads are divided, and kernels that draw their masks.

The kernels run on GPUs only. Ranks here run the op in parts, or a stand-in for a kernel (:mod:`fused_dropout`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_turns import run_in_turns
from torch import nn

from fused_dropout import (
    DROPOUT,
    HEADS,
    SAMPLES,
    TOKENS,
    WIDTH,
    Kernel,
    batch,
    cudnn,
    efficient,
    flash,
    kernel_backward,
    kernel_forward,
    model,
)
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower import attention as lowering
from hetspmd.optimize.compiler import plan_for
from hetspmd.placement import REPLICATE, shard
from hetspmd.plan.plan import Plan
from hetspmd.program.lengths import lengths_for
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.program.levels import one_level
from hetspmd.program.micro_batch_check import check_loop
from hetspmd.program.program import Compute
from hetspmd.program.time_split import split_in_time
from hetspmd.rules.theory import Theory, derive
from hetspmd.search.constraints import Constraints
from hetspmd.trace import dropout_attention as ops
from hetspmd.trace import gpu_dropout
from hetspmd.trace.compat.tensors import FakeTensorMode
from hetspmd.trace.dropout_attention import (
    BACKWARD,
    FORWARD,
    dropout_attention,
    dropout_attention_backward,
    kept,
)
from hetspmd.trace.trace import trace
from hetspmd.verify.comparison import largest_error
from nets import Net
from scheduled import lower
from workbench import CPU, cluster, simulated_error, single_device

# the op ------------------------------------------------------------------------------------------------------


def made(groups: int = HEADS, keys: int = TOKENS, batch: int = SAMPLES) -> list[torch.Tensor]:
    torch.manual_seed(1)
    sizes = (HEADS, TOKENS), (groups, keys), (groups, keys)
    return [torch.randn(batch, *size, WIDTH, dtype=torch.float64, requires_grad=True) for size in sizes]


MASK = torch.zeros(TOKENS, 7, dtype=torch.float64).index_fill(1, torch.tensor([2]), -torch.inf)
CASES: dict[str, tuple[dict[str, int], torch.Tensor | None, bool, float | None]] = {
    "plain": ({}, None, False, None),
    "causal": ({}, None, True, None),
    "a bias of each": (
        {},
        torch.linspace(-1, 1, SAMPLES * HEADS * TOKENS * TOKENS, dtype=torch.float64).view(
            SAMPLES, HEADS, TOKENS, TOKENS
        ),
        False,
        None,
    ),
    "a bias and a scale": ({"keys": 7}, MASK, False, 0.4),
    "groups": ({"groups": 2, "keys": 7}, None, False, None),
    "one key head": ({"groups": 1}, None, True, None),
    "no samples": ({"batch": 0}, None, False, None),
}


@pytest.mark.parametrize("scores", [1, 40, 300, 1 << 22])
@pytest.mark.parametrize("name", CASES)
def test_the_op_is_attention_whose_weights_are_dropped_by_the_seeds(
    name: str, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "SCORES", scores)
    sizes, bias, causal, scale = CASES[name]
    query, key, value = made(**sizes)
    seeds = torch.rand(query.shape[:2], dtype=torch.float64)
    options = DROPOUT, causal, scale
    out, logsumexp, state = dropout_attention(query, key, value, bias, seeds, *options)
    keys, values = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (key, value))
    products = query @ keys.transpose(2, 3) * (WIDTH**-0.5 if scale is None else scale)
    if bias is not None:
        products = products + bias
    if causal:
        products = products.masked_fill(torch.ones(products.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    mask = kept(seeds.view(torch.int64), products, DROPOUT)
    want = (products.softmax(3) * mask / (1 - DROPOUT)) @ values
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(logsumexp, products.logsumexp(3))
    grad = torch.randn_like(want)
    gradients = torch.autograd.grad(want, (query, key, value), grad)
    found = dropout_attention_backward(grad, query, key, value, bias, out, logsumexp, state, *options)
    for got, of in zip(found, gradients, strict=True):
        torch.testing.assert_close(got, of)


def test_masks_are_random_and_of_each_sample_and_head() -> None:
    torch.manual_seed(0)
    seeds = torch.rand(8, 16, dtype=torch.float64)
    weights = torch.empty(8, 16, 64, 64)
    for p in (0.0, 0.1, 0.5):
        mask = kept(seeds.view(torch.int64), weights, p).double()
        assert abs(mask.mean() - (1 - p)) < 0.002  # five standard deviations
        assert (mask.mean((2, 3)) - (1 - p)).abs().max() < 0.05
        assert (mask.mean((0, 1)) - (1 - p)).abs().max() < 0.25
    flat = kept(seeds.view(torch.int64), weights, 0.5).double().flatten(0, 1).flatten(1) * 2 - 1
    alike = flat @ flat.T / flat.shape[1]
    assert (alike - torch.eye(128, dtype=alike.dtype)).abs().max() < 0.1
    neighbours = (flat[:, 1:] * flat[:, :-1]).mean()
    assert abs(neighbours) < 0.01
    again = kept(seeds[2:3, 5:7].contiguous().view(torch.int64), weights[:1, :2], 0.5)
    assert torch.equal(again, kept(seeds.view(torch.int64), weights, 0.5)[2:3, 5:7])


# the trace ---------------------------------------------------------------------------------------------------


def theory_of(net: nn.Module) -> Theory:
    return derive(trace(net, (batch(),), {}))


def attentions(theory: Theory) -> list[str]:
    return [i.op for i in theory.graph.instructions if "attention" in i.op]


@pytest.mark.parametrize("kernel", [efficient, flash, cudnn])
def test_a_fused_kernel_with_dropout_is_traced_as_the_op(kernel: Kernel) -> None:
    theory = theory_of(model(kernel))
    assert attentions(theory) == [FORWARD, FORWARD, BACKWARD, BACKWARD]
    for instruction in theory.graph.instructions:
        if instruction.op in (FORWARD, BACKWARD):
            names = {row.name for row in theory.rows[instruction.id]}
            assert {"always", "b", "h"} <= names


@pytest.mark.parametrize("bias", [torch.zeros(TOKENS, TOKENS), torch.zeros(SAMPLES, 1, 1, TOKENS)], ids=str)
def test_a_bias_is_traced(bias: torch.Tensor) -> None:
    theory = theory_of(model(efficient, bias=nn.Parameter(bias, requires_grad=False)))
    assert attentions(theory) == [FORWARD, FORWARD, BACKWARD, BACKWARD]


def test_without_dropout_or_with_the_gradient_of_a_bias_the_kernel_stays() -> None:
    kernels = ["aten._scaled_dot_product_efficient_attention.default"] * 2
    kernels += ["aten._scaled_dot_product_efficient_attention_backward.default"] * 2
    assert attentions(theory_of(model(efficient, 0.0))) == kernels
    learned = model(efficient, bias=nn.Parameter(torch.zeros(TOKENS, TOKENS)))
    assert attentions(theory_of(learned)) == kernels


def test_an_output_may_be_the_query_of_another_attention() -> None:
    """Its gradient reads it as well, and is not that of the first one."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        heads = net.layer(x).view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)
        once = efficient(heads, heads, heads, 0.1, None)
        return efficient(once, once, heads, 0.2, None).square().mean()

    net = Net(forward, layer=nn.Linear(HEADS * WIDTH, HEADS * WIDTH)).double()
    theory = theory_of(net)
    by_state = {}
    for instruction in theory.graph.instructions:
        if instruction.op == FORWARD:
            by_state[instruction.outputs[2]] = instruction.args[5]
        elif instruction.op == BACKWARD:
            assert by_state.pop(instruction.inputs[-1]) == instruction.args[8]
    assert not by_state
    plan = planned(theory, ("b", "b"))
    want = single_device(theory, net, [batch()])
    assert simulated_error(theory, plan.program, plan.lengths, net, [batch()], want) < 1e-9


def test_a_forward_alone_is_traced() -> None:
    graph = trace(model(efficient), (batch(),), {}, training=False)
    assert [i.op for i in graph.instructions if "attention" in i.op] == [FORWARD, FORWARD]


# programs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [(0.5, 0.5), (0.5, 0.34, 0.16), (0.0, 0.7, 0.3)], ids=str)
def test_micro_batches_draw_what_the_whole_batch_would_draw(parts: tuple[float, ...]) -> None:
    net = model(efficient)
    theory = theory_of(net)
    loop = split_in_time(theory)
    check_loop(theory, loop)
    want = single_device(theory, net, [batch()])
    got = run_in_turns(theory, loop, lengths_for(theory.axes, parts), net, [batch()])
    assert got.loss is not None
    assert want.loss is not None
    error = largest_error({**got.gradients, "loss": got.loss}, {**want.gradients, "loss": want.loss}, 1e-9)
    assert error[0] < 1e-9


def by(theory: Theory, forward: str, backward: str | None = None) -> Constraints:
    """Attention runs by the triples of these names."""
    names = {FORWARD: forward, BACKWARD: backward or forward}

    def allowed(instruction: int, row: Any, axis: int | None) -> bool:
        op = theory.graph.instructions[instruction].op
        return op not in names or row.name == names[op]

    return Constraints({}, allowed)


WAYS = [("b", "b"), ("h", "h"), ("always", "always"), ("b", "h"), ("h", "always"), ("always", "b")]


def planned(theory: Theory, way: tuple[str, str]) -> Plan:
    plan = plan_for(theory, cluster(5, 1, 3), by(theory, *way), (0.5, 0.2, 0.3))
    rows = {theory.graph.instructions[s.instruction].op: s.row.name for s in computes(plan)}
    assert (rows[FORWARD], rows[BACKWARD]) == way
    return plan


def computes(plan: Plan) -> list[Compute]:
    return [s for s in plan.program.steps if isinstance(s, Compute)]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shares", [(0.5, 0.2, 0.3), (0.7, 0.0, 0.3)], ids=str)
def test_devices_compute_what_one_computes(way: tuple[str, str], shares: tuple[float, ...]) -> None:
    net = model(efficient)
    theory = theory_of(net)
    plan = planned(theory, way)
    want = single_device(theory, net, [batch()])
    lengths = lengths_for(theory.axes, shares)
    assert simulated_error(theory, plan.program, lengths, net, [batch()], want) < 1e-9


# kernels that draw inside ------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lowering.KERNELS, "cpu", {FORWARD: kernel_forward, BACKWARD: kernel_backward})


def fused(theory: Theory, plan: Plan) -> int:
    """How many attentions may be given to kernels, forward and backward."""
    steps = one_level(theory, plan.program, plan.schedule)
    found = {
        lowering.fused_attentions(
            LevelLayout(theory, plan.lengths), RankPlace(rank), (*steps.forward, *steps.backward)
        )
        for rank in range(3)
    }
    (instructions,) = found
    return len(instructions)


def losses_and_gradients(
    theory: Theory, plan: Plan, net: nn.Module, *, gradients: bool
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """What ranks compute that draw as in training."""
    graph, x = theory.graph, batch()
    parameters = dict(net.named_parameters())

    def body(communicator: Communicator) -> tuple[torch.Tensor, list[torch.Tensor]]:
        local = lower(theory, plan.program, plan.lengths, communicator.rank, CPU, schedule=plan.schedule)
        random = Randomness(5, communicator.rank, CPU)
        random.begin_step()
        runtime = Runtime(communicator, random)
        with torch.no_grad():
            shards = [
                layout.slice(parameters[p.name].detach())
                for layout, p in zip(local.parameters, graph.parameters, strict=True)
            ]
            loss, _, _, saved = local.forward(runtime, *shards, x)
            if not gradients:
                return loss, []
            assert local.backward is not None
            return loss, local.backward(runtime, torch.ones((), dtype=loss.dtype), saved)

    return run_ranks(3, body)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_gradient_has_the_mask_of_its_loss(way: tuple[str, str]) -> None:
    """The gradient along a direction is what the loss changes by in it, with the same random numbers."""
    net = model(efficient)
    theory = theory_of(net)
    plan = planned(theory, way)
    assert fused(theory, plan) == (4 if way in (("b", "b"), ("h", "h")) else 0)
    found = losses_and_gradients(theory, plan, net, gradients=True)
    torch.manual_seed(9)
    directions = {p.name: torch.randn_like(net.get_parameter(p.name)) for p in theory.graph.parameters}
    slope = torch.zeros((), dtype=torch.float64)
    for rank, (_, gradients) in enumerate(found):
        local = lower(theory, plan.program, plan.lengths, rank, CPU, schedule=plan.schedule)
        for index, gradient in zip(local.differentiable, gradients, strict=True):
            layout, name = local.parameters[index], theory.graph.parameters[index].name
            if layout.form != REPLICATE or rank == 0:
                slope += (gradient * layout.slice(directions[name])).sum()
    moved = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, direction in directions.items():
                net.get_parameter(name).add_(direction, alpha=sign * 1e-5)
            moved.append(losses_and_gradients(theory, plan, net, gradients=False)[0][0])
            for name, direction in directions.items():
                net.get_parameter(name).sub_(direction, alpha=sign * 1e-5)
    torch.testing.assert_close(slope, (moved[0] - moved[1]) / 2e-5, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("kernels")
def test_ranks_draw_masks_of_their_own_and_others_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def forward(query: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = kernel_forward(query, *args)
        drawn.append(int(found[2][0, 0, 0]))
        return found

    monkeypatch.setitem(lowering.KERNELS, "cpu", {FORWARD: forward, BACKWARD: kernel_backward})
    net, x = model(efficient), batch()
    theory = theory_of(net)
    plan = planned(theory, ("b", "b"))
    state = torch.get_rng_state()

    def body(communicator: Communicator) -> None:
        local = lower(theory, plan.program, plan.lengths, communicator.rank, CPU, schedule=plan.schedule)
        runtime = Runtime(communicator, Randomness(5, communicator.rank, CPU))
        shards = [
            layout.slice(p.detach()) for layout, p in zip(local.parameters, net.parameters(), strict=True)
        ]
        for _ in range(2):
            with torch.no_grad():
                local.forward(runtime, *shards, x)

    run_ranks(3, body)
    assert len(set(drawn)) == len(drawn) == 3 * 2 * 2  # ranks, steps, blocks
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.usefixtures("kernels")
def test_comparisons_with_one_device_run_in_parts() -> None:
    net = model(efficient)
    theory = theory_of(net)
    plan = planned(theory, ("b", "b"))
    want = single_device(theory, net, [batch()])
    assert simulated_error(theory, plan.program, plan.lengths, net, [batch()], want) < 1e-9


def test_one_device_alone_takes_the_kernels_whatever_the_triple() -> None:
    theory = theory_of(model(efficient))
    plan = plan_for(theory, cluster(1), by(theory, "always"), (1.0,))
    steps = one_level(theory, plan.program, plan.schedule)
    layout = LevelLayout(theory, plan.lengths)
    assert len(lowering.fused_attentions(layout, RankPlace(0), (*steps.forward, *steps.backward))) == 4


# the kernels of GPUs, by shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("has_flash", [False, True])
def test_a_gpu_takes_its_own_kernels(
    dtype: torch.dtype, masked: bool, groups: int, has_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors of a GPU; whether it has the flash kernel is asked of torch, which is on a CPU here."""
    answers = iter([has_flash])  # it is asked once: what a user turns off meanwhile does not part the two
    monkeypatch.setattr(gpu_dropout, "_ASKED", {})
    monkeypatch.setattr(gpu_dropout, "can_use_flash_attention", lambda _: next(answers))
    with FakeTensorMode():
        query = torch.empty(4, 4, 30, 64, device="cuda", dtype=dtype)
        key = torch.empty(4, groups, 30, 64, device="cuda", dtype=dtype)
        bias = torch.empty(30, 30, device="cuda", dtype=dtype) if masked else None
        seeds = torch.empty(4, 4, device="cuda", dtype=torch.float64)
        options = 0.1, not masked, None
        forward, backward = (
            lowering.kernel_of(FORWARD, query.device),
            lowering.kernel_of(BACKWARD, query.device),
        )
        assert forward is not None
        assert backward is not None
        with Calls() as calls:
            out, logsumexp, state = forward(query, key, key, bias, seeds, *options)
            found = backward(torch.empty_like(out), query, key, key, bias, out, logsumexp, state, *options)
        assert (out.shape, out.device.type, out.dtype) == (query.shape, "cuda", dtype)
        assert tuple(logsumexp.shape) == (4, 4, 30)
        assert (tuple(state.shape), state.dtype) == ((4, 4, 2), torch.int64)
        assert [g.shape for g in found] == [query.shape, key.shape, key.shape]
    kind = "flash" if has_flash and dtype == torch.bfloat16 and not masked else "efficient"
    names = [n for n in calls.names if "attention" in n]
    want = [f"_scaled_dot_product_{kind}_attention{way}" for way in ("", "_backward")]
    assert names == ([] if dtype == torch.float64 else want)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """The names of the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_samples_and_heads_are_divided_and_nothing_else_the_rule_says() -> None:
    theory = theory_of(model(efficient))
    forward = next(i for i in theory.graph.instructions if i.op == FORWARD)
    rows = {row.name: row.post for row in theory.rows[forward.id]}
    assert rows["b"] == (shard(0),) * 3
    assert rows["h"] == (shard(1),) * 3
    assert rows["always"] == (REPLICATE,) * 3
    assert set(rows) == {"always", "b", "h"}


def test_the_script_for_a_gpu_on_a_cpu() -> None:
    script = Path(__file__).parents[2] / "scripts" / "gpu" / "attention.py"
    command = [sys.executable, str(script), "--device", "cpu", "--rounds", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(": pass: ") == 8
    assert "kernels: " in ran.stdout
