"""Optimizers that mix elements are refused over shards at their first step, on every rank; others step as ever."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from ranks import lone, loss_of, on_ranks
from small_models import Case, case
from small_plans import cluster, random_plan
from torch import nn
from transformers import optimization

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import OptimizerError
from hetspmd.optimize.compiler import plan_for
from hetspmd.placement import is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.run import optimizer_guard
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import plain
from hetspmd.search.constraints import Constraints

Parameters = Iterable[nn.Parameter]


class Own(torch.optim.Optimizer):
    """An optimizer whose update is a function of gradient and parameter."""

    def __init__(self, params: Parameters, update: Callable[..., torch.Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p.grad, p), alpha=group["lr"])


class SAM(torch.optim.Optimizer):
    """As davda54's: two steps of its own around another optimizer, which alone has a ``step`` that is called."""

    def __init__(self, params: Parameters, **options: Any) -> None:
        super().__init__(params, dict(rho=0.05, **options))
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()  # type: ignore[union-attr]  # held have one
        for p in held:
            assert p.grad is not None
            self.state[p]["e"] = p.grad * (0.05 / norm)
            p.add_(self.state[p]["e"])

    @torch.no_grad()
    def second_step(self) -> None:
        for p, state in self.state.items():
            if "e" in state:
                p.sub_(state["e"])
        self.base.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class Lookahead(torch.optim.Optimizer):
    """Slow weights around another optimizer, element by element."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.count = base, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            for p in (p for group in self.base.param_groups for p in group["params"]):
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


class Bare(Lookahead):
    """As timm's: torch's ``__init__`` is left out, and with it the hooks of ``state_dict``."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self.base, self.count = base, 0
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state = defaultdict(dict)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()


def lamb(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return g * (p.norm() / (g.norm() + 1e-6))


def centred(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return g - g.mean(tuple(range(1, g.ndim)), keepdim=True) if g.ndim > 1 else g


def clipped_by_itself(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return g / g.norm().clamp(min=1.0)


def noisy(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return g + 0.1 * torch.randn_like(g)


def adafactor_of_transformers(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = optimization.Adafactor(ps, lr=1e-3, relative_step=False)
    return made


class Shampoo(torch.optim.Optimizer):
    """As pytorch_optimizer's: matrices are multiplied with roots of the sums of their gradients' products."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            update = p.grad
            if p.ndim == 2:
                for key, product in (("left", p.grad @ p.grad.t()), ("right", p.grad.t() @ p.grad)):
                    unit = 1e-4 * torch.eye(len(product), dtype=p.dtype)
                    self.state[p].setdefault(key, unit).add_(product)
                update = self._root(p, "left") @ p.grad @ self._root(p, "right")
            p.sub_(update, alpha=0.1)

    def _root(self, p: torch.Tensor, key: str) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(self.state[p][key])
        return vectors * values.clamp(min=1e-12) ** -0.25 @ vectors.t()


class Guarded(torch.optim.SGD):
    """It takes no step where a gradient is not finite."""

    def step(self, closure: Any = None) -> Any:
        gradients = (p.grad for group in self.param_groups for p in group["params"])
        return super().step() if all(g is None or g.isfinite().all() for g in gradients) else None


MIXING: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2]),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps),
    "SparseAdam": lambda ps: torch.optim.SparseAdam(ps),
    "Shampoo": Shampoo,
    "Adafactor of transformers": adafactor_of_transformers,
    "LAMB": lambda ps: type("LAMB", (Own,), {})(ps, lamb),
    "SelfClipping": lambda ps: type("SelfClipping", (Own,), {})(ps, clipped_by_itself),
    "SGLD": lambda ps: type("SGLD", (Own,), {})(ps, noisy),
    "Skipping": lambda ps: type("Skipping", (Own,), {})(ps, lambda g, p: g if g.isfinite().all() else 0 * p),
    "Guarded": lambda ps: Guarded(ps, lr=0.1),
    "Clipping": lambda ps: type("Clipping", (Own,), {})(ps, lambda g, p: g * (5e3 / g.norm()).clamp(max=1.0)),
}
STEPPING: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "without NaN": lambda ps: Own(ps, lambda g, p: g.nan_to_num().clamp(-1, 1)),
    "lion": lambda ps: Own(ps, lambda g, p: g.sign() + 0.01 * p),
    "subclass": lambda ps: type("MyAdamW", (torch.optim.AdamW,), {})(ps, lr=0.01),
    "lookahead": lambda ps: Lookahead(torch.optim.SGD(ps, lr=0.1, momentum=0.9)),
    "bare": lambda ps: Bare(torch.optim.SGD(ps, lr=0.1, momentum=0.9)),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=True),
}


def divided(c: Case, world: int = 3) -> Plan:
    """A plan that stores a matrix in shards."""
    plans = (random_plan(c, world, seed) for seed in range(60))
    return next(p for p in plans if any(is_sharded(p.parameter_layout()[f"{n}.weight"][0]) for n in "ab"))


def stepped(
    module: nn.Module, batch: dict[str, Any], optimizer: torch.optim.Optimizer, steps: int = 3
) -> list[float]:
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(module(**batch))
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        closure()
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            optimizer.step()
    return losses


def test_what_mixes_elements_is_refused_on_every_rank() -> None:
    c = case("mlp")

    def body(hap: HAP) -> dict[str, str]:
        found = {}
        before = [p.clone() for p in plain(hap.parameters())]
        for name, make in MIXING.items():
            with pytest.raises(OptimizerError, match=rf"^{name.split()[0]} over ") as caught:
                stepped(hap, c.batch, make(list(hap.parameters())))
            found[name] = str(caught.value)
        assert all(map(torch.equal, plain(hap.parameters()), before)), "nothing was stepped"
        return found

    first, *others = on_ranks(c, divided(c), body)
    assert all(found == first for found in others)
    assert all("hetspmd.allow_optimizer" in text and "constraints=" in text for text in first.values())


def test_state_of_a_wrapper_without_hooks_is_refused_as_that_of_what_it_holds() -> None:
    c = case("mlp")

    def body(hap: HAP) -> str:
        optimizer = Bare(torch.optim.SGD(hap.parameters(), lr=0.1, momentum=0.9))
        stepped(hap, c.batch, optimizer)
        with pytest.raises(OptimizerError, match="full_optimizer_state_dict") as caught:
            optimizer.state_dict()
        return str(caught.value)

    assert all("SGD.state_dict()" in text for text in on_ranks(c, divided(c), body))


def test_sam_is_found_behind_the_optimizer_that_it_steps() -> None:
    c = case("mlp")

    def body(hap: HAP) -> str:
        optimizer = SAM(hap.parameters(), lr=0.1)
        loss_of(hap(**c.batch)).backward()
        with pytest.raises(OptimizerError, match=r"^SAM over "):
            optimizer.step(lambda: loss_of(hap(**c.batch)))
        with pytest.raises(OptimizerError, match=r"^SAM over ") as caught:
            optimizer.base.step()
        return str(caught.value)

    assert len(set(on_ranks(c, divided(c), body))) == 1


def test_elementwise_optimizers_step_as_on_one_device() -> None:
    """Also unknown ones, and those around another."""
    c = case("mlp")
    want = {}
    for name, make in STEPPING.items():
        model = copy.deepcopy(c.model)
        want[name] = stepped(model, c.batch, make(list(model.parameters())))
    start = copy.deepcopy(c.model.state_dict())

    def body(hap: HAP) -> dict[str, list[float]]:
        found = {}
        for name, make in STEPPING.items():
            hap.load_full_state_dict(start)
            found[name] = stepped(hap, c.batch, make(list(hap.parameters())))
        return found

    idle = plan_for(c.theory, cluster(3, 1, 2), Constraints({}), (0.6, 0.4), active=(0, 2))
    for plan in (divided(c), idle):
        for found in on_ranks(c, plan, body):
            for name, losses in found.items():
                assert losses == pytest.approx(want[name], rel=1e-9), name


def test_what_is_allowed_and_what_is_stored_whole_is_stepped() -> None:
    class Allowed(Own):
        pass

    c = case("mlp")
    hetspmd.allow_optimizer(Allowed)

    def body(hap: HAP) -> int:
        layout = hap.plan.parameter_layout()
        cut = [hap.module.get_parameter(n) for n, (form, _) in layout.items() if is_sharded(form)]
        whole = [hap.module.get_parameter(n) for n, (form, _) in layout.items() if not is_sharded(form)]
        steps = stepped(hap, c.batch, Allowed(cut, clipped_by_itself))
        return len(steps) + len(stepped(hap, c.batch, Own(whole, clipped_by_itself)))

    assert on_ranks(c, divided(c), body) == [6] * 3


def test_state_of_whole_parameters_is_cut() -> None:
    """Of an optimizer that was stepped before the model was wrapped, made with state, or loaded as usual."""
    c = case("mlp")
    plan = divided(c)

    def before(model: nn.Module) -> list[torch.optim.Optimizer]:
        made: list[torch.optim.Optimizer] = [
            torch.optim.Adagrad(model.parameters(), lr=0.05),
            torch.optim.Adam(model.parameters(), lr=0.05),
        ]
        stepped(model, c.batch, made[1], 2)
        return made

    def after(module: nn.Module, made: list[torch.optim.Optimizer]) -> list[float]:
        losses = [x for optimizer in made for x in stepped(module, c.batch, optimizer, 2)]
        loaded = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        loaded.load_state_dict(copy.deepcopy(saved))
        losses += stepped(module, c.batch, loaded, 2)
        loaded.load_state_dict(copy.deepcopy(saved))
        return losses + stepped(module, c.batch, loaded, 2)

    model = copy.deepcopy(c.model)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(model, c.batch, momentum, 1)
    saved = copy.deepcopy(momentum.state_dict())
    alone = copy.deepcopy(c.model)
    want = after(alone, before(alone))
    models = [copy.deepcopy(c.model) for _ in range(3)]
    _ = plan.theory, plan.digest

    def rank(communicator: Communicator) -> list[float]:
        mine = models[communicator.rank]
        made = before(mine)
        return after(HAP(mine, plan.cluster, plan=plan, process_group=communicator), made)

    for losses in run_ranks(3, rank):
        assert losses == pytest.approx(want, rel=1e-9)


def test_shards_of_state_are_not_handed_out() -> None:
    c = case("mlp")

    def body(hap: HAP) -> None:
        optimizer = torch.optim.Adam(hap.parameters())
        optimizer.state_dict()  # of nothing
        stepped(hap, c.batch, optimizer, 1)
        with pytest.raises(OptimizerError, match=r"full_optimizer_state_dict\(hap, optimizer\)"):
            optimizer.state_dict()
        state = hetspmd.full_optimizer_state_dict(hap, optimizer)
        wrong = copy.deepcopy(state)
        for entries in wrong["state"].values():
            entries["exp_avg"] = torch.zeros(3, 77)
        optimizer.load_state_dict(wrong)
        with pytest.raises(OptimizerError, match=r"'exp_avg' of Adam for .* is of shape \[3, 77\]"):
            optimizer.step()

    on_ranks(c, divided(c), body)


def test_an_optimizer_of_parameters_that_were_on_the_meta_device() -> None:
    c = case("mlp")
    with torch.device("meta"):
        model = type(c.model)().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hap = HAP(model, cluster(1), example=c.batch)
    hap.load_full_state_dict(c.model.state_dict())
    with pytest.raises(OptimizerError, match=r"make it after HAP\(\.\.\.\): SGD\(hap\.parameters\(\)"):
        stepped(hap, c.batch, optimizer)


def test_hooks_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many HAP modules there are: one for all optimizers, one of each kind for an optimizer's state."""
    c, registered = case("mlp"), list[Any]()
    monkeypatch.setattr(optimizer_guard, "_HOOK", [])
    monkeypatch.setattr(optimizer_guard, "register_optimizer_step_pre_hook", registered.append)

    def body(hap: HAP) -> list[int]:
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            others = [copy.deepcopy(hap), copy.deepcopy(hap)]
            optimizer_guard._before_step(optimizer, (), {})
            stepped(hap, c.batch, optimizer, 1)
            optimizer.load_state_dict(hetspmd.full_optimizer_state_dict(hap, optimizer))
            assert len(others) == 2
        hooks = ("state_dict_pre", "state_dict_post", "load_state_dict_post")
        return [len(getattr(optimizer, f"_optimizer_{name}_hooks")) for name in hooks]

    assert on_ranks(c, divided(c), body) == [[1, 1, 1]] * 3
    lone(c)
    assert registered == [optimizer_guard._before_step]
