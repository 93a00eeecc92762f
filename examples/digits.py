"""Handwritten digits on four unlike workers, beside the single device.

    python examples/digits.py                                # starts the four workers itself
    torchrun --nproc-per-node 4 examples/digits.py

A convolutional network with batch norm learns scikit-learn's digits (1,797 images of 8 x 8). Every worker
runs this file. Worker 0 also trains a copy of the model alone and prints both losses: they agree to more than
nine digits, because the program computes what one device computes. At the end the weights are put together
again, and the plain model is tested on images that it has not seen.

The network is in float64, so that nothing hides behind rounding: in float32 it decides now and then on which side
of a ReLU a number close to zero falls, and after 96 steps the third digit of the loss depends on it, as it does on
one device that is given the rows of each batch in another order.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hetspmd
from launch import launch_workers

CLUSTER = Path(__file__).parent / "clusters" / "four-boards.yaml"
BATCH = 120
Example = dict[str, Tensor]


class Network(nn.Module):
    """``forward(images, labels)`` gives the mean cross entropy and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.classifier(self.features(images).flatten(1))
        return cross_entropy(logits, labels), logits


def network() -> Network:
    """The network with the weights that every worker starts from."""
    torch.manual_seed(0)
    return Network().double()


def load_data() -> tuple[Example, Example]:
    """Images in [-1, 1] with labels: 1,440 to train on, 357 held out."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images, dtype=torch.float64)[order, None] / 8 - 1
    labels = torch.tensor(bunch.target)[order]
    train, test = slice(None, 1440), slice(1440, None)
    return (
        {"images": images[train], "labels": labels[train]},
        {"images": images[test], "labels": labels[test]},
    )


def batches(data: Example, epochs: int) -> Iterator[Example]:
    """Shuffled batches, the same on every worker."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for rows in torch.randperm(len(data["labels"]), generator=generator).split(BATCH):
            yield {name: tensor[rows] for name, tensor in data.items()}


def train(model: nn.Module, data: Iterable[Example]) -> Iterator[float]:
    """An ordinary training loop; yields the loss of each step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for batch in data:
        optimizer.zero_grad()
        loss, _ = model(**batch)
        loss.backward()
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, data: Example) -> float:
    """The share of images whose class is predicted right."""
    model.eval()
    _, logits = model(**data)
    return (logits.argmax(-1) == data["labels"]).float().mean().item()


def work(cluster: str, epochs: int) -> None:
    """What each worker does."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data, held_out = load_data()
    single = network()
    first = dist.get_rank() == 0

    model = hetspmd.HAP(copy.deepcopy(single), cluster, example=next(batches(data, 1)))

    if first:
        print(f"{model.plan}\n\n{'step':>4}  {'four workers':>12}  {'one device':>12}")
    worst = 0.0
    alone = train(single, batches(data, epochs)) if first else None
    for step, loss in enumerate(train(model, batches(data, epochs))):
        if alone is None:
            continue
        reference = next(alone)
        worst = max(worst, abs(loss - reference) / reference)
        if step % 12 == 0:
            print(f"{step:>4}  {loss:>12.4f}  {reference:>12.4f}", flush=True)

    state = model.full_state_dict()
    if first:
        restored = network()
        restored.load_state_dict(state)
        print(
            f"\nlargest relative difference of a loss: {worst:.1e}\n"
            f"held-out accuracy: {accuracy(restored, held_out):.1%} (four workers), "
            f"{accuracy(single, held_out):.1%} (one device)"
        )
    dist.destroy_process_group()
    if worst > 1e-9:
        raise SystemExit(
            f"the losses differ by {worst:.1e}: the program does not compute what one device does"
        )


def build() -> tuple[nn.Module, Example]:
    """The model and a batch, for ``hetspmd compile examples/digits.py --cluster ...``."""
    return network(), next(batches(load_data()[0], 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cluster", default=str(CLUSTER), help="cluster file with one device per worker")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options.cluster, options.epochs)
    else:
        launch_workers(__file__, hetspmd.Cluster.load(options.cluster).world)
