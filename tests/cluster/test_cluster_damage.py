"""Cluster files damaged at random, and by known slips: ClusterError, or a cluster that is whole."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from damage import damaged_bytes, damaged_tree
from hetspmd.cluster.cluster import Cluster
from hetspmd.errors import ClusterError

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
CHUNK = 50

MEASURED = """\
devices:
- {name: a, flops: {float32: 1e9, default: 5e8}, memory: 4GiB, memory_bandwidth: 10GB/s, issue: 1us}
- {name: b, count: 2, flops: 5e8, memory: 2GiB, launch: 10us, optimizer: 1e9, issue_bandwidth: 3e9}
network: {bandwidth: 1Gbit/s, latency: 100us}
measured:
  version: 1
  about: {backend: gloo, budget: 60.0}
  rates:
  - {rank: 0, what: matmul, dtype: float32, amount: 2e8, seconds: 0.2, low: 0.1, high: 0.3, samples: 9}
  curves:
  - {kind: all_reduce, devices: 3, latency: 1e-4, per_byte: 2e-9, r2: 0.99, error: 0.04}
  - kind: all_gather
    devices: 3
    latency: 1e-4
    per_byte: 2.0e-10
    per_largest: 9.0e-10
    points:
    - [even, 4096, 3, 0.34, 0, 1.2e-4, 1.1e-4, 1.3e-4, 12]
  - {kind: all_gather, devices: 3, above: 1e6, latency: 2e-4}
  lanes: 2
  ops:
  - ranks: [1, 2]
    times:
    - ['aten.relu.default(float32[64/64,512]) -> float32[64/64,512]', 2e-6, 2e-5, 0.02, 0.25, 7e-6, 1.0, 2.2e-5]
  steps:
  - model: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
    name: bert.py
    rows: [[x, 0, 1], [y, 1, 2]]
    optimizer: adamw
    curves:
    - ranks: [1, 2]
      memory: 2147483648
      over: [5, 2300000000]
      points:
      - [1, 0.1, 0.09, 0.11, 9, 700000000, 650000000]
      - [4, 0.3, 0.28, 0.33, 5, 2000000000, 1900000000]
    - {ranks: [0], memory: 4294967296, over: [1, 5000000000], points: []}
"""


@cache
def files() -> tuple[bytes, ...]:
    found = [path.read_bytes() for path in sorted(EXAMPLES.iterdir()) if path.stem != "hap-64"]
    return (MEASURED.encode(), *found)


def whole(cluster: Cluster) -> bool:
    """Whether a cluster is one that can be written, read again, printed and planned for."""
    assert str(cluster)
    rates = [d.rate("float32") for d in cluster.devices]
    return all(0 < r < math.inf for r in rates) and Cluster.from_text(cluster.to_text()) == cluster


def check_bytes(seeds: range, folder: Path) -> None:
    path, refused = folder / "cluster.yaml", 0
    for seed in seeds:
        path.write_bytes(damaged_bytes(files()[seed % len(files())], random.Random(seed)))
        try:
            found = Cluster.load(path)
        except ClusterError:
            refused += 1
        else:
            assert whole(found), seed
    assert refused > len(seeds) / 4


def check_trees(seeds: range) -> None:
    refused = 0
    for seed in seeds:
        tree = damaged_tree(yaml.safe_load(files()[seed % len(files())]), random.Random(seed))
        for load in (
            lambda tree=tree: Cluster.load(tree),
            lambda tree=tree: Cluster.from_text(json.dumps(tree)),
        ):
            try:
                found = load()
            except ClusterError:
                refused += 1
            else:
                assert whole(found), seed
    assert refused > len(seeds) / 2


@pytest.mark.parametrize("first", range(0, 150, CHUNK))
def test_damaged_files_are_refused_or_whole(first: int, tmp_path: Path) -> None:
    check_bytes(range(first, first + CHUNK), tmp_path)


@pytest.mark.parametrize("first", range(0, 150, CHUNK))
def test_damaged_entries_are_refused_or_whole(first: int) -> None:
    check_trees(range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 500))
def test_many_damaged_files_are_refused_or_whole(first: int, tmp_path: Path) -> None:
    check_bytes(range(first, first + 500), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 500))
def test_many_damaged_entries_are_refused_or_whole(first: int) -> None:
    check_trees(range(first, first + 500))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices:\n\t- {flops: 1}", "f.yaml:2:1: line 2 has a tab, and YAML takes spaces there"),
        ("devices:\n- flops: 1\n\tmemory: 3", "f.yaml:3:1: line 3 has a tab"),
        ("devices:\n  -\t\t{flops: 1\n", "has a tab"),
        ("[" * 5000, "nested too deeply"),
        ("{a: " * 5000, "nested too deeply"),
        ("devices: [{flops: 1e99999999999999999999}]", "is not positive and finite"),
        ("devices: [{flops: " + "9" * 5000 + "}]", "is not positive and finite"),
        ("devices: [{flops: .nan}]", "no quantity"),
        ("devices: [{flops: true}]", "no quantity"),
        ("devices: [{flops: 1, memory: 1e-400}]", "is not positive and finite"),
        ("devices: [{flops: 1, count: 60000}, {flops: 1, count: 60000}]", "a cluster has at most 65536"),
        ("devices: [{flops: 1, count: 9, accelerators: 65536, inside: {bandwidth: 1}}]", "at most 65536"),
        ("devices: [{flops: 1}]\ndevices: [{flops: 2}]", "the key 'devices' stands twice"),
        ("devices: [!!python/object:os.system {flops: 1}]", ""),
    ],
)  # fmt: skip
def test_slips(text: str, message: str) -> None:
    try:
        assert Cluster.from_text(text, "f.yaml").world == 1
        assert message == ""
    except ClusterError as error:
        assert message in str(error)  # noqa: PT017  # one of two outcomes
        assert "\n" not in str(error)  # noqa: PT017  # as above


def test_aliases_do_not_multiply() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(ClusterError, match="unknown key 'a0'"):
        Cluster.from_text("\n".join([*lines, "devices: [{flops: 1}]"]))
    shared = "devices: [&d {flops: 1}, *d]\nnetwork: {bandwidth: 1}"
    assert Cluster.from_text(shared).world == 2


@pytest.mark.parametrize("value", [10**400, -(10**400), math.nan, True, {}, [], b"1", 1j])
@pytest.mark.parametrize("key", ["flops", "memory", "launch", "count", "accelerators", "name", "inside"])
def test_values_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(ClusterError, match=rf"cluster\['devices'\]\[0\]\['{key}'\]"):
        Cluster.load({"devices": [{"flops": 1.0, key: value}]})


def test_dicts_that_hold_themselves() -> None:
    tree: dict[str, Any] = {"devices": []}
    tree["devices"].append(tree)
    with pytest.raises(ClusterError, match="nested too deeply, or holds itself"):
        Cluster.load(tree)


def test_paths_that_cannot_be() -> None:
    with pytest.raises(ClusterError, match="is no path of a cluster file"):
        Cluster.load("a\0b")
