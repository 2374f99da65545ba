"""The tasks on a real disk."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from typing import Any

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from hivebash.interfaces import INotices, ITaskStore, StoreError
from hivebash.store import MIGRATIONS, TaskStore
from hivebash.task import Cause, Exit, Identity, Notice, Phase, State, Task, Todo

TIMES = st.floats(0, 1e12)
IDENTITIES = st.builds(Identity, st.integers(1, 2**22), st.integers(0, 2**60), st.text(max_size=40))
TASKS = st.builds(
    Task,
    id=st.just("a"),
    cmd=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    submitted_at=TIMES,
    mark=st.just("m"),
    timeout_secs=st.none() | TIMES,
    state=st.sampled_from(State),
    asked=st.none() | st.sampled_from(Cause),
    leader=st.none() | IDENTITIES,
    started_clock=st.none() | TIMES,
    duration_secs=st.none() | TIMES,
    finished_at=st.none() | TIMES,
    exit=st.builds(Exit, st.none() | st.integers(0, 255), st.none() | st.integers(1, 64)),
    cause=st.none() | st.sampled_from(Cause),
    detail=st.text(st.characters(exclude_categories=["Cs"])),
    left=st.lists(IDENTITIES, max_size=3).map(tuple),
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NOTICES = st.builds(
    Notice,
    key=st.just("a"),
    mark=TEXT,
    todo=st.builds(Todo, TEXT, TEXT, st.sampled_from(State)),
    phase=st.sampled_from(Phase),
    exposed=st.booleans(),
    problem=TEXT,
)


class StoreTests(SynchronousTestCase):
    """What was written is found again."""

    def setUp(self) -> None:
        self.path = os.path.abspath(self.mktemp())
        self.store = self.open()

    def open(self) -> TaskStore:
        store = TaskStore(self.path)
        store.open()
        self.addCleanup(store.close)
        return store

    def add(self, task_id: str, state: State = State.DONE, **more: object) -> Task:
        task = Task(task_id, "true", 1.0, f"mark-{task_id}", **more)
        self.store.add(task)
        if state is not State.PENDING:
            task = attrs.evolve(task, state=state, finished_at=2.0 if state.final else None)
            self.store.save(task)
        return task

    def test_interface(self) -> None:
        """It provides what it says, in a file for its owner alone."""
        verifyObject(ITaskStore, self.store)
        verifyObject(INotices, self.store)
        self.assertEqual(stat.S_IMODE(os.stat(self.path).st_mode), 0o600)

    @settings(deadline=None, derandomize=True, database=None, max_examples=100)
    @given(TASKS)
    def test_whole(self, task: Task) -> None:
        """Everything about a task is as it was, also for another reader."""
        self.store.add(Task("a", task.cmd, task.submitted_at, "m", task.timeout_secs))
        self.store.save(task)
        other = TaskStore(self.path)
        other.open()
        try:
            self.assertEqual(other.get("a"), task)
            self.assertEqual(other.marked("m"), task)
            self.assertEqual(other.instance, self.store.instance)
        finally:
            other.close()

    def test_orders(self) -> None:
        """Unfinished tasks come in the order of submission, finished ones in that of their ends."""
        for task_id, state in (("p", State.PENDING), ("r", State.RUNNING), ("q", State.PENDING)):
            self.add(task_id, state)
        first, second, third = (self.add(task_id) for task_id in ("1", "2", "3"))
        self.store.save(first)  # again: its place stays
        self.assertEqual([task.id for task in self.store.unfinished()], ["p", "r", "q"])
        self.assertEqual(self.store.newest(2), [third, second])
        self.assertEqual([finished.id for finished in self.store.oldest(2)], ["1", "2"])
        self.assertEqual(self.store.finished(), 3)
        self.assertIsNone(self.store.get("never"))
        self.assertIsNone(self.store.marked("never"))

    def test_again(self) -> None:
        """A new task of a name takes the place of the finished one, and is the newest."""
        self.add("a")
        self.add("b", State.PENDING)
        again = Task("a", "false", 3.0, "other")
        self.store.add(again)
        self.assertEqual(self.store.get("a"), again)
        self.assertIsNone(self.store.marked("mark-a"))
        self.assertEqual([task.id for task in self.store.unfinished()], ["b", "a"])
        self.assertEqual(self.store.finished(), 0)

    def test_forget(self) -> None:
        """Only finished tasks are forgotten."""
        for task_id, state in (("a", State.DONE), ("b", State.RUNNING), ("c", State.KILLED)):
            self.add(task_id, state)
        self.store.forget(["a", "b", "never"])
        self.assertIsNone(self.store.get("a"))
        self.assertEqual((self.store.get("b").state, self.store.get("c").state), (State.RUNNING, State.KILLED))

    def test_left_behind(self) -> None:
        """Finished tasks with processes are found."""
        task = attrs.evolve(self.add("a"), left=(Identity(1, 2, "b"),))
        self.add("b")
        self.store.save(task)
        self.assertEqual(self.store.left_behind(), [task])

    def notice(self, key: str, **more: Any) -> Notice:
        return Notice(key, f"mark-{key}", Todo(f"{key}: done", "d", State.DONE), **more)

    @settings(deadline=None, derandomize=True, database=None, max_examples=100)
    @given(NOTICES)
    def test_whole_notice(self, notice: Notice) -> None:
        """Everything about a notice is as it was, also when it takes the place of another."""
        self.store.keep(notice)
        self.assertEqual(self.store.notice("a"), notice)
        self.store.drop("a")
        self.assertIsNone(self.store.notice("a"))
        self.store.drop("a")

    def test_end_with_notice(self) -> None:
        """An end and its notice are written together, or neither is."""
        task = self.add("a", State.RUNNING)
        ended = attrs.evolve(task, state=State.DONE)
        self.store._connection.execute(
            "CREATE TEMP TRIGGER full BEFORE INSERT ON notice BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
        refusal = self.assertRaises(StoreError, self.store.save, ended, self.notice("a"))
        self.assertIn("disk full", str(refusal))
        self.assertEqual(self.store.get("a"), task)
        self.assertIsNone(self.store.notice("a"))
        self.store._connection.execute("DROP TRIGGER full")
        self.store.save(ended, self.notice("a"))
        self.assertEqual((self.store.get("a"), self.store.notice("a")), (ended, self.notice("a")))

    def test_owed(self) -> None:
        """What is due or withdrawn is owed, the oldest first."""
        for key, phase in (("b", Phase.DUE), ("a", Phase.WITHDRAWN), ("s", Phase.SENT), ("r", Phase.REFUSED)):
            self.store.keep(self.notice(key, phase=phase))
        self.store.keep(self.notice("b", problem="x"))
        self.assertEqual(self.store.owed(), ["b", "a"])

    def test_forget_notices(self) -> None:
        """With a task its notice goes, unless somebody has to be told yet, or it is that of a later task."""
        for key, phase in (("s", Phase.SENT), ("r", Phase.REFUSED), ("d", Phase.DUE), ("w", Phase.WITHDRAWN)):
            self.add(key)
            self.store.keep(self.notice(key, phase=phase))
        self.add("o")
        self.store.keep(attrs.evolve(self.notice("o", phase=Phase.SENT), mark="later"))
        self.store.forget(["s", "r", "d", "w", "o"])
        self.assertEqual([key for key in "srdwo" if self.store.notice(key)], ["d", "w", "o"])
        self.assertEqual(self.store.finished(), 0)

    def test_first_version(self) -> None:
        """A file of the first version is brought up to date with all that is in it."""
        path = os.path.abspath(f"{self.mktemp()}-first")
        connection = sqlite3.connect(path)
        connection.executescript(f"{MIGRATIONS[0]};PRAGMA user_version = 1")
        connection.execute(
            "INSERT INTO task (id, cmd, submitted_at, mark, state, detail, left_behind) VALUES "
            "('a', 'true', 1, 'm', 'running', '', '[]')"
        )
        connection.commit()
        connection.close()
        store = TaskStore(path)
        store.open()
        self.addCleanup(store.close)
        self.assertEqual([task.id for task in store.unfinished()], ["a"])
        store.keep(self.notice("a"))

    def test_newer(self) -> None:
        """A file of a newer version is refused, naming both versions, and left as it is."""
        connection = sqlite3.connect(self.path)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 7}")
        connection.close()
        refusal = str(self.assertRaises(StoreError, self.open))
        self.assertIn(f"version is {len(MIGRATIONS) + 7}", refusal)
        self.assertIn(self.path, refusal)

    def test_unusable(self) -> None:
        """What is no database, or no file, is refused by its path."""
        for path in (self.mktemp(), self.mktemp()):
            if path == self.path:
                continue
            with open(path, "wb") as file:
                file.write(b"something else " * 100)
            self.assertIn(path, str(self.assertRaises(StoreError, TaskStore(path).open)))
        self.assertIn("/no/such", str(self.assertRaises(StoreError, TaskStore("/no/such/file").open)))
        os.mkdir(folder := self.mktemp())
        self.assertIn(folder, str(self.assertRaises(StoreError, TaskStore(folder).open)))

    def test_full(self) -> None:
        """What the disk does not take is an error with its reason, and what was there stays."""
        self.add("a")
        self.store._connection.execute("PRAGMA max_page_count = 1")
        refusal = self.assertRaises(StoreError, self.store.add, Task("b", "x" * 100_000, 1.0, "m"))
        self.assertIn("full", str(refusal))
        self.assertIsNone(self.store.get("b"))
        self.assertIsNotNone(self.store.get("a"))

    def test_locked(self) -> None:
        """Somebody else's lock is an error soon, not a long wait, and goes by."""
        other = sqlite3.connect(self.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        self.assertIn("locked", str(self.assertRaises(StoreError, self.store.add, Task("a", "true", 1.0, "m"))))
        other.execute("ROLLBACK")
        other.close()
        self.add("a")

    def test_killed(self) -> None:
        """What was written before the daemon was killed is there."""
        program = (
            "import sys; from hivebash.store import TaskStore; from hivebash.task import Task\n"
            "store = TaskStore(sys.argv[1]); store.open()\n"
            "for number in range(10**6):\n"
            " store.add(Task(f'n{number}', 'true', 1.0, f'm{number}')); print(number, flush=True)\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        writer = subprocess.Popen([sys.executable, "-c", program, self.path], env=environment, stdout=subprocess.PIPE)
        for _ in range(200):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        told = [*range(200), *(int(line) for line in writer.stdout.read().split(b"\n")[:-1])]
        writer.wait()
        writer.stdout.close()
        self.assertTrue(all(self.store.get(f"n{number}") for number in told))
