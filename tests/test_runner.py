"""The runner on a clock and in-memory fakes: queue, waits, deadlines, kills, recovery, stop, retention."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from hivebash import limits
from hivebash.interfaces import (
    INotices,
    IProcess,
    IProcesses,
    IReach,
    IReceipt,
    ISpool,
    ITaskStore,
    ITodoSink,
)
from hivebash.requests import Kill, Refusal, Run, Wait
from hivebash.retention import Retention
from hivebash.task import Cause, Exit, Sent, Snapshot, State
from tests.fakes import Bench, FakeProcess, FakeReceipt

T = TypeVar("T")


class RunnerCase(SynchronousTestCase):
    """A bench, and the runner's coroutines as Deferreds."""

    def setUp(self) -> None:
        self.use(Bench())

    def use(self, bench: Bench) -> None:
        self.bench, self.runner, self.machine, self.store = bench, bench.runner, bench.machine, bench.store

    def run_task(self, cmd: str = "true", *, wait: float = 0, **more: Any) -> Deferred[Snapshot]:
        return Deferred.fromCoroutine(self.runner.run(Run(cmd, wait=Wait(wait), **more)))

    def observe(self, task_id: str, seconds: float = 0) -> Deferred[Snapshot]:
        return Deferred.fromCoroutine(self.runner.observe(task_id, seconds))

    def now(self, waiting: Coroutine[Deferred[Any], Any, T]) -> T:
        return self.successResultOf(Deferred.fromCoroutine(waiting))

    def started(self, cmd: str = "true", **more: Any) -> tuple[str, FakeProcess]:
        """The id and process of a task that runs."""
        task_id = self.successResultOf(self.run_task(cmd, **more)).task.id
        return task_id, self.machine.processes[-1]

    def state(self, task_id: str) -> State:
        return self.successResultOf(self.observe(task_id)).task.state

    def refusal(self, deferred: Deferred[Any]) -> str:
        return str(self.failureResultOf(deferred, Refusal).value)


class FakesTests(RunnerCase):
    """The stand-ins are what they stand in for."""

    def test_interfaces(self) -> None:
        verifyObject(IProcesses, self.machine)
        verifyObject(IReach, self.machine)
        verifyObject(ISpool, self.bench.spool)
        verifyObject(ITaskStore, self.store)
        verifyObject(INotices, self.store)
        verifyObject(ITodoSink, self.bench.harness)
        verifyObject(IReceipt, FakeReceipt())
        self.started()
        verifyObject(IProcess, self.machine.processes[0])


class RunTests(RunnerCase):
    """What run answers."""

    def test_end_within_the_wait(self) -> None:
        """A task that ends within the wait is answered with its end, at that moment."""
        waiting = self.run_task(wait=3)
        self.assertNoResult(waiting)
        self.bench.advance(1.25)
        self.machine.exit(self.machine.processes[0], 7)
        snapshot = self.successResultOf(waiting)
        self.assertEqual((snapshot.task.state, snapshot.task.exit), (State.DONE, Exit(7)))
        self.assertEqual(snapshot.duration_secs, 1.25)

    def test_wait_passes(self) -> None:
        """When the wait is over the task is answered as running, and goes on."""
        waiting = self.run_task(wait=3)
        self.bench.advance(3)
        self.assertEqual(self.successResultOf(waiting).task.state, State.RUNNING)
        self.assertTrue(self.machine.processes[0].alive)

    def test_no_wait(self) -> None:
        """Without a wait the answer is there at once."""
        self.assertEqual(self.successResultOf(self.run_task()).task.state, State.RUNNING)

    def test_signal(self) -> None:
        """A leader that dies of a signal has that and no exit code, and ended by itself."""
        task_id, process = self.started()
        self.machine.exit(process, signal=11)
        task = self.successResultOf(self.observe(task_id)).task
        self.assertEqual((task.state, task.exit, task.cause), (State.DONE, Exit(signal=11), None))

    def test_recorded_before_the_answer(self) -> None:
        """A task is on disk before its process is there, and its end before it is told."""
        waiting = self.run_task(wait=3)
        self.assertEqual([task.state for task in self.store.history], [State.PENDING, State.RUNNING])
        self.assertEqual(self.store.history[1].leader, self.machine.processes[0].identity)
        told: list[State] = []
        waiting.addCallback(lambda snapshot: told.append(self.store.tasks[snapshot.task.id].state))
        self.machine.exit(self.machine.processes[0])
        self.assertEqual(told, [State.DONE])

    def test_disk_full_at_submission(self) -> None:
        """What cannot be written down is refused, and nothing runs."""
        self.store.full = True
        self.assertIn("disk full", self.refusal(self.run_task()))
        self.assertEqual(self.machine.processes, [])
        self.store.full = False
        self.started()

    def test_disk_full_at_the_end(self) -> None:
        """An end is told once the disk has taken it; until then the task counts as running."""
        waiting = self.run_task(wait=30, name="a")
        self.store.full = True
        self.machine.exit(self.machine.processes[0], 3)
        self.assertNoResult(waiting)
        self.assertEqual(self.state("a"), State.RUNNING)
        self.assertIn("in use", self.refusal(self.run_task(name="a")))
        self.bench.advance(5)
        self.store.full = False
        self.bench.advance(limits.STORE_RETRY)
        snapshot = self.successResultOf(waiting)
        self.assertEqual((snapshot.task.exit, snapshot.duration_secs), (Exit(3), 0.0))
        self.started(name="a")

    def test_could_not_start(self) -> None:
        """Without a process the task is done with neither exit code nor signal, says why, and the next one starts."""
        self.use(Bench(max_running=1))
        self.machine.trouble = "no process slot is free"
        task = self.successResultOf(self.run_task(wait=3)).task
        self.assertEqual((task.state, task.exit, task.cause), (State.DONE, Exit(), Cause.COULD_NOT_START))
        self.assertEqual(task.detail, "no process slot is free")
        self.machine.trouble = None
        self.started()

    def test_error_at_the_start(self) -> None:
        """The same if the reason is an error of the daemon's own, which its log has."""
        self.machine.trouble = RuntimeError("surprise")
        task = self.successResultOf(self.run_task(wait=3)).task
        self.assertTrue(task.could_not_start)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.assertEqual(self.runner.load(), (0, 0))

    def test_no_files(self) -> None:
        """The same when its files cannot be made."""
        self.bench.spool.trouble = "its file /x: No space left on device"
        task = self.successResultOf(self.run_task(wait=3)).task
        self.assertTrue(task.could_not_start)
        self.assertIn("No space", task.detail)

    def test_words(self) -> None:
        """The command reaches bash as it is, whatever it begins with; one that is too long for an argument by file."""
        self.started("echo hi")
        self.assertEqual(self.machine.processes[-1].words, ("-c", "echo hi"))
        self.started("-x")
        self.assertEqual(self.machine.processes[-1].words, ("-c", "--", "-x"))
        self.started("+x")
        self.assertEqual(self.machine.processes[-1].words, ("-c", "--", "+x"))
        fits = "ä" * (limits.ARGUMENT_MAX // 2 - 1) + "x"
        self.started(fits)
        self.assertEqual(self.machine.processes[-1].words, ("-c", fits))
        task_id, process = self.started(fits + "x")
        self.assertEqual(process.words, (f"/spool/{task_id}.sh",))
        self.assertEqual(self.bench.spool.scripts[task_id], fits + "x")


class NameTests(RunnerCase):
    """Ids, and names as ids."""

    def test_fresh_id(self) -> None:
        """Without a name the id is fresh lowercase hex, of no other task that is known."""
        first, _ = self.started()
        self.assertRegex(first, "^[0-9a-f]{8}$")
        self.started(name=f"{int(first, 16) + 2:08x}")
        third, _ = self.started()
        self.assertEqual(len({*self.store.tasks}), 3)
        self.assertNotEqual(third, first)

    def test_busy(self) -> None:
        """A name is refused while its task is pending or running."""
        self.use(Bench(max_running=1))
        self.started(name="a")
        self.run_task(name="b")
        self.assertIn("running", self.refusal(self.run_task(name="a")))
        self.assertIn("pending", self.refusal(self.run_task(name="b")))

    def test_reuse(self) -> None:
        """A name can be used again once its task has finished; the files are new ones from the start."""
        self.use(Bench(max_running=1))
        _, process = self.started(name="a")
        self.bench.spool.contents["a"] = (b"old", b"")
        self.machine.exit(process)
        self.assertEqual(self.successResultOf(self.observe("a")).stdout.size, 3)
        self.started(name="other")
        pending = self.successResultOf(self.run_task(name="a"))
        self.assertEqual((pending.task.state, pending.stdout.size), (State.PENDING, 0))

    def test_wait_for_the_earlier_one(self) -> None:
        """Who waited for a task is told of it, not of the next of that name."""
        _, process = self.started(name="a")
        waiting = self.observe("a", 10)
        waiting.addCallback(lambda snapshot: (snapshot, self.run_task(name="a")))
        self.bench.spool.contents["a"] = (b"old", b"")
        second = self.observe("a", 10)
        self.machine.exit(process, 5)
        snapshot, _ = self.successResultOf(waiting)
        for told in (snapshot, self.successResultOf(second)):
            self.assertEqual((told.task.exit, told.stdout.tail), (Exit(5), "old"))

    def test_unknown(self) -> None:
        """An id never seen is refused, saying how long tasks are kept."""
        self.assertIn("7 days", self.refusal(self.observe("nope")))
        self.assertIn("1000", str(self.assertRaises(Refusal, self.runner.kill, Kill("nope"))))


class QueueTests(RunnerCase):
    """More tasks than slots."""

    def test_fifo(self) -> None:
        """Tasks over the limit wait, and start in the order in which they came."""
        self.use(Bench(max_running=2))
        for name in "abcde":
            self.run_task(name, name=name)
        self.assertEqual([process.words[1] for process in self.machine.running], ["a", "b"])
        self.assertEqual(self.runner.load(), (2, 3))
        self.machine.exit(self.machine.processes[1])
        self.assertEqual([process.words[1] for process in self.machine.running], ["a", "c"])
        self.runner.kill(Kill("d"))
        self.machine.exit(self.machine.processes[0])
        self.assertEqual([process.words[1] for process in self.machine.running], ["c", "e"])

    def test_time_limit_counts_from_the_start(self) -> None:
        """Waiting for a slot is not running."""
        self.use(Bench(max_running=1))
        _, first = self.started()
        waiting = self.run_task(wait=30, timeout_secs=5.0)
        self.bench.advance(10)
        self.machine.exit(first)
        self.bench.advance(4)
        self.assertNoResult(waiting)
        self.bench.advance(1)
        snapshot = self.successResultOf(waiting)
        self.assertEqual((snapshot.task.state, snapshot.duration_secs), (State.TIMED_OUT, 5.0))

    def test_kill_pending(self) -> None:
        """A pending task that is killed never starts."""
        self.use(Bench(max_running=1))
        _, first = self.started()
        waiting = self.run_task(wait=30, name="b")
        report = self.runner.kill(Kill("b"))
        self.assertTrue(report.cancelled)
        task = self.successResultOf(waiting).task
        self.assertEqual((task.state, task.cause, task.exit), (State.KILLED, Cause.KILL, Exit()))
        self.machine.exit(first)
        self.assertEqual(len(self.machine.processes), 1)

    def test_slot_is_free_while_the_disk_is_full(self) -> None:
        """A task that ended makes room even if its end is not written down yet."""
        self.use(Bench(max_running=1))
        _, first = self.started()
        self.run_task(name="b")
        self.store.full = True
        self.machine.exit(first)
        self.assertEqual(len(self.machine.running), 1)
        self.store.full = False
        self.bench.advance(1)
        self.assertEqual(self.state("b"), State.RUNNING)


class WaitTests(RunnerCase):
    """Waiting for ends."""

    def test_several(self) -> None:
        """Several clients wait for one task, each with its own time."""
        task_id, process = self.started()
        short, long, other = (self.observe(task_id, seconds) for seconds in (1, 10, 20))
        self.bench.advance(2)
        self.assertEqual(self.successResultOf(short).task.state, State.RUNNING)
        self.assertNoResult(long)
        self.machine.exit(process)
        for waiting in (long, other):
            self.assertEqual(self.successResultOf(waiting).task.state, State.DONE)

    def test_client_leaves(self) -> None:
        """A client that leaves ends its own wait, and nothing else."""
        waiting = self.run_task(wait=10, name="a")
        other = self.observe("a", 10)
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertEqual(self.state("a"), State.RUNNING)
        self.machine.exit(self.machine.processes[0])
        self.assertEqual(self.successResultOf(other).task.state, State.DONE)

    def test_no_timer_left(self) -> None:
        """A wait that is over leaves no timer behind."""
        before = len(self.bench.clock.getDelayedCalls())
        task_id, process = self.started()
        self.observe(task_id, 10).addErrback(lambda _: None).cancel()
        self.assertEqual(len(self.bench.clock.getDelayedCalls()), before)
        self.observe(task_id, 10)
        self.machine.exit(process)
        self.bench.advance(1)
        self.assertEqual([call.func for call in self.bench.clock.getDelayedCalls()], [self.runner._prune])

    def test_finished(self) -> None:
        """Nobody waits for a task that has finished."""
        task_id, process = self.started()
        self.machine.exit(process)
        self.assertEqual(self.successResultOf(self.observe(task_id, 30)).task.state, State.DONE)


class EndingTests(RunnerCase):
    """Time limits and kills."""

    def test_time_limit(self) -> None:
        """SIGTERM to all at the limit; SIGKILL to all after the grace."""
        task_id, process = self.started(timeout_secs=10.0)
        process.stubborn = True
        self.machine.fork(process)
        self.bench.advance(10)
        self.assertEqual(self.machine.sent, [("SIGTERM", 2)])
        self.bench.advance(4.75)
        self.assertEqual(self.machine.sent, [("SIGTERM", 2)])
        self.bench.advance(0.5)
        self.assertEqual(self.machine.sent[1], ("SIGKILL", 2))
        task = self.successResultOf(self.observe(task_id)).task
        self.assertEqual((task.state, task.exit, task.cause), (State.TIMED_OUT, Exit(signal=9), Cause.TIME_LIMIT))

    def test_in_time(self) -> None:
        """A task that ends in time is not touched later."""
        _, process = self.started(timeout_secs=10.0)
        self.machine.fork(process)
        self.machine.exit(process)
        self.bench.advance(60)
        self.assertEqual(self.machine.sent, [])

    def test_huge_time_limit(self) -> None:
        """A limit beyond all sense is none."""
        self.started(timeout_secs=1e300)
        self.assertEqual(self.bench.clock.getDelayedCalls(), [])

    def test_polite_kill(self) -> None:
        """SIGINT to the group, once; the leader takes as long as it likes, and what it leaves follows it."""
        task_id, process = self.started()
        self.machine.fork(process)
        self.assertEqual(self.runner.kill(Kill(task_id)).sent, Sent("SIGINT", 2))
        self.bench.advance(600)
        self.assertEqual(self.state(task_id), State.RUNNING)
        self.assertEqual(self.machine.sent, [("SIGINT", 2)])
        process.stubborn = True
        self.machine.exit(process, 0)
        task = self.successResultOf(self.observe(task_id)).task
        self.assertEqual((task.state, task.exit, task.cause), (State.KILLED, Exit(0), Cause.KILL))
        self.assertEqual(self.machine.sent[1:], [("SIGTERM", 1)])
        self.bench.advance(5.25)
        self.assertEqual(self.machine.sent[2:], [("SIGKILL", 1)])
        self.assertEqual(self.machine.members(None, process.mark, ()), ())

    def test_forced_kill(self) -> None:
        """SIGKILL to every process, at once."""
        task_id, process = self.started()
        self.machine.fork(process)
        report = self.runner.kill(Kill(task_id, force=True))
        self.assertEqual((report.state, report.sent), (State.RUNNING, Sent("SIGKILL", 2)))
        self.machine.bury()
        task = self.successResultOf(self.observe(task_id)).task
        self.assertEqual((task.state, task.exit), (State.KILLED, Exit(signal=9)))

    def test_force_after_politeness(self) -> None:
        """A second kill may press harder."""
        task_id, process = self.started()
        self.runner.kill(Kill(task_id))
        self.runner.kill(Kill(task_id))
        self.assertEqual(process.signals, [2, 2])
        self.runner.kill(Kill(task_id, force=True))
        self.machine.bury()
        self.assertEqual(self.state(task_id), State.KILLED)

    def test_first_to_ask(self) -> None:
        """Out of time wins over a later kill, and a kill over a time limit that passes later."""
        timed, first = self.started(timeout_secs=5.0)
        first.stubborn = True
        self.bench.advance(5)
        self.runner.kill(Kill(timed, force=True))
        self.machine.bury()
        self.assertEqual(self.state(timed), State.TIMED_OUT)
        killed, second = self.started(timeout_secs=5.0)
        self.runner.kill(Kill(killed))
        self.bench.advance(6)
        self.assertFalse(second.alive)
        self.assertEqual(self.state(killed), State.KILLED)

    def test_asked_is_on_disk(self) -> None:
        """That a task was asked to end is remembered on disk from that moment."""
        task_id, _ = self.started()
        self.runner.kill(Kill(task_id))
        self.assertIs(self.store.tasks[task_id].asked, Cause.KILL)

    def test_children_live_on(self) -> None:
        """What a command that ended by itself left running lives on and is counted; kill ends it, and says so."""
        task_id, process = self.started()
        self.machine.fork(process)
        process.stubborn = True
        self.machine.exit(process)
        self.assertEqual(self.successResultOf(self.observe(task_id)).processes, 1)
        self.bench.advance(600)
        report = self.runner.kill(Kill(task_id))
        self.assertEqual((report.state, report.sent), (State.DONE, Sent("SIGTERM", 1)))
        self.bench.advance(6)
        self.assertEqual(self.successResultOf(self.observe(task_id)).processes, 0)
        self.assertIsNone(self.runner.kill(Kill(task_id)).sent)
        self.assertEqual(self.state(task_id), State.DONE)

    def test_force_on_children(self) -> None:
        """With force they are gone at once."""
        task_id, process = self.started()
        self.machine.fork(process)
        self.machine.exit(process)
        self.assertEqual(self.runner.kill(Kill(task_id, force=True)).sent, Sent("SIGKILL", 1))
        self.assertEqual(self.successResultOf(self.observe(task_id)).processes, 0)

    def test_blind(self) -> None:
        """While the daemon cannot look nothing counts as gone: ends are told, and what is left is ended later."""
        task_id, process = self.started()
        self.machine.fork(process)
        self.runner.kill(Kill(task_id))
        self.machine.blind = True
        self.machine.exit(process)
        self.assertEqual(self.state(task_id), State.KILLED)
        self.bench.advance(20)
        self.machine.blind = False
        self.bench.advance(1)
        self.assertEqual(self.machine.members(None, process.mark, ()), ())
        self.assertEqual(self.bench.runner.load(), (0, 0))

    def test_force_is_remembered(self) -> None:
        """What comes to light after a forced kill gets SIGKILL too."""
        task_id, process = self.started()
        self.runner.kill(Kill(task_id, force=True))
        self.machine.fork(process)
        self.machine.bury()
        self.assertEqual(self.machine.sent[-1], ("SIGKILL", 1))

    def test_nothing_polls(self) -> None:
        """While nothing is being ended no timer runs but deadlines, and the ladder is over when all are gone."""
        task_id, process = self.started()
        self.assertEqual(self.bench.clock.getDelayedCalls(), [])
        self.runner.kill(Kill(task_id))
        self.assertEqual(self.bench.clock.getDelayedCalls(), [])
        child = self.machine.fork(process)
        process.stubborn = True
        self.machine.exit(process)
        self.bench.advance(1)
        self.assertEqual(len(self.bench.clock.getDelayedCalls()), 2)
        process.children.discard(child)
        self.bench.advance(1)
        self.assertEqual([call.func for call in self.bench.clock.getDelayedCalls()], [self.runner._prune])


class TableTests(RunnerCase):
    """Status without an id."""

    def test_order(self) -> None:
        """Running tasks, then pending ones, then the newest finished, all without tails."""
        self.use(Bench(max_running=2))
        _, first = self.started(name="first")
        self.started(name="second")
        self.run_task(name="third")
        self.run_task(name="fourth")
        self.machine.exit(first)
        self.machine.fork(self.machine.processes[1])
        table = self.runner.table()
        self.assertEqual(
            [(row.task.id, row.task.state, row.processes) for row in table.snapshots],
            [
                ("second", State.RUNNING, 2),
                ("third", State.RUNNING, 1),
                ("fourth", State.PENDING, 0),
                ("first", State.DONE, 0),
            ],
        )
        self.assertEqual(table.hidden, 0)
        self.assertEqual({row.stdout.tail for row in table.snapshots}, {None})

    def test_short(self) -> None:
        """However much there is, the table is short and says how much is not in it."""
        self.use(Bench(max_running=2))
        for _ in range(limits.TABLE_FINISHED + 5):
            self.machine.exit(self.started()[1])
        for _ in range(limits.TABLE_ACTIVE + 7):
            self.run_task()
        table = self.runner.table()
        self.assertEqual(len(table.snapshots), limits.TABLE_ACTIVE + limits.TABLE_FINISHED)
        self.assertEqual(table.hidden, 7)


class RecoveryTests(RunnerCase):
    """A new daemon after one that died."""

    def restart(self) -> None:
        """The daemon is gone; its processes are not, and nobody is told of their end."""
        for process in self.machine.processes:
            members = set(process.children) | ({process.identity} if process.alive else set())
            self.machine.foreign[process.mark] = members
        self.machine.processes.clear()
        self.runner = self.bench.new_runner()
        self.runner.recover()

    def test_unfinished(self) -> None:
        """What was pending or running is interrupted, and its processes are ended."""
        self.use(Bench(max_running=1))
        running, process = self.started()
        pending = self.successResultOf(self.run_task()).task.id
        self.machine.fork(process)
        self.bench.advance(7)
        self.restart()
        task = self.successResultOf(self.observe(running)).task
        self.assertEqual((task.state, task.cause, task.duration_secs), (State.INTERRUPTED, Cause.DAEMON_DIED, 7.0))
        self.assertEqual(self.state(pending), State.INTERRUPTED)
        self.assertEqual(self.machine.sent, [("SIGTERM", 2)])
        self.bench.advance(6)
        self.assertEqual(self.machine.foreign[process.mark], set())

    def test_finished(self) -> None:
        """What had finished is as it was, and the children it left live on and can be killed."""
        task_id, process = self.started()
        self.machine.fork(process)
        self.machine.exit(process, 4)
        self.restart()
        self.bench.advance(60)
        snapshot = self.successResultOf(self.observe(task_id))
        self.assertEqual((snapshot.task.state, snapshot.task.exit, snapshot.processes), (State.DONE, Exit(4), 1))
        self.assertEqual(self.machine.sent, [])
        self.assertEqual(self.runner.kill(Kill(task_id, force=True)).sent, Sent("SIGKILL", 1))

    def test_asked_before_the_crash(self) -> None:
        """A task for which kill was asked, or whose time was over, ends as that."""
        killed, _ = self.started()
        self.runner.kill(Kill(killed))
        timed, process = self.started(timeout_secs=1.0)
        process.stubborn = True
        self.bench.advance(1)
        self.restart()
        self.assertEqual((self.state(killed), self.state(timed)), (State.KILLED, State.TIMED_OUT))

    def test_crash_during_the_ladder(self) -> None:
        """What was still being ended when the daemon died is ended by the next."""
        task_id, process = self.started()
        self.machine.fork(process)
        process.stubborn = True
        self.runner.kill(Kill(task_id))
        self.machine.exit(process)
        self.machine.sent.clear()
        self.restart()
        self.assertEqual(self.machine.sent, [("SIGTERM", 1)])
        self.bench.advance(6)
        self.assertEqual(self.machine.foreign[process.mark], set())

    def test_crash_twice(self) -> None:
        """Nothing changes once it is settled."""
        task_id, _ = self.started()
        self.restart()
        before = self.store.tasks[task_id]
        self.restart()
        self.assertEqual(self.store.tasks[task_id], before)


class StopTests(RunnerCase):
    """The end of the daemon."""

    def test_stop(self) -> None:
        """All tasks are interrupted, their waits answered, nothing is left, and nothing new starts."""
        self.use(Bench(max_running=1))
        done, first = self.started(name="done")
        self.machine.fork(first)
        self.machine.exit(first)
        waiting = self.run_task(wait=30, name="running")
        pending = self.run_task(wait=30, name="pending")
        stopping = Deferred.fromCoroutine(self.runner.stop())
        self.assertIn("stopping", self.refusal(self.run_task()))
        self.bench.advance(1)
        self.successResultOf(stopping)
        for told in (waiting, pending):
            task = self.successResultOf(told).task
            self.assertEqual((task.state, task.cause), (State.INTERRUPTED, Cause.DAEMON_STOPPED))
        self.assertEqual(self.store.tasks[done].state, State.DONE)
        self.assertEqual(self.machine.marks(), {})
        self.assertEqual(self.bench.clock.getDelayedCalls(), [])
        self.assertEqual(len(self.machine.processes), 2)

    def test_stubborn(self) -> None:
        """What ignores SIGTERM gets SIGKILL after the grace."""
        task_id, process = self.started()
        process.stubborn = True
        stopping = Deferred.fromCoroutine(self.runner.stop())
        self.bench.advance(4.5)
        self.assertNoResult(stopping)
        self.bench.advance(1)
        self.successResultOf(stopping)
        self.assertEqual(self.store.tasks[task_id].state, State.INTERRUPTED)

    def test_bounded(self) -> None:
        """A disk that takes nothing does not hold the stop up for ever."""
        task_id, _ = self.started()
        self.store.full = True
        stopping = Deferred.fromCoroutine(self.runner.stop())
        self.bench.advance(5 + limits.STOP_MARGIN)
        self.successResultOf(stopping)
        self.assertEqual(self.bench.clock.getDelayedCalls(), [])
        self.store.full = False
        self.runner = self.bench.new_runner()
        self.runner.recover()
        self.assertEqual(self.state(task_id), State.INTERRUPTED)

    def test_killed_before(self) -> None:
        """A task for which kill was asked before is killed all the same."""
        task_id, _ = self.started()
        self.runner.kill(Kill(task_id))
        Deferred.fromCoroutine(self.runner.stop())
        self.bench.advance(1)
        self.assertEqual(self.store.tasks[task_id].state, State.KILLED)

    def test_nothing_to_do(self) -> None:
        """With nothing running the stop is at once."""
        self.now(self.runner.stop())


class RetentionTests(RunnerCase):
    """What is forgotten."""

    def test_count(self) -> None:
        """Finished tasks beyond the count are forgotten, the oldest first, their files too."""
        self.use(Bench(retention=Retention(count=2)))
        ids = []
        for _ in range(5):
            task_id, process = self.started()
            self.machine.exit(process)
            ids.append(task_id)
        running, _ = self.started()
        self.bench.advance(1)
        self.assertEqual([*self.store.tasks], [*ids[3:], running])
        self.assertEqual([*self.bench.spool.contents], [*ids[3:], running])
        self.assertIn("2 finished", self.refusal(self.observe(ids[0])))

    def test_age(self) -> None:
        """Finished tasks older than the limit are forgotten without anything else happening."""
        task_id, process = self.started()
        self.machine.exit(process)
        for _ in range(24 * 8):
            self.bench.clock.advance(3600)
        self.assertEqual(self.store.tasks, {})
        self.assertNotIn(task_id, self.bench.spool.contents)

    def test_none(self) -> None:
        """With nothing to be kept an end is told before it is forgotten."""
        self.use(Bench(retention=Retention(count=0)))
        waiting = self.run_task(wait=3)
        self.machine.exit(self.machine.processes[0], 6)
        self.assertEqual(self.successResultOf(waiting).task.exit, Exit(6))
        self.bench.advance(1)
        self.assertEqual(self.store.tasks, {})

    def test_many(self) -> None:
        """A great number is forgotten in batches, so that nothing else has to wait for it."""
        self.use(Bench(retention=Retention(count=3)))
        for _ in range(limits.PRUNE_BATCH * 2 + 50):
            self.machine.exit(self.started()[1])
        self.bench.advance(1)
        self.assertEqual([len(ids) for ids in self.store.forgotten], [limits.PRUNE_BATCH, limits.PRUNE_BATCH, 47])

    def test_full_disk(self) -> None:
        """What cannot be forgotten now is forgotten later."""
        self.use(Bench(retention=Retention(count=0)))
        self.machine.exit(self.started()[1])
        self.store.full = True
        self.bench.advance(1)
        self.assertEqual(len(self.store.tasks), 1)
        self.store.full = False
        self.bench.clock.advance(limits.PRUNE_INTERVAL)
        self.assertEqual(self.store.tasks, {})
