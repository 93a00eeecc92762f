"""The code of docs/extending.md runs, and its rules are the ones that the text states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import hetspmd
from hetspmd.rules import registry
from hetspmd.rules.brute import case_of
from hetspmd.rules.oracle import check
from hetspmd.rules.registry import rule_for

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
OPS = ("mylib.bias_gelu.default", "mylib.bias_gelu_backward.default", "mylib.decay.default")


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, Any]]:
    """The names that the page's Python blocks define, run in order as one module."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    module = ModuleType("extending")
    torch.manual_seed(0)
    exec(compile("\n".join(blocks), str(PAGE), "exec", dont_inherit=True), module.__dict__)
    yield module.__dict__
    for op in OPS:
        registry.unregister(op)


def rows(op: str, *args: Any) -> list[str]:
    call = case_of(op, args, {}).call
    rule = rule_for(call)
    assert rule is not None
    return [str(row) for row in rule.rows(call)]


def test_rows_of_the_annotations(page: dict[str, Any]) -> None:
    x, bias = torch.randn(6, 4), torch.randn(4)
    assert rows(OPS[0], x, bias) == [
        "{replicated, replicated} always {replicated}",
        "{shard(0), replicated} b {shard(0)}",
        "{shard(1), shard(0)} h {shard(1)}",
    ]
    assert rows(OPS[1], x, x, bias)[1:] == [
        "{shard(0), shard(0), replicated} b {shard(0), partial}",
        "{shard(1), shard(1), shard(0)} h {shard(1), shard(0)}",
        "{partial, replicated, replicated} linear(0) {partial, partial}",
    ]


def test_gradients_go_through_the_custom_ops(page: dict[str, Any]) -> None:
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(page["bias_gelu"], (x, bias))
    assert torch.autograd.gradcheck(lambda x: page["decay"](x, 0.3, 2), (x,))


def test_the_oracle_finds_the_fault_that_the_page_shows(page: dict[str, Any]) -> None:
    registry.unregister(OPS[0])
    hetspmd.rule("mylib::bias_gelu", "b h, h -> b h", linear=[[0]])
    x, bias = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    report = check("mylib::bias_gelu", [((x, bias), {})])
    shown = [line.strip() for line in PAGE.read_text().splitlines() if line.startswith("    ")]
    lines = [re.sub(r"error [\d.]+", "error 0.87", line.strip()) for line in str(report).splitlines()]
    assert len(lines) == 4
    assert [line for line in lines if line not in shown] == []


def test_the_rewrite_is_needed(page: dict[str, Any]) -> None:
    registry.unregister(OPS[2])

    @hetspmd.rule("mylib::decay")
    def _(call: Any) -> Any:
        rule = page["decay_rule"](call)
        return type(rule)(rule.factors, linear=rule.linear)

    x = torch.randn(6, 4, dtype=torch.float64)
    report = check("mylib::decay", [((x, 0.5, 0), {})], missing=False)
    assert [w.row for w in report.wrong] == ["{shard(0)} rows {shard(0)}"]
