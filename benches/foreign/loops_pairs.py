"""Loops over two models or more: adversaries, teachers, targets, momentum encoders, agents."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign.loops_basic import CLASSES, ROWS, WIDTH, batches, classified, mlp, sgd, step
from foreign.registry import loop
from foreign.run import Run

LATENT = 6


class Gan(nn.Module):
    """A generator and a discriminator; ``forward`` is the loss of one of the two players."""

    def __init__(self, wasserstein: bool = False) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(LATENT, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, WIDTH)
        )
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
        self.wasserstein = wasserstein

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        fake = self.generator(noise)
        if real is None:
            score = self.discriminator(fake)
            return -score.mean() if self.wasserstein else F.softplus(-score).mean()
        found, true = self.discriminator(fake.detach()), self.discriminator(real)
        if self.wasserstein:
            return found.mean() - true.mean()
        return F.softplus(found).mean() + F.softplus(-true).mean()


def _alternate(
    run: Run, model: Gan, data: Any, *, critic_steps: int = 1, clip: float | None = None
) -> dict[str, Any]:
    of_g = torch.optim.Adam(model.generator.parameters(), lr=0.01, betas=(0.5, 0.9), eps=1e-4)
    of_d = torch.optim.Adam(model.discriminator.parameters(), lr=0.01, betas=(0.5, 0.9), eps=1e-4)
    wrapped = run.wrap(model, (data[0][0][:, :LATENT], data[0][0]))
    losses = []
    for real, _ in data:
        for _ in range(critic_steps):
            of_d.zero_grad()
            loss = wrapped(run.randn(ROWS, LATENT), real)
            loss.backward()
            of_d.step()
            losses.append(loss.detach().clone())
            if clip is not None:
                with torch.no_grad():
                    for p in model.discriminator.parameters():
                        p.clamp_(-clip, clip)
        of_g.zero_grad()
        loss = wrapped(run.randn(ROWS, LATENT))
        loss.backward()
        of_g.step()
        losses.append(loss.detach().clone())
    return {"losses": losses, "state": run.state(wrapped)}


@loop("torch", lambda: (Gan(), batches(3)))
def gan_with_two_optimizers(run: Run, made: Any) -> dict[str, Any]:
    return _alternate(run, *made)


@loop("torch", lambda: (Gan(wasserstein=True), batches(2)))
def wasserstein_gan_with_clamped_weights(run: Run, made: Any) -> dict[str, Any]:
    return _alternate(run, *made, critic_steps=2, clip=0.05)


def _dcgan() -> Any:
    generator = nn.Sequential(
        nn.ConvTranspose2d(LATENT, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(16, 1, 4, 1,
        0, bias=False),
    )  # fmt: skip
    return generator, discriminator, [torch.randn(8, 3, 8, 8) for _ in range(2)]


@loop("torch", _dcgan)
def dcgan_with_two_wrapped_models(run: Run, made: Any) -> dict[str, Any]:
    """The discriminator by itself; the generator through a whole copy of it, made at every step."""
    generator, discriminator, data = made

    def of_d(m: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
        return F.softplus(m(fake)).mean() + F.softplus(-m(real)).mean()

    d = run.wrap(discriminator, (data[0], data[0]), loss=of_d)
    g = run.wrap(generator, (torch.randn(8, LATENT, 1, 1),), loss=lambda m, z: m(z).square().mean())
    optimize_d, optimize_g = sgd(d), sgd(g)
    losses = []
    for real in data:
        z = run.randn(8, LATENT, 1, 1)
        with torch.no_grad():
            fake = run.whole(g)(z)
        losses.append(step(d, optimize_d, (real, fake)))
        losses.append(step(g, optimize_g, (z,)))
    return {"losses": losses, "state": [run.state(d), run.state(g)]}


class Distilled(nn.Module):
    """A student beside a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = mlp(), nn.Linear(WIDTH, CLASSES)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.teacher(x)
        out, t = self.student(x), 2.0
        soft = F.kl_div(
            F.log_softmax(out / t, -1), F.log_softmax(goal / t, -1), reduction="batchmean", log_target=True
        )
        return F.cross_entropy(out, y) + t * t * soft


@loop("torch", lambda: (Distilled(), batches()))
def distillation_inside(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0])
    optimizer = sgd(model.student)
    model.teacher.eval()
    return {"losses": [step(wrapped, optimizer, b) for b in data], "state": run.state(wrapped)}


@loop("torch", lambda: (mlp(), nn.Linear(WIDTH, CLASSES), batches()))
def distillation_from_a_teacher_outside(run: Run, made: Any) -> dict[str, Any]:
    teacher, student, data = made
    teacher.eval()

    def loss(m: nn.Module, x: Tensor, goal: Tensor) -> Tensor:
        return F.kl_div(F.log_softmax(m(x), -1), F.softmax(goal, -1), reduction="batchmean")

    wrapped = run.wrap(student, (data[0][0], torch.randn(ROWS, CLASSES)), loss=loss)
    optimizer = sgd(wrapped)
    losses = []
    for x, _ in data:
        with torch.no_grad():
            goal = teacher(x)
        losses.append(step(wrapped, optimizer, (x, goal)))
    return {"losses": losses, "state": run.state(wrapped)}


class MoCo(nn.Module):
    """Momentum contrast: a key encoder that follows, and a queue of keys."""

    def __init__(self, size: int = 32, width: int = 8) -> None:
        super().__init__()
        self.query, self.key = mlp(), mlp()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(CLASSES, size), dim=0))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for a, b in zip(self.key.parameters(), self.query.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
            k = F.normalize(self.key(y), dim=1)
        positive, negative = (q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()
        logits = torch.cat([positive, negative], 1) / 0.2
        with torch.no_grad():
            self.queue.copy_(torch.cat([k.T, self.queue[:, : -len(k)]], 1))
            self.place.add_(len(k)).remainder_(self.queue.shape[1])
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@loop("torch", lambda: (MoCo(), [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(4)]))
def moco_with_a_queue(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0])
    optimizer = sgd(model.query)
    return {"losses": [step(wrapped, optimizer, b) for b in data], "state": run.state(wrapped)}


class Byol(nn.Module):
    """Bootstrap your own latent: the target network is moved by the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = mlp(), nn.Linear(CLASSES, CLASSES)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            goal = F.normalize(self.target(y), dim=1)
        return 2 - 2 * (F.normalize(self.predictor(self.online(x)), dim=1) * goal).sum(1).mean()


@loop("torch", lambda: (Byol(), [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(3)]))
def byol_with_a_moved_target(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0])
    optimizer = torch.optim.SGD([*model.online.parameters(), *model.predictor.parameters()], lr=0.05)
    losses = []
    for batch in data:
        losses.append(step(wrapped, optimizer, batch))
        with torch.no_grad():
            for a, b in zip(model.target.parameters(), model.online.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
    return {"losses": losses, "state": run.state(wrapped)}


@loop("torch", lambda: (mlp(), [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(3)]))
def simclr(run: Run, made: Any) -> dict[str, Any]:
    model, data = made

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(m(torch.cat([x, y])), dim=1)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(x)))

    wrapped = run.wrap(model, data[0], loss=loss)
    optimizer = sgd(wrapped)
    return {"losses": [step(wrapped, optimizer, b) for b in data], "state": run.state(wrapped)}


def _q() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def _transitions() -> list[dict[str, Tensor]]:
    return [
        {"state": torch.randn(ROWS, WIDTH), "action": torch.randint(0, CLASSES, (ROWS,)),
        "reward": torch.randn(ROWS),
         "after": torch.randn(ROWS, WIDTH), "done": (torch.rand(ROWS) < 0.2).to(torch.get_default_dtype())}
        for _ in range(4)
    ]  # fmt: skip


def _td(m: nn.Module, state: Tensor, action: Tensor, goal: Tensor) -> Tensor:
    return F.smooth_l1_loss(m(state).gather(1, action[:, None])[:, 0], goal)


@loop("torch", lambda: (_q(), _transitions()))
def dqn_with_a_target_network(run: Run, made: Any) -> dict[str, Any]:
    """The target is a whole copy, taken over every second step; actions come from a whole copy as well."""
    model, data = made
    example = {"state": data[0]["state"], "action": data[0]["action"], "goal": data[0]["reward"]}
    wrapped = run.wrap(model, example, loss=_td)
    optimizer, target = torch.optim.RMSprop(wrapped.parameters(), lr=0.001, eps=1e-4), run.whole(wrapped)
    losses, acted = [], []
    for i, d in enumerate(data):
        with torch.no_grad():
            goal = d["reward"] + 0.9 * (1 - d["done"]) * target(d["after"]).amax(1)
        optimizer.zero_grad()
        loss = wrapped(state=d["state"], action=d["action"], goal=goal)
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 10.0)
        optimizer.step()
        losses.append(loss.detach().clone())
        if i % 2:
            target.load_state_dict(run.state(wrapped))
        with torch.no_grad():
            acted.append(run.whole(wrapped)(d["after"][:3]).argmax(1))
    return {"losses": losses, "acted": acted, "state": run.state(wrapped)}


class Twin(nn.Module):
    """A Q network and its target in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = _q(), _q()
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    def forward(self, state: Tensor, action: Tensor, reward: Tensor, after: Tensor, done: Tensor) -> Tensor:
        with torch.no_grad():
            best = self.online(after).argmax(1, keepdim=True)
            goal = reward + 0.9 * (1 - done) * self.target(after).gather(1, best)[:, 0]
        return F.mse_loss(self.online(state).gather(1, action[:, None])[:, 0], goal)


@loop("torch", lambda: (Twin(), _transitions()))
def double_dqn_with_polyak_averaging(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0])
    optimizer = torch.optim.Adam(model.online.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for d in data:
        optimizer.zero_grad()
        loss = wrapped(**d)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
        with torch.no_grad():
            for a, b in zip(model.target.parameters(), model.online.parameters(), strict=True):
                a.lerp_(b, 0.05)
    return {"losses": losses, "state": run.state(wrapped)}


class ActorCritic(nn.Module):
    """A policy and a value over one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, CLASSES), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.policy(hidden), self.value(hidden)[:, 0]


def _ppo(m: nn.Module, x: Tensor, action: Tensor, before: Tensor, advantage: Tensor, goal: Tensor) -> Tensor:
    logits, value = m(x)
    found = torch.distributions.Categorical(logits=logits, validate_args=False)
    ratio = (found.log_prob(action) - before).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return 0.5 * F.mse_loss(value, goal) - gain - 0.01 * found.entropy().mean()


@loop("torch", lambda: (ActorCritic(), [torch.randn(ROWS, WIDTH) for _ in range(2)]))
def ppo_with_rollouts(run: Run, made: Any) -> dict[str, Any]:
    model, states = made
    zeros, places = torch.zeros(ROWS), torch.zeros(ROWS, dtype=torch.long)
    wrapped = run.wrap(model, (states[0], places, zeros, zeros, zeros), loss=_ppo)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for x in states:
        with torch.no_grad():
            logits, value = run.whole(wrapped)(x)
        action = torch.multinomial(logits.softmax(1), 1, generator=run.generator)[:, 0]
        before = logits.log_softmax(1).gather(1, action[:, None])[:, 0]
        goal = run.randn(ROWS)
        for _ in range(2):
            losses.append(step(wrapped, optimizer, (x, action, before, goal - value, goal)))
    return {"losses": losses, "state": run.state(wrapped)}


@loop("torch", lambda: (ActorCritic(), [torch.randn(ROWS, WIDTH) for _ in range(3)]))
def reinforce_with_a_loss_outside(run: Run, made: Any) -> dict[str, Any]:
    """The loss is computed from outputs, outside the wrapped model."""
    model, states = made
    wrapped = run.wrap(model, (states[0],))
    optimizer = sgd(model)
    losses = []
    for x in states:
        optimizer.zero_grad()
        logits, value = wrapped(x)
        loss = (logits.log_softmax(1)[:, 0] * (value.detach() - 1)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return {"losses": losses}


@loop("torch", lambda: (mlp(), batches(2)))
def adversarial_examples(run: Run, made: Any) -> dict[str, Any]:
    """The fast gradient sign method: the attack needs the gradient of an input."""
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped)
    losses = []
    for x, y in data:
        attacked = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(wrapped(attacked, y), attacked)
        losses.append(step(wrapped, optimizer, (x + 0.1 * gradient.sign(), y)))
    return {"losses": losses}
