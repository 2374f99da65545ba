"""The built-in harness in a real daemon: its socket, its MCP server, its turns; and the document of its protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import sqlite3
import stat
import subprocess
import unittest
from typing import Any

import jsonschema
from mcp.client.client import Client

from hivebash.loose_ends import TOOLS
from tests.daemon import (
    MODERN,
    REVISIONS,
    DaemonCase,
    Reply,
    alive,
    asynchronous,
    eventually,
    head,
    message,
    read_reply,
    rpc_headers,
)
from tests.daemon import SharedDaemonCase as Shared

PROTOCOL = pathlib.Path(__file__).parent.parent / "docs" / "harness-protocol.md"
SCHEMAS = {tool.name: tool.output_schema for tool in TOOLS}


class HyperhiveMixin:
    """What an agent does at its harness."""

    port: int
    state: str

    async def ask(self, tool: str, arguments: dict[str, Any] | None = None, revision: str = MODERN) -> Any:
        """A tool's result."""
        params = {"name": tool, "arguments": arguments or {}}
        headers = rpc_headers(revision, "tools/call", params)
        reply = await self.request("POST", "/hyperhive/mcp", message(revision, "tools/call", params), **headers)  # type: ignore[attr-defined]
        if reply.status != 200:
            raise AssertionError(reply)
        return reply.result

    async def loose_ends(self) -> Any:
        result = await self.ask("get_loose_ends")
        jsonschema.validate(result["structuredContent"], SCHEMAS["get_loose_ends"])
        return result["structuredContent"]["loose_ends"]

    async def at_socket(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        reader, writer = await asyncio.open_unix_connection(f"{self.state}/agent.sock")
        try:
            writer.write(head(method, path, body, headers) + body)
            return await read_reply(reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def until(condition: Any) -> Any:
    """The first true value of a coroutine function, asked again and again until a deadline."""
    async with asyncio.timeout(30):
        while not (value := await condition()):
            await asyncio.sleep(0.01)
        return value


class LooseEndTests(HyperhiveMixin, Shared):
    """On a daemon without an agent socket."""

    @asynchronous
    async def test_round(self) -> None:
        """A task that goes on is a loose end, then its end is, under the same id; looking at it clears it."""
        await self.serve()
        go = f"{self.root}/round"
        task = await self.run_task(f"until [ -e {go} ]; do sleep 0.05; done; echo x", wait_seconds=0)

        async def found() -> Any:
            return [end for end in await self.loose_ends() if end["key"] == task["id"]]

        (first,) = await until(found)
        self.assertEqual((first["kind"], first["state"]), ("todo", "running"))
        pathlib.Path(go).touch()

        async def done() -> Any:
            return [end for end in await found() if end["state"] == "done"]

        (second,) = await until(done)
        self.assertEqual(second["id"], first["id"])
        self.assertEqual(second["summary"], f"{task['id']}: done, exit code 0")
        self.assertIn(f"Read({task['stdout_path']})", second["detail"])
        self.assertRegex(second["since"], r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00\Z")
        await self.status(task["id"])

        async def cleared() -> bool:
            return not await found()

        await until(cleared)

    @asynchronous
    async def test_official_client(self) -> None:
        """The official client lists and calls the tools in both eras; schemas are short and hold."""
        await self.serve()
        task = await self.run_task("false", wait_seconds=0)

        async def told() -> bool:
            return any(end["key"] == task["id"] and end["state"] == "done" for end in await self.loose_ends())

        await until(told)
        for mode in ("legacy", "auto"):
            async with Client(f"http://127.0.0.1:{self.port}/hyperhive/mcp", mode=mode) as client:
                self.assertEqual(client.server_info.name, "hyperhive")
                tools = (await client.list_tools()).tools
                self.assertEqual([tool.name for tool in tools], ["get_loose_ends", "cancel_loose_end"])
                self.assertLess(sum(len(str(tool.description).split()) for tool in tools), 40)
                result = await client.call_tool("get_loose_ends", {})
                self.assertIn(f"{task['id']}: done, exit code 1", result.content[0].text)
        (number,) = [end["id"] for end in await self.loose_ends() if end["key"] == task["id"]]
        answer = await self.ask("cancel_loose_end", {"kind": "todo", "id": number})
        jsonschema.validate(answer["structuredContent"], SCHEMAS["cancel_loose_end"])
        self.assertFalse(answer["isError"])
        again = await self.ask("cancel_loose_end", {"kind": "todo", "id": str(number)})
        self.assertTrue(again["isError"])
        self.assertIn(f"todo {number}", again["content"][0]["text"])
        self.assertNotIn(task["id"], [end["key"] for end in await self.loose_ends()])

    @asynchronous
    async def test_refusals(self) -> None:
        """Bad arguments get one sentence that names them, in every revision."""
        await self.serve()
        for tool, arguments, words in [
            ("get_loose_ends", {"all": True}, "all"),
            ("cancel_loose_end", {}, "kind"),
            ("cancel_loose_end", {"kind": "todo"}, "id"),
            ("cancel_loose_end", {"kind": "message", "id": 1}, "kind"),
            ("cancel_loose_end", {"kind": "todo", "id": 1.5}, "1.5"),
            ("cancel_loose_end", {"kind": "todo", "id": True}, "true"),
            ("cancel_loose_end", {"kind": "todo", "id": -1}, "-1"),
            ("cancel_loose_end", {"kind": "todo", "id": "1e300"}, "1e300"),
            ("cancel_loose_end", {"kind": "todo", "id": 1, "x": 2}, "x"),
        ]:
            for revision in REVISIONS:
                result = await self.ask(tool, arguments, revision)
                self.assertTrue(result["isError"], arguments)
                self.assertIn(words, result["content"][0]["text"].replace("True", "true"))

    @asynchronous
    async def test_socket(self) -> None:
        """The protocol: new and known keys, removal, and a sentence for what is bad; the socket is its owner's."""
        await self.serve()
        body = json.dumps({"summary": "s", "detail": "d", "state": "running"}).encode()
        new = await self.at_socket("PUT", "/todos/bash/some", body)
        known = await self.at_socket("PUT", "/todos/bash/some", body)
        self.assertEqual((new.status, known.status, new.json), (201, 200, known.json))
        self.assertEqual([end["id"] for end in await self.loose_ends() if end["key"] == "some"], [new.json["id"]])
        self.assertEqual((await self.at_socket("DELETE", "/todos/bash/some")).status, 204)
        self.assertEqual((await self.at_socket("DELETE", "/todos/bash/some")).status, 404)
        for path, text, status in [
            ("/todos/bash/some", b"{", 400),
            ("/todos/bash/some", b"[]", 400),
            ("/todos/bash/some", b"[" * 100_000, 400),
            ("/todos/bash/some", b'{"summary": "s", "detail": "d"}', 400),
            ("/todos/bash/some", b'{"summary": "s", "detail": "d", "state": "odd"}', 400),
            ("/todos/bash/some", b'{"summary": "\\ud800", "detail": "d", "state": "done"}', 400),
            ("/todos/bash/Some", body, 400),
            ("/todos/bash/some", b'"' + b"x" * 5_000_000 + b'"', 413),
            ("/todos/mail/some", body, 404),
            ("/", body, 404),
        ]:
            reply = await self.at_socket("PUT", path, text)
            self.assertEqual(reply.status, status, (path, text[:80]))
            self.assertTrue(reply.body)
        self.assertEqual((await self.at_socket("GET", "/todos/bash/some")).status, 405)
        mode = os.stat(f"{self.state}/agent.sock").st_mode
        self.assertEqual((stat.S_ISSOCK(mode), mode & 0o777), (True, 0o600))
        for name in ("loose-ends.sqlite", "hivebash.sqlite"):
            self.assertEqual(os.stat(f"{self.state}/{name}").st_mode & 0o777, 0o600)

    @asynchronous
    async def test_examples(self) -> None:
        """The examples of the protocol's document give what it says."""
        if shutil.which("curl") is None:
            raise unittest.SkipTest("there is no curl")
        await self.serve()
        blocks = re.findall(r"```sh\n(.*?)```", PROTOCOL.read_text(), re.DOTALL)
        self.assertGreater(len(blocks), 3)
        script = "\n".join(re.sub(r"^#.*\n", "", block, flags=re.MULTILINE) for block in blocks)
        expected = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("# ")]
        done = await asyncio.create_subprocess_exec(
            *("bash", "-euc", script), stdout=subprocess.PIPE, env={**os.environ, "STATE_DIR": self.state}
        )
        output, _ = await done.communicate()
        self.assertEqual(done.returncode, 0)
        # A number is what the ledger makes it, and some answers do not end their line.
        lines = [
            re.sub(r'"id": \d+', '"id": 1', line) for line in re.sub(r"\}(?=\{|\d)", "}\n", output.decode()).split("\n")
        ]
        self.assertEqual([line for line in lines if line], expected)


class TurnTests(HyperhiveMixin, DaemonCase):
    """--on-todo, and what survives."""

    @asynchronous
    async def test_turns(self) -> None:
        """An end runs the command, with all loose ends on its standard input; a task that goes on does not."""
        turns = pathlib.Path(self.root, "turns")
        await self.start("--on-todo", f"cat >> {turns}; echo >> {turns}; echo noise; exit 3")
        task = await self.run_task("sleep 300", wait_seconds=0)

        async def listed() -> Any:
            return await self.loose_ends()

        await until(listed)
        other = await self.run_task("true", wait_seconds=0)
        await eventually(lambda: turns.exists() and turns.read_text().endswith("\n"))
        (told,) = map(json.loads, turns.read_text().splitlines())
        self.assertEqual([(end["key"], end["state"]) for end in told], [(task["id"], "running"), (other["id"], "done")])
        await self.call("kill", {"id": task["id"]})
        await eventually(lambda: len(turns.read_text().splitlines()) == 2)
        await eventually(lambda: self.log.read_text().count("a turn failed: exit code 3") == 2)
        self.assertNotIn("noise", self.log.read_text())

    @asynchronous
    async def test_ended_with_the_daemon(self) -> None:
        """A turn ends with the daemon, all of it, and the next daemon begins it again; so after a crash."""
        pids = pathlib.Path(self.root, "pids")
        options = ("--on-todo", f"trap '' TERM; setsid sleep 300 & echo $$ $! >> {pids}; wait", "--kill-grace", "0.5")
        daemon = await self.start(*options)
        await self.run_task("true", wait_seconds=0)

        def turns(count: int) -> list[int]:
            text = pids.read_text() if pids.exists() else ""
            return [int(pid) for pid in text.split()] if text.count("\n") == count else []

        first = await eventually(lambda: turns(1))
        self.assertLess(await self.stop(daemon), 2.5)
        self.assertFalse(any(map(alive, first)))
        daemon = await self.start(*options)
        second = (await eventually(lambda: turns(2)))[2:]
        self.assertTrue(all(map(alive, second)))
        await self.stop(daemon, signal.SIGKILL)
        await self.start(*options)
        third = (await eventually(lambda: turns(3)))[4:]
        self.assertFalse(any(map(alive, second)))
        self.assertTrue(all(map(alive, third)))

    @asynchronous
    async def test_crash(self) -> None:
        """Loose ends survive a crash, and what ran then becomes one."""
        daemon = await self.start()
        done = await self.run_task("true", wait_seconds=0)
        ran = await self.run_task("sleep 300", wait_seconds=0)

        async def states() -> dict[str, str]:
            return {end["key"]: end["state"] for end in await self.loose_ends()}

        async def before() -> bool:
            return await states() == {done["id"]: "done", ran["id"]: "running"}

        await until(before)
        await self.stop(daemon, signal.SIGKILL)
        await self.start()

        async def after() -> bool:
            return await states() == {done["id"]: "done", ran["id"]: "interrupted"}

        await until(after)
        with contextlib.closing(sqlite3.connect(f"{self.state}/hivebash.sqlite")) as database:
            await eventually(lambda: not database.execute("SELECT * FROM notice WHERE phase != 'sent'").fetchall())

    @asynchronous
    async def test_only_when_it_runs(self) -> None:
        """With a harness of the agent's own there is no other."""
        await self.start("--agent-socket", f"{self.root}/other.sock")
        reply = await self.request("POST", "/hyperhive/mcp", b"{}")
        self.assertEqual(reply.status, 404)
        self.assertFalse(os.path.exists(f"{self.state}/agent.sock"))
        self.assertFalse(os.path.exists(f"{self.state}/loose-ends.sqlite"))
