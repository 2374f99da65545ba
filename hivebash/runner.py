"""The tasks: queue and slots, deadlines, waits, and what an end sets off. The only writer of task state.

Rank 2: the clock, the time of day and everything with more than one side are passed in.

Theory of operation. Only what is pending or running is held in memory, with whatever ended and left processes behind;
of all else the store is the memory. What becomes of a task is decided by its lifecycle, written to the store together
with the notice of it, and told to those who wait and to the harness, in this order: an end that the disk does not take
yet is tried again and told later, and until then the task counts as running. A slot is free again as soon as the leader
has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import attrs
from twisted.internet import defer
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from hivebash import limits, wording
from hivebash.ending import Ending
from hivebash.interfaces import CannotStart, IProcess, IProcesses, IReach, IReceipt, ISpool, ITaskStore, StoreError
from hivebash.lifecycle import Life, end_of_lost, new_life
from hivebash.notices import Hold, Notices
from hivebash.requests import Kill, Refusal, Run
from hivebash.retention import Retention
from hivebash.task import Exit, KillReport, Notice, Snapshot, State, Task

_log = Logger()


@attrs.frozen
class Table:
    """What ``status`` without an id tells."""

    snapshots: list[Snapshot]
    """Running, pending, newest finished; without tails."""
    hidden: int
    """How many more are pending or running."""


@attrs.define(eq=False)
class _Active:
    """A task that has not ended, or whose end is not on disk yet."""

    task: Task
    ending: Ending
    life: Life
    started_at: float = 0.0
    """On the monotonic clock."""
    deadline: IDelayedCall | None = None
    ended: Task | None = None
    """The task with its end, from the moment it is decided."""
    left: int = 0
    """How many processes it left behind when it ended."""
    waiters: list[Deferred[Snapshot]] = attrs.field(factory=list)

    @property
    def told(self) -> bool:
        """Whether its end is on disk, so that it may be told."""
        return self.task.state.final


@attrs.define(eq=False)
class TaskRunner:
    """Runs tasks, watches and ends them, and answers about them."""

    _clock: IReactorTime
    """Monotonic."""
    _now: Callable[[], float]
    """Seconds since the epoch, to show only."""
    _fresh_token: Callable[[], str]
    """A new string of lowercase hex that nobody can guess."""
    _processes: IProcesses
    _reach: IReach
    _spool: ISpool
    _store: ITaskStore
    _notices: Notices
    max_running: int = limits.MAX_RUNNING
    kill_grace: float = limits.KILL_GRACE
    """Seconds."""
    retention: Retention = attrs.field(factory=Retention)
    _active: dict[str, _Active] = attrs.field(factory=dict, init=False)
    _queue: deque[_Active] = attrs.field(factory=deque, init=False)
    _running: int = attrs.field(default=0, init=False)
    _haunted: dict[str, Ending] = attrs.field(factory=dict, init=False)
    """Finished tasks with live processes, by mark: their ids may have been used again."""
    _haunted_most: int = attrs.field(default=limits.HAUNTED_MOST, init=False)
    _unwritten: dict[str, _Active] = attrs.field(factory=dict, init=False)
    """What the disk refused, by id."""
    _retry: IDelayedCall | None = attrs.field(default=None, init=False)
    _pruning: IDelayedCall | None = attrs.field(default=None, init=False)
    _stopping: bool = attrs.field(default=False, init=False)

    # What clients ask for.

    async def run(self, request: Run, receipt: IReceipt | None = None) -> Snapshot:
        """Start a task, or put it in the queue; the task as it is at its end, or when the wait is over.

        ``receipt``: of the answer that shows it. A task that goes on is put on the harness's list; the end of one that
        ended is not, if the answer is written. Cancelling ends the wait and leaves the task alone. Raises Refusal: busy
        name, daemon stopping, disk.
        """
        active, hold = self._submit(request)
        try:
            snapshot = await self._wait(active, request.wait.seconds)
        except BaseException:  # a client that left, for the most part
            self._list(active)
            hold.release()
            raise
        if snapshot.task.state.final:
            hold.follow(receipt)
        else:
            self._list(active)
            hold.release()
        return snapshot

    async def observe(self, task_id: str, seconds: float, receipt: IReceipt | None = None) -> Snapshot:
        """A task as it is at its end, or after that many seconds at the latest.

        ``receipt``: of the answer that shows it; once one with the end is written, the harness need not tell it.
        Cancelling ends the wait and leaves the task alone. Raises Refusal: unknown id.
        """
        active = self._active.get(task_id)
        task = self._known(task_id) if active is None else active.task
        hold = self._notices.hold(task_id, task.mark)
        try:
            snapshot = self._snapshot_finished(task) if active is None else await self._wait(active, seconds)
        except BaseException:
            hold.release()
            raise
        if snapshot.task.state.final:
            hold.follow(receipt)
        else:
            hold.release()
        return snapshot

    def table(self) -> Table:
        """What is running and pending, and the newest finished tasks."""
        active = sorted(self._active.values(), key=lambda each: each.task.state is State.PENDING)  # a stable sort
        shown = active[: limits.TABLE_ACTIVE]
        finished = list(self._store.newest(limits.TABLE_FINISHED))
        endings = {each.task.mark: each.ending for each in shown}
        endings |= {task.mark: self._ending_of(task) for task in finished}
        counts = self._count({mark: ending for mark, ending in endings.items() if ending.leader is not None})
        snapshots = [
            self._snapshot(task, counts.get(task.mark, 0), started_at=started_at, tails=False)
            for task, started_at in [
                *((each.task, each.started_at) for each in shown),
                *((task, 0.0) for task in finished),
            ]
        ]
        return Table(snapshots, len(active) - len(shown))

    def kill(self, request: Kill) -> KillReport:
        """Signal a task, or what it left behind; cancel it if it is pending. Returns at once.

        Raises Refusal: unknown id.
        """
        active = self._active.get(request.id)
        if active is None or active.ended is not None:
            task = self._known(request.id) if active is None else active.task
            return self._kill_stragglers(task, self._ending_of(task) if active is None else active.ending, request)
        if active.task.state is State.PENDING:
            self._queue.remove(active)
            active.life.kill(force=request.force)
            self._finish(active)
            return KillReport(request.id, State.KILLED, cancelled=True)
        active.ending.sent = None
        self._ask(active, lambda: active.life.kill(force=request.force))
        return KillReport(request.id, active.task.state, active.ending.sent)

    def load(self) -> tuple[int, int]:
        """How many tasks are running and how many pending."""
        return self._running, len(self._queue)

    # What the daemon asks for.

    def recover(self) -> None:
        """Settle what an earlier daemon left: its unfinished tasks are over, and their processes are ended.

        Raises StoreError: the daemon cannot work then.
        """
        for task in self._store.unfinished():
            end = end_of_lost(task)
            ended = task.ended(end, duration_secs=self._lost_duration(task), finished_at=self._now())
            self._save_end(ended)
            ending = self._ending_of(ended)
            if ending.members():
                self._haunted[task.mark] = ending
                ending.terminate()
        for mark in self._reach.marks():
            if not mark.startswith(f"{self._store.instance}-") or mark in self._haunted:
                continue
            owner = self._store.marked(mark)  # None: its id was used again
            ending = self._haunted[mark] = self._new_ending(mark) if owner is None else self._ending_of(owner)
            if owner is not None and owner.state is not State.DONE:
                ending.terminate()  # the daemon's own end came before that of these processes
        for task in self._store.left_behind():
            self._haunted.setdefault(task.mark, self._new_ending(task.mark, task))
        self._lay_to_rest()
        self._prune_soon(0.0)

    async def stop(self) -> None:
        """End everything. Returns when nothing is left, or after the grace and a margin. Call it once."""
        self._stopping = True
        actives = list(self._active.values())
        haunted = self._count(self._haunted)
        while self._queue:
            pending = self._queue.popleft()
            pending.life.halt()
            self._finish(pending)
        # One look for all: with many tasks a look for each would take longer than anybody waits for.
        with self._one_look():
            for active in actives:
                if active.ended is None:
                    self._ask(active, active.life.halt)
        for mark, ending in list(self._haunted.items()):
            if haunted.get(mark, 1):
                ending.terminate()
            else:
                del self._haunted[mark]
        endings = [*self._haunted.values(), *(active.ending for active in actives)]
        waits: list[Deferred[None]] = [ending.when_gone() for ending in endings]
        waits += [self._told(active).addCallback(lambda _: None) for active in actives if not active.told]
        # When the time is over this list cancels what it waits for, and fires all the same.
        await DeferredList(waits, consumeErrors=True).addTimeout(self.kill_grace + limits.STOP_MARGIN, self._clock)
        left = [*self._active, *(mark for mark, count in self._count(self._haunted).items() if count)]
        if left:
            _log.error("stopped without the end of {tasks}", tasks=left)
        for ending in endings:
            ending.abandon()
        for call in (self._retry, self._pruning):
            if call is not None and call.active():
                call.cancel()

    # From submission to end.

    def _submit(self, request: Run) -> tuple[_Active, Hold]:
        """The new task, and the hold on its end by the one who asked for it."""
        if self._stopping:
            raise Refusal(wording.STOPPING)
        task_id = self._fresh_id() if request.name is None else request.name
        busy = self._active.get(task_id)
        if busy is not None:
            raise Refusal(wording.busy_name(task_id, busy.task.state))
        mark = f"{self._store.instance}-{self._fresh_token()}"
        task = Task(task_id, request.cmd, self._now(), mark, request.timeout_secs)
        try:
            self._store.add(task)
        except StoreError as error:
            raise Refusal(wording.not_recorded(str(error))) from None
        if request.name is not None:
            self._spool.remove(task_id)
        ending = self._new_ending(mark)
        active = self._active[task_id] = _Active(task, ending, new_life(ending))
        hold = self._notices.hold(task_id, mark)
        self._queue.append(active)
        self._fill()
        return active, hold

    def _fresh_id(self) -> str:
        while True:
            task_id = self._fresh_token()[: limits.ID_LENGTH]
            if task_id not in self._active and self._store.get(task_id) is None:
                return task_id

    def _fill(self) -> None:
        while self._queue and self._running < self.max_running and not self._stopping:
            self._start(self._queue.popleft())

    def _start(self, active: _Active) -> None:
        task = active.task
        process: IProcess | None = None
        with contextlib.ExitStack() as descriptors:
            try:
                stdout, stderr = self._spool.create(task.id)
                descriptors.callback(os.close, stdout)
                descriptors.callback(os.close, stderr)
                process = self._processes.spawn(self._words(task), task.id, task.mark, stdout, stderr)
            except CannotStart as error:
                active.life.fail(str(error))
            except Exception:  # noqa: BLE001 - whatever it was, the task must end and the next one get its turn
                _log.failure("task {id} could not be started", id=task.id)
                active.life.fail("an error inside the daemon; its log says why")
        if process is None:
            self._finish(active)
            return
        self._running += 1
        active.started_at = self._clock.seconds()
        active.ending.leader, active.ending.held = process.identity, True
        active.life.start()
        active.task = attrs.evolve(task, state=State.RUNNING, leader=process.identity, started_clock=active.started_at)
        self._write(active)
        if task.timeout_secs is not None and task.timeout_secs < limits.TIMEOUT_MAX:
            active.deadline = self._clock.callLater(task.timeout_secs, lambda: self._ask(active, active.life.expire))
        process.ended.addCallback(lambda exit_: self._exited(active, process, exit_))

    def _words(self, task: Task) -> tuple[str, ...]:
        if len(task.cmd.encode()) >= limits.ARGUMENT_MAX:
            return (self._spool.script(task.id, task.cmd),)
        if task.cmd[0] in "-+":
            return ("-c", "--", task.cmd)
        return ("-c", task.cmd)

    def _ask(self, active: _Active, ask: Callable[[], None]) -> None:
        """Have the lifecycle asked to end a task, and remember on disk that it was."""
        ask()
        if active.life.asked() is not active.task.asked:
            active.task = attrs.evolve(active.task, asked=active.life.asked())
            self._write(active)

    def _exited(self, active: _Active, process: IProcess, exit_: Exit) -> None:
        if active.deadline is not None and active.deadline.active():
            active.deadline.cancel()
        # The leader is still there as a zombie, so its session is surely its own: what this look finds stays known.
        active.left = len(active.ending.members())
        active.life.exited(exit_)
        self._running -= 1
        self._finish(active)
        active.ending.when_gone().addCallback(lambda _: self._release(active, process))
        self._fill()

    def _release(self, active: _Active, process: IProcess) -> None:
        active.ending.held = False
        process.release()

    def _finish(self, active: _Active) -> None:
        """The lifecycle has come to an end: write it down, then tell."""
        end = active.life.end()
        if end is None:
            raise AssertionError(f"task {active.task.id} has no end")
        duration = 0.0 if active.ending.leader is None else self._clock.seconds() - active.started_at
        active.ended = active.task.ended(
            end, duration_secs=duration, finished_at=self._now(), left=active.ending.known if active.left else ()
        )
        self._write(active)

    def _write(self, active: _Active) -> None:
        try:
            if active.ended is None:
                self._store.save(active.task)
            else:
                self._save_end(active.ended)
        except StoreError as error:
            _log.error("task {id} cannot be written down: {error}", id=active.task.id, error=str(error))
            self._unwritten[active.task.id] = active
            if self._retry is None or not self._retry.active():
                self._retry = self._clock.callLater(limits.STORE_RETRY, self._write_again)
            return
        self._unwritten.pop(active.task.id, None)
        if active.ended is not None:
            self._tell(active, active.ended)

    def _save_end(self, ended: Task) -> None:
        """The end and its notice, both or neither. Raises StoreError."""
        self._store.save(ended, self._draft(ended))
        self._notices.post(ended.id)

    def _list(self, active: _Active) -> None:
        """Tell the harness of a task that nobody waits for any more; its end will be told in any case."""
        if active.told:
            return
        try:
            self._notices.keep(self._draft(active.task))
        except StoreError as error:
            _log.error("task {id} is not put on the list: {error}", id=active.task.id, error=str(error))

    def _draft(self, task: Task) -> Notice:
        snapshot = Snapshot(task, task.duration_secs or 0.0, 0, *self._spool.streams(task.id, tails=False))
        return self._notices.draft(task, wording.todo(snapshot))

    def _write_again(self) -> None:
        for active in list(self._unwritten.values()):
            self._write(active)

    def _tell(self, active: _Active, ended: Task) -> None:
        active.task = ended
        del self._active[ended.id]
        if active.left:
            self._haunted[ended.mark] = active.ending
            if len(self._haunted) > self._haunted_most:
                self._lay_to_rest()
        self._prune_soon(limits.PRUNE_PAUSE)
        if active.waiters:
            snapshot = self._snapshot_active(active)
            while active.waiters:
                active.waiters.pop(0).callback(snapshot)

    # Waits.

    async def _wait(self, active: _Active, seconds: float) -> Snapshot:
        if not active.told and seconds > 0:
            told = self._told(active).addTimeout(seconds, self._clock)
            with contextlib.suppress(defer.TimeoutError):
                return await told
        return self._snapshot_active(active)

    def _told(self, active: _Active) -> Deferred[Snapshot]:
        """Fires with the task as it ended, once that is on disk."""
        told: Deferred[Snapshot] = Deferred(active.waiters.remove)
        active.waiters.append(told)
        return told

    # What is told.

    def _known(self, task_id: str) -> Task:
        task = self._store.get(task_id)
        if task is None:
            raise Refusal(wording.unknown_id(task_id, self.retention.count, self.retention.days))
        return task

    def _snapshot_active(self, active: _Active) -> Snapshot:
        task = active.task
        count = task.state is State.RUNNING or active.left > 0
        processes = len(active.ending.members()) if count else 0
        if active.ended is not None:  # perhaps not on disk yet, but its time is over
            task = attrs.evolve(task, duration_secs=active.ended.duration_secs)
        return self._snapshot(task, processes, started_at=active.started_at, tails=True)

    def _snapshot_finished(self, task: Task) -> Snapshot:
        ending = self._ending_of(task)
        processes = 0 if ending.leader is None else len(ending.members())
        if not processes:
            self._haunted.pop(task.mark, None)
        return self._snapshot(task, processes, tails=True)

    def _snapshot(self, task: Task, processes: int, *, started_at: float = 0.0, tails: bool) -> Snapshot:
        duration = task.duration_secs
        if duration is None:
            duration = self._clock.seconds() - started_at if task.state is State.RUNNING else 0.0
        return Snapshot(task, duration, processes, *self._spool.streams(task.id, tails=tails))

    # Processes of finished tasks.

    def _new_ending(self, mark: str, task: Task | None = None) -> Ending:
        ending = Ending(self._clock, self._reach, mark, self.kill_grace)
        if task is not None:
            ending.leader, ending.known = task.leader, task.left
        return ending

    def _ending_of(self, task: Task) -> Ending:
        return self._haunted.get(task.mark) or self._new_ending(task.mark, task)

    def _count(self, endings: Mapping[str, Ending]) -> Mapping[str, int]:
        """How many live processes each has, by mark; nothing where the daemon cannot look."""
        try:
            return self._reach.counts({mark: (ending.leader, ending.known) for mark, ending in endings.items()})
        except OSError as error:
            _log.error("processes cannot be counted: {error}", error=error)
            return {}

    @contextlib.contextmanager
    def _one_look(self) -> Iterator[None]:
        """A single look for all that is asked within this context, where the daemon can look."""
        with contextlib.ExitStack() as look:
            try:
                look.enter_context(self._reach.one_look())
            except OSError as error:
                _log.error("processes cannot be looked at: {error}", error=error)
            yield

    def _lay_to_rest(self) -> None:
        """Drop those whose processes are gone; again once there are twice as many."""
        counts = self._count(self._haunted)
        self._haunted = {mark: ending for mark, ending in self._haunted.items() if counts.get(mark, 1)}
        self._haunted_most = max(limits.HAUNTED_MOST, 2 * len(self._haunted))

    def _kill_stragglers(self, task: Task, ending: Ending, request: Kill) -> KillReport:
        ending.sent = None
        if ending.members():
            self._haunted[task.mark] = ending
            if request.force:
                ending.destroy()
            else:
                # They outlived their leader, and those started with & ignore SIGINT.
                ending.terminate()
        return KillReport(task.id, task.state, ending.sent)

    def _lost_duration(self, task: Task) -> float:
        """Seconds from a lost task's start until now: nobody saw when it ended."""
        if task.leader is None or task.started_clock is None:
            return 0.0
        if task.leader.boot_id == self._reach.boot_id:
            return max(0.0, self._clock.seconds() - task.started_clock)
        return max(0.0, self._now() - task.submitted_at)

    # Forgetting.

    def _prune_soon(self, seconds: float) -> None:
        if self._stopping:
            return
        if self._pruning is not None and self._pruning.active():
            if self._pruning.getTime() <= self._clock.seconds() + seconds:
                return
            self._pruning.cancel()
        self._pruning = self._clock.callLater(seconds, self._prune)

    def _prune(self) -> None:
        """Forget one batch of what is beyond the limits; soon again if that was not all, else with time."""
        finished = self._store.finished()
        surplus = finished - self.retention.count
        oldest = self._store.oldest(min(max(surplus, 1), limits.PRUNE_BATCH))
        ids = self.retention.forgettable(oldest, finished, self._now())
        if not ids:
            self._prune_soon(limits.PRUNE_INTERVAL)
            return
        for task_id in ids:
            self._spool.remove(task_id)
        try:
            self._store.forget(ids)
        except StoreError as error:
            _log.error("finished tasks cannot be forgotten: {error}", error=str(error))
            self._prune_soon(limits.PRUNE_INTERVAL)
        else:
            self._prune_soon(0.0)
