"""Cluster files: units, text round trip, and every mistake named with its place."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import LATENCY, LAUNCH, Device, Network
from hetspmd.codec.quantities import Kind, parse_quantity, quantity_text
from hetspmd.codec.records import decode, encode
from hetspmd.errors import ClusterError

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"

DESIGN = """\
devices:                       # rank order
  - {name: v100, count: 2, flops: 12e12, memory: 16GiB, memory_bandwidth: 800GB/s}
  - {name: p100, count: 2, flops: 7.5e12, memory: 12GiB, memory_bandwidth: 550GB/s}
network: {bandwidth: 10.4Gbit/s, latency: 50us}
"""


def test_reads_the_documented_file() -> None:
    cluster = Cluster.from_text(DESIGN)
    v100 = Device("v100", {"default": 12e12}, 16 * 2**30, 800e9)
    p100 = Device("p100", {"default": 7.5e12}, 12 * 2**30, 550e9)
    assert cluster == Cluster((v100, v100, p100, p100), Network(1.3e9, 50e-6))
    assert cluster.world == 4


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("16GiB", "bytes", 16 * 2**30), ("16 GB", "bytes", 16e9), ("5e3", "bytes", 5000),
        ("1_000", "bytes", 1000),
        ("800GB/s", "bytes/s", 800e9), ("10.4Gbit/s", "bytes/s", 1.3e9), ("10 Gbps", "bytes/s", 1.25e9),
        ("1.5 GiB/s", "bytes/s", 1.5 * 2**30), ("50us", "seconds", 50e-6), ("50 µs", "seconds", 50e-6),
        ("2ms", "seconds", 2e-3), ("1s", "seconds", 1), ("12 TFLOP/s", "FLOP/s", 12e12),
        ("12TFLOPS", "FLOP/s", 12e12), ("12e12", "FLOP/s", 12e12), (7, "FLOP/s", 7.0), (0.5, "seconds", 0.5),
    ],
)  # fmt: skip
def test_quantities(text: object, kind: Kind, value: float) -> None:
    assert parse_quantity(text, kind) == value


@pytest.mark.parametrize(
    "text", ["", "fast", "-1", "0", "0s", "1e999", "nan", "inf", "12 GB", "1,5", True, None, [1]]
)
def test_bad_quantities(text: object) -> None:
    with pytest.raises(ValueError, match=r"write seconds as|allowed are"):
        parse_quantity(text, "seconds")


@given(st.floats(1e-9, 1e18), st.sampled_from(["FLOP/s", "bytes", "bytes/s", "seconds"]))
def test_quantity_text_reads_back(value: float, kind: Kind) -> None:
    assert parse_quantity(quantity_text(value, kind), kind) == pytest.approx(value, rel=1e-3)


def test_dtypes() -> None:
    device = Cluster.load(
        {"devices": [{"flops": {"fp32": "10 TFLOP/s", "bfloat16": 4e13, "default": 1e12}}]}
    ).devices[0]
    assert [device.rate(d) for d in ("float32", "bfloat16", "int64")] == [1e13, 4e13, 1e12]
    assert Device("d", {"float32": 2.0, "float16": 8.0}).rate("float64") == 2.0


def test_defaults() -> None:
    cluster = Cluster.load({"devices": [{"flops": 1e12}]})
    assert cluster == Cluster((Device("device0", {"default": 1e12}, math.inf, math.inf, LAUNCH),), None)
    two = Cluster.load({"devices": [{"flops": 1, "count": 2}], "network": {"bandwidth": 8}})
    assert two.network == Network(8.0, LATENCY)


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda p: p.name)
def test_examples_load_and_round_trip(path: Path, tmp_path: Path) -> None:
    cluster = Cluster.load(path)
    assert Cluster.load(str(path)) == cluster
    assert cluster.world == {"four-unlike": 4, "hap-64": 64, "eight-equal": 8}.get(path.stem, cluster.world)
    assert Cluster.from_text(cluster.to_text()) == cluster
    assert Cluster.load(cluster.to_dict()) == cluster == Cluster.load(cluster)
    assert Cluster.from_text(json.dumps(cluster.to_dict(), indent="\t")) == cluster
    assert decode(encode(cluster), Cluster) == cluster


def test_table() -> None:
    assert str(Cluster.from_text(DESIGN)) == (
        "ranks  device  FLOP/s       memory  bandwidth  launch\n"
        "0-1    v100    12 TFLOP/s   16 GiB  800 GB/s   5 us\n"
        "2-3    p100    7.5 TFLOP/s  12 GiB  550 GB/s   5 us\n"
        "network  1.3 GB/s, 50 us per collective"
    )


@given(
    st.lists(
        st.builds(
            Device,
            st.sampled_from(["a", "b", "1e3", "null", "x: y", "é"]),
            st.dictionaries(st.sampled_from(["default", "float32"]), st.floats(1.0, 1e18), min_size=1),
            st.just(math.inf) | st.floats(1, 1e15),
            st.just(math.inf) | st.floats(1, 1e15),
            st.floats(1e-9, 1),
        ),
        min_size=1, max_size=5,
    ),
    st.builds(Network, st.floats(1, 1e15), st.floats(1e-9, 1)),
)  # fmt: skip
def test_round_trip(devices: list[Device], network: Network) -> None:
    cluster = Cluster(tuple(devices), network)
    assert Cluster.from_text(cluster.to_text()) == cluster
    assert Cluster.load(cluster.to_dict()) == cluster


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "1:1", "is empty; write {devices"),
        ("a: [", "1:5", "not YAML"),
        ("[1]", "1:1", "the cluster is a list; write a mapping with the keys devices, network, measured"),
        ("network: {bandwidth: 1}", "1:1", "lacks the key 'devices'"),
        ("devices: []", "1:10", "devices is empty; list at least one device"),
        ("devices: {flops: 1}", "1:10", "devices is a mapping; write a list"),
        ("devices:\n- flops: 1\n  memroy: 3", "3:3", "unknown key 'memroy' (did you mean 'memory'?)"),
        ("devices: [{flops: 1}]\nnetwrk: {}", "2:1", "unknown key 'netwrk' (did you mean 'network'?)"),
        ("devices: [{name: a}]", "1:11", "device 0 lacks the key 'flops'"),
        ("devices: [7]", "1:11", "device 0 is '7'; write a mapping"),
        ("devices: [{flops: -1}]", "1:19", "flops: '-1' is not positive"),
        ("devices: [{flops: 0}]", "1:19", "flops: '0' is not positive"),
        ("devices: [{flops: }]", "1:18", "no quantity; write FLOP/s as"),
        ("devices: [{flops: [1]}]", "1:19", "flops is a list; write a number of FLOP/s"),
        ("devices: [{flops: {}}]", "1:19", "flops is empty"),
        ("devices: [{flops: {float31: 1}}]", "1:20", "unknown key 'float31' (did you mean 'float32'?)"),
        ("devices: [{flops: {fp32: 1, float32: 2}}]", "1:38", "flops of float32 stands twice"),
        ("devices: [{flops: 1, memory: 3Gx}]", "1:30", "the unit 'Gx'; allowed are B, kB"),
        ("devices: [{flops: 1, count: 0}]", "1:29", "write a whole number from 1"),
        ("devices: [{flops: 1, count: 1.5}]", "1:29", "write a whole number from 1"),
        ("devices: [{flops: 1, count: 100000}]", "1:29", "write a whole number from 1"),
        ("devices: [{flops: 1, name: [a]}]", "1:28", "name is a list; write a name"),
        ("devices: [{flops: 1, flops: 2}]", "1:22", "the key 'flops' stands twice (first at f.yaml:1:12)"),
        ("devices: [{flops: 1, count: 2}]", "1:1", "lacks the key 'network', which 2 devices need"),
        ("devices: [{flops: 1}]\nnetwork: {bandwidth: -3}", "2:22", "bandwidth: '-3' is not positive"),
        ("devices: [{flops: 1}]\nnetwork: {latency: 1}", "2:10", "network lacks the key 'bandwidth'"),
        ("devices: [{flops: 1}]\nnetwork: 5", "2:10", "network is '5'; write a mapping"),
        ("devices: &a [{flops: 1, name: *a}]", "1:10", "an alias refers to what it is part of"),
        ("? [a]\n: 1", "1:3", "a key must be a name"),
    ],
)  # fmt: skip
def test_mistakes_name_line_and_column(text: str, place: str, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.from_text(text, "f.yaml")
    assert str(caught.value).startswith(f"f.yaml:{place}: "), caught.value
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"devices": [{"flops": 1}, {"flops": "x"}]},
            "cluster['devices'][1]['flops']: flops: 'x' is no quantity",
        ),
        ({"devices": [{"flop": 1}]}, "cluster['devices'][0]['flop']: device 0 has the unknown key"),
        ({"devices": [{"flops": {1: 2}}]}, "the key 1 is no string"),
        ({"devices": [{"flops": object()}]}, "cluster['devices'][0]['flops']: a object is no mapping"),
        ({"devices": []}, "devices is empty"),
        (5, "a cluster is a dict, the path of a file, or a hetspmd.Cluster; got a int"),
    ],
)
def test_mistakes_in_a_dict(spec: object, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.load(spec)
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read the cluster file .*none\.yaml: No such file"):
        Cluster.load(tmp_path / "none.yaml")
    with pytest.raises(ClusterError, match="cannot read the cluster file"):
        Cluster.load(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00a: \x80")
    with pytest.raises(ClusterError, match="not UTF-8"):
        Cluster.load(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_bytes(b"devices: \x01")
    with pytest.raises(ClusterError, match="not YAML"):
        Cluster.load(tmp_path / "c.yaml")


def test_constructors_check() -> None:
    for make in (
        lambda: Device("d", {}), lambda: Device("d", {"default": -1.0}), lambda: Device("d", {"x": 1.0}),
        lambda: Device("d", {"default": 1.0}, memory=0), lambda: Device("d", {"default": 1.0}, launch=0.0),
        lambda: Device("d", {"default": 1.0}, memory_bandwidth=math.nan), lambda: Network(0.0),
        lambda: Network(1.0, math.inf), lambda: Cluster(()),
        lambda: Cluster((Device("d", {"default": 1.0}),) * 2),
    ):  # fmt: skip
        with pytest.raises(ClusterError):
            make()
