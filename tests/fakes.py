"""In-memory stand-ins for what the runner works with, as strict as the real ones."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from zope.interface import implementer

from hivebash.interfaces import (
    CannotStart,
    INotices,
    IProcess,
    IProcesses,
    IReach,
    IReceipt,
    ISpool,
    ITaskStore,
    ITodoSink,
    StoreError,
)
from hivebash.notices import Notices
from hivebash.retention import Finished, Retention
from hivebash.runner import TaskRunner
from hivebash.task import Exit, Identity, Notice, Phase, Stream, Task, Todo

BOOT = "boot-1"


@implementer(IProcess)
@attrs.define(eq=False)
class FakeProcess:
    """A leader, and the processes that it started."""

    identity: Identity
    mark: str
    words: Sequence[str]
    ended: Deferred[Exit] = attrs.field(factory=Deferred)
    alive: bool = True
    children: set[Identity] = attrs.field(factory=set)
    signals: list[int] = attrs.field(factory=list)
    stubborn: bool = False
    """Whether it lets every signal but SIGKILL pass."""
    released: bool = False
    stdin: bytes = b""

    def release(self) -> None:
        if self.released or not self.ended.called:
            raise AssertionError("a leader is released once, after its end")
        self.released = True


@implementer(IProcesses, IReach)
class FakeMachine:
    """Starts processes and has them die of signals."""

    boot_id = BOOT

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []
        self.foreign: dict[str, set[Identity]] = {}
        """Processes of earlier daemons, by their marks."""
        self.sent: list[tuple[str, int]] = []
        """Every signal to a group or to members: its name and how many got it."""
        self.dying: list[tuple[FakeProcess, int]] = []
        """Leaders that a signal ended, and whose end was not seen yet."""
        self.trouble: str | Exception | None = None
        self.blind = False
        """Whether nothing can be looked at, as when the daemon has no descriptor left."""
        self._pids = itertools.count(1000)

    def new_identity(self) -> Identity:
        pid = next(self._pids)
        return Identity(pid, pid, BOOT)

    # IProcesses

    def spawn(  # noqa: PLR0917 - the interface's order
        self,
        words: Sequence[str],
        task_id: str | None,
        mark: str,
        stdout: int,
        stderr: int,
        stdin: int | None = None,
    ) -> FakeProcess:
        os.fstat(stdout), os.fstat(stderr)
        if isinstance(self.trouble, Exception):
            raise self.trouble
        if self.trouble is not None:
            raise CannotStart(self.trouble)
        process = FakeProcess(self.new_identity(), mark, tuple(words))
        if stdin is not None:
            process.stdin = os.read(stdin, 1 << 20)
        self.processes.append(process)
        return process

    # What tests do.

    @property
    def running(self) -> list[FakeProcess]:
        return [process for process in self.processes if process.alive]

    def exit(self, process: FakeProcess, code: int | None = 0, signal: int | None = None) -> None:
        process.alive = False
        process.ended.callback(Exit(code if signal is None else None, signal))

    def fork(self, process: FakeProcess) -> Identity:
        child = self.new_identity()
        process.children.add(child)
        return child

    # IReach

    def identify(self, pid: int) -> Identity | None:
        return next((process.identity for process in self.running if process.identity.pid == pid), None)

    def members(self, leader: Identity | None, mark: str, known: Iterable[Identity]) -> Sequence[Identity]:
        if self.blind:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        found = set(self.foreign.get(mark, ()))
        for process in self.processes:
            if process.mark == mark:
                found |= process.children | ({process.identity} if process.alive else set())
        return tuple(sorted(found, key=lambda identity: identity.pid))

    def counts(self, tasks: Mapping[str, tuple[Identity | None, Iterable[Identity]]]) -> Mapping[str, int]:
        return {mark: len(self.members(leader, mark, known)) for mark, (leader, known) in tasks.items()}

    def marks(self) -> Mapping[str, Sequence[Identity]]:
        marks = {*self.foreign, *(process.mark for process in self.processes)}
        return {mark: members for mark in marks if (members := self.members(None, mark, ()))}

    def one_look(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def destroy(
        self, leader: Identity | None, mark: str, known: Iterable[Identity], *, held: bool
    ) -> Sequence[Identity]:
        if held and any(process.identity == leader and process.released for process in self.processes):
            raise AssertionError("a leader that was reaped is not held")
        members = self.members(leader, mark, known)
        if members:
            self.signal(members, signal.SIGKILL)
        return members

    def interrupt(self, leader: Identity) -> int:
        process = next(process for process in self.processes if process.identity == leader)
        if process.ended.called:
            raise AssertionError("the group of a leader that was reaped must not be signalled")
        count = process.alive + len(process.children)
        self._log(signal.SIGINT, count)
        process.signals.append(signal.SIGINT)
        return count

    def signal(self, processes: Iterable[Identity], number: int) -> int:
        wanted = set(processes)
        count = 0
        for mark in list(self.foreign):
            count += len(hit := self.foreign[mark] & wanted)
            if number == signal.SIGKILL:
                self.foreign[mark] -= hit
        for process in self.processes:
            count += len(hit := process.children & wanted)
            if number == signal.SIGKILL or (number == signal.SIGTERM and not process.stubborn):
                process.children -= hit
        for process in self.running:
            if process.identity in wanted:
                count += 1
                process.signals.append(number)
                if number == signal.SIGKILL or (number == signal.SIGTERM and not process.stubborn):
                    process.alive = False
                    self.dying.append((process, number))
        if number != signal.SIGCONT and count:
            self._log(number, count)
        return count

    def bury(self) -> None:
        """Let the leaders that signals ended be seen as ended: a pidfd tells in a later turn."""
        while self.dying:
            process, number = self.dying.pop(0)
            process.ended.callback(Exit(signal=number))

    def _log(self, number: int, count: int) -> None:
        self.sent.append((signal.Signals(number).name, count))


@implementer(ISpool)
class FakeSpool:
    """Files in memory: what was created, written as scripts and removed."""

    def __init__(self) -> None:
        self.contents: dict[str, tuple[bytes, bytes]] = {}
        self.scripts: dict[str, str] = {}
        self.trouble: str | None = None

    def create(self, task_id: str) -> tuple[int, int]:
        if self.trouble is not None:
            raise CannotStart(self.trouble)
        self.contents[task_id] = (b"", b"")
        return os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)

    def script(self, task_id: str, cmd: str) -> str:
        self.scripts[task_id] = cmd
        return f"/spool/{task_id}.sh"

    def streams(self, task_id: str, *, tails: bool) -> tuple[Stream, Stream]:
        out, err = (
            Stream(f"/spool/{task_id}.{name}", len(data), data.decode() if tails else None)
            for name, data in zip(("out", "err"), self.contents.get(task_id, (b"", b"")), strict=True)
        )
        return out, err

    def remove(self, task_id: str) -> None:
        self.contents.pop(task_id, None)


@implementer(ITaskStore, INotices)
class FakeStore:
    """Tasks in memory, with a disk that can be full. ``history``: every change; ``forgotten``: the ids of each call."""

    instance = "feed"

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.ends: list[str] = []
        self.history: list[Task] = []
        self.forgotten: list[list[str]] = []
        self.full = False
        self.notices: dict[str, Notice] = {}

    def add(self, task: Task) -> None:
        self._check()
        old = self.tasks.pop(task.id, None)
        if old is not None:
            if not old.state.final:
                raise AssertionError("an unfinished task was replaced")
            self.ends.remove(task.id)
        self.tasks[task.id] = task
        self.history.append(task)

    def save(self, task: Task, notice: Notice | None = None) -> None:
        self._check()
        if task.state.final is not (notice is not None):
            raise AssertionError("an end and its notice go together")
        if notice is not None:
            self.notices[notice.key] = notice
        old = self.tasks[task.id]
        if old.state.final and old != task:
            raise AssertionError(f"a final state changed: {old} to {task}")
        if task.state.final and task.id not in self.ends:
            self.ends.append(task.id)
        self.tasks[task.id] = task
        self.history.append(task)

    def _check(self) -> None:
        if self.full:
            raise StoreError("disk full")

    def get(self, task_id: str) -> Task | None:
        return self.tasks.get(task_id)

    def marked(self, mark: str) -> Task | None:
        return next((task for task in self.tasks.values() if task.mark == mark), None)

    def unfinished(self) -> Sequence[Task]:
        return [task for task in self.tasks.values() if not task.state.final]

    def left_behind(self) -> Sequence[Task]:
        return [self.tasks[task_id] for task_id in self.ends if self.tasks[task_id].left]

    def newest(self, count: int) -> Sequence[Task]:
        return [self.tasks[task_id] for task_id in self.ends[::-1][:count]]

    def oldest(self, count: int) -> Sequence[Finished]:
        return [Finished(task_id, self.tasks[task_id].finished_at or 0.0) for task_id in self.ends[:count]]

    def finished(self) -> int:
        return len(self.ends)

    def forget(self, task_ids: Iterable[str]) -> None:
        self._check()
        self.forgotten.append(list(task_ids))
        for task_id in self.forgotten[-1]:
            task = self.tasks.pop(task_id)
            self.ends.remove(task_id)
            notice = self.notices.get(task_id)
            if notice is not None and notice.mark == task.mark and notice.phase in (Phase.SENT, Phase.REFUSED):
                del self.notices[task_id]

    def notice(self, key: str) -> Notice | None:
        return self.notices.get(key)

    def keep(self, notice: Notice) -> None:
        self._check()
        self.notices[notice.key] = notice

    def drop(self, key: str) -> None:
        self._check()
        self.notices.pop(key, None)

    def owed(self) -> Sequence[str]:
        return [key for key, notice in self.notices.items() if notice.phase in (Phase.DUE, Phase.WITHDRAWN)]


@attrs.define(eq=False)
class Asked:
    """One request to the harness."""

    key: str
    todo: Todo | None
    """None: to remove it."""
    answered: Deferred[None] = attrs.field(factory=Deferred)


@implementer(ITodoSink)
class FakeHarness:
    """A harness whose answers are the test's. ``todos``: what it has."""

    def __init__(self) -> None:
        self.todos: dict[str, Todo] = {}
        self.waiting: list[Asked] = []
        self.requests: list[tuple[str, str | None]] = []
        """Every request: the key, and the state put, None for a removal."""
        self.watchers: list[Deferred[None]] = []

    def put(self, key: str, todo: Todo) -> Deferred[None]:
        return self._ask(Asked(key, todo))

    def remove(self, key: str) -> Deferred[None]:
        return self._ask(Asked(key, None))

    def _ask(self, asked: Asked) -> Deferred[None]:
        if any(other.key == asked.key for other in self.waiting):
            raise AssertionError(f"two requests at once for {asked.key}")
        self.waiting.append(asked)
        self.requests.append((asked.key, None if asked.todo is None else asked.todo.state.value))
        return asked.answered

    def when_back(self) -> Deferred[None]:
        watcher: Deferred[None] = Deferred(self.watchers.remove)
        self.watchers.append(watcher)
        return watcher

    def close(self) -> Deferred[None]:
        return succeed(None)

    # What tests do.

    def take(self, error: Exception | None = None, *, applied: bool | None = None) -> Asked:
        """Answer the oldest request; it takes effect if it is answered well, or as ``applied`` says."""
        asked = self.waiting.pop(0)
        if applied if applied is not None else error is None:
            if asked.todo is None:
                self.todos.pop(asked.key, None)
            else:
                self.todos[asked.key] = asked.todo
        if error is None:
            asked.answered.callback(None)
        else:
            asked.answered.errback(error)
        return asked

    def take_all(self) -> None:
        while self.waiting:
            self.take()

    def come_back(self) -> None:
        self.watchers.pop(0).callback(None)


@implementer(IReceipt)
@attrs.define(eq=False)
class FakeReceipt:
    """An answer whose fate is the test's."""

    asked: list[Deferred[bool]] = attrs.field(factory=list)

    def written(self) -> Deferred[bool]:
        self.asked.append(Deferred())
        return self.asked[-1]

    def settle(self, *, written: bool) -> None:
        while self.asked:
            self.asked.pop().callback(written)


@attrs.define(eq=False)
class Bench:
    """A runner with all its fakes, and the clock in the test's hands."""

    max_running: int = 64
    kill_grace: float = 5.0
    retention: Retention = attrs.field(factory=Retention)
    clock: Clock = attrs.field(factory=Clock)
    machine: FakeMachine = attrs.field(factory=FakeMachine)
    spool: FakeSpool = attrs.field(factory=FakeSpool)
    store: FakeStore = attrs.field(factory=FakeStore)
    harness: FakeHarness = attrs.field(factory=FakeHarness)
    epoch: float = 1_700_000_000.0
    tokens: Iterator[int] = attrs.field(factory=itertools.count)
    notices: Notices = attrs.field(init=False)
    runner: TaskRunner = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.runner = self.new_runner()
        self.notices.start()

    def new_runner(self) -> TaskRunner:
        """A runner that finds what this bench's store and machine hold, with notices that were not started yet."""
        self.notices = Notices(clock=self.clock, chance=lambda: 1.0, outbox=self.store, harness=self.harness)
        return TaskRunner(
            clock=self.clock,
            now=lambda: self.epoch + self.clock.seconds(),
            fresh_token=lambda: f"{next(self.tokens):08x}{'0' * 24}",
            processes=self.machine,
            reach=self.machine,
            spool=self.spool,
            store=self.store,
            notices=self.notices,
            max_running=self.max_running,
            kill_grace=self.kill_grace,
            retention=self.retention,
        )

    def advance(self, seconds: float) -> None:
        """Let time pass in small steps, with leaders that died being seen."""
        step = 1 / 32
        for _ in range(max(1, round(seconds / step))):
            self.machine.bury()
            self.clock.advance(min(seconds, step))
        self.machine.bury()
