"""A real daemon, started by twistd, and ways to speak to it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, ClassVar

import attrs
from mcp.client.client import Client
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

TWISTD = os.path.join(os.path.dirname(sys.executable), "twistd")
DEADLINE = 30.0
HANDSHAKE_REVISIONS = ("2025-03-26", "2025-06-18", "2025-11-25")
MODERN = "2026-07-28"
REVISIONS = (*HANDSHAKE_REVISIONS, MODERN)


def asynchronous(test: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], Deferred[None]]:
    """Run a test in one asyncio task, as the official client wants it."""

    @functools.wraps(test)
    def run(case: Any) -> Deferred[None]:
        return Deferred.fromFuture(asyncio.ensure_future(test(case)))

    return run


async def eventually(predicate: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """The first true value of ``predicate``, looked at every 10 ms; fails when the time is over."""
    deadline = time.monotonic() + seconds
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError("it did not come about in time")
        await asyncio.sleep(0.01)
    return value


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def remove(path: str) -> None:
    subprocess.run(["rm", "-rf", path], check=True)


def end(daemon: subprocess.Popen[bytes]) -> None:
    """End a daemon as an operator would; one that does not end is a failure."""
    if daemon.poll() is None:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(15)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
            raise


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@attrs.define
class Reply:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def result(self) -> Any:
        return self.json["result"]


class DaemonCase(TestCase):
    """Starts daemons on a state directory of the test's own, and leaves none behind."""

    timeout = 60
    options: tuple[str, ...] = ()

    def setUp(self) -> None:
        # Short, since the path of a unix socket has to be.
        self.root = tempfile.mkdtemp(prefix="hivebash-test-", dir="/tmp")
        self.addCleanup(remove, self.root)
        self.state = os.path.join(self.root, "state")
        self.port = free_port()
        self.log = pathlib.Path(self.root, "log")
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.addCleanup(lambda: [end(daemon) for daemon in self.daemons])

    def arguments(self, *options: str) -> list[str]:
        listen = () if "--listen" in options else ("--listen", f"tcp:{self.port}:interface=127.0.0.1")
        return [TWISTD, "--nodaemon", "--pidfile=", "hivebash", "--state-dir", self.state, *listen, *options]

    async def start(self, *options: str, **more: Any) -> subprocess.Popen[bytes]:
        """A daemon that answers; its log in ``self.log``."""
        more.setdefault("cwd", self.root)
        with self.log.open("ab") as log:
            daemon = subprocess.Popen(
                self.arguments(*options, *self.options), stdout=log, stderr=log, stdin=subprocess.DEVNULL, **more
            )
        self.daemons.append(daemon)
        await self.ready(daemon)
        return daemon

    async def ready(self, daemon: subprocess.Popen[bytes] | None = None) -> None:
        deadline = time.monotonic() + DEADLINE
        while True:
            with contextlib.suppress(OSError):
                if (await self.get("/healthz")).status == 200:
                    return
            if time.monotonic() > deadline or (daemon is not None and daemon.poll() is not None):
                raise AssertionError(f"the daemon did not start: {self.log.read_text()}")
            await asyncio.sleep(0.02)

    async def stop(self, daemon: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> float:
        """End a daemon by a signal; how many seconds it took."""
        begun = time.monotonic()
        daemon.send_signal(number)
        await eventually(lambda: daemon.poll() is not None)
        return time.monotonic() - begun

    def refused(self, *options: str, **more: Any) -> str:
        """What a daemon that cannot start says: one line on stderr, nothing on stdout, exit status 1."""
        more.setdefault("cwd", self.root)
        done = subprocess.run(self.arguments(*options), capture_output=True, timeout=30, check=False, **more)
        self.assertEqual((done.returncode, done.stdout), (1, b""), done)
        line = done.stderr.decode()
        self.assertTrue(line.startswith("hivebash: "), line)
        self.assertEqual(line.count("\n"), 1, line)
        return line

    # The official client.

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    @contextlib.asynccontextmanager
    async def client(self, mode: str = "auto") -> AsyncIterator[Client]:
        async with Client(self.url, mode=mode) as client:
            yield client

    # Raw requests.

    async def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        """One request on a connection of its own; header names are written with ``_`` for ``-``."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(head(method, path, body, headers) + body)
            return await read_reply(reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.request("GET", path, **headers)

    async def rpc(self, revision: str, method: str, params: dict[str, Any] | None = None, **headers: str) -> Reply:
        """One JSON-RPC request in the words of a revision."""
        return await self.request(
            "POST", "/mcp", message(revision, method, params), **rpc_headers(revision, method, params), **headers
        )

    async def call(self, tool: str, arguments: dict[str, Any], revision: str = MODERN) -> Any:
        """A tool's result."""
        reply = await self.rpc(revision, "tools/call", {"name": tool, "arguments": arguments})
        self.assertEqual(reply.status, 200, reply)
        return reply.result

    async def run_task(self, cmd: str, **arguments: Any) -> Any:
        """The status object that run answers with."""
        return (await self.call("run", {"cmd": cmd, **arguments}))["structuredContent"]

    async def status(self, task_id: str, wait: float = 0) -> Any:
        return (await self.call("status", {"id": task_id, "wait_seconds": wait}))["structuredContent"]

    def files(self, task_id: str) -> Iterator[pathlib.Path]:
        yield from pathlib.Path(self.state, "harness", "bash-tasks").glob(f"{task_id}.*")


class SharedDaemonCase(DaemonCase):
    """Tests that need no daemon of their own: the first starts one for all of them, and it ends with the run."""

    shared: ClassVar[dict[str, Any]] = {}

    async def serve(self) -> subprocess.Popen[bytes]:
        """The daemon; ``self`` then speaks to it."""
        if not self.shared:
            root = tempfile.mkdtemp(prefix="hivebash-test-", dir="/tmp")
            self.state, self.log = os.path.join(root, "state"), pathlib.Path(root, "log")
            daemon = await self.start("--kill-grace", "0.5", cwd=root)
            self.daemons.remove(daemon)
            atexit.register(remove, root)
            atexit.register(end, daemon)
            self.shared.update(daemon=daemon, root=root, state=self.state, log=self.log, port=self.port)
        self.root, self.state, self.log = self.shared["root"], self.shared["state"], self.shared["log"]
        self.port = self.shared["port"]
        return self.shared["daemon"]


def head(method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = {"Host": "localhost", "Content-Length": str(len(body)), "Connection": "close"}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode("latin-1")


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """The answer on a connection that closes after it."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    body = await reader.read()
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(_chunks(body))
    return Reply(int(lines[0].split()[1]), headers, body)


def _chunks(data: bytes) -> Iterator[bytes]:
    while data:
        size, _, data = data.partition(b"\r\n")
        yield data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]


def message(revision: str, method: str, params: dict[str, Any] | None, request_id: int = 1) -> bytes:
    params = dict(params or {})
    if revision == MODERN:
        params["_meta"] = {
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "0"},
            "io.modelcontextprotocol/clientCapabilities": {},
            **params.get("_meta", {}),
        }
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}).encode()


def rpc_headers(revision: str, method: str, params: dict[str, Any] | None = None) -> dict[str, str]:
    headers = {
        "Content_Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP_Protocol_Version": revision,
    }
    if revision == MODERN:
        headers["Mcp_Method"] = method
        if method == "tools/call" and params:
            headers["Mcp_Name"] = params["name"]
    return headers
