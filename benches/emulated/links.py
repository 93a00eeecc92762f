"""Links of an emulated cluster: how large their bursts and packets are, and the commands that make them so.

A link's rate is a token bucket (``tbf``), its latency ``netem`` behind it.
"""

from __future__ import annotations

import re

BURST = 2e-3
"""Seconds' worth of bytes that a link which has been idle sends at once. A collective of a megabyte that begins on
an idle link must not be quicker than one that follows another: no wire gives such credit."""

SMALLEST, LARGEST = 32 * 1024, 128 * 1024
"""Bytes of such a burst, at least and at most."""

FILLED, PACKET = 0.94, 60_000
"""The part of a burst that a packet before segmentation fills, at most, and its bytes, at most. Each packet takes
a timer, interrupts and the waking of threads, which Linux charges to whichever rank computes, as no network card
would (docs/cluster.md has figures); so packets are as large as the link's time allows. A token bucket divides what
is larger than its burst into packets of 1500 bytes, which is far worse; a burst counts the headers, too."""

QUEUE = 32 * 1024 * 1024
"""Bytes that wait at a link before packets are dropped; a drop would cost a retransmission timer."""

_EMPTY = re.compile(r"tbf.*?backlog 0b ", re.DOTALL)


def rate_command(device: str, rate: float, verb: str = "add") -> list[str]:
    """Arguments of ``tc`` that give one end of a link its rate in bytes/s (``verb="change"``: another one)."""
    shape = ["rate", f"{round(rate * 8)}bit", "burst", str(burst(rate)), "limit", str(QUEUE)]
    return ["qdisc", verb, "dev", device, "root", "handle", "1:", "tbf", *shape]


def packet_command(device: str, rate: float) -> list[str]:
    """Arguments of ``ip`` that give packets at one end of a link their size (:func:`packet`)."""
    return ["link", "set", "dev", device, "gso_max_size", str(packet(rate))]


def burst(rate: float) -> int:
    """Bytes that a link of ``rate`` bytes/s may send at once."""
    return int(min(max(BURST * rate, SMALLEST), LARGEST))


def packet(rate: float) -> int:
    """Bytes of a packet before segmentation where no link is slower than ``rate`` bytes/s, at most."""
    return min(int(FILLED * burst(rate)), PACKET)


def link_commands(device: str, rate: float, latency: float = 0.0) -> list[list[str]]:
    """Arguments of ``tc`` that give one end of a link its rate in bytes/s and its latency in seconds."""
    microseconds = round(latency * 1e6)
    found = [rate_command(device, rate)]
    if microseconds:
        delay = ["netem", "delay", f"{microseconds}us", "limit", str(QUEUE // 1500)]
        found.append(["qdisc", "add", "dev", device, "parent", "1:1", "handle", "10:", *delay])
    return found


def idle(shown: str) -> bool:
    """Whether nothing waits at an end of a link, of which ``tc -s qdisc show`` has ``shown`` this."""
    return _EMPTY.search(shown) is not None
