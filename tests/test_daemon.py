"""A real daemon, started by twistd, as its clients meet it."""

from __future__ import annotations

import asyncio
import os
import pathlib
import resource
import signal
import stat
import subprocess
import time
from typing import Any

from mcp.shared.exceptions import MCPError

from hivebash import limits, wording
from tests.daemon import (
    HANDSHAKE_REVISIONS,
    MODERN,
    REVISIONS,
    DaemonCase,
    SharedDaemonCase,
    alive,
    asynchronous,
    eventually,
    head,
    message,
    read_reply,
    rpc_headers,
)

FIELDS = {
    "id",
    "status",
    "exit_code",
    "signal",
    "reason",
    "duration_secs",
    "stdout_tail",
    "stderr_tail",
    "stdout_path",
    "stderr_path",
    "stdout_bytes",
    "stderr_bytes",
    "processes",
    "cmd",
}


class ClientTests(SharedDaemonCase):
    """The official client, of both eras."""

    async def each_mode(self, test: Any) -> None:
        await self.serve()
        for mode in ("legacy", "auto"):
            async with self.client(mode) as client:
                await test(client)

    @asynchronous
    async def test_introduction(self) -> None:
        """The server is named bash, says in few words what it is for, and describes its tools fully."""

        async def test(client: Any) -> None:
            self.assertEqual(client.server_info.name, "bash")
            self.assertEqual(client.instructions, wording.INSTRUCTIONS)
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            self.assertEqual(list(tools), ["run", "status", "kill"])
            self.assertEqual(
                set(tools["run"].input_schema["properties"]), {"cmd", "timeout_secs", "wait_seconds", "name"}
            )
            self.assertEqual(set(tools["status"].input_schema["properties"]), {"id", "wait_seconds"})
            self.assertEqual(set(tools["kill"].input_schema["properties"]), {"id", "force"})
            for tool in tools.values():
                self.assertEqual(tool.output_schema["type"], "object")
                self.assertTrue(tool.description)
            self.assertTrue(tools["status"].annotations.read_only_hint)
            self.assertTrue(tools["run"].annotations.destructive_hint)
            self.assertTrue(tools["kill"].annotations.destructive_hint)

        await self.each_mode(test)

    @asynchronous
    async def test_round(self) -> None:
        """Run, status and kill answer in text and in structures that their own schemas admit."""

        async def test(client: Any) -> None:
            done = await client.call_tool("run", {"cmd": "echo out; echo err >&2; exit 3", "wait_seconds": "10"})
            self.assertFalse(done.is_error)
            self.assertEqual(set(done.structured_content), FIELDS)
            self.assertEqual(
                {name: done.structured_content[name] for name in ("status", "exit_code", "signal", "reason")},
                {"status": "done", "exit_code": 3, "signal": None, "reason": None},
            )
            self.assertEqual(done.structured_content["stdout_tail"], "out\n")
            self.assertEqual(pathlib.Path(done.structured_content["stderr_path"]).read_text(), "err\n")
            self.assertIn("exit code 3", done.content[0].text)
            started = await client.call_tool("run", {"cmd": "sleep 300", "wait_seconds": 0})
            task_id = started.structured_content["id"]
            self.assertTrue(started.content[0].text.startswith(f"task started: id={task_id}"))
            self.assertEqual(started.structured_content["status"], "running")
            table = await client.call_tool("status", {})
            rows = {row["id"]: row for row in table.structured_content["tasks"]}
            self.assertEqual(rows[task_id]["status"], "running")
            self.assertNotIn("stdout_tail", rows[task_id])
            self.assertIn(task_id, table.content[0].text)
            killed = await client.call_tool("kill", {"id": task_id, "force": True})
            self.assertEqual(
                (killed.structured_content["signal"], killed.structured_content["processes"]), ("SIGKILL", 1)
            )
            ended = await client.call_tool("status", {"id": task_id, "wait_seconds": 10})
            self.assertEqual(
                (ended.structured_content["status"], ended.structured_content["signal"]), ("killed", "SIGKILL")
            )

        await self.each_mode(test)

    @asynchronous
    async def test_progress(self) -> None:
        """During a wait there is a sign of life each second for a client that asks for it."""

        async def test(client: Any) -> None:
            signs: list[float] = []

            async def sign(progress: float, total: float | None, text: str | None) -> None:
                signs.append(progress)

            result = await client.call_tool("run", {"cmd": "sleep 2.3", "wait_seconds": 10}, progress_callback=sign)
            self.assertEqual(result.structured_content["status"], "done")
            self.assertEqual(signs, [1.0, 2.0])

        await self.each_mode(test)

    @asynchronous
    async def test_refusals(self) -> None:
        """A request that cannot be carried out is a tool result that says so, and the next one is served."""

        async def test(client: Any) -> None:
            busy = await client.call_tool("run", {"cmd": "sleep 300", "name": "busy", "wait_seconds": 0})
            self.assertFalse(busy.is_error)
            for tool, arguments, word in (
                ("run", {}, "cmd"),
                ("run", {"cmd": ""}, "blank"),
                ("run", {"cmd": " \n\t"}, "blank"),
                ("run", {"cmd": "a\0b"}, "NUL"),
                ("run", {"cmd": ["ls"]}, "cmd"),
                ("run", {"cmd": "true", "shell": "zsh"}, "shell"),
                ("run", {"cmd": "true", "wait_seconds": -1}, "wait_seconds"),
                ("run", {"cmd": "true", "wait_seconds": ""}, "wait_seconds"),
                ("run", {"cmd": "true", "timeout_secs": "soon"}, "timeout_secs"),
                ("run", {"cmd": "true", "timeout_secs": True}, "timeout_secs"),
                ("run", {"cmd": "true", "name": "No Name"}, "name"),
                ("run", {"cmd": "true", "name": "x" * 64}, "name"),
                ("run", {"cmd": "true", "name": "busy"}, "busy"),
                ("status", {"id": "never-seen"}, "never-seen"),
                ("status", {"id": "../x"}, "../x"),
                ("status", {"task": "busy"}, "task"),
                ("kill", {}, "id"),
                ("kill", {"id": "never-seen"}, "never-seen"),
                ("kill", {"id": "busy", "force": "yes"}, "force"),
            ):
                result = await client.call_tool(tool, arguments)
                self.assertTrue(result.is_error, (tool, arguments))
                self.assertIn(word, result.content[0].text)
                self.assertLess(len(result.content[0].text), 250)
            with self.assertRaises(MCPError):
                await client.call_tool("no-such-tool", {})
            await client.call_tool("kill", {"id": "busy", "force": True})
            ended = await client.call_tool("status", {"id": "busy", "wait_seconds": 10})
            self.assertEqual(ended.structured_content["status"], "killed")

        await self.each_mode(test)

    @asynchronous
    async def test_restart(self) -> None:
        """A client that was connected before a restart goes on after it as if nothing had been."""
        daemon = await self.start()
        async with self.client("legacy") as legacy, self.client("auto") as modern:
            for client in (legacy, modern):
                await client.call_tool("run", {"cmd": "true"})
            for number in (signal.SIGTERM, signal.SIGKILL):
                await self.stop(daemon, number)
                daemon = await self.start()
                for client in (legacy, modern):
                    result = await client.call_tool("run", {"cmd": "echo again"})
                    self.assertEqual(result.structured_content["stdout_tail"], "again\n")

    @asynchronous
    async def test_many(self) -> None:
        """200 tasks at once are each answered with their own end, in both eras."""

        async def test(client: Any) -> None:
            results = await asyncio.gather(
                *(client.call_tool("run", {"cmd": f"echo {n}; exit {n}", "wait_seconds": 30}) for n in range(200))
            )
            for number, result in enumerate(results):
                self.assertEqual(
                    (result.structured_content["exit_code"], result.structured_content["stdout_tail"]),
                    (number, f"{number}\n"),
                )

        await self.each_mode(test)


class WireTests(SharedDaemonCase):
    """Raw requests."""

    @asynchronous
    async def test_revisions(self) -> None:
        """Each of the four revisions is spoken, without any session."""
        await self.serve()
        for revision in HANDSHAKE_REVISIONS:
            params = {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}
            reply = await self.rpc(revision, "initialize", params)
            self.assertEqual(reply.result["protocolVersion"], revision)
            self.assertEqual(reply.result["serverInfo"]["name"], "bash")
            self.assertNotIn("mcp-session-id", reply.headers)
        discovered = await self.rpc(MODERN, "server/discover")
        self.assertIn(MODERN, discovered.result["supportedVersions"])
        for revision in REVISIONS:
            listed = await self.rpc(revision, "tools/list")
            self.assertEqual([tool["name"] for tool in listed.result["tools"]], ["run", "status", "kill"])
            result = await self.call("run", {"cmd": "echo hi"}, revision)
            self.assertEqual(result["structuredContent"]["stdout_tail"], "hi\n")

    @asynchronous
    async def test_any_session(self) -> None:
        """A request with any session id is answered as usual."""
        await self.serve()
        for revision in REVISIONS:
            reply = await self.rpc(revision, "tools/list", Mcp_Session_Id="from-before-the-restart")
            self.assertEqual(len(reply.result["tools"]), 3)

    @asynchronous
    async def test_methods(self) -> None:
        """GET and DELETE of the endpoint are 405 with Allow, other paths 404."""
        await self.serve()
        for method in ("GET", "DELETE", "PUT", "HEAD"):
            reply = await self.request(method, "/mcp")
            self.assertEqual((reply.status, reply.headers["allow"]), (405, "POST"))
        self.assertEqual((await self.get("/nothing")).status, 404)
        self.assertEqual((await self.get("/%ff")).status, 400)
        self.assertNotIn("Traceback", self.log.read_text())

    @asynchronous
    async def test_broken_bodies(self) -> None:
        """What is no JSON-RPC message gets an error, never a 500, and the daemon goes on."""
        await self.serve()
        for revision in REVISIONS:
            headers = rpc_headers(revision, "tools/list")
            for body in (b"[]", b' [{"jsonrpc":"2.0","id":1,"method":"ping"}]'):
                reply = await self.request("POST", "/mcp", body, **headers)
                self.assertEqual((reply.status, reply.json["error"]["code"]), (400, -32600))
            for body in (b"", b"{", b"\xff\xfe", b"null", b'{"id": 1}', b"[" * 100_000, b'{"a":' * 50_000):
                reply = await self.request("POST", "/mcp", body, **headers)
                self.assertEqual(reply.status, 400, (revision, body[:20]))
        self.assertEqual((await self.get("/healthz")).status, 200)

    @asynchronous
    async def test_lone_surrogates(self) -> None:
        """Half a character in the command is refused by its name, and a whole one is taken."""
        await self.serve()
        for revision in REVISIONS:
            params = {"name": "run", "arguments": {"cmd": "echo HALF"}}
            for half in (rb"\ud800", rb"\uDC00x", rb"\ud83dx\ude00"):
                body = message(revision, "tools/call", params).replace(b"HALF", half)
                reply = await self.request("POST", "/mcp", body, **rpc_headers(revision, "tools/call", params))
                self.assertTrue(reply.result["isError"])
                self.assertIn("surrogate", reply.result["content"][0]["text"])
            for text, shown in ((rb"\ud83d\ude00", "😀\n"), (rb"'\\ud800'", "\\ud800\n")):
                body = message(revision, "tools/call", params).replace(b"HALF", text)
                reply = await self.request("POST", "/mcp", body, **rpc_headers(revision, "tools/call", params))
                self.assertEqual(reply.result["structuredContent"]["stdout_tail"], shown)

    @asynchronous
    async def test_foreign_names(self) -> None:
        """Every route checks Host and Origin."""
        await self.start("--allow-host", "agent.example")
        for path in ("/mcp", "/healthz", "/", "/nothing"):
            for method in ("GET", "POST"):
                self.assertEqual((await self.request(method, path, Host="evil.example")).status, 421)
                self.assertEqual((await self.request(method, path, Origin="http://evil.example")).status, 403)
        self.assertEqual((await self.get("/healthz", Host="agent.example", Origin="https://agent.example")).status, 200)

    @asynchronous
    async def test_health(self) -> None:
        """The health says how many tasks run and wait."""
        await self.start("--max-running", "1")
        await self.run_task("sleep 300", wait_seconds=0)
        await self.run_task("sleep 300", wait_seconds=0)
        health = (await self.get("/healthz")).json
        self.assertEqual((health["status"], health["running"], health["pending"]), ("ok", 1, 1))
        self.assertTrue(health["version"])

    @asynchronous
    async def test_long_body(self) -> None:
        """A body over the limit is refused, whether its length was told or not, and kept nowhere."""
        daemon = await self.serve()
        body = b"x" * (limits.REQUEST_BODY + 1)
        self.assertEqual((await self.request("POST", "/mcp", body, **rpc_headers(MODERN, "x"))).status, 413)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head("POST", "/mcp", b"", {"Content_Length": "", "Transfer_Encoding": "chunked"}))
        for _ in range(64):
            writer.write(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        self.assertEqual((await read_reply(reader)).status, 413)
        writer.close()
        peak = pathlib.Path(f"/proc/{daemon.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        self.assertLess(int(peak), 200_000)

    @asynchronous
    async def test_pipelined(self) -> None:
        """Requests on one kept connection are answered in their order."""
        await self.serve()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for number, close in ((1, "keep-alive"), (2, "close")):
            params = {"name": "run", "arguments": {"cmd": f"echo {number}"}}
            body = message(MODERN, "tools/call", params, number)
            writer.write(
                head("POST", "/mcp", body, {**rpc_headers(MODERN, "tools/call", params), "Connection": close}) + body
            )
        text = (await reader.read()).decode()
        self.assertLess(text.index('"id":1'), text.index('"id":2'))
        writer.close()


class WaitTests(SharedDaemonCase):
    """Waits that break off."""

    @asynchronous
    async def test_disconnect(self) -> None:
        """When the connection breaks during a wait the task goes on, in both eras, JSON and event stream."""
        await self.serve()
        for revision in REVISIONS:
            for meta in ({}, {"_meta": {"progressToken": 1}}):
                name = f"task-{revision}-{len(meta)}"
                arguments = {"cmd": "sleep 0.5; echo there", "name": name, "wait_seconds": 30}
                params = {"name": "run", "arguments": arguments, **meta}
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                body = message(revision, "tools/call", params)
                writer.write(head("POST", "/mcp", body, rpc_headers(revision, "tools/call", params)) + body)
                while True:
                    table = (await self.call("status", {}))["structuredContent"]["tasks"]
                    if any(row["id"] == name for row in table):
                        break
                writer.transport.abort()
                ended = await self.status(name, 10)
                self.assertEqual((ended["status"], ended["stdout_tail"]), ("done", "there\n"))
        self.assertNotIn("Traceback", self.log.read_text())
        self.assertNotIn("Unhandled", self.log.read_text())

    @asynchronous
    async def test_several(self) -> None:
        """Several clients wait for one task, and one that cancels does not disturb the others."""
        await self.serve()
        task = await self.run_task("sleep 1; exit 4", wait_seconds=0)
        async with self.client() as client:
            leaving = asyncio.ensure_future(client.call_tool("status", {"id": task["id"], "wait_seconds": 30}))
            staying = [asyncio.ensure_future(self.status(task["id"], 30)) for _ in range(5)]
            short = await self.status(task["id"], 0.1)
            self.assertEqual(short["status"], "running")
            leaving.cancel()
            for waiting in staying:
                self.assertEqual((await waiting)["exit_code"], 4)

    @asynchronous
    async def test_capped(self) -> None:
        """A wait of more than 30 seconds counts as 30, and the answer says so."""
        await self.serve()
        result = await self.call("run", {"cmd": "true", "wait_seconds": 31})
        self.assertIn("30", result["content"][0]["text"])
        result = await self.call("run", {"cmd": "true", "wait_seconds": 30})
        self.assertNotIn("30", result["content"][0]["text"])


class TaskTests(SharedDaemonCase):
    """What tasks are given, and what becomes of them."""

    @asynchronous
    async def test_surroundings(self) -> None:
        """A task is clean of how the daemon was started: signals, descriptors, private variables."""
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        self.addCleanup(os.close, writing)

        def harden() -> None:
            for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])

        daemon = await self.start(
            "--env", "GREETING=hello world", "--env", "HOME=",
            preexec_fn=harden, pass_fds=[reading, writing],
            env={**os.environ, "HIVEBASH_STATE_DIR": "/x", "HIVE_AGENT_SOCKET": "/x", "PAGER": "less", "KEPT": "1"},
        )  # fmt: skip
        task = await self.run_task(
            "ls -l /proc/self/fd; grep Sig /proc/self/status; pwd; env; ps -o pid=,pgid=,sid= $$", wait_seconds=20
        )
        text = pathlib.Path(task["stdout_path"]).read_text()
        descriptors = [line.split()[-3:] for line in text.splitlines() if " -> " in line]
        self.assertEqual([line[0] for line in descriptors if "/proc/" not in line[2]], ["0", "1", "2"])
        self.assertEqual([line[2] for line in descriptors[:3]], ["/dev/null", task["stdout_path"], task["stderr_path"]])
        masks = dict(line.split(":\t") for line in text.splitlines() if line.startswith("Sig"))
        # The C library sets its own two, 32 and 33, to be ignored in whatever it spawns.
        self.assertEqual(int(masks["SigIgn"], 16) & ~0x180000000, 0)
        self.assertEqual(int(masks["SigBlk"], 16), 0)
        variables = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        expected = {
            "GREETING": "hello world",
            "PAGER": "cat",
            "TERM": "dumb",
            "KEPT": "1",
            "HIVEBASH_TASK_ID": task["id"],
            "GIT_TERMINAL_PROMPT": "0",
            "DEBIAN_FRONTEND": "noninteractive",
        }
        self.assertEqual({name: variables.get(name) for name in expected}, expected)
        self.assertFalse({"HOME", "HIVEBASH_STATE_DIR", "HIVE_AGENT_SOCKET"} & set(variables))
        self.assertIn(f"\n{self.root}\n", text)
        pid, group, session = text.split()[-3:]
        self.assertEqual((pid, pid), (group, session))
        await self.stop(daemon)

    @asynchronous
    async def test_files(self) -> None:
        """Output files are private, as is everything the daemon keeps."""
        await self.start(umask=0)
        task = await self.run_task("echo x")
        for path in (self.state, f"{self.state}/harness/bash-tasks"):
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o700)
        for path in (task["stdout_path"], task["stderr_path"], f"{self.state}/hivebash.sqlite"):
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
        self.assertEqual(task["stdout_path"], f"{self.state}/harness/bash-tasks/{task['id']}.out")

    @asynchronous
    async def test_any_length(self) -> None:
        """A command reaches bash byte for byte, at any length up to the request's."""
        await self.serve()
        for length in (10, 131_000, 131_072, 1_000_000, limits.REQUEST_BODY - 2000):
            text = "ä" + "x'$ y " * (length // 6)
            task = await self.run_task(f"cat <<'END' | sha256sum\n{text}\nEND", wait_seconds=30)
            expected = subprocess.run(["sha256sum"], input=f"{text}\n".encode(), capture_output=True, check=True).stdout
            self.assertEqual(task["stdout_tail"], expected.decode())
        for cmd in ("-x", "+x", "--version"):
            self.assertEqual((await self.run_task(cmd))["exit_code"], 127)

    @asynchronous
    async def test_could_not_start(self) -> None:
        """Without a working directory a task is done with a reason, its answers are errors, and the daemon goes on."""
        workdir = os.path.join(self.root, "work")
        os.mkdir(workdir)
        await self.start("--workdir", workdir)
        os.rmdir(workdir)
        for result in (
            await self.call("run", {"cmd": "true", "name": "a"}),
            await self.call("status", {"id": "a"}),
        ):
            self.assertTrue(result["isError"])
            task = result["structuredContent"]
            self.assertEqual((task["status"], task["exit_code"], task["signal"]), ("done", None, None))
            self.assertIn(workdir, task["reason"])
            self.assertTrue(task["reason"].startswith("could not start: "))
        os.mkdir(workdir)
        self.assertEqual((await self.run_task("true", name="a"))["exit_code"], 0)

    @asynchronous
    async def test_time_limit(self) -> None:
        """A task that is out of time is ended with all its processes, also those that ignore SIGTERM."""
        await self.serve()
        cmd = "trap '' TERM; (trap '' TERM; setsid sleep 300) & echo $!; while :; do sleep 0.1; done"
        task = await self.run_task(cmd, timeout_secs=0.5, wait_seconds=20)
        self.assertEqual((task["status"], task["signal"]), ("timed_out", "SIGKILL"))
        self.assertIn("0.5", task["reason"])
        self.assertGreater(task["duration_secs"], 0.99)
        await self.gone(task["id"])

    async def gone(self, task_id: str) -> None:
        mark = f"HIVEBASH_TASK_ID={task_id}".encode()

        def left() -> list[str]:
            found = []
            for entry in pathlib.Path("/proc").glob("[0-9]*/environ"):
                try:
                    if mark in entry.read_bytes().split(b"\0") and alive(int(entry.parent.name)):
                        found.append(entry.parent.name)
                except OSError:
                    continue
            return found

        await eventually(lambda: not left())

    @asynchronous
    async def test_kill(self) -> None:
        """A polite kill is SIGINT to the group; children started with & follow their leader; kill decides the state."""
        await self.serve()
        task = await self.run_task(
            "trap 'echo bye; exit 0' INT; sleep 300 & (trap '' TERM; setsid sleep 300) & wait", wait_seconds=0
        )
        await eventually_async(lambda: self.has_processes(task["id"], 3))
        result = await self.call("kill", {"id": task["id"]})
        self.assertEqual(result["structuredContent"]["signal"], "SIGINT")
        self.assertIn("SIGINT", result["content"][0]["text"])
        ended = await self.status(task["id"], 10)
        self.assertEqual((ended["status"], ended["exit_code"], ended["stdout_tail"]), ("killed", 0, "bye\n"))
        self.assertEqual(ended["reason"], "kill")
        await self.gone(task["id"])
        again = await self.call("kill", {"id": task["id"]})
        self.assertIsNone(again["structuredContent"]["signal"])
        self.assertIn("nothing to signal", again["content"][0]["text"])

    async def has_processes(self, task_id: str, count: int) -> bool:
        return bool((await self.status(task_id))["processes"] >= count)

    @asynchronous
    async def test_fork_chain(self) -> None:
        """Processes that fork and end all the time do not get away, however the task is ended."""
        await self.serve()
        ignoring = "import os, signal; [signal.signal(number, signal.SIG_IGN) for number in (2, 15)]"
        loop = f"{ignoring}\nwhile True:\n if os.fork(): os._exit(0)"
        for name, arguments in (("forced", {}), ("asked", {}), ("timed", {"timeout_secs": 1})):
            cmd = f"echo $$; python3 -c '{loop}' & sleep 300"
            task = await self.run_task(cmd, name=f"chain-{name}", wait_seconds=0.7, **arguments)
            if name != "timed":
                await self.call("kill", {"id": task["id"], "force": name == "forced"})
            self.assertIn((await self.status(task["id"], 10))["status"], ("killed", "timed_out"))
            await eventually(lambda group=int(task["stdout_tail"]): not group_exists(group))

    @asynchronous
    async def test_one_polite_signal(self) -> None:
        """At its time limit each process of a task gets one SIGTERM: a second one means to hurry for some."""
        await self.serve()
        task = await self.run_task(
            "(trap 'echo TERM' TERM; for i in {1..40}; do sleep 0.05; done) & sleep 300",
            timeout_secs=0.5,
            wait_seconds=10,
        )
        await self.gone(task["id"])
        self.assertEqual((await self.status(task["id"]))["stdout_tail"], "TERM\n")

    @asynchronous
    async def test_directory_in_place_of_a_file(self) -> None:
        """Whatever a task makes of its output file, its name can be used again."""
        await self.serve()
        task = await self.run_task("true", name="odd")
        os.unlink(task["stdout_path"])
        os.makedirs(f"{task['stdout_path']}/below")
        os.unlink(task["stderr_path"])
        os.mkfifo(task["stderr_path"])
        self.assertEqual((await self.status("odd"))["stdout_bytes"], 0)
        self.assertEqual((await self.run_task("echo again", name="odd"))["stdout_tail"], "again\n")

    @asynchronous
    async def test_server_left_running(self) -> None:
        """A server started with & lives on, is counted, and kill ends it."""
        await self.serve()
        task = await self.run_task("sleep 300 & exec >&- 2>&-; exit 5", wait_seconds=10)
        self.assertEqual((task["status"], task["exit_code"], task["processes"]), ("done", 5, 1))
        result = await self.call("kill", {"id": task["id"], "force": True})
        self.assertEqual(
            (result["structuredContent"]["signal"], result["structuredContent"]["processes"]), ("SIGKILL", 1)
        )
        await self.gone(task["id"])
        self.assertEqual((await self.status(task["id"]))["processes"], 0)

    @asynchronous
    async def test_name_again(self) -> None:
        """A name that is used again has new files: a straggler of the earlier run does not write into them."""
        await self.serve()
        first = await self.run_task("(sleep 0.5; echo late) & echo first", name="a")
        self.assertEqual(first["stdout_tail"], "first\n")
        second = await self.run_task("sleep 1; echo second", name="a", wait_seconds=10)
        self.assertEqual(second["stdout_tail"], "second\n")

    @asynchronous
    async def test_output(self) -> None:
        """All output is in the file, only its end in the answer, and none in the log."""
        await self.serve()
        task = await self.run_task("seq 1000000; printf 'a\\0b\\xff\\rc\\e[31md\\n' >&2", wait_seconds=30)
        text = pathlib.Path(task["stdout_path"]).read_text()
        self.assertEqual(text, "".join(f"{n}\n" for n in range(1, 1_000_001)))
        self.assertEqual(task["stdout_bytes"], len(text))
        self.assertTrue(text.endswith(task["stdout_tail"]))
        self.assertLessEqual(len(task["stdout_tail"]), 4096)
        self.assertEqual(pathlib.Path(task["stderr_path"]).read_bytes(), b"a\0b\xff\rc\x1b[31md\n")
        self.assertNotIn("1000000", self.log.read_text())

    @asynchronous
    async def test_clean_machine(self) -> None:
        """After many tasks there is no zombie and no descriptor more than before."""
        daemon = await self.serve()
        await self.run_task("true")
        before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        await asyncio.gather(*(self.run_task("true", wait_seconds=30) for _ in range(50)))
        await eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before)
        children = pathlib.Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text()
        self.assertEqual(children, "")


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def eventually_async(predicate: Any) -> None:
    deadline = time.monotonic() + 20
    while not await predicate():
        if time.monotonic() > deadline:
            raise AssertionError("it did not come about in time")
        await asyncio.sleep(0.02)


class LifeTests(DaemonCase):
    """Start, stop, crash."""

    @asynchronous
    async def test_stop(self) -> None:
        """SIGTERM ends the daemon within the grace and 2 seconds; waits are answered, nothing is left running."""
        daemon = await self.start("--kill-grace", "1", "--max-running", "2")
        stubborn = await self.run_task("trap '' TERM; echo $$; while :; do sleep 0.1; done", wait_seconds=0.3)
        waiting = asyncio.ensure_future(self.run_task("echo $$; exec sleep 300", wait_seconds=30, name="waiting"))
        await eventually(lambda: self.pids("waiting"))
        pending = await self.run_task("true", wait_seconds=0)
        seconds = await self.stop(daemon)
        self.assertLess(seconds, 3)
        self.assertGreater(seconds, 1)
        self.assertEqual((await waiting)["status"], "interrupted")
        for task_id in (stubborn["id"], "waiting"):
            self.assertFalse(any(alive(pid) for pid in self.pids(task_id)))
        await self.start()
        for task_id in (stubborn["id"], "waiting", pending["id"]):
            task = await self.status(task_id)
            self.assertEqual((task["status"], task["reason"]), ("interrupted", "daemon stopped"))

    def pids(self, task_id: str) -> list[int]:
        return [int(line) for path in self.files(task_id) if path.suffix == ".out" for line in path.read_text().split()]

    @asynchronous
    async def test_quick_stop(self) -> None:
        """With nothing running the stop is quick, by SIGINT and SIGHUP too."""
        daemon = await self.start()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            task = await self.run_task("sleep 300", wait_seconds=0)
            self.assertLess(await self.stop(daemon, number), 2)
            daemon = await self.start()
            self.assertEqual((await self.status(task["id"]))["reason"], "daemon stopped")

    @asynchronous
    async def test_crash(self) -> None:
        """After kill -9 every task is found with its output, and what was running is interrupted and ended."""
        daemon = await self.start("--max-running", "1")
        done = await self.run_task("echo done", name="done")
        running = await self.run_task(
            "echo $$; trap '' INT; sleep 300 & setsid sleep 300 & sleep 300", wait_seconds=0.3
        )
        pending = await self.run_task("true", wait_seconds=0)
        pids = self.pids(running["id"])
        await self.stop(daemon, signal.SIGKILL)
        self.assertTrue(alive(pids[0]))
        await self.start("--kill-grace", "0.5")
        self.assertEqual((await self.status("done")) | {"duration_secs": 0}, done | {"duration_secs": 0})
        task = await self.status(running["id"])
        self.assertEqual(
            (task["status"], task["reason"], task["stdout_tail"]), ("interrupted", "daemon died", f"{pids[0]}\n")
        )
        self.assertGreater(task["duration_secs"], 0.3)
        self.assertEqual((await self.status(pending["id"]))["status"], "interrupted")
        await eventually(lambda: not alive(pids[0]))
        await eventually_async(lambda: self.no_processes(running["id"]))

    async def no_processes(self, task_id: str) -> bool:
        return bool((await self.status(task_id))["processes"] == 0)

    @asynchronous
    async def test_retention(self) -> None:
        """Only so many finished tasks are kept, and their files."""
        await self.start("--keep", "3")
        tasks = [await self.run_task("true") for _ in range(6)]
        await eventually_async(lambda: self.forgotten(tasks[2]["id"]))
        self.assertEqual((await self.status(tasks[3]["id"]))["status"], "done")
        self.assertEqual(len(list(self.files("*"))), 6)

    async def forgotten(self, task_id: str) -> bool:
        return bool((await self.call("status", {"id": task_id})).get("isError"))

    @asynchronous
    async def test_second_daemon(self) -> None:
        """A second daemon on the state directory, or on the port, says so and does not start."""
        await self.start()
        self.assertIn(self.state, self.refused("--listen", "tcp:0:interface=127.0.0.1"))
        self.state += "-2"
        self.assertIn("already in use", self.refused())

    def test_bad_options(self) -> None:
        """What is wrong with an option, a directory or an address is one clear line."""
        afile = os.path.join(self.root, "file")
        pathlib.Path(afile).touch()
        for options, word in (
            (["--no-such-option"], "no-such-option"),
            (["--workdir", "/no\nsuch"], "/no such"),
            (["--workdir", afile], afile),
            (["--state-dir", f"{afile}/below"], afile),
            (["--listen", "nonsense:1"], "nonsense"),
            (["--listen", "tcp:notaport"], "notaport"),
            (["--listen", f"unix:{self.root}/{'x' * 108}"], "107"),
            (["--listen", "unix:/no/such/dir/socket"], "/no/such/dir"),
            (["--listen", f"unix:{afile}"], "else than a socket"),
            (["--on-todo", "true", "--agent-socket", "/a"], "--on-todo"),
        ):
            self.assertIn(word, self.refused(*options), options)
        self.assertEqual(self.daemons, [])

    def test_strange_store(self) -> None:
        """A database of a newer version, or something else in its place, is left as it is and named."""
        os.makedirs(self.state)
        path = pathlib.Path(self.state, "hivebash.sqlite")
        path.write_bytes(b"this is no database, and longer than a header " * 10)
        self.assertIn(str(path), self.refused())
        self.assertTrue(path.read_bytes().startswith(b"this is no"))

    @asynchronous
    async def test_damaged_store(self) -> None:
        """A database with damaged pages is refused before anything is started."""
        daemon = await self.start()
        for _ in range(20):
            await self.run_task(f"true {'x' * 1000}")
        await self.stop(daemon)
        path = pathlib.Path(self.state, "hivebash.sqlite")
        data = path.read_bytes()
        path.write_bytes(data[:8192] + os.urandom(len(data) - 8192))
        self.assertIn(str(path), self.refused())

    def test_directories_of_others(self) -> None:
        """A directory that cannot be meant is refused and stays as it is; so is a start from one that is gone."""
        foreign, everyones, gone = (os.path.join(self.root, name) for name in ("foreign", "everyones", "gone"))
        for path, mode in ((foreign, 0o755), (everyones, 0o1777), (gone, 0o755)):
            os.mkdir(path)
            os.chmod(path, mode)
        if os.geteuid() == 0:
            os.chown(foreign, 65534, 65534)
        else:
            foreign = "/"
        for path, word in ((foreign, "belongs to"), (everyones, "everyone")):
            before = os.stat(path)
            self.assertIn(word, self.refused("--state-dir", path))
            self.assertEqual((os.stat(path).st_mode, os.stat(path).st_nlink), (before.st_mode, before.st_nlink))
        self.assertIn("gone", self.refused(cwd=gone, preexec_fn=lambda: os.rmdir(gone)))

    @asynchronous
    async def test_failed_start(self) -> None:
        """A start that fails at one address leaves no socket at the others."""
        await self.start()
        self.state += "-2"
        busy = f"tcp:{self.port}:interface=127.0.0.1"
        self.assertIn("in use", self.refused("--listen", f"unix:{self.root}/socket", "--listen", busy))
        self.assertFalse([name for name in os.listdir(self.root) if "socket" in name])

    @asynchronous
    async def test_in_the_background(self) -> None:
        """Without --nodaemon twistd puts it into the background, where it works as in the foreground."""
        pidfile, log = os.path.join(self.root, "pid"), os.path.join(self.root, "daemon.log")
        arguments = [argument for argument in self.arguments() if argument not in ("--nodaemon", "--pidfile=")]
        arguments[1:1] = ["--pidfile", pidfile, "--logfile", log]
        subprocess.run(arguments, check=True, cwd=self.root, timeout=30, stdin=subprocess.DEVNULL)
        pid = int(pathlib.Path(pidfile).read_text())
        self.addCleanup(lambda: alive(pid) and os.kill(pid, signal.SIGKILL))
        await self.ready()
        task = await self.run_task("pwd; sleep 300", wait_seconds=0.5)
        self.assertEqual(task["stdout_tail"], f"{self.root}\n")
        self.assertIn(self.state, self.refused("--listen", "tcp:0"))
        os.kill(pid, signal.SIGTERM)
        await eventually(lambda: not alive(pid))
        await self.start()
        self.assertEqual((await self.status(task["id"]))["status"], "interrupted")

    @asynchronous
    async def test_without_standard_descriptors(self) -> None:
        """A daemon that was started with 0, 1 and 2 closed works, and its tasks get theirs."""
        command = 'exec 0<&- 1>&- 2>&-; exec "$@"'
        daemon = subprocess.Popen(["bash", "-c", command, "bash", *self.arguments()], cwd=self.root)
        self.daemons.append(daemon)
        await self.ready(daemon)
        task = await self.run_task("cat; echo out; echo err >&2")
        self.assertEqual((task["stdout_tail"], task["stderr_tail"]), ("out\n", "err\n"))

    async def over(self, path: str) -> Any:
        """What a task answers over a unix socket."""
        reader, writer = await asyncio.open_unix_connection(path)
        params = {"name": "run", "arguments": {"cmd": "echo hi; sleep 300", "wait_seconds": 0.3}}
        body = message(MODERN, "tools/call", params)
        writer.write(head("POST", "/mcp", body, rpc_headers(MODERN, "tools/call", params)) + body)
        reply = await read_reply(reader)
        writer.close()
        return reply.result["structuredContent"]

    @asynchronous
    async def test_unix_socket(self) -> None:
        """It serves on a unix socket, which is for its owner, also after a crash, and which no other daemon takes."""
        path = f"{self.root}/socket"
        both = ("--listen", "unix:socket", "--listen", f"tcp:{self.port}:interface=127.0.0.1", "--workdir", "/")
        for number in (signal.SIGKILL, signal.SIGTERM):
            daemon = await self.start(*both)
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
            self.assertEqual((await self.over(path))["stdout_tail"], "hi\n")
            self.state, state = f"{self.state}-2", self.state
            self.assertIn("listens there", self.refused("--listen", f"unix:{path}"))
            self.state = state
            self.assertEqual((await self.over(path))["stdout_tail"], "hi\n")
            await self.stop(daemon, number)
        self.assertEqual([name for name in os.listdir(self.root) if name.startswith("socket")], [])

    @asynchronous
    async def test_socket_taken_away(self) -> None:
        """The end is in order if somebody removed the socket, and a second signal changes nothing."""
        path = f"{self.root}/socket"
        both = ("--listen", f"unix:{path}", "--listen", f"tcp:{self.port}:interface=127.0.0.1")
        daemon = await self.start(*both, "--kill-grace", "0.5")
        task = await self.run_task("trap '' TERM; echo $$; while :; do sleep 0.1; done", wait_seconds=0.3)
        os.unlink(path)
        daemon.send_signal(signal.SIGTERM)
        await eventually(lambda: "Received SIGTERM" in self.log.read_text())
        daemon.send_signal(signal.SIGTERM)
        daemon.send_signal(signal.SIGHUP)
        await eventually(lambda: daemon.poll() is not None)
        self.assertFalse(any(alive(pid) for pid in self.pids(task["id"])))
        self.assertNotIn("ReactorNotRunning", self.log.read_text())

    @asynchronous
    async def test_no_descriptors(self) -> None:
        """Out of descriptors, new tasks are refused a start, and those that run are ended all the same."""

        def few() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))

        daemon = await self.start("--kill-grace", "0.5", preexec_fn=few)
        timed = await self.run_task("sleep 300", timeout_secs=2, wait_seconds=0)
        names: list[str] = []
        while True:
            result = await self.call("run", {"cmd": "echo $$; sleep 300", "wait_seconds": 0})
            if result["isError"]:
                break
            names.append(result["structuredContent"]["id"])
        self.assertIn("descriptor", result["structuredContent"]["reason"])
        result = await self.call("kill", {"id": names[0], "force": True})
        self.assertEqual(result["structuredContent"]["signal"], "SIGKILL")
        self.assertEqual((await self.status(names[0], 10))["status"], "killed")
        self.assertEqual((await self.status(timed["id"], 10))["status"], "timed_out")
        while not (await self.call("run", {"cmd": "echo $$; sleep 300", "wait_seconds": 0}))["isError"]:
            pass
        pids = [pid for name in names for pid in self.pids(name)]
        self.assertLess(await self.stop(daemon), 2.5)
        self.assertFalse(any(alive(pid) for pid in pids))

    @asynchronous
    async def test_names_and_stragglers(self) -> None:
        """What an earlier task of a name left running is ended at the daemon's stop, also after a crash in between."""
        daemon = await self.start("--kill-grace", "0.5")
        pids: list[int] = []
        for cmd in ("sleep 300 & echo $!", "env -i sleep 300 & echo $!", "trap '' TERM; sleep 300 & echo $!"):
            task = await self.run_task(cmd, name="server")
            pids += [int(task["stdout_tail"])]
        left = await self.run_task("env -i sleep 300 & echo $!", name="left")
        await self.run_task("true", name="server")
        await self.stop(daemon, signal.SIGKILL)
        daemon = await self.start("--kill-grace", "0.5")
        self.assertEqual((await self.status("left"))["processes"], 1)
        self.assertEqual([alive(pid) for pid in pids], [True, True, True])
        await self.stop(daemon)
        # The second had cleared its environment, and nothing tells any more whose it is.
        os.kill(pids.pop(1), signal.SIGKILL)
        self.assertFalse(any(alive(pid) for pid in [*pids, int(left["stdout_tail"])]))

    @asynchronous
    async def test_many_stragglers(self) -> None:
        """That many tasks left something behind, which is long gone, does not make the stop slow."""
        daemon = await self.start("--kill-grace", "0.2")
        await asyncio.gather(*(self.run_task("sleep 0.5 & true", wait_seconds=30) for _ in range(200)))
        self.assertLess(await self.stop(daemon), 2.2)

    def test_found_from_anywhere(self) -> None:
        """Twistd lists the plugin wherever it is started."""
        listed = subprocess.run(
            ["twistd", "--help"], executable=self.arguments()[0], cwd="/", capture_output=True, check=True
        )
        self.assertIn(b"hivebash", listed.stdout)
        described = subprocess.run(
            [self.arguments()[0], "hivebash", "--help"], cwd="/", capture_output=True, check=True
        )
        for option in (
            b"--listen",
            b"--state-dir",
            b"--workdir",
            b"--max-running",
            b"--kill-grace",
            b"--keep",
            b"--env",
            b"--allow-host",
        ):
            self.assertIn(option, described.stdout)
