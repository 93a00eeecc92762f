"""Buffers and parameters that forward changes are those of one device on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import assert_equal_to_one_device
from small_plans import cluster
from torch import nn

WIDE = torch.float64


class Model(nn.Module):
    """Two layers and a forward that a test gives."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], **members: Any) -> None:
        super().__init__()
        self.a = nn.Linear(12, 24, dtype=WIDE)
        self.b = nn.Linear(24, 12, dtype=WIDE)
        self.function = forward
        for name, member in members.items():
            if isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def hidden(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(m.a(x))


def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(hidden(m, x)).pow(2).mean()


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=WIDE)


def batches(count: int = 3) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(3)
    return [(torch.randn(16, 12, dtype=WIDE),) for _ in range(count)]


def check(forward: Callable[[Any, torch.Tensor], Any], devices: Any = None, **members: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return Model(forward, **copy.deepcopy(members))

    assert_equal_to_one_device(make, batches(), devices)


# Buffers whose slots are given other tensors.


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n = m.n + 1
    return loss(m, x) * m.n


def averaged(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = hidden(m, x)
    m.ema = 0.9 * m.ema + 0.1 * h.detach().mean(0)
    return m.b(h - m.ema).pow(2).mean()


def with_history(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = hidden(m, x)
    m.ema = (0.9 * m.ema + 0.1 * h.mean(0)).detach() + 0 * m.ema
    return m.b(h).pow(2).mean()


def by_dict(m: Any, x: torch.Tensor) -> torch.Tensor:
    m._buffers["n"] = m.n + x.sum()
    return loss(m, x) + m.n.sin()


def by_setattr(m: Any, x: torch.Tensor) -> torch.Tensor:
    for name in ("n", "k"):
        setattr(m, name, getattr(m, name) + 1)
    return loss(m, x) * (m.n + m.k)


def in_a_loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        m.n = 2 * m.n + 1
        m.n.add_(1)
    return loss(m, x) * m.n.log1p()


def without_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = hidden(m, x)
    with torch.no_grad():
        m.ema = m.ema.lerp(h.mean(0), 0.1)
    return m.b(h).pow(2).mean() + m.ema.sum()


def shifted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.k = m.n
    m.n = x.detach().mean()
    return loss(m, x) + (m.n - m.k).sin()


def swapped(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n, m.k = m.k, m.n
    m.n.mul_(1.5)
    return loss(m, x) * m.n


def replaced_after_a_write(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n.add_(5)
    m.n = m.n.clone() * 0.5
    return loss(m, x) * m.n


def rows_kept(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.queue = torch.cat([m.queue[4:], hidden(m, x).detach()[:4]])
    return loss(m, x) + (hidden(m, x) @ m.queue.t()).logsumexp(1).mean()


REPLACED = {
    "counted": (counted, {"n": zeros()}),
    "counted in integers": (counted, {"n": torch.zeros((), dtype=torch.int64)}),
    "averaged": (averaged, {"ema": zeros(24)}),
    "with history": (with_history, {"ema": zeros(24)}),
    "by dict": (by_dict, {"n": zeros()}),
    "by setattr": (by_setattr, {"n": zeros() + 1, "k": zeros()}),
    "in a loop": (in_a_loop, {"n": zeros()}),
    "without grad": (without_grad, {"ema": zeros(24)}),
    "shifted": (shifted, {"n": zeros(), "k": zeros() + 1}),
    "swapped": (swapped, {"n": zeros() + 1, "k": zeros() + 2}),
    "replaced after a write": (replaced_after_a_write, {"n": zeros()}),
    "rows kept": (rows_kept, {"queue": zeros(8, 24) + 0.1}),
}


QUICK = ("averaged", "swapped", "assigned", "binarized")


def some(table: dict[str, Any]) -> list[Any]:
    """All names of a table; those that are not quick to name a kind are slow tests."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in table]


@pytest.mark.parametrize("name", some(REPLACED))
def test_a_replaced_buffer_has_one_devices_values(name: str) -> None:
    forward, members = REPLACED[name]
    check(forward, **members)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x * self.seen


def test_a_buffer_of_a_nested_module_that_is_called_twice() -> None:
    check(lambda m, x: m.b(m.c(m.c(hidden(m, x)))).pow(2).mean(), c=Counting())


def test_a_shared_module_counts_once_for_each_call() -> None:
    shared = Counting()
    check(lambda m, x: m.b(m.d(m.c(hidden(m, x)))).pow(2).mean(), c=shared, d=shared)


def tied(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.c.seen.add_(1)
    return loss(m, x) * m.d.seen


def test_tied_buffers_stay_tied() -> None:
    one, other = Counting(), Counting()
    other.seen = one.seen
    check(tied, c=one, d=other)


def test_the_lone_device_replaces_the_slot_itself() -> None:
    check(averaged, cluster(1.0), ema=zeros(24))


def test_evaluation_updates_buffers_where_the_model_does() -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return Model(averaged, ema=zeros(24))

    assert_equal_to_one_device(make, batches(), grad=False)


def test_batch_norm_in_evaluation_updates_nothing() -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return Model(
            lambda m, x: m.b(m.n(hidden(m, x))).pow(2).mean(), n=nn.BatchNorm1d(24, dtype=WIDE)
        ).eval()

    assert_equal_to_one_device(make, batches(), grad=False)


# Parameters whose data forward changes.


def assigned(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a.weight.data = m.a.weight.data * 0.5
    return loss(m, x)


def assigned_after_use(m: Any, x: torch.Tensor) -> torch.Tensor:
    found = loss(m, x)
    m.b.weight.data = m.b.weight.data.clamp(-0.1, 0.1)
    return found


def multiplied(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a.weight.data.mul_(0.9).clamp_(-0.2, 0.2)
    return loss(m, x)


def multiplied_after_use(m: Any, x: torch.Tensor) -> torch.Tensor:
    found = loss(m, x) + m.a.bias.pow(3).sum()
    m.b.weight.data.mul_(0.9)
    m.a.bias.data.sub_(0.1)
    return found


def normalized(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.b.weight.copy_(F.normalize(m.b.weight.data.clone(), dim=1))
    return F.cross_entropy(m.b(F.normalize(hidden(m, x), dim=1)) / 0.1, x.argmax(1))


def under_no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.a.weight.mul_(0.5)
        m.a.bias.add_(0.25)
    return loss(m, x)


def by_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a.weight.data[0] = 0.0
    m.a.weight.data[1:3] *= 0.5
    m.b.weight.data[:, 2] = m.b.weight.data[:, 3]
    return loss(m, x)


def binarized(m: Any, x: torch.Tensor) -> torch.Tensor:
    kept = m.b.weight.data
    m.b.weight.data = kept.sign()
    found = loss(m, x) + m.b.weight.pow(3).sum()
    m.b.weight.data = kept
    return found


def by_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a.weight.detach().view(-1)[:12].fill_(0.25)
    return loss(m, x)


def copied(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.b.weight.data.copy_(m.a.weight.data.t())
    return loss(m, x)


def buffer_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n.data = m.n + 1
    m.n.data.mul_(2)
    return loss(m, x) * m.n


def straight_through(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = hidden(m, x)
    q = h.clone()
    q.data = h.data.sign()
    return m.b(q).pow(2).mean()


WRITTEN = {
    "assigned": (assigned, {}),
    "assigned after use": (assigned_after_use, {}),
    "multiplied": (multiplied, {}),
    "multiplied after use": (multiplied_after_use, {}),
    "normalized": (normalized, {}),
    "under no_grad": (under_no_grad, {}),
    "by rows": (by_rows, {}),
    "binarized": (binarized, {}),
    "by view": (by_view, {}),
    "copied": (copied, {}),
    "data of a buffer": (buffer_data, {"n": zeros()}),
    "straight through": (straight_through, {}),
}


@pytest.mark.parametrize("name", some(WRITTEN))
def test_a_parameter_that_forward_writes_to_has_one_devices_values(name: str) -> None:
    forward, members = WRITTEN[name]
    check(forward, **members)


def contrast(m: Any, x: torch.Tensor) -> torch.Tensor:
    """MoCo in small: a momentum encoder, and a queue of its outputs."""
    with torch.no_grad():
        for key, query in zip(m.key.parameters(), m.a.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1
        k = F.normalize(m.key(x + 1), dim=1)
    q = F.normalize(m.a(x), dim=1)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ m.queue.clone().detach().t()], 1)
    with torch.no_grad():
        m.queue[:16] = k
    return F.cross_entropy(logits / 0.2, torch.zeros(16, dtype=torch.int64)) + m.b(q).pow(2).mean()


def key_encoder() -> nn.Linear:
    made = nn.Linear(12, 24, dtype=WIDE)
    return made.requires_grad_(False)


def test_a_momentum_encoder_follows() -> None:
    torch.manual_seed(0)
    check(contrast, key=key_encoder(), queue=torch.randn(32, 24, dtype=WIDE))


def averaging(m: Any, x: torch.Tensor) -> torch.Tensor:
    """BYOL in small: in-place moving averages after the losses."""
    found = (m.b(m.a(x)) - m.b(m.key(x)).detach()).pow(2).mean()
    for key, query in zip(m.key.parameters(), m.a.parameters(), strict=True):
        key.data.mul_(0.9).add_(query.data, alpha=0.1)
    return found


@pytest.mark.parametrize("form", ["replicated", "shard(0)", "shard(1)"])
def test_an_updated_parameter_may_be_stored_in_shards(form: str) -> None:
    torch.manual_seed(0)

    def make() -> nn.Module:
        torch.manual_seed(1)
        return Model(averaging, key=key_encoder())

    forms = {"key.weight": form, "a.weight": form}
    assert_equal_to_one_device(make, batches(), constraints=forms)


def test_a_tied_parameter_is_updated_once() -> None:
    class Tied(Model):
        def __init__(self, forward: Any) -> None:
            super().__init__(forward)
            self.c = nn.Linear(12, 24, dtype=WIDE)
            self.c.weight = self.a.weight

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.a.weight.data.mul_(0.5)
        return loss(m, x) + m.c(x).sin().mean()

    assert_equal_to_one_device(lambda: Tied(forward), batches())


def test_the_lone_device_writes_to_the_parameters_itself() -> None:
    check(assigned, cluster(1.0))
    check(normalized, cluster(1.0))
