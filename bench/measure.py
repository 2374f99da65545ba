"""Measures a daemon of its own: the round trip of a short command, and the price of much output.

    python bench/measure.py [COUNT]

Prints medians in milliseconds, of COUNT calls each, taken by turns so that the machine's moods hit all alike:

floor    posix_spawn of ``bash -c true`` and waitpid, from a program as large as the daemon
run      ``run("true")`` over a kept connection, from the request's first byte to the answer's last, for each era
todo     from a task's last act until the harness, a program of its own, has the todo
output   the daemon's CPU seconds while a task writes 2 GB
idle     the daemon's CPU seconds in 5 seconds without anything to do, after all this
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
from typing import IO

import mcp  # noqa: F401 - for the size of this program

ERAS = {"2025-11-25": {}, "2026-07-28": {"Mcp-Method": "tools/call", "Mcp-Name": "run"}}
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "0"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


@contextlib.contextmanager
def daemon() -> Iterator[tuple[subprocess.Popen[bytes], int, IO[str]]]:
    """A daemon on a free port, and what its harness prints."""
    with tempfile.TemporaryDirectory() as state:
        agent_socket = os.path.join(state, "harness.sock")
        harness = subprocess.Popen(
            [sys.executable, "-c", HARNESS, agent_socket], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        twistd = os.path.join(os.path.dirname(sys.executable), "twistd")
        command = [twistd, "--nodaemon", "--pidfile=", "hivebash", "--state-dir", state, "--agent-socket", agent_socket]
        process = subprocess.Popen([*command, "--listen", f"tcp:{port}:interface=127.0.0.1"], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit("the daemon did not start")
                time.sleep(0.05)
            yield process, port, harness.stdout
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            harness.kill()
            harness.wait()


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


HARNESS = """
import http.server, json, socketserver, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_PUT(self):
        now = time.time()
        todo = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(now, self.path.rpartition("/")[2], todo["state"], flush=True)
        self.answer(200, b'{"id": 1}')

    def do_DELETE(self):
        self.answer(204, b"")

    def answer(self, status, body):
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

    def address_string(self):
        return "unix"

class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

Server(sys.argv[1], Handler).serve_forever()
"""
"""A harness that prints when it got which todo."""


def todo_times(call: Callable[[dict[str, object]], dict[str, object]], harness: IO[str], count: int) -> Iterator[float]:
    """Milliseconds from the time that a task prints as its last act until the harness has the end's todo."""
    for _ in range(count):
        task = call({"cmd": "sleep 0.05; echo $EPOCHREALTIME", "wait_seconds": 0})
        while (seen := harness.readline().split())[1:] != [task["id"], "done"]:
            pass
        with open(str(task["stdout_path"])) as output:
            yield (float(seen[0]) - float(output.read())) * 1000


def floor() -> None:
    pid = os.posix_spawn("/bin/bash", ["bash", "-c", "true"], os.environ, setsid=True)
    os.waitpid(pid, 0)


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(count: int) -> None:
    with daemon() as (process, port, harness):
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
        late = sorted(todo_times(calls["2025-11-25"], harness, count))
        print(f"todo         {statistics.median(late):6.2f} ms  (95th percentile {late[len(late) * 95 // 100]:.2f})")
        before = cpu_seconds(process.pid)
        task = calls["2025-11-25"]({"cmd": "head -c 2000000000 /dev/zero", "wait_seconds": 30})
        print(
            f"output       {cpu_seconds(process.pid) - before:.2f} s CPU of the daemon for {task['stdout_bytes']} bytes"
        )
        before = cpu_seconds(process.pid)
        time.sleep(5)
        print(f"idle         {cpu_seconds(process.pid) - before:.2f} s CPU of the daemon in 5 s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
