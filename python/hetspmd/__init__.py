"""hetspmd: synthesizes uneven SPMD programs for PyTorch training on clusters of unlike devices.

model = hetspmd.HAP(model, "cluster.yaml", example=batch)     # like DistributedDataParallel
plan = hetspmd.compile(model, batch, "cluster.yaml")          # the program, its cost, its alternatives
report = hetspmd.verify(model, batch, "cluster.yaml")         # all ranks in one process against one device
"""

from __future__ import annotations

from hetspmd import errors, rules
from hetspmd.compiler import compile
from hetspmd.cost.cluster import Cluster
from hetspmd.plan import Plan
from hetspmd.rules import SUM, Call, Cut, Factor, Local, OpRule, rule
from hetspmd.run.module import HAP
from hetspmd.run.verify import VerifyReport, verify

__version__ = "0.1.0"

__all__ = [
    "HAP",
    "SUM",
    "Call",
    "Cluster",
    "Cut",
    "Factor",
    "Local",
    "OpRule",
    "Plan",
    "VerifyReport",
    "compile",
    "errors",
    "rule",
    "rules",
    "verify",
]
