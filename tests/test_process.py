"""Leaders: real bash, real signals."""

from __future__ import annotations

import os
import pathlib
import resource
import shutil
import signal
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.interfaces import IProcessTransport, IReadDescriptor
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface.verify import verifyObject

from hivebash import limits
from hivebash.interfaces import CannotStart, IProcess, IProcesses
from hivebash.process import TASK_MARK, LeaderTransport, Processes, TaskProtocol, task_environment
from hivebash.reach import ProcReach
from hivebash.task import Exit


class EnvironmentTests(SynchronousTestCase):
    """The variables of tasks."""

    def test_rules(self) -> None:
        """The daemon's without its private ones, the quiet defaults over them, the operator's changes over both."""
        daemon = {"PATH": "/bin", "PAGER": "less", "HIVEBASH_X": "1", "HIVE_AGENT_SOCKET": "1", "NOTIFY_SOCKET": "1"}
        daemon |= {
            "OTEL_TRACES": "1",
            "LISTEN_FDS": "1",
            "WATCHDOG_USEC": "1",
            "STATE_DIRECTORY": "/x",
            "HOME": "/root",
        }
        environment = task_environment(daemon, [("TERM", "xterm"), ("HOME", ""), ("NEW", "a=b"), ("NONE", "")])
        self.assertEqual(
            environment,
            {
                "PATH": "/bin",
                "PAGER": "cat",
                "GIT_PAGER": "cat",
                "MANPAGER": "cat",
                "SYSTEMD_PAGER": "cat",
                "TERM": "xterm",
                "GIT_TERMINAL_PROMPT": "0",
                "DEBIAN_FRONTEND": "noninteractive",
                "NEW": "a=b",
            },
        )


class ProcessTests(TestCase):
    """What becomes of what is spawned."""

    timeout = 60

    def setUp(self) -> None:
        self.folder = os.path.abspath(self.mktemp())
        os.mkdir(self.folder)
        self.here = os.getcwd()
        self.addCleanup(os.chdir, self.here)
        self.processes = self.starter()

    def starter(self, workdir: str | None = None, **environment: str) -> Processes:
        return Processes(reactor, ProcReach(TASK_MARK), {**os.environ, **environment}, workdir or self.folder)

    def spawn(self, *words: str, processes: Processes | None = None, name: str = "out") -> TaskProtocol:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        out, err = (os.open(f"{self.folder}/{name}.{kind}", flags, 0o600) for kind in ("out", "err"))
        try:
            return (processes or self.processes).spawn(words, "the-id", "the-mark", out, err)
        finally:
            os.close(out)
            os.close(err)

    def output(self, name: str = "out") -> str:
        return pathlib.Path(self.folder, f"{name}.out").read_text()

    async def finish(self, process: TaskProtocol) -> Exit:
        exit_ = await process.ended
        process.release()
        return exit_

    async def result(self, *words: str, **more: Any) -> Exit:
        return await self.finish(self.spawn(*words, **more))

    async def test_interfaces(self) -> None:
        """A leader is an ordinary process protocol on an ordinary process transport."""
        process = self.spawn("-c", "sleep 300")
        verifyObject(IProcesses, self.processes)
        verifyObject(IProcess, process)
        verifyObject(IProcessTransport, process.transport)
        verifyObject(IReadDescriptor, process.transport)
        self.assertEqual(self.successResultOf(process.started), process.identity)
        self.assertEqual(process.transport.pid, process.identity.pid)
        process.transport.signalProcess("TERM")
        self.assertEqual(await self.finish(process), Exit(signal=15))
        self.assertRaises(ProcessExitedAlready, process.transport.signalProcess, "TERM")
        self.assertIsInstance(process.transport, LeaderTransport)

    async def test_exits(self) -> None:
        """Every exit code and signal is told as it was."""
        self.assertEqual(await self.result("-c", "exit 0"), Exit(0))
        self.assertEqual(await self.result("-c", "exit 255"), Exit(255))
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGRTMAX):
            self.assertEqual(await self.result("-c", f"kill -{int(number)} $$"), Exit(signal=number))

    async def test_place(self) -> None:
        """A leader leads its own session and group, in the working directory, with its id and mark."""
        await self.result("-c", "ps -o pid=,pgid=,sid= $$; pwd; echo $HIVEBASH_TASK_ID $HIVEBASH_TASK_MARK")
        ids, where, marks = self.output().splitlines()
        self.assertEqual(len({*ids.split()}), 1)
        self.assertEqual((where, marks), (self.folder, "the-id the-mark"))

    async def test_zombie(self) -> None:
        """When the end is told the leader is a zombie; once it is released nothing of it is left."""
        process = self.spawn("-c", "true")
        pid = process.identity.pid
        await process.ended
        self.assertIn(" Z ", pathlib.Path(f"/proc/{pid}/stat").read_text())
        os.killpg(pid, 0)
        process.release()
        process.release()
        self.assertFalse(os.path.exists(f"/proc/{pid}"))

    async def test_many(self) -> None:
        """Many at once each have their own end; no descriptor is left."""
        before = len(os.listdir("/proc/self/fd"))
        ends = await gatherResults(
            [Deferred.fromCoroutine(self.result("-c", f"exit {number}", name=str(number))) for number in range(100)]
        )
        self.assertEqual(ends, [Exit(number) for number in range(100)])
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    async def test_reaped_by_another(self) -> None:
        """If somebody else took the child its end is told all the same, only not how it was."""
        process = self.spawn("-c", "exit 3")
        os.waitpid(process.identity.pid, 0)
        self.assertEqual(await self.finish(process), Exit())

    async def test_lengths(self) -> None:
        """The longest argument that there can be reaches bash; a longer one is a sentence with its length."""
        text = "x" * (limits.ARGUMENT_MAX - 1 - len("printf %s "))
        self.assertEqual(await self.result("-c", f"printf %s {text}"), Exit(0))
        self.assertEqual(self.output(), text)
        refusal = self.assertRaises(CannotStart, self.spawn, "-c", f"printf %s {text}x")
        self.assertIn(str(limits.ARGUMENT_MAX), str(refusal))
        refusal = self.assertRaises(CannotStart, self.spawn, "-c", "true", processes=self.starter(HUGE="x" * 200_000))
        self.assertIn("HUGE", str(refusal))

    def test_no_directory(self) -> None:
        """A working directory that is gone is named."""
        gone = f"{self.folder}/gone"
        self.assertIn(gone, str(self.assertRaises(CannotStart, self.spawn, "-c", "true", processes=self.starter(gone))))

    def test_no_bash(self) -> None:
        """A bash that is not there is named."""
        self.patch(shutil, "which", lambda name, path: "/no/such/bash")
        refusal = self.assertRaises(CannotStart, self.spawn, "-c", "true", processes=self.starter())
        self.assertIn("/no/such/bash", str(refusal))

    async def test_no_descriptors(self) -> None:
        """Out of descriptors, nothing is started that could not be watched."""
        children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children")
        before = children.read_text()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        out = os.open(os.devnull, os.O_WRONLY)
        self.addCleanup(os.close, out)
        free = os.dup(out)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limit[1]))
        try:
            refusal = self.assertRaises(CannotStart, self.processes.spawn, ("-c", "true"), "id", "mark", out, out)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        self.assertIn("descriptor", str(refusal))
        self.assertEqual(children.read_text(), before)
        self.assertEqual(await self.result("-c", "exit 4"), Exit(4))
