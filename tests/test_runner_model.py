"""The runner against a model, through random sequences of all that can happen to it."""

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

from hivebash.requests import Kill, Refusal, Run, Wait
from hivebash.task import Exit, Snapshot, State
from tests.fakes import Bench, FakeProcess

NAMES = st.sampled_from(["a", "b", "c"])
SECONDS = st.sampled_from([0.0, 0.25, 1.0, 4.0, 30.0])


@attrs.define(eq=False)
class Expected:
    """One run, as the model knows it."""

    mark: str
    id: str
    asked: State | None = None
    """How it will end if somebody asked for that first."""
    deadline: float | None = None
    state: State = State.PENDING
    process: FakeProcess | None = None


class RunnerModel(RuleBasedStateMachine):
    """Submissions, ends, kills, waits that end or are left, time, full disks and crashes, in any order."""

    @initialize(slots=st.integers(1, 3))
    def begin(self, slots: int) -> None:
        self.bench = Bench(max_running=slots)
        self.runs: dict[str, Expected] = {}
        """By mark, in the order of submission."""
        self.waits: list[list[Snapshot | Failure]] = []
        self.open: list[Deferred[Snapshot]] = []
        self.seen: dict[str, State] = {}

    # What the model derives.

    @property
    def live(self) -> list[Expected]:
        return [run for run in self.runs.values() if not run.state.final]

    def settle(self) -> None:
        """See which runs were started, in the order of submission, as long as there are slots."""
        started = {process.mark: process for process in self.bench.machine.processes}
        for run in self.live:
            if run.process is None and run.mark in started:
                run.process, run.state = started[run.mark], State.RUNNING
                if run.deadline is not None:
                    run.deadline += self.bench.clock.seconds()

    def bury(self) -> None:
        """Whatever signals ended is seen as ended; deadlines that passed have asked before."""
        now = self.bench.clock.seconds()
        for run in self.live:
            if run.process and run.asked is None and run.deadline is not None and run.deadline <= now:
                run.asked = State.TIMED_OUT
        dead = [process.mark for process, _ in self.bench.machine.dying]
        self.bench.machine.bury()
        for mark in dead:
            self.ended(mark)
        self.settle()

    def ended(self, mark: str) -> None:
        run = self.runs[mark]
        run.state = run.asked or State.DONE

    def watch(self, waiting: Deferred[Snapshot]) -> None:
        results: list[Snapshot | Failure] = []
        self.waits.append(results)
        waiting.addBoth(results.append)
        if not results:
            self.open.append(waiting)

    # What can happen.

    @rule(name=st.none() | NAMES, wait=SECONDS, timeout=st.none() | SECONDS, stubborn=st.booleans())
    def submit(self, name: str | None, wait: float, timeout: float | None, stubborn: bool) -> None:
        before = {task.mark for task in self.bench.store.history}
        request = Run("cmd", timeout, Wait(wait), name)
        waiting: Deferred[Snapshot] = Deferred.fromCoroutine(self.bench.runner.run(request))
        new = [task for task in self.bench.store.history if task.mark not in before]
        busy = name is not None and any(run.id == name for run in self.live)
        if busy or self.bench.store.full:
            refused: list[Any] = []
            waiting.addErrback(refused.append)
            assert not new
            assert refused[0].check(Refusal)
            return
        self.runs[new[0].mark] = Expected(new[0].mark, new[0].id, deadline=timeout)
        if stubborn and self.bench.machine.processes[-1:] and self.bench.machine.processes[-1].mark == new[0].mark:
            self.bench.machine.processes[-1].stubborn = True
        self.watch(waiting)
        self.settle()

    @precondition(lambda self: self.bench.machine.running)
    @rule(data=st.data(), code=st.integers(0, 255), child=st.booleans())
    def leader_ends(self, data: st.DataObject, code: int, child: bool) -> None:
        process = data.draw(st.sampled_from(self.bench.machine.running))
        if child:
            self.bench.machine.fork(process)
        self.bench.machine.exit(process, code)
        self.ended(process.mark)
        self.settle()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), force=st.booleans())
    def kill(self, data: st.DataObject, force: bool) -> None:
        run = data.draw(st.sampled_from(self.live))
        self.bench.runner.kill(Kill(run.id, force))
        run.asked = run.asked or State.KILLED
        if run.process is None:
            run.state = State.KILLED
        self.settle()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), seconds=SECONDS)
    def wait(self, data: st.DataObject, seconds: float) -> None:
        run = data.draw(st.sampled_from(self.live))
        self.watch(Deferred.fromCoroutine(self.bench.runner.observe(run.id, seconds)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        waiting = data.draw(st.sampled_from(self.open))
        self.open.remove(waiting)
        waiting.cancel()

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        for _ in range(max(1, int(seconds / 0.25))):
            self.bench.clock.advance(min(seconds, 0.25))
            self.bury()

    @rule(full=st.booleans())
    def disk(self, full: bool) -> None:
        self.bench.store.full = full
        if not full:
            self.time_passes(1.0)

    @precondition(lambda self: not self.bench.store.full)
    @rule()
    def crash(self) -> None:
        """The daemon dies: nothing more is heard of its processes, and a new one finds what is on disk."""
        machine = self.bench.machine
        for run in self.live:
            run.state = run.asked or State.INTERRUPTED
        for process in machine.processes:
            members = set(process.children) | ({process.identity} if process.alive else set())
            machine.foreign[process.mark] = members
        machine.processes.clear()
        machine.dying.clear()
        for call in list(self.bench.clock.getDelayedCalls()):
            call.cancel()
        self.open.clear()
        self.waits = [results for results in self.waits if results]
        self.bench.runner = self.bench.new_runner()
        self.bench.runner.recover()

    # What always holds.

    @invariant()
    def never_too_many(self) -> None:
        assert len(self.bench.machine.running) <= self.bench.max_running

    @invariant()
    def first_come_first_served(self) -> None:
        """A run is pending only while all slots are taken and all earlier ones have been started or ended."""
        pending = [run for run in self.runs.values() if run.state is State.PENDING]
        assert self.bench.runner.load()[1] == len(pending)
        if pending and not self.bench.machine.dying:
            assert len(self.bench.machine.running) == self.bench.max_running
            order = list(self.runs.values())
            first = order.index(pending[0])
            assert all(run.state is State.PENDING or run.state.final for run in order[first:])

    @invariant()
    def states(self) -> None:
        """Each task is on disk as the model has it, once the disk takes it; and final ones stay as they are."""
        if self.bench.store.full:
            return
        newest = {run.id: run for run in self.runs.values()}
        for task_id, run in newest.items():
            task = self.bench.store.get(task_id)
            assert task is not None
            assert task.mark == run.mark
            assert task.state is run.state, (task, run)
            if task.state.final:
                assert self.seen.setdefault(task.mark, task.state) is task.state
                assert task.exit == Exit() or run.process is not None

    @invariant()
    def answers(self) -> None:
        """A wait is answered at most once, and what it is told is a task that was waited for."""
        for results in self.waits:
            assert len(results) <= 1
            for result in results:
                if isinstance(result, Failure):
                    assert result.check(CancelledError)
                else:
                    run = self.runs[result.task.mark]
                    assert not result.task.state.final or result.task.state is run.state

    def teardown(self) -> None:
        """Once the disk works and the leaders end, everyone who waits is told."""
        if not hasattr(self, "bench"):
            return
        self.disk(full=False)
        for _ in range(len(self.runs) + 1):
            for process in self.bench.machine.running:
                self.bench.machine.exit(process)
        self.bench.advance(2)
        assert all(len(results) == 1 for results in self.waits)
        assert self.bench.runner.load() == (0, 0)
        assert all(process.released for process in self.bench.machine.processes)


class ModelTests(SynchronousTestCase):
    """The rules hold, whatever happens in which order."""

    def test_model(self) -> None:
        """Never two final states, never more than the slots running, first come first served, every wait answered."""
        run_state_machine_as_test(
            RunnerModel,
            settings=settings(
                max_examples=150,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
                report_multiple_bugs=False,
            ),
        )
