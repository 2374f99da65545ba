"""The outbox on a clock and in-memory fakes: what the harness is told, and when."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from hivebash import limits
from hivebash.interfaces import HarnessAway, HarnessFailed, HarnessRefused
from hivebash.requests import Run, Wait
from hivebash.task import Phase, Snapshot
from tests.fakes import Bench, FakeProcess, FakeReceipt


class NoticesCase(SynchronousTestCase):
    """A bench, and tasks on it."""

    def setUp(self) -> None:
        self.bench = Bench()
        self.harness, self.store = self.bench.harness, self.bench.store

    def run_task(self, wait: float = 0.0, receipt: FakeReceipt | None = None, **more: str) -> Deferred[Snapshot]:
        return Deferred.fromCoroutine(self.bench.runner.run(Run("cmd", wait=Wait(wait), **more), receipt))

    def observe(self, task_id: str, wait: float, receipt: FakeReceipt) -> Deferred[Snapshot]:
        return Deferred.fromCoroutine(self.bench.runner.observe(task_id, wait, receipt))

    def listed(self, **more: str) -> tuple[str, FakeProcess]:
        """A running task that the harness has on its list."""
        task_id = self.successResultOf(self.run_task(**more)).task.id
        self.harness.take_all()
        return task_id, self.bench.machine.processes[-1]

    @property
    def states(self) -> list[str | None]:
        """What was asked of the harness so far."""
        return [state for _, state in self.harness.requests]


class ToldTests(NoticesCase):
    """An end is told once: by an answer, or by the harness."""

    def test_not_waited_for(self) -> None:
        """A task that goes on is listed, and its end follows."""
        task_id, process = self.listed()
        self.bench.machine.exit(process, 3)
        self.harness.take_all()
        self.assertEqual(self.states, ["running", "done"])
        self.assertEqual(self.harness.todos[task_id].summary, f"{task_id}: done, exit code 3")
        self.assertIs(self.store.notices[task_id].phase, Phase.SENT)

    def test_inline(self) -> None:
        """An end that an answer told is never sent."""
        receipt = FakeReceipt()
        self.run_task(3.0, receipt)
        self.bench.machine.exit(self.bench.machine.processes[0])
        self.assertEqual(self.store.owed(), list(self.store.notices))
        receipt.settle(written=True)
        self.assertEqual((self.states, self.store.notices), ([], {}))

    def test_lost(self) -> None:
        """An answer that was not written, or of which nobody knows, has told nothing."""
        for receipt in (FakeReceipt(), None):
            self.run_task(3.0, receipt)
            self.bench.machine.exit(self.bench.machine.processes[-1])
            if receipt is not None:
                self.assertEqual(self.states, [])
                receipt.settle(written=False)
            self.harness.take_all()
        self.assertEqual(self.states, ["done", "done"])

    def test_wait_passes(self) -> None:
        """When the wait is over, or is left, the task is listed."""
        self.run_task(3.0)
        self.bench.advance(2.5)
        self.assertEqual(self.states, [])
        self.bench.advance(0.5)
        left = self.run_task(3.0)
        left.cancel()
        self.failureResultOf(left)
        self.assertEqual(self.states, ["running", "running"])

    def test_seen_by_status(self) -> None:
        """A status that shows the end takes it from the list once it is written, and the waits hold it till then."""
        task_id, process = self.listed()
        first, second = FakeReceipt(), FakeReceipt()
        for receipt in (first, second):
            self.observe(task_id, 30, receipt)
        self.bench.machine.exit(process)
        first.settle(written=False)
        self.assertEqual(self.states, ["running"])
        second.settle(written=True)
        self.harness.take_all()
        self.assertEqual((self.states, self.harness.todos, self.store.notices), (["running", None], {}, {}))

    def test_seen_later(self) -> None:
        """So does a status after the end was sent; one that is lost changes nothing."""
        task_id, process = self.listed()
        self.bench.machine.exit(process)
        self.harness.take_all()
        for written, todos in ((False, 1), (True, 0)):
            receipt = FakeReceipt()
            self.observe(task_id, 0, receipt)
            receipt.settle(written=written)
            self.harness.take_all()
            self.assertEqual(len(self.harness.todos), todos)

    def test_name_again(self) -> None:
        """A late answer about an earlier run does not take back what is told of the next one."""
        _, process = self.listed(name="a")
        receipt = FakeReceipt()
        self.observe("a", 30, receipt)
        self.bench.machine.exit(process)
        self.run_task(name="a")
        self.bench.machine.exit(self.bench.machine.processes[-1])
        receipt.settle(written=True)
        self.harness.take_all()
        self.assertEqual(self.harness.todos["a"].state.value, "done")

    def test_crash(self) -> None:
        """What is owed, held or was running is told by the next daemon."""
        _, process = self.listed(name="held")
        self.listed(name="ran")
        self.observe("held", 30, FakeReceipt())
        self.bench.machine.exit(process)
        self.bench.runner = self.bench.new_runner()
        self.bench.runner.recover()
        self.bench.notices.start()
        self.harness.take_all()
        self.assertEqual(
            {key: todo.state.value for key, todo in self.harness.todos.items()},
            {"held": "done", "ran": "interrupted"},
        )


class RetryTests(NoticesCase):
    """A harness with trouble of its own."""

    def test_away(self) -> None:
        """One request tries, less and less often; only the newest of a key travels, and all of them at the end."""
        for name in "abc":
            self.run_task(name=name)
        while self.harness.waiting:
            self.harness.take(HarnessAway("no socket"))
        before = len(self.harness.requests)
        for process in self.bench.machine.running:
            self.bench.machine.exit(process)
        pause = limits.RETRY_FIRST
        for _ in range(12):
            self.bench.clock.advance(pause - 0.01)
            self.assertEqual(self.harness.waiting, [])
            self.bench.clock.advance(0.02)
            self.assertEqual(len(self.harness.waiting), 1)
            self.harness.take(HarnessAway("no socket"))
            pause = min(pause * 2, limits.RETRY_MOST)
        self.harness.come_back()
        self.harness.take_all()
        self.assertNotIn("running", self.states[before:])
        self.assertEqual({todo.state.value for todo in self.harness.todos.values()}, {"done"})
        self.assertEqual((len(self.harness.todos), self.harness.watchers), (3, []))

    def test_failing_key(self) -> None:
        """An error at one key delays that key alone."""
        self.run_task(name="a")
        self.harness.take(HarnessFailed("status 500"))
        self.run_task(name="b")
        self.harness.take()
        self.assertEqual(list(self.harness.todos), ["b"])
        self.bench.clock.advance(limits.RETRY_FIRST)
        self.harness.take()
        self.assertEqual(list(self.harness.todos), ["b", "a"])

    def test_refused(self) -> None:
        """A refusal is kept with its reason, and not asked again, nor by the next daemon."""
        task_id = self.successResultOf(self.run_task()).task.id
        self.harness.take(HarnessRefused("status 400: no"))
        self.bench.advance(3)
        self.bench.new_runner()
        self.bench.notices.start()
        self.assertEqual(self.states, ["running"])
        notice = self.store.notices[task_id]
        self.assertEqual((notice.phase, notice.problem), (Phase.REFUSED, "status 400: no"))

    def test_full_disk(self) -> None:
        """What was acknowledged is not sent again because the disk does not take it; it is written later."""
        task_id = self.successResultOf(self.run_task()).task.id
        self.store.full = True
        self.harness.take()
        self.bench.advance(5)
        self.store.full = False
        self.bench.advance(2)
        self.assertEqual(self.states, ["running"])
        self.assertIs(self.store.notices[task_id].phase, Phase.SENT)

    def test_burst(self) -> None:
        """Of many ends a few are under way at a time, and all are told; then nothing is scheduled for them."""
        self.bench.runner.max_running = 500
        for _ in range(500):
            self.run_task()
        self.harness.take_all()
        for process in self.bench.machine.running:
            self.bench.machine.exit(process)
        self.assertEqual(len(self.harness.waiting), limits.SENDS_AT_ONCE)
        self.harness.take_all()
        self.assertEqual(len(self.harness.todos), 500)
        self.assertEqual({todo.state.value for todo in self.harness.todos.values()}, {"done"})
        self.assertEqual(len(self.bench.clock.getDelayedCalls()), 1)  # the look for what is to be forgotten
