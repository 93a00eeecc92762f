"""What workers run in test_emulated_cluster.py, and what the test's own processes run inside the namespaces."""

from __future__ import annotations

import os
from typing import Any

RECEIVE = """
import socket, time
listener = socket.create_server(("", 5000))
print("listening", flush=True)
peer, _ = listener.accept()
count, start = 0, None
while data := peer.recv(1 << 16):
    start = start or time.monotonic()
    count += len(data)
print(count / (time.monotonic() - start))
"""

SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000))
for _ in range(40):
    peer.sendall(bytes(1 << 16))
"""

SEND_LATER = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000))
def packets():
    return int(open("/sys/class/net/eth0/statistics/tx_packets").read())
for turn in ("sent", None):
    sys.stdin.readline()
    before = packets()
    for _ in range(40):
        peer.sendall(bytes(1 << 16))
    if turn is None:
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
    print(turn or packets() - before, flush=True)
"""

BUSY = """
import time
start, used = time.monotonic(), time.process_time()
while time.monotonic() < start + 1:
    pass
print(time.process_time() - used)
"""

DRIVER = """
import subprocess, sys, time
from emulated.cluster import EmulatedCluster
from emulated.spec import ClusterSpec
with EmulatedCluster(ClusterSpec.of((1, 1), cores=0.5, rate="100Mbit/s")) as cluster:
    process = cluster.start(0, [sys.executable, "-c", "import time; time.sleep(600)"])
    print(cluster.prefix, process.pid, flush=True)
    time.sleep(600)
"""


def whoami(context: Any, *, fail: int) -> list[int]:
    """The rank, and the pid on both sides of a meeting; rank ``fail`` raises instead."""
    before = os.getpid()
    context.throttle(True)
    if context.rank == fail:
        raise ValueError("asked to")
    context.throttle(False)
    return [context.rank, context.world, before]
