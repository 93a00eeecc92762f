"""What an import of hetspmd brings with it."""

from __future__ import annotations

import os
import subprocess
import sys


def test_torch_compiler_is_imported_by_the_first_trace_only() -> None:
    """It takes most of the time; ``hetspmd --help`` and a process that reads a plan do without it."""
    code = (
        "import sys, torch, hetspmd, hetspmd.cli.main\n"
        "hetspmd.HAP, hetspmd.compile, hetspmd.Plan, hetspmd.verify, hetspmd.tune\n"
        "print('torch._dynamo' in sys.modules)\n"
        "model, batch = torch.nn.Linear(4, 1), (torch.ones(2, 4),)\n"
        "network = {'bandwidth': '1Gbit/s', 'latency': '1us'}\n"
        "device = {'flops': '1 GFLOP/s', 'memory': '1GiB'}\n"
        "hetspmd.compile(model, batch, {'devices': [device], 'network': network}, loss=lambda m, x: m(x).sum())\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]
