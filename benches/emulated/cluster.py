"""An emulated cluster: one network namespace and one CPU share per rank, all on this machine.

Every rank has an interface ``eth0`` in a namespace of its own, a veth pair to a bridge, and the bridge lies in a
namespace too, so that nothing of it is seen from outside. A link's rate is a token bucket (``tbf``) at both ends of
the pair, one for what the rank sends and one for what it receives (:mod:`emulated.links`); its latency is
``netem`` behind each of them, so that a packet from rank a to rank b takes ``latency_a + latency_b``. A rank's
speed is a CPU quota (:mod:`emulated.cpu_groups`), which is put on and taken off by
:meth:`EmulatedCluster.throttle`: imports and set-up need not take minutes.

The quota holds for the rank's main thread, which computes. Its other threads, those of gloo, carry messages as a
network card and a host's processor do beside an accelerator, and are not held to it: under one quota a thread that
must answer a message would wait until the computation has used up its time slice, tens of milliseconds on a slow
rank, several times over in one collective. They have what time the shares leave of the machine. With one quota for
all threads of a rank (:attr:`emulated.spec.ClusterSpec.one_quota`) they wait so, as on a machine whose cores both
compute and carry messages.

Names hold the pid of the driver and the time at which it started. What a driver that was killed has left behind
is removed by :func:`clean`, which every new cluster calls.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from emulated.ballast import Ballast
from emulated.cpu_groups import CpuGroups, kill, placement
from emulated.links import idle, link_commands, packet_command, rate_command
from emulated.spec import ClusterSpec, EmulationError
from emulated.ticker import Tickers

PREFIX = "hetspmd-emulated"
DRAINED = 30.0
"""Seconds within which a link must have sent what waits, before it gets another rate."""

NOTICED = 0.03
"""Corrections of a share by less than this part of it are not made: each gives the rank its quota once more, which
at five a second is a tenth of its time."""
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-\d+")
_SERIAL = itertools.count()


def unavailable(spec: ClusterSpec | None = None) -> str | None:
    """Why a cluster (this one) cannot be emulated here, in words; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"emulating a cluster needs Linux's network namespaces; this is {sys.platform}"
    if os.geteuid() != 0:
        return "emulating a cluster needs root: namespaces, rate limits and CPU quotas; run it with sudo"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"emulating a cluster needs the command {tool}; install iproute2"
    if CpuGroups.find() is None:
        return "emulating a cluster needs the cpu controller of control groups below /sys/fs/cgroup"
    reason = _probe(latency=spec is not None and any(r.latency for r in spec.ranks))
    if reason is None and spec is not None:
        cores = len(os.sched_getaffinity(0))
        if spec.cores > cores + 1e-9:
            return f"the shares add up to {spec.cores:g} cores, this machine has {cores}; lower them"
    return reason


@cache
def _probe(*, latency: bool) -> str | None:
    """Make one link and one quota, and remove them: whether the kernel and its container allow it."""
    prefix = _prefix()
    name = f"{prefix}-probe"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        for command in link_commands("eth0", 1e7, 1e-3 if latency else 0.0):
            _run("tc", "-n", name, *command)
        groups = CpuGroups.find()
        assert groups is not None
        groups.make(f"{prefix}/probe")
        groups.limit(f"{prefix}/probe", 0.5)
    except (EmulationError, OSError) as error:
        hint = "; without the kernel's netem, leave the latency at 0" if "netem" in str(error) else ""
        return f"a cluster cannot be emulated here: {error}{hint}"
    finally:
        _remove(prefix)
    return None


def clean() -> list[str]:
    """Remove what drivers that no longer run have left; the names of those clusters."""
    found = set()
    groups = CpuGroups.find()
    for name in (*_namespaces(), *(groups.names(PREFIX) if groups else ())):
        match = _NAME.match(name)
        if match is not None and _start_time(int(match[1])) != int(match[2]):
            found.add(match[0])
    for prefix in sorted(found):
        _remove(prefix)
    return sorted(found)


class EmulatedCluster:
    """A context manager; within it the ranks' namespaces and CPU groups exist.

    ``pace``: what :class:`emulated.ticker.Tickers` count in a second on the core that is meant by a share of 1;
    without it, what this machine's do now. While ranks are held to their shares, these are corrected so that the
    ranks keep the pace when the machine changes its speed.

    Raises EmulationError with the reason of :func:`unavailable`.
    """

    def __init__(self, spec: ClusterSpec, pace: float | None = None) -> None:
        self.spec = spec
        self.pace = pace
        self.prefix = _prefix()
        self._held: set[int] = set()
        self._given: dict[int, float] = {}
        self._pids: dict[int, int] = {}
        self._freed: set[int] = set()
        self._tickers: Tickers | None = None
        self._ballast: Ballast | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.spec.ranks)

    def address(self, rank: int) -> str:
        """The rank's IPv4 address on the bridge."""
        return f"10.77.0.{rank + 1}"

    def __enter__(self) -> EmulatedCluster:
        reason = unavailable(self.spec)
        if reason is not None:
            raise EmulationError(reason)
        clean()
        try:
            self._make()
            cpus = sorted(frozenset().union(*self._cpus))
            self._tickers = Tickers(cpus)
            self._ballast = Ballast(cpus)
            if self.pace is None:
                self._ballast.press(True)
                self.pace = self._tickers.measured()
                self._ballast.press(False)
            self._tickers.pace = self.pace
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for helper in (self._tickers, self._ballast):
            if helper is not None:
                helper.end()
        _remove(self.prefix)

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """``command`` as it is run inside the rank's namespace."""
        return ["ip", "netns", "exec", self._namespace(rank), *command]

    def start(
        self, rank: int, command: Sequence[str], *, stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None, stderr: int | IO[Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Start a process inside the rank's namespace and in its CPU group."""
        process = subprocess.Popen(
            self.command(rank, command), stdin=stdin, stdout=stdout, stderr=stderr, env=env
        )
        os.sched_setaffinity(process.pid, self._cpus[rank])
        self._groups.join(self._group(rank), process.pid)
        self._pids[rank] = process.pid
        return process

    def throttle(self, rank: int, on: bool) -> None:
        """Hold the rank to its CPU share from now on, or let it have what there is.

        While any rank is held to its share, the ranks come before other processes of the machine, and what they
        leave of the CPUs is kept busy (:mod:`emulated.ballast`).
        """
        assert self._ballast is not None
        assert self._tickers is not None
        if on and not self._held:
            self._tickers.forget()
        (self._held.add if on else self._held.discard)(rank)
        self._groups.prefer(self.prefix, bool(self._held))
        self._ballast.press(bool(self._held))
        self._given.pop(rank, None)
        if on:
            self.keep_pace()
        else:
            self._groups.limit(self._group(rank), None)
        self.free_network_threads(rank)

    def keep_pace(self) -> None:
        """Correct the CPU shares of the ranks that are held to them by the machine's speed now.

        To be called several times a second.
        """
        assert self._tickers is not None
        for rank in sorted(self._held):
            share = self.spec.ranks[rank].share
            corrected = share * self._tickers.correction(self._cpus[rank])
            if abs(corrected - self._given.get(rank, 0.0)) > NOTICED * share:
                self._groups.limit(self._group(rank), corrected)
                self._given[rank] = corrected

    def set_rate(self, rate: float) -> None:
        """Give every link another rate in bytes/s, once what is on its way has come: a packet that is larger than
        a bucket has become would never leave it.

        Raises EmulationError if the links do not get idle.
        """
        self.spec = replace(self.spec, ranks=tuple(replace(r, rate=rate) for r in self.spec.ranks))
        ends = [end for rank in range(self.world) for end in self._ends(rank)]
        for namespace, device in ends:
            _run("ip", "-n", namespace, *packet_command(device, rate))
        for rank in range(self.world):
            # Connections ask for the size of their packets where they look up their route.
            _run("ip", "-n", self._namespace(rank), "route", "flush", "cache")
        for namespace, device in ends:
            self._drain(namespace, device)
            _run("tc", "-n", namespace, *rate_command(device, rate, "change"))

    def _drain(self, namespace: str, device: str) -> None:
        """Return once nothing waits at an end of a link."""
        give_up = time.monotonic() + DRAINED
        while not idle(_run("tc", "-n", namespace, "-s", "qdisc", "show", "dev", device)):
            if time.monotonic() > give_up:
                raise EmulationError(f"{device} of {namespace} still has bytes to send after {DRAINED:g} s")
            time.sleep(0.01)

    def free_network_threads(self, rank: int) -> None:
        """Let all threads but the main one of the rank's process run beside its CPU share, if it is held to it and
        the share is not that of all threads.

        To be called now and then: a thread that is started later is held to the share until then.
        """
        if self.spec.one_quota or rank not in self._held or rank not in self._pids:
            return
        main = self._pids[rank]
        for task in sorted(Path(f"/proc/{main}/task").glob("*")):
            thread = int(task.name)
            if thread in self._freed or thread == main:
                continue
            try:
                os.sched_setaffinity(thread, os.sched_getaffinity(0))
                self._groups.join_thread(self._network, thread)
            except (ProcessLookupError, FileNotFoundError):
                continue  # the thread has ended
            self._freed.add(thread)

    def _make(self) -> None:
        self._groups = _groups()
        self._cpus = placement([r.share for r in self.spec.ranks], sorted(os.sched_getaffinity(0)))
        switch = f"{self.prefix}-switch"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for rank, of in enumerate(self.spec.ranks):
            own, port = self._namespace(rank), f"port{rank}"
            _run("ip", "netns", "add", own)
            veth = ["link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", own]
            _run("ip", "-n", switch, *veth)
            _run("ip", "-n", own, "addr", "add", f"{self.address(rank)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", own, "link", "set", device, "up")
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            for namespace, device in self._ends(rank):
                _run("ip", "-n", namespace, *packet_command(device, self.spec.slowest))
                for command in link_commands(device, of.rate, of.latency):
                    _run("tc", "-n", namespace, *command)
            _run("ip", "netns", "exec", own, "sh", "-c", _STACK)
            self._groups.make(self._group(rank))
        self._groups.make(self._network)

    def _ends(self, rank: int) -> tuple[tuple[str, str], ...]:
        """The ends of a rank's link, each as a namespace and a device in it."""
        return (self._namespace(rank), "eth0"), (f"{self.prefix}-switch", f"port{rank}")

    def _namespace(self, rank: int) -> str:
        return f"{self.prefix}-rank{rank}"

    @property
    def _network(self) -> str:
        return f"{self.prefix}/network"

    def _group(self, rank: int) -> str:
        return f"{self.prefix}/rank{rank}"


_STACK = """
cd /proc/sys/net/ipv4
grep -qw cubic tcp_available_congestion_control && echo cubic > tcp_congestion_control
[ ! -e tcp_slow_start_after_idle ] || echo 0 > tcp_slow_start_after_idle
true
"""
"""A link is idle between collectives, and BBR would lower its rate now and then to measure it."""


def _groups() -> CpuGroups:
    groups = CpuGroups.find()
    if groups is None:
        raise EmulationError("the cpu controller of control groups is gone")
    return groups


def _prefix() -> str:
    pid = os.getpid()
    return f"{PREFIX}-{pid}-{_start_time(pid)}-{next(_SERIAL)}"


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    after = text.rpartition(")")[2].split()
    return None if after[0] == "Z" else int(after[19])


def _namespaces() -> list[str]:
    listed = _run("ip", "netns", "list").splitlines()
    return sorted(line.split()[0] for line in listed if line.startswith(PREFIX))


def _remove(prefix: str) -> None:
    """Kill what runs in a cluster, and remove its groups and namespaces."""
    groups = CpuGroups.find()
    if groups is not None:
        groups.remove(prefix)
    if shutil.which("ip") is None:
        return
    for name in _namespaces():
        if not name.startswith(f"{prefix}-"):
            continue
        try:
            for _ in range(100):
                pids = _run("ip", "netns", "pids", name).split()
                if not pids:
                    break
                kill(pids)
                time.sleep(0.02)
            _run("ip", "netns", "delete", name)
        except EmulationError:
            if name in _namespaces():  # otherwise another driver has cleaned up at the same time
                raise


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise EmulationError(f"{' '.join(command)}: {said}")
    return done.stdout
