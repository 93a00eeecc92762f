"""Measuring a point of several ranks: profile, plans, DDP's two halves apart, and all arms in turns.

The profile of the ranks, and the times of a model's ops on them, are kept in the folder. Later runs take them on a
machine of the same description.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from emulated.arms import proportional_rows
from emulated.command import say
from emulated.launch import Workers
from gpu.points import AUTOCAST, UNLIKE, Key, size_of
from gpu.results import Arm
from hetspmd.cluster.cluster import Cluster
from hetspmd.codec.files import write_atomically
from versus.models import OPTIMIZERS
from versus.points import ALONE, DDP, DDP_EVEN, FSDP, FSDP_EVEN
from versus.results import measured

HELD = 4
"""Times its parameters that an arm holds: them, gradients, and two moments."""

FILLED = 0.5
"""Part of the device's memory that arms may hold between their steps, all of them at once."""

REPEATS = 5
"""Of each of DDP's halves."""


class SharedPoint:
    """A point of several ranks, which are running."""

    def __init__(
        self, key: Key, options: argparse.Namespace, workers: Workers, machine: Mapping[str, str]
    ) -> None:
        self.key, self.options, self.workers = key, options, workers
        self.shares = [float(s) for s in key.at.split(":")]
        self.autocast = "bfloat16" if key.precision == AUTOCAST else ""
        self.case = {
            "model": key.model, "size": size_of(key, options.small), "precision": key.precision,
            "device": options.device,
        }  # fmt: skip
        self.folder = Path(options.folder) / "-".join((*key.at.split(":"), fingerprint(machine)))
        self.folder.mkdir(parents=True, exist_ok=True)

    def measure(self) -> dict[str, Any]:
        """The fields of the point's line."""
        file = self._ops(self._profile())
        cluster = Cluster.load(str(file))
        forced = self.key.part != UNLIKE
        planned = self.workers.run(
            "gpu.rank:plan", ranks=[0], case=self.case, cluster=str(file), folder=str(self._plans()),
            forced=forced,
        )[0]  # fmt: skip
        plans = planned["plans"]
        for name, plan in plans.items():
            say(f"  {name}: predicted {plan['predicted']:.4f} s")
        arms: dict[str, dict[str, Any]] = {
            n: {"arm": "hetspmd", "rows": None, "plan": p["file"]} for n, p in plans.items()
        }
        found: dict[str, Any] = {}
        if not forced:
            even, proportional = self._rows(cluster, planned["rows"])
            arms = incumbents(even, proportional) | arms
            found |= self._apart(proportional)
        ranks = self.workers.run(
            "gpu.rank:train", case=self.case, arms=arms, fastest=self.fastest, rounds=self.options.turns,
            steps=self.options.steps, keep=self._keeps(cluster, arms, planned["parameters"]),
            longest=self.options.longest,
        )  # fmt: skip
        return found | {
            "arms": {name: _arm(arm, [r[name] for r in ranks], plans.get(name)) for name, arm in arms.items()}
        }

    @property
    def fastest(self) -> int:
        """The rank with the largest share, the first among equals."""
        return self.shares.index(max(self.shares))

    def _plans(self) -> Path:
        """Where the plans of the point are kept."""
        folder = self.folder / f"{self.key.part} {self.key.model} {self.key.precision}"
        folder.mkdir(exist_ok=True)
        return folder

    def _profile(self) -> Path:
        """The profile of the ranks."""
        file = self.folder / "cluster.yaml"
        if not file.exists():
            say(f"{self.key.at}: profile")
            dtypes = ["float32", "bfloat16"]
            text = self.workers.run(
                "trust.rank:profile", budget=self.options.budget, device=self.options.device, dtypes=dtypes
            )[0]
            write_atomically(file, text)
        return file

    def _ops(self, profile: Path) -> Path:
        """The profile with the times of the model's ops."""
        file = self.folder / f"{self.key.model} {self.key.precision}.yaml"
        if not file.exists():
            say(f"{self.key}: profile of its ops")
            text = self.workers.run(
                "trust.rank:profile_ops", file=str(profile), model=self.key.model,
                cache=str(self.folder / "cache"), budget=self.options.ops_budget, options=self.case["size"],
                optimizer=OPTIMIZERS[self.key.model], device=self.options.device, autocast=self.autocast,
            )[0]  # fmt: skip
            write_atomically(file, text)
        return file

    def _rows(self, cluster: Cluster, rows: int) -> tuple[list[int], list[int]]:
        """Each rank's rows of the batch: even ones, and in proportion to the measured FLOP/s."""
        rates = [device.rate(self.autocast or "float32") for device in cluster.devices]
        return proportional_rows(rows, [1.0] * len(rates)), proportional_rows(rows, rates)

    def _apart(self, rows: list[int]) -> dict[str, float]:
        """Seconds of the slowest rank, computing and communicating; medians over repeats."""
        found = self.workers.run("gpu.rank:apart", case=self.case, rows=rows, repeats=REPEATS)
        return {
            what: median(map(max, zip(*(rank[what] for rank in found), strict=True)))
            for what in ("computing", "communicating")
        }

    def _keeps(self, cluster: Cluster, arms: Mapping[str, Mapping[str, Any]], parameters: int) -> bool:
        """Whether all arms may be there at once, on a device that all ranks share; ``parameters`` in bytes."""
        copies = sum(1 if of["arm"] in ("alone", "fsdp") else len(self.shares) for of in arms.values())
        memory = cluster.devices[self.fastest].memory
        return memory is None or HELD * parameters * copies <= FILLED * memory


def incumbents(even: Sequence[int], proportional: Sequence[int]) -> dict[str, dict[str, Any]]:
    """What people use today, with each rank's rows."""
    return {
        ALONE: {"arm": "alone", "rows": None, "plan": None},
        DDP_EVEN: {"arm": "ddp", "rows": even, "plan": None},
        DDP: {"arm": "ddp", "rows": proportional, "plan": None},
        FSDP_EVEN: {"arm": "fsdp", "rows": even, "plan": None},
        FSDP: {"arm": "fsdp", "rows": proportional, "plan": None},
    }


def fingerprint(machine: Mapping[str, str]) -> str:
    """A short name of a machine's description."""
    return hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:8]


def _arm(arm: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], plan: Mapping[str, Any] | None) -> Arm:
    """An arm of what the ranks found."""
    found = measured(ranks, summed=arm["arm"] in ("ddp", "fsdp"))
    if plan is None:
        return Arm(found.seconds, found.losses)
    return Arm(found.seconds, found.losses, predicted=plan["predicted"], words=plan["words"])
