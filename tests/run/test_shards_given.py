"""What a shard or its gradient is given, and what is told of another tensor by it, is as on one device."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from divided import X, net, on_four
from torch import nn

from hetspmd.errors import ShardError
from hetspmd.run.module import HAP


def weight(model: nn.Module) -> Any:
    return getattr(model, "module", model).a.weight


def ramp(shape: Any) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def gradients_assigned(model: nn.Module) -> None:
    """Whole ones, for code that accumulates by hand."""
    model(X).backward()
    for p in model.parameters():
        p.grad = ramp(p.shape)


def gradients_data(model: nn.Module) -> None:
    model(X).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data = p.grad.data * 2
        p.grad.data.mul_(0.7)
        p.grad.data = ramp(p.shape) * p.grad.data
        found = p.grad
        found.data = found.sign() * 0.01 + found.data


def whole_gradients_data(model: nn.Module) -> None:
    model(X).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data = ramp(p.shape)


def values_data(model: nn.Module) -> None:
    """``p.data`` is a tensor of its own, whose values are others' afterwards; the parameter stays."""
    model(X).backward()
    for p in model.parameters():
        values = p.data
        values.data = values.data * 3
        assert p.grad is not None
        p.grad.add_(values)


def expanded(model: nn.Module) -> None:
    model(X).backward()
    w, row = weight(model), ramp((12,))
    w.data.sub_(row.expand_as(w)).mul_(w.data.expand(24, 12))
    w.data.add_(w.data.expand_as(ramp((24, 12)))).add_(torch.broadcast_to(row, w.shape))
    w.data.add_(w.data.expand(-1, -1)).add_(w.data.broadcast_to(w.shape)).add_(ramp((288,)).view_as(w))


def by_keywords(model: nn.Module) -> None:
    model(X).backward()
    w, whole = weight(model), ramp((24, 12))
    assert torch.numel(input=w) == 288
    with torch.no_grad():
        w.copy_(torch.add(input=w, other=whole).reshape((24, 12)))
        w.copy_(torch.reshape(input=w, shape=(24, 12)))
        w.copy_(torch.where(condition=w > 0, input=w, other=w * 0.1))
        torch.clamp(input=w, min=ramp((12,)), out=w)
        w.copy_(torch.mul(input=whole, other=w))


class Named(torch.Tensor):
    """A class with nothing of its own."""


def of_a_class(model: nn.Module) -> None:
    model(X).backward()
    other = ramp((24, 12)).as_subclass(Named)
    with torch.no_grad():
        weight(model).mul_(other).add_(other * weight(model))


def loaded(model: nn.Module) -> None:
    """An average by hand, put into the model as a state dict, and taken out again."""
    named = dict(getattr(model, "module", model).named_parameters())
    average, kept = ({n: p.detach().clone() for n, p in named.items()} for _ in range(2))
    for name, p in named.items():
        average[name].lerp_(p.detach() * 3, 0.5)
    model.load_state_dict(kept, strict=False)
    model.load_state_dict(average, strict=False)
    model(X).backward()


def copied(model: nn.Module) -> None:
    model(X).backward()
    copy.copy(weight(model).data).mul_(2)  # another name for the same memory
    copy.copy(weight(model).grad).mul_(2)


@pytest.mark.parametrize(
    "use",
    [
        gradients_assigned, gradients_data, whole_gradients_data, values_data, expanded, by_keywords, of_a_class,
        loaded, copied,
    ],
    ids=lambda use: use.__name__,
)  # fmt: skip
def test_it_is_that_of_one_device(use: Callable[[nn.Module], None]) -> None:
    def body(model: nn.Module) -> list[float]:
        use(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        losses = [model(X).item()]
        optimizer.step()
        return [*losses, model(X).item()]

    want = body(net())
    for found in on_four(body):
        assert found == pytest.approx(want, rel=1e-9)


def test_a_tensor_that_takes_the_type_of_a_shard_is_whole() -> None:
    def body(model: nn.Module) -> list[Any]:
        w = weight(model)
        for shape in ((24, 12), (3,), (12, 12), (3, 12)):
            for found in (torch.ones(shape).to(w), torch.ones(shape).type_as(w.data)):
                assert (type(found), found.dtype, found.sum().item()) == (
                    torch.Tensor, torch.float64, torch.Size(shape).numel(),
                )  # fmt: skip
        return [w.to(torch.ones(2)).dtype, w.data.type_as(torch.ones(2)).dtype]

    assert on_four(body) == [body(net())] * 4


def test_what_goes_in_and_out_of_a_layer_is_that_of_the_whole() -> None:
    """Scales of learning rates and of updates ask for it."""

    def body(model: nn.Module) -> list[Any]:
        fans = nn.init._calculate_fan_in_and_fan_out
        return [(fans(p), fans(p.data)) for p in model.parameters() if p.dim() == 2]

    assert on_four(body) == [body(net())] * 4


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated

    @torch.jit.script
    def scripted(v: torch.Tensor) -> torch.Tensor:
        return (v * v).sum()


class Squares(nn.Module):
    def forward(self, v: torch.Tensor) -> torch.Tensor:
        return (v * v).sum()


def scripted_module() -> Any:
    return torch.jit.script(Squares())


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda w: torch.func.grad(lambda v: v.norm())(w),
    "grad of a dict": lambda w: torch.func.grad(lambda v: v["w"].norm())({"w": w.detach()}),
    "vjp": lambda w: torch.func.vjp(lambda v: v.norm(), w),
    "jvp": lambda w: torch.func.jvp(lambda v: v.norm(), (w.detach(),), (torch.ones_like(w.detach()),)),
    "jacrev": lambda w: torch.func.jacrev(lambda v: v.norm())(w.data),
    "jacfwd": lambda w: torch.func.jacfwd(lambda v: v.norm())(w.data),
    "hessian": lambda w: torch.func.hessian(lambda v: v.norm())(w.data),
    "functionalize": lambda w: torch.func.functionalize(lambda v: v.norm())(w.data),
    "vmap": lambda w: torch.vmap(lambda row: row.sum())(w),
    "vmap of columns": lambda w: torch.vmap(lambda column: column.sum(), in_dims=1)(w.data),
    "of a closure": lambda w: torch.func.grad(lambda s: (w * s).sum())(torch.ones(())),
    "of a gradient": lambda w: torch.func.grad(lambda v: v.norm())(w.grad),
    "scripted": lambda w: scripted(w),
    "scripted values": lambda w: scripted(v=w.detach() * 2),
    "a scripted module": lambda w: scripted_module()(w.data),
    "nested": lambda w: torch.nested.nested_tensor([w.data, torch.ones(2, 12)]),
    "nested as it is": lambda w: torch.nested.as_nested_tensor([w.grad], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch's own module
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_refused(name: str) -> None:
    """The tensors that it hands on are of no class of ours."""
    lock = threading.Lock()  # levels of forward differentiation are the process's

    def body(hap: HAP) -> str:
        hap(X).backward()
        with lock, pytest.raises(ShardError) as caught:
            TRANSFORMS[name](hap.module.a.weight)
        return str(caught.value)

    for text in on_four(body):
        assert "a.weight of [24, 12] lies in shards" in text
        assert "hap.full_tensors()[" in text or "hap.full_gradients()[" in text


def test_other_tensors_are_transformed() -> None:
    def body(hap: HAP) -> torch.Tensor:
        whole = hap.full_tensors()["a.weight"]
        return torch.func.grad(lambda v: v.norm())(whole.detach())

    w = net().a.weight.detach()
    for found in on_four(body):
        torch.testing.assert_close(found, w / w.norm())


def test_a_shard_is_no_batch() -> None:
    def body(hap: HAP) -> None:
        for given in (hap.module.a.weight.detach(), hap.module.a.weight.data * 2):
            with pytest.raises(
                ShardError, match=r"a\.weight of .* lies in shards.*the model, which it is given to"
            ):
                hap(given)

    on_four(body)
