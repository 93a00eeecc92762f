"""Emulated clusters: rates, CPU shares, isolation, what is left behind, workers."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from emulated_cases import BUSY, DRIVER, RECEIVE, SEND, SEND_LATER

from emulated import command as benches
from emulated import links, ticker
from emulated.cluster import EmulatedCluster, clean, unavailable
from emulated.cpu_groups import LEAST_QUOTA, CpuGroups, placement, quota
from emulated.launch import Workers
from emulated.spec import ClusterSpec, EmulationError, Rank
from emulated.ticker import Tickers

REASON = unavailable()
emulation = pytest.mark.skipif(REASON is not None, reason=REASON or "")


def output(process: subprocess.Popen[bytes]) -> str:
    return process.communicate(timeout=60)[0].decode().strip()


def test_quotas() -> None:
    assert quota(0.5) == (1000, 2000)
    assert quota(1.5) == (3000, 2000)
    budget, period = quota(0.15)
    assert budget >= LEAST_QUOTA
    assert budget / period == pytest.approx(0.15, rel=1e-3)


def test_placement_fills_the_emptiest_cpu() -> None:
    zero, one = frozenset([0]), frozenset([1])
    assert placement([0.15, 0.6, 0.3, 0.15], [0, 1]) == [one, zero, one, one]
    assert placement([1.5, 0.5], [0, 1]) == [zero | one, zero]


def test_groups_of_version_2(tmp_path: Path) -> None:
    """What is written, to a folder that stands for the hierarchy."""
    groups = CpuGroups(tmp_path, 2)
    groups.make("cluster/rank0")
    assert [(tmp_path / p / "cgroup.subtree_control").read_text() for p in (".", "cluster")] == ["+cpu"] * 2
    groups.limit("cluster/rank0", 0.5)
    assert (tmp_path / "cluster/rank0/cpu.max").read_text() == "1000 2000"
    groups.limit("cluster/rank0", None)
    assert (tmp_path / "cluster/rank0/cpu.max").read_text() == "max 2000"
    groups.prefer("cluster", True)
    assert (tmp_path / "cluster/cpu.weight").read_text() == "10000"
    assert groups.names("clu") == ["cluster"]
    groups.remove("absent")


def test_specs() -> None:
    spec = ClusterSpec.of((4, 2, 1, 1), cores=1.2, rate="200Mbit/s", latency="1ms")
    assert [r.share for r in spec.ranks] == pytest.approx([0.6, 0.3, 0.15, 0.15])
    assert spec.ranks[0].rate == 25e6
    assert spec.fastest == 0
    assert str(spec) == "0.6 : 0.3 : 0.15 : 0.15 cores, links of 200 Mbit/s and 1 ms"
    with pytest.raises(EmulationError, match="rank 1 has 0 cores"):
        ClusterSpec((Rank(0.5, 1e6), Rank(0.0, 1e6)))
    with pytest.raises(EmulationError, match="0 ranks"):
        ClusterSpec(())


def test_bursts() -> None:
    """An idle link gives little credit, and never less than a packet with its headers."""
    assert links.burst(25e6) == 50_000
    assert links.burst(1e9) == links.LARGEST
    assert links.burst(1e6) == links.SMALLEST
    for rate in (1e6, 25e6, 31e6, 125e6, 1e9):
        segments = -(-links.packet(rate) // 1448)
        assert links.packet(rate) + 66 * segments <= links.burst(rate)


def test_link_commands() -> None:
    (bucket,) = links.link_commands("eth0", 25e6)
    assert " ".join(bucket).startswith("qdisc add dev eth0 root handle 1: tbf rate 200000000bit burst ")
    _, delay = links.link_commands("eth0", 25e6, 2e-3)
    assert " ".join(delay).startswith("qdisc add dev eth0 parent 1:1 handle 10: netem delay 2000us limit ")


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in (unavailable() or "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (unavailable() or "")
    with pytest.raises(EmulationError, match="root"), EmulatedCluster(ClusterSpec((Rank(0.5, 1e6),))):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "command ip" in (unavailable() or "")


@emulation
def test_more_cores_than_there_are() -> None:
    cores = len(os.sched_getaffinity(0))
    reason = unavailable(ClusterSpec.of((1, 1), cores=cores + 1, rate="1Gbit/s"))
    assert f"this machine has {cores}" in (reason or "")


def received(cluster: EmulatedCluster) -> float:
    """Bytes/s that rank 1 gets from rank 0."""
    receiver = cluster.start(1, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"listening\n"
    sender = cluster.start(0, [sys.executable, "-c", SEND, cluster.address(1)])
    found = float(output(receiver))
    assert sender.wait(60) == 0
    return found


@emulation
def test_a_rate_can_be_changed() -> None:
    rate = 5e6
    with EmulatedCluster(ClusterSpec((Rank(0.5, 10 * rate), Rank(0.25, 10 * rate)))) as cluster:
        shown = subprocess.run(
            cluster.command(0, ["ip", "-d", "link", "show", "eth0"]),
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"gso_max_size {links.packet(10 * rate)} " in shown.stdout
        cluster.set_rate(rate)
        assert cluster.spec == ClusterSpec((Rank(0.5, rate), Rank(0.25, rate)))
        assert 0.6 * rate < received(cluster) < 1.05 * rate


@emulation
def test_connections_follow_a_change_of_the_rate() -> None:
    """Packets that are larger than the new rate's burst would be divided into 1500 bytes each."""
    spec = ClusterSpec((Rank(0.5, 125e6), Rank(0.25, 125e6)))
    with EmulatedCluster(spec) as cluster:
        receiver = cluster.start(1, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"listening\n"
        command = [sys.executable, "-c", SEND_LATER, cluster.address(1)]
        with receiver, cluster.start(0, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
            assert sender.stdin is not None
            assert sender.stdout is not None
            said = []
            for rate in (12.5e6, 12.5e6):
                sender.stdin.write(b"\n")
                sender.stdin.flush()
                said.append(sender.stdout.readline().strip())
                cluster.set_rate(rate)
            float(receiver.stdout.readline())
        assert said[0] == b"sent"
        assert 40 * 65536 / links.packet(12.5e6) <= int(said[1]) < 40 * 65536 / 6000


@emulation
def test_rates_shares_and_isolation() -> None:
    rate, share = 12.5e6, 0.25
    with EmulatedCluster(ClusterSpec((Rank(share, rate), Rank(share, rate)))) as cluster:
        assert 0.6 * rate < received(cluster) < 1.05 * rate
        for rank in range(2):
            cluster.throttle(rank, True)
        busy = [cluster.start(r, [sys.executable, "-c", BUSY], stdout=subprocess.PIPE) for r in range(2)]
        for process in busy:
            assert 0.5 * share < float(output(process)) < 1.2 * share
        assert (
            "10.77" not in subprocess.run(["ip", "addr"], capture_output=True, text=True, check=True).stdout
        )
        prefix = cluster.prefix
    assert not left(prefix)


def helpers(module_name: str, parent: int) -> list[int]:
    """The processes of a module that help the clusters of a driver."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if arguments[1:3] == [b"-m", module_name.encode()] and int(arguments[4]) == parent:
            found.append(int(entry.name))
    return found


@emulation
def test_the_kernel_is_made_to_look_at_quotas() -> None:
    with EmulatedCluster(ClusterSpec((Rank(0.25, 1e7), Rank(0.5, 1e7)))):
        expected = min(2, len(os.sched_getaffinity(0)))
        woken: dict[int, int] = {}
        for _ in range(200):
            running = helpers("emulated.ticker", os.getpid())
            woken = {p: switches(p) for p in running}
            if len(woken) == expected and min(woken.values()) > 100:
                break
            time.sleep(0.1)
        assert len(woken) == expected, "one per CPU"
        assert min(woken.values()) > 100, "they wake up"
        assert all(len(os.sched_getaffinity(p)) == 1 for p in woken)
    assert not helpers("emulated.ticker", os.getpid())


@emulation
def test_what_ranks_leave_of_the_cpus_is_kept_busy() -> None:
    with EmulatedCluster(ClusterSpec((Rank(0.25, 1e7), Rank(0.5, 1e7)))) as cluster:
        expected = min(2, len(os.sched_getaffinity(0)))

        def listed() -> list[int]:
            return helpers("emulated.ballast", os.getpid())

        assert eventually(lambda: len(listed()) == expected), "one per CPU"
        pressing = listed()

        def at_rest() -> bool:
            return all(state(p) == "T" for p in pressing)

        assert eventually(at_rest), "at rest while nobody is held to a share"
        cluster.throttle(0, True)
        assert eventually(lambda: min(cpu_seconds(p) for p in pressing) > 0.5), "they compute"
        assert all(os.sched_getscheduler(p) == os.SCHED_IDLE for p in pressing)
        cluster.throttle(0, False)
        assert eventually(at_rest)
    assert not helpers("emulated.ballast", os.getpid())


@emulation
def test_shares_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that computes less in a second gives more of its seconds, up to a limit."""
    spec = ClusterSpec((Rank(0.2, 1e7), Rank(0.4, 1e7)))
    with EmulatedCluster(spec, pace=100.0) as cluster:
        speed = [80.0]
        monkeypatch.setattr(cluster._tickers, "speeds", lambda cpus=None: speed)
        limits: dict[str, float | None] = {}
        monkeypatch.setattr(CpuGroups, "limit", lambda _, group, share: limits.update({group[-1]: share}))
        cluster.throttle(0, True)
        cluster.throttle(1, True)
        assert limits == {"0": pytest.approx(0.25), "1": pytest.approx(0.5)}
        speed[0] = 80.1
        cluster.keep_pace()
        assert limits["0"] == pytest.approx(0.25), "not for so little"
        speed[0] = 81.5
        cluster.keep_pace()
        assert limits["0"] == pytest.approx(0.25), "nor for so little"
        speed[0] = 125.0
        cluster.keep_pace()
        assert limits == {"0": pytest.approx(0.16), "1": pytest.approx(0.32)}
        speed[0] = 1.0
        cluster.keep_pace()
        assert limits == {"0": pytest.approx(0.4), "1": pytest.approx(0.8)}
        cluster.throttle(0, False)
        assert limits["0"] is None


@pytest.mark.slow
@emulation
def test_the_pace_is_measured_and_kept_for_later(tmp_path: Path) -> None:
    spec = ClusterSpec((Rank(0.25, 1e7),))
    with benches.running(spec, tmp_path / "bench") as (cluster, _):
        pace = cluster.pace
        assert pace is not None
        assert 10 < pace < 1e7
        cluster.throttle(0, True)
        assert cluster._given[0] == pytest.approx(0.25, rel=0.6)
    with benches.running(spec, tmp_path / "bench") as (cluster, _):
        assert cluster.pace == pace


def test_one_pause_is_no_speed() -> None:
    """A round in which the machine stood still counts for a round in which it did nothing, no more."""
    with mmap.mmap(-1, ticker._ROOM) as shared:
        numbers = memoryview(shared).cast("d")
        one = ticker._Ticker(None, shared)  # type: ignore[arg-type]  # it has no process
        for count in range(1, 2 * ticker.MEMORY):
            numbers[1 + (count - 1) % ticker.MEMORY] = 1.0 if count % 10 == 0 else 1e-4
            numbers[0] = count
            speed = one.speed
            assert (speed is None) == (count < ticker.LEAST)
            if speed is not None:
                assert speed == pytest.approx(0.9e4, rel=0.06)
        numbers.release()


def test_speeds_are_those_since_ranks_were_held() -> None:
    """What other work took before says nothing; a correction that was known holds until the next is."""
    with mmap.mmap(-1, ticker._ROOM) as shared:
        numbers = memoryview(shared).cast("d")
        tickers = Tickers(())
        tickers._tickers[3] = ticker._Ticker(None, shared)  # type: ignore[arg-type]  # it has no process
        tickers.pace = 1e4

        def rounds(count: int, seconds: float) -> None:
            for _ in range(count):
                numbers[1 + int(numbers[0]) % ticker.MEMORY] = seconds
                numbers[0] += 1

        rounds(ticker.MEMORY + 7, 2e-4)
        assert tickers.correction([3]) == pytest.approx(2.0)
        tickers.forget()
        rounds(ticker.LEAST - 1, 1e-4)
        assert tickers.correction([3]) == pytest.approx(2.0)
        rounds(1, 1e-4)
        assert tickers.correction([3]) == pytest.approx(1.0)
        rounds(ticker.LEAST, 5e-5)
        assert tickers.correction([3]) == pytest.approx(1 / 1.5), "the mean of speeds"
        numbers.release()


def test_a_limit_is_not_lifted_while_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = CpuGroups(tmp_path, 1)
    (tmp_path / "rank0").mkdir()
    written: list[tuple[str, str]] = []
    monkeypatch.setattr(
        Path, "write_text", lambda path, text, encoding: written.append((path.name, text)) or len(text)
    )
    groups.limit("rank0", 0.5)
    groups.limit("rank0", 0.1)
    period, budget = "cpu.cfs_period_us", "cpu.cfs_quota_us"
    assert written == [(period, "2000"), (budget, "1000"), (period, "10000"), (budget, "1000")]
    written.clear()
    groups.limit("rank0", None)
    assert written == [(budget, "-1")]


def eventually(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether something holds within the time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def state(pid: int) -> str:
    """The letter for a process's state."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def cpu_seconds(pid: int) -> float:
    """What a process has had of the CPUs."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def switches(pid: int) -> int:
    """How often a process has waited for something."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    raise AssertionError("Linux says so")


@emulation
def test_what_a_killed_driver_leaves_is_removed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, env=environment)
    assert driver.stdout is not None
    prefix, pid = driver.stdout.readline().decode().split()
    assert left(prefix)
    assert prefix not in clean(), "its driver still runs"
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    assert Path(f"/proc/{pid}").exists()
    clean()
    assert not left(prefix)
    deadline = time.monotonic() + 5
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running(pid)
    assert prefix not in clean()


def left(prefix: str) -> list[str]:
    """Namespaces and groups of a cluster."""
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    groups = CpuGroups.find()
    assert groups is not None
    return [n for n in namespaces.split() if n.startswith(prefix)] + groups.names(prefix)


def running(pid: str) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return state(int(pid)) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@emulation
@pytest.mark.slow
def test_workers_and_their_failures() -> None:
    """Start, several jobs, then a rank that raises: about half a minute of imports on two cores."""
    spec = ClusterSpec.of((1, 1), cores=1.0, rate="1Gbit/s")
    with EmulatedCluster(spec) as cluster:
        with Workers(cluster, timeout=120) as workers:
            first = workers.run("emulated_cases:whoami", fail=-1)
            assert [found[:2] for found in first] == [[0, 2], [1, 2]]
            assert workers.run("emulated_cases:whoami", fail=-1) == first
            assert workers.run("emulated_cases:whoami", ranks=[1], fail=-1) == [first[1]]
            with pytest.raises(EmulationError, match=r"rank 1 failed:(.|\n)*ValueError: asked to"):
                workers.run("emulated_cases:whoami", fail=1)
        assert not any(running(str(found[2])) for found in first)
