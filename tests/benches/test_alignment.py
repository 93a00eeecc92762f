"""The bench of slices at even and odd places."""

from __future__ import annotations

import pytest
import torch

import alignment


def test_widths_are_multiples_of_no_more() -> None:
    found = alignment.widths(1000)
    assert found == {64: 1024, 32: 1056, 16: 1040, 8: 1032, 4: 1028, 2: 1026, 1: 1025}
    for multiple, width in found.items():
        assert width % multiple == 0
        assert multiple == 64 or width % (2 * multiple)


def test_the_products_are_those_of_a_layer() -> None:
    torch.manual_seed(0)
    y, of_x, of_weight = (call() for call in alignment.products(3, 5, 4, "cpu", torch.float64))
    assert (y.shape, of_x.shape, of_weight.shape) == ((3, 4), (3, 5), (4, 5))
    torch.manual_seed(0)
    x, gradient = (torch.randn(3, n, dtype=torch.float64) for n in (5, 4))
    weight = torch.randn(4, 5, dtype=torch.float64)
    layer = torch.nn.Linear(5, 4, bias=False, dtype=torch.float64)
    layer.load_state_dict({"weight": weight})
    x.requires_grad_()
    layer(x).backward(gradient)
    assert torch.allclose(y, layer(x))
    assert x.grad is not None
    assert torch.allclose(of_x, x.grad)
    assert torch.allclose(of_weight, layer.weight.grad)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert alignment.main(["--rows", "2", "--columns", "3", "--outputs", "2", "--rounds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(alignment.MULTIPLES)
    assert lines[2] == "| 64 | 1.00 | 1.00 | 1.00 |"
    with pytest.raises(SystemExit):
        alignment.main(["--rows", "0"])
    assert "at least 1" in capsys.readouterr().err
