"""Measures a daemon of its own: the round trip of a short command, and the price of much output.

    python bench/measure.py [COUNT]

Prints medians in milliseconds, of COUNT calls each, taken by turns so that the machine's moods hit all alike:

floor    posix_spawn of ``bash -c true`` and waitpid, from a program as large as the daemon
run      ``run("true")`` over a kept connection, from the request's first byte to the answer's last, for each era
output   the daemon's CPU seconds while a task writes 2 GB
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import mcp  # noqa: F401 - for the size of this program

ERAS = {"2025-11-25": {}, "2026-07-28": {"Mcp-Method": "tools/call", "Mcp-Name": "run"}}
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "0"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


@contextlib.contextmanager
def daemon() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A daemon on a free port."""
    with tempfile.TemporaryDirectory() as state:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        twistd = os.path.join(os.path.dirname(sys.executable), "twistd")
        command = [twistd, "--nodaemon", "--pidfile=", "hivebash", "--state-dir", state]
        process = subprocess.Popen([*command, "--listen", f"tcp:{port}:interface=127.0.0.1"], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit("the daemon did not start")
                time.sleep(0.05)
            yield process, port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def caller(port: int, era: str) -> Callable[[dict[str, object]], dict[str, object]]:
    """Calls run on one kept connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": era,
        **ERAS[era],
    }

    def call(arguments: dict[str, object]) -> dict[str, object]:
        params: dict[str, object] = {"name": "run", "arguments": arguments}
        if era == "2026-07-28":
            params["_meta"] = META
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        connection.request("POST", "/mcp", body, headers)
        answer = json.load(connection.getresponse())
        return answer["result"]["structuredContent"]

    return call


def floor() -> None:
    pid = os.posix_spawn("/bin/bash", ["bash", "-c", "true"], os.environ, setsid=True)
    os.waitpid(pid, 0)


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(count: int) -> None:
    with daemon() as (process, port):
        calls = {era: caller(port, era) for era in ERAS}
        times: dict[str, list[float]] = {"floor": [], **{era: [] for era in ERAS}}
        for turn in range(count + 20):
            for name, spent in times.items():
                begun = time.perf_counter()
                if name == "floor":
                    floor()
                elif calls[name]({"cmd": "true"})["status"] != "done":
                    raise SystemExit("a run did not end")
                if turn >= 20:
                    spent.append((time.perf_counter() - begun) * 1000)
        lowest = statistics.median(times["floor"])
        for name, spent in times.items():
            middle = statistics.median(spent)
            late = sorted(spent)[len(spent) * 95 // 100]
            print(f"{name:12} {middle:6.2f} ms  {middle / lowest:.2f} x floor  (95th percentile {late:.2f})")
        before = cpu_seconds(process.pid)
        task = calls["2025-11-25"]({"cmd": "head -c 2000000000 /dev/zero", "wait_seconds": 30})
        print(
            f"output       {cpu_seconds(process.pid) - before:.2f} s CPU of the daemon for {task['stdout_bytes']} bytes"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
