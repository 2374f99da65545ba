"""The tasks and the notices of them on disk: one SQLite file.

Rank 3: implements ITaskStore and INotices.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
from zope.interface import implementer

from hivebash.database import Change, check, open_database, write, write_all
from hivebash.interfaces import INotices, ITaskStore, StoreError
from hivebash.retention import Finished
from hivebash.task import Cause, Exit, Identity, Notice, Phase, State, Task, Todo

MIGRATIONS = (
    """
    CREATE TABLE task (
        number INTEGER PRIMARY KEY,  -- the order of submission
        id TEXT NOT NULL UNIQUE,
        cmd TEXT NOT NULL,
        submitted_at REAL NOT NULL,  -- seconds since the epoch
        mark TEXT NOT NULL UNIQUE,
        timeout_secs REAL,
        state TEXT NOT NULL,
        asked TEXT,
        leader_pid INTEGER,
        leader_start_time INTEGER,   -- clock ticks since boot
        leader_boot_id TEXT,
        started_clock REAL,          -- seconds on the monotonic clock of that boot
        duration_secs REAL,
        finished_at REAL,            -- seconds since the epoch
        exit_code INTEGER,
        exit_signal INTEGER,
        cause TEXT,
        detail TEXT NOT NULL,
        left_behind TEXT NOT NULL,   -- processes, as JSON: [[pid, start_time, boot_id], …]
        ended INTEGER                -- the order of ends; NULL before it
    ) STRICT;
    CREATE UNIQUE INDEX task_ended ON task (ended) WHERE ended IS NOT NULL;
    CREATE INDEX task_unfinished ON task (number) WHERE ended IS NULL;
    CREATE TABLE store (instance TEXT NOT NULL) STRICT;
    INSERT INTO store VALUES (lower(hex(randomblob(8))));
    """,
    """
    CREATE TABLE notice (
        number INTEGER PRIMARY KEY,  -- the order in which they came about
        key TEXT NOT NULL UNIQUE,    -- a task's id
        mark TEXT NOT NULL,          -- that task's mark
        summary TEXT NOT NULL,
        detail TEXT NOT NULL,
        state TEXT NOT NULL,
        phase TEXT NOT NULL,
        exposed INTEGER NOT NULL,    -- whether the harness may hold anything under this key
        problem TEXT NOT NULL
    ) STRICT;
    CREATE INDEX notice_owed ON notice (number) WHERE phase IN ('due', 'withdrawn');
    """,
)
"""From each version of the schema to the next."""

_COLUMNS = (
    "id", "cmd", "submitted_at", "mark", "timeout_secs", "state", "asked", "leader_pid", "leader_start_time",
    "leader_boot_id", "started_clock", "duration_secs", "finished_at", "exit_code", "exit_signal", "cause", "detail",
    "left_behind",
)  # fmt: skip
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM task"  # noqa: S608 - our own names
_ADD = f"INSERT OR REPLACE INTO task ({', '.join(_COLUMNS)}) VALUES ({', '.join(':' + name for name in _COLUMNS)})"  # noqa: S608
_NEXT_END = "(SELECT coalesce(max(ended), 0) + 1 FROM task WHERE ended IS NOT NULL)"
_SAVE = (
    f"UPDATE task SET {', '.join(f'{name} = :{name}' for name in _COLUMNS[5:])}, "  # noqa: S608 - our own names
    f"ended = CASE WHEN :final THEN coalesce(ended, {_NEXT_END}) END WHERE mark = :mark"
)


_NOTICE_COLUMNS = ("key", "mark", "summary", "detail", "state", "phase", "exposed", "problem")
_NOTICE = f"SELECT {', '.join(_NOTICE_COLUMNS)} FROM notice WHERE key = ?"  # noqa: S608 - our own names
_KEEP = (
    f"INSERT INTO notice ({', '.join(_NOTICE_COLUMNS)}) VALUES ({', '.join('?' * len(_NOTICE_COLUMNS))}) "  # noqa: S608
    f"ON CONFLICT (key) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _NOTICE_COLUMNS[1:])}"
)


@implementer(ITaskStore, INotices)
@attrs.define(eq=False)
class TaskStore:
    """The tasks in a file, between ``open`` and ``close``."""

    _path: str
    instance: str = attrs.field(init=False)
    _connection: sqlite3.Connection = attrs.field(init=False)

    def open(self) -> None:
        """See ``database.open_database``."""
        self._connection = open_database(self._path, MIGRATIONS)
        try:
            (self.instance,) = self._connection.execute("SELECT instance FROM store").fetchone()
        except sqlite3.Error as error:
            self._connection.close()
            raise StoreError(f"{self._path}: {error}") from None

    def check(self) -> None:
        """Read it all. Raises StoreError: it is damaged."""
        check(self._path, self._connection)

    def close(self) -> None:
        """Give the file up."""
        self._connection.close()

    def add(self, task: Task) -> None:
        write(self._connection, _ADD, _row(task))

    def save(self, task: Task, notice: Notice | None = None) -> None:
        change: Change = (_SAVE, {**_row(task), "final": task.state.final})
        if notice is None:
            write(self._connection, *change)
        else:
            write_all(self._connection, change, (_KEEP, _notice_row(notice)))

    def get(self, task_id: str) -> Task | None:
        return self._one(f"{_SELECT} WHERE id = ?", task_id)

    def marked(self, mark: str) -> Task | None:
        return self._one(f"{_SELECT} WHERE mark = ?", mark)

    def unfinished(self) -> Sequence[Task]:
        return self._all(f"{_SELECT} WHERE ended IS NULL ORDER BY number")

    def left_behind(self) -> Sequence[Task]:
        return self._all(f"{_SELECT} WHERE ended IS NOT NULL AND left_behind != '[]'")

    def newest(self, count: int) -> Sequence[Task]:
        return self._all(f"{_SELECT} WHERE ended IS NOT NULL ORDER BY ended DESC LIMIT ?", count)

    def oldest(self, count: int) -> Sequence[Finished]:
        rows = self._connection.execute(
            "SELECT id, finished_at FROM task WHERE ended IS NOT NULL ORDER BY ended LIMIT ?", (count,)
        )
        return [Finished(*row) for row in rows]

    def finished(self) -> int:
        (count,) = self._connection.execute("SELECT count(*) FROM task WHERE ended IS NOT NULL").fetchone()
        return int(count)

    def forget(self, task_ids: Iterable[str]) -> None:
        ids = [json.dumps(list(task_ids))]
        finished = "ended IS NOT NULL AND id IN (SELECT value FROM json_each(?))"
        settled = f"phase IN ('sent', 'refused') AND mark IN (SELECT mark FROM task WHERE {finished})"  # noqa: S608
        write_all(
            self._connection,
            (f"DELETE FROM notice WHERE {settled}", ids),  # noqa: S608 - our own words
            (f"DELETE FROM task WHERE {finished}", ids),  # noqa: S608
        )

    def notice(self, key: str) -> Notice | None:
        row = self._connection.execute(_NOTICE, (key,)).fetchone()
        return None if row is None else _notice(row)

    def keep(self, notice: Notice) -> None:
        write(self._connection, _KEEP, _notice_row(notice))

    def drop(self, key: str) -> None:
        write(self._connection, "DELETE FROM notice WHERE key = ?", (key,))

    def owed(self) -> Sequence[str]:
        rows = self._connection.execute("SELECT key FROM notice WHERE phase IN ('due', 'withdrawn') ORDER BY number")
        return [key for (key,) in rows]

    def _one(self, query: str, value: object) -> Task | None:
        row = self._connection.execute(query, (value,)).fetchone()
        return None if row is None else _task(row)

    def _all(self, query: str, *values: object) -> Sequence[Task]:
        return [_task(row) for row in self._connection.execute(query, values)]


def _row(task: Task) -> dict[str, object]:
    leader = task.leader
    return {
        "id": task.id,
        "cmd": task.cmd,
        "submitted_at": task.submitted_at,
        "mark": task.mark,
        "timeout_secs": task.timeout_secs,
        "state": task.state.value,
        "asked": None if task.asked is None else task.asked.value,
        "leader_pid": None if leader is None else leader.pid,
        "leader_start_time": None if leader is None else leader.start_time,
        "leader_boot_id": None if leader is None else leader.boot_id,
        "started_clock": task.started_clock,
        "duration_secs": task.duration_secs,
        "finished_at": task.finished_at,
        "exit_code": task.exit.code,
        "exit_signal": task.exit.signal,
        "cause": None if task.cause is None else task.cause.value,
        "detail": task.detail,
        "left_behind": json.dumps([attrs.astuple(process) for process in task.left]),
    }


def _task(row: Sequence[object]) -> Task:
    values: dict[str, Any] = dict(zip(_COLUMNS, row, strict=True))
    leader = values.pop("leader_pid"), values.pop("leader_start_time"), values.pop("leader_boot_id")
    exit_ = Exit(values.pop("exit_code"), values.pop("exit_signal"))
    values |= {
        "state": State(values["state"]),
        "asked": None if values["asked"] is None else Cause(values["asked"]),
        "cause": None if values["cause"] is None else Cause(values["cause"]),
        "left": tuple(Identity(*process) for process in json.loads(values.pop("left_behind"))),
    }
    return Task(**values, leader=None if leader[0] is None else Identity(*leader), exit=exit_)


def _notice_row(notice: Notice) -> Sequence[object]:
    todo = notice.todo
    return (
        notice.key,
        notice.mark,
        todo.summary,
        todo.detail,
        todo.state.value,
        notice.phase.value,
        int(notice.exposed),
        notice.problem,
    )


def _notice(row: Sequence[Any]) -> Notice:
    key, mark, summary, detail, state, phase, exposed, problem = row
    return Notice(key, mark, Todo(summary, detail, State(state)), Phase(phase), bool(exposed), problem)
