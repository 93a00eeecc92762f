"""What ``torch.compile`` of a user's code makes of a HAP module and of optimizers: it leaves them as they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from divided import X, net, on_four

from hetspmd.run import optimizer_guard
from hetspmd.run.module import HAP
from hetspmd.trace.compat.bytecode import REASON, left_by_compilers


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def steps(model: Any, wrap: Callable[[str, Any], Any], count: int = 4) -> list[float]:
    """Losses of a few steps, of which ``wrap`` compiles some part."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    call, step = wrap("model", model), wrap("optimizer", optimizer.step)

    def whole(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = call(x)
        (loss * 2).backward()
        step()
        optimizer.zero_grad()
        return loss.detach()

    run = wrap("step", whole)
    return [run(X).item() for _ in range(count)]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's, of the loss
@pytest.mark.parametrize(
    "part",
    [
        "model",
        pytest.param("optimizer", marks=pytest.mark.slow),
        pytest.param("step", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_one_device(part: str) -> None:
    """Compiled, AdamW corrects its moments in float32, on one device as here."""

    def wrap(name: str, thing: Any) -> Any:
        return torch.compile(thing, backend="eager") if name == part else thing

    def body(hap: HAP) -> list[float]:
        return steps(hap, wrap)

    want = steps(net(), wrap)
    for found in on_four(body):
        assert found == pytest.approx(want, rel=1e-12 if part == "model" else 1e-9)


def test_nothing_within_is_read() -> None:
    seen = list[str]()

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "call" in node.op)
        return graph

    @left_by_compilers
    def inner(x: torch.Tensor) -> torch.Tensor:
        return helper(x).tanh()

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x.sin()).cos()

    x = torch.linspace(0, 1, 5)
    assert torch.equal(torch.compile(outer, backend=backend)(x), outer(x))
    assert seen == ["sin", "cos"], "what is around is compiled"
    torch.compiler.reset()
    with pytest.raises(Exception, match="compile=True"):
        torch.compile(outer, backend=backend, fullgraph=True)(x)
    assert "compile=True" in REASON


def test_hooks_of_optimizers_are_among_them() -> None:
    """What they say to the other ranks is in C, of which the compiler knows nothing."""
    assert vars(optimizer_guard._before_step)["_torchdynamo_disable_msg"] == REASON
    assert vars(optimizer_guard._after_step)["_torchdynamo_disable_msg"] == REASON


def test_no_compiler_is_imported_for_it() -> None:
    code = (
        "import sys, torch; from hetspmd.trace.compat.bytecode import left_by_compilers;"
        "assert left_by_compilers(lambda: 3)() == 3; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
