"""The processes of tasks, in the real /proc."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import attrs
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from hivebash.interfaces import IReach
from hivebash.reach import ProcReach
from hivebash.task import Identity

MARK = f"mark-{os.getpid()}"


class ReachTests(SynchronousTestCase):
    """Who belongs to a task, and who gets signals."""

    def setUp(self) -> None:
        self.reach = ProcReach("HIVEBASH_TEST_MARK")
        self.started: list[subprocess.Popen[str]] = []
        self.addCleanup(self.end_all)

    def end_all(self) -> None:
        for leader in self.started:
            for process in self.reach.members(None, MARK, ()):
                self.reach.signal([process], signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader.pid, signal.SIGKILL)
            leader.kill()
            leader.wait()
            leader.stdout.close()

    def start(self, cmd: str, mark: str = MARK) -> tuple[Identity, list[int]]:
        """A leader, and the pids that it printed on its first line, once these are ``sleep``."""
        environment = {**os.environ, "HIVEBASH_TEST_MARK": mark}
        leader = subprocess.Popen(
            ["bash", "-c", cmd], env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        self.started.append(leader)
        pids = [int(word) for word in leader.stdout.readline().split()]
        for pid in pids:
            self.until(lambda path=pathlib.Path(f"/proc/{pid}/comm"): path.read_text() == "sleep\n")
        identity = self.reach.identify(leader.pid)
        assert identity is not None
        return identity, pids

    def until(self, predicate: Callable[[], bool]) -> None:
        """Look until it is so; fail when that takes too long."""
        deadline = time.monotonic() + 10
        while not predicate():
            if time.monotonic() > deadline:
                self.fail("it did not come about in time")
            os.sched_yield()

    def pids(self, leader: Identity | None, known: tuple[Identity, ...] = (), mark: str = MARK) -> set[int]:
        return {process.pid for process in self.reach.members(leader, mark, known)}

    def test_interface(self) -> None:
        """It provides what it says."""
        verifyObject(IReach, self.reach)

    def test_identify(self) -> None:
        """A process is known by its start, whatever its name; nothing has pid 0."""
        me = self.reach.identify(os.getpid())
        with open("/proc/self/stat") as stat:
            self.assertEqual(me.start_time, int(stat.read().rpartition(")")[2].split()[19]))
        self.assertIsNone(self.reach.identify(0))
        leader, _ = self.start("echo; exec -a 'odd ) (name 1 2' sleep 300")
        self.assertEqual(self.pids(leader), {leader.pid})

    def test_members(self) -> None:
        """The session, also without the mark; the mark, also in another session; nothing else."""
        cmd = "sleep 300 & a=$!; env -i sleep 300 & b=$!; setsid sleep 300 & c=$!; echo $a $b $c; sleep 300 & wait"
        leader, pids = self.start(cmd)
        other, _ = self.start("echo; sleep 300", mark=f"{MARK}-other")
        members = self.pids(leader)
        self.assertTrue({leader.pid, *pids} <= members)
        self.assertNotIn(other.pid, members)
        self.assertNotIn(os.getpid(), members)
        looked = self.reach.members(leader, MARK, ())
        # The short way, by the pids since the leader's start, finds the same as the long one.
        self.assertEqual(
            {
                process.pid
                for process in self.reach._look(leader, range(leader.pid, max(members) + 1)).members(leader, MARK, ())
            },
            {process.pid for process in self.reach._look(leader).members(leader, MARK, ())},
        )
        self.assertEqual(self.reach.counts({MARK: (leader, ()), "none": (None, ())}), {MARK: len(looked), "none": 0})
        self.assertEqual({process.pid for process in self.reach.marks()[MARK]}, members - {pids[1]})
        with self.reach.one_look():
            self.assertEqual(self.pids(leader), members)

    def test_after_the_leader(self) -> None:
        """Once the leader is gone its session counts as long as one that is known or marked is in it."""
        leader, (cleared, marked) = self.start("env -i sleep 300 & a=$!; sleep 300 & echo $a $!")
        self.started[-1].wait()
        self.assertEqual(self.pids(leader), {cleared, marked})
        os.kill(marked, signal.SIGKILL)
        self.until(lambda: not os.path.exists(f"/proc/{marked}"))
        known = (self.reach.identify(cleared),)
        self.assertEqual(self.pids(leader, known), {cleared})
        self.assertEqual(self.pids(leader, mark="none"), set())
        # Whoever got the number of a leader later is not taken for it.
        stranger = attrs.evolve(leader, start_time=leader.start_time - 1)
        self.assertEqual(self.pids(stranger, mark="none"), set())

    def test_zombies(self) -> None:
        """A zombie is no live process, but vouches for its session."""
        leader, (cleared,) = self.start("env -i sleep 300 & echo $!")
        os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
        self.assertEqual(self.pids(leader, mark="none"), {cleared})

    def test_interrupt(self) -> None:
        """SIGINT reaches the group, a stopped one too, and is counted."""
        leader, _ = self.start("trap 'exit 3' INT; echo; kill -STOP $$; sleep 300")
        os.waitid(os.P_PID, leader.pid, os.WSTOPPED)
        self.assertEqual(self.reach.interrupt(leader), 1)
        self.assertEqual(self.started[-1].wait(10), 3)

    def test_signal(self) -> None:
        """A signal goes to whom it was meant for or to nobody."""
        leader, _ = self.start("echo; exec sleep 300")
        for stranger in (
            attrs.evolve(leader, start_time=leader.start_time + 1),
            attrs.evolve(leader, boot_id="another"),
            attrs.evolve(leader, pid=2**22 + 1),
        ):
            self.assertEqual(self.reach.signal([stranger], signal.SIGKILL), 0)
        self.assertIsNone(self.started[-1].poll())
        self.assertEqual(self.reach.signal([leader, stranger], signal.SIGKILL), 1)
        self.started[-1].wait(10)
        self.assertEqual(self.reach.signal([leader], signal.SIGKILL), 0)

    def test_destroy(self) -> None:
        """SIGKILL reaches all of a task: its group at one stroke, the rest one by one."""
        cmd = "trap '' TERM INT; sleep 300 & a=$!; setsid sleep 300 & b=$!; echo $a $b; wait"
        leader, pids = self.start(cmd)
        hit = {process.pid for process in self.reach.destroy(leader, MARK, (), held=True)}
        self.assertTrue({leader.pid, *pids} <= hit)
        self.assertEqual(self.started[-1].wait(10), -9)

    def test_itself(self) -> None:
        """The process that asks is never a member, whatever mark it bears and whoever started it."""
        program = (
            "import os, sys; from hivebash.reach import ProcReach; reach = ProcReach('HIVEBASH_TEST_MARK')\n"
            "me = reach.identify(os.getpid())\n"
            "print(len(reach.members(me, sys.argv[1], ())), sys.argv[1] in reach.marks())"
        )
        environment = {**os.environ, "HIVEBASH_TEST_MARK": "own", "PYTHONPATH": os.pathsep.join(sys.path)}
        asked = subprocess.run(
            [sys.executable, "-c", program, "own"],
            env=environment,
            start_new_session=True,
            capture_output=True,
            check=True,
        )
        self.assertEqual(asked.stdout, b"0 False\n")
