"""The outbox against a model: whatever happens in which order, each end is told, and told once."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from hivebash import limits
from hivebash.interfaces import HarnessAway, HarnessFailed
from hivebash.requests import Kill, Refusal, Run, Wait
from hivebash.task import Snapshot
from tests.fakes import Asked, Bench, FakeHarness, FakeReceipt, FakeStore

NAMES = st.sampled_from([None, "a", "a", "b"])
WAITS = st.sampled_from([0.0, 4.0])
SECONDS = st.sampled_from([0.25, 1.0, 4.0, 31.0])
TROUBLE = st.sampled_from([None, None, None, HarnessFailed("status 500"), HarnessAway("no socket")])


@attrs.define(eq=False)
class Watching:
    """A call that waits, or an answer of which nobody knows yet what became of it."""

    mark: str
    receipt: FakeReceipt | None
    call: Deferred[Snapshot]


class StrictHarness(FakeHarness):
    """Looks at each request; errors inside the outbox are its own to handle, so what is wrong is gathered."""

    def __init__(self, store: FakeStore, model: NoticesModel) -> None:
        super().__init__()
        self.store = store
        self.model = model
        self.wrong: list[str] = []
        self.given: set[str] = set()
        """The marks of those whose end took effect here."""
        self.acknowledged: set[str] = set()
        """Those of which the daemon that lives was told so."""
        self.removed: set[str] = set()
        """Those of which some daemon was told that they were removed."""
        self.marks: dict[Asked, str] = {}

    def _ask(self, asked: Asked) -> Deferred[None]:
        notice = self.store.notice(asked.key)
        if any(other.key == asked.key for other in self.waiting):
            self.wrong.append("two requests at once for one key")
        if notice is None or (asked.todo is not None and asked.todo != notice.todo):
            self.wrong.append("what was sent is not what is on disk")
        mark = "" if notice is None else notice.mark
        self.marks[asked] = mark
        if asked.todo is not None and asked.todo.state.final:
            if mark in self.acknowledged:
                self.wrong.append("sent although it was acknowledged")
            if mark in self.removed:
                self.wrong.append("sent although it was removed")
            if mark in self.model.written:
                self.wrong.append("sent although an answer told it")
            if any(each.mark == mark and each.receipt for each in (*self.model.open, *self.model.answers)):
                self.wrong.append("sent although an answer may yet tell it")
        return super()._ask(asked)

    def take(self, error: Exception | None = None, *, applied: bool | None = None) -> Asked:
        self.note(self.waiting[0], error, applied=error is None if applied is None else applied)
        return super().take(error, applied=applied)

    def note(self, asked: Asked, error: Exception | None, *, applied: bool) -> None:
        mark = self.marks[asked]
        if asked.todo is None:
            if error is None:
                self.removed.add(mark)
        elif asked.todo.state.final:
            if applied:
                self.given.add(mark)
            if error is None:
                self.acknowledged.add(mark)

    def die(self, *, applied: bool) -> None:
        """The daemon is gone; what was under way took effect or did not."""
        while self.waiting:
            asked = self.waiting.pop(0)
            self.note(asked, HarnessAway("gone"), applied=applied)
            if applied and asked.todo is None:
                self.todos.pop(asked.key, None)
            elif applied and asked.todo is not None:
                self.todos[asked.key] = asked.todo
        self.acknowledged.clear()
        self.watchers.clear()


class NoticesModel(RuleBasedStateMachine):
    """Tasks, waits, answers that arrive or do not, a harness with trouble, full disks and crashes, in any order."""

    @initialize(
        slots=st.integers(1, 3), arrive=st.booleans(), first=st.lists(st.tuples(NAMES, WAITS), min_size=1, max_size=4)
    )
    def begin(self, slots: int, arrive: bool, first: list[tuple[str | None, float]]) -> None:
        self.open: list[Watching] = []
        self.answers: list[Watching] = []
        self.written: set[str] = set()
        """The marks of those whose end was shown by an answer that was written."""
        store = FakeStore()
        self.harness = StrictHarness(store, self)
        self.bench = Bench(max_running=slots, store=store, harness=self.harness)
        self.arrive = arrive
        """Whether the answers that are left at the end are written."""
        self.graves: list[Any] = []
        """Daemons that died; were they collected, their coroutines would clean up in the next one's store."""
        for name, wait in first:
            self.submit(name, wait, known=True)

    def watch(self, mark: str, receipt: FakeReceipt | None, call: Deferred[Snapshot]) -> None:
        watching = Watching(mark, receipt, call)
        self.open.append(watching)

        def answered(result: Snapshot | Failure) -> None:
            if watching in self.open:
                self.open.remove(watching)
            if isinstance(result, Failure):
                if not result.check(CancelledError):
                    result.raiseException()
            elif result.task.state.final and receipt is not None:
                self.answers.append(watching)

        call.addBoth(answered)

    def settle(self, answer: Watching, *, written: bool) -> None:
        self.answers.remove(answer)
        if written:
            self.written.add(answer.mark)
        assert answer.receipt is not None
        answer.receipt.settle(written=written)

    @property
    def ids(self) -> list[str]:
        return sorted(self.bench.store.tasks)

    # What can happen.

    @rule(name=NAMES, wait=WAITS, known=st.booleans())
    def submit(self, name: str | None, wait: float, known: bool) -> None:
        before = len(self.bench.store.history)
        receipt = FakeReceipt() if known else None
        call = Deferred.fromCoroutine(self.bench.runner.run(Run("cmd", wait=Wait(wait), name=name), receipt))
        if len(self.bench.store.history) == before:
            call.addErrback(lambda failure: failure.trap(Refusal))
        else:
            self.watch(self.bench.store.history[before].mark, receipt, call)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), wait=st.sampled_from([0.0, 4.0, 30.0]), known=st.sampled_from([True, True, False]))
    def status(self, data: st.DataObject, wait: float, known: bool) -> None:
        task = self.bench.store.tasks[data.draw(st.sampled_from(self.ids))]
        receipt = FakeReceipt() if known else None
        self.watch(task.mark, receipt, Deferred.fromCoroutine(self.bench.runner.observe(task.id, wait, receipt)))

    @precondition(lambda self: self.bench.machine.running)
    @rule(data=st.data())
    def leader_ends(self, data: st.DataObject) -> None:
        self.bench.machine.exit(data.draw(st.sampled_from(self.bench.machine.running)))

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), force=st.booleans())
    def kill(self, data: st.DataObject, force: bool) -> None:
        self.bench.runner.kill(Kill(data.draw(st.sampled_from(self.ids)), force))
        self.bench.machine.bury()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        watching = data.draw(st.sampled_from(self.open))
        self.open.remove(watching)
        watching.call.cancel()

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), written=st.booleans())
    def answer_arrives(self, data: st.DataObject, written: bool) -> None:
        self.settle(data.draw(st.sampled_from(self.answers)), written=written)

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            self.bench.clock.advance(0.25)
            self.bench.machine.bury()

    @precondition(lambda self: self.harness.waiting)
    @rule(error=TROUBLE, applied=st.booleans())
    def harness_answers(self, error: Exception | None, applied: bool) -> None:
        self.harness.take(error, applied=error is None or applied)

    @precondition(lambda self: self.harness.watchers)
    @rule()
    def harness_comes_back(self) -> None:
        self.harness.come_back()

    @rule(full=st.booleans())
    def disk(self, full: bool) -> None:
        self.bench.store.full = full
        if not full:
            self.time_passes(limits.STORE_RETRY)

    @precondition(lambda self: not self.bench.store.full)
    @rule(applied=st.booleans())
    def crash(self, applied: bool) -> None:
        """The daemon dies, and nobody hears what became of its answers and requests."""
        machine = self.bench.machine
        self.graves += [self.bench.runner, self.bench.notices, *self.open, *self.answers, *self.harness.waiting]
        self.graves += machine.processes
        self.open.clear()
        self.answers.clear()
        self.harness.die(applied=applied)
        for process in machine.processes:
            machine.foreign[process.mark] = process.children | ({process.identity} if process.alive else set())
        machine.processes.clear()
        machine.dying.clear()
        for call in list(self.bench.clock.getDelayedCalls()):
            call.cancel()
        self.bench.runner = self.bench.new_runner()
        self.bench.runner.recover()
        self.bench.notices.start()

    # What always holds.

    @invariant()
    def requests(self) -> None:
        """No end is sent twice, or although it was told, or while it may be told."""
        assert self.harness.wrong == []
        assert len(self.harness.waiting) <= limits.SENDS_AT_ONCE

    def teardown(self) -> None:
        """With a harness and a disk that work, each end was told by an answer or stands in the list, never both."""
        if not hasattr(self, "bench"):
            return
        self.disk(full=False)
        self.harness.take_all()  # so that the ends have to set off requests of their own
        for _ in range(int((limits.RETRY_MOST + 10) / 0.25)):
            for process in self.bench.machine.running:
                self.bench.machine.exit(process)
            for answer in list(self.answers):
                self.settle(answer, written=self.arrive)
            self.harness.take_all()
            self.time_passes(0.25)
        self.requests()
        assert not self.open
        for task in self.bench.store.tasks.values():
            assert task.state.final
            todo = self.harness.todos.pop(task.id, None)
            if task.mark in self.written:
                assert todo is None, (task, todo)
            else:
                assert task.mark in self.harness.given, task
                assert todo is not None, task
                assert todo.state is task.state, (task, todo)
        assert not self.harness.todos
        assert not self.bench.store.owed()
        prune = self.bench.runner._prune
        assert all(call.func == prune for call in self.bench.clock.getDelayedCalls())


class ModelTests(SynchronousTestCase):
    """The rules hold, whatever happens in which order."""

    def test_model(self) -> None:
        """Every end is told, by an answer or by the harness; none is sent again, or after it was told."""
        run_state_machine_as_test(
            NoticesModel,
            settings=settings(
                max_examples=200,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
                report_multiple_bugs=False,
            ),
        )
