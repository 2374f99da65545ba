"""The todos of the built-in harness on disk.

Rank 3: implements ILedger.

A file of its own: for the rest of the daemon the harness is another program, with which only its socket is shared.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import attrs
from zope.interface import implementer

from hivebash import limits
from hivebash.database import Change, check, open_database, write, write_all
from hivebash.interfaces import ILedger
from hivebash.task import LooseEnd, State, Todo

MIGRATIONS = (
    """
    CREATE TABLE todo (
        id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given twice
        key TEXT NOT NULL UNIQUE,
        summary TEXT NOT NULL,
        detail TEXT NOT NULL,
        state TEXT NOT NULL,
        since REAL NOT NULL      -- seconds since the epoch
    ) STRICT;
    CREATE TABLE turn (
        due INTEGER NOT NULL,    -- whether one has to be run
        begun INTEGER NOT NULL   -- how often it was begun
    ) STRICT;
    INSERT INTO turn VALUES (0, 0);
    """,
)
"""From each version of the schema to the next."""

_MAKE = "INSERT INTO todo (summary, detail, state, since, key) VALUES (?, ?, ?, ?, ?)"
_CHANGE = (
    "UPDATE todo SET summary = ?1, detail = ?2, state = ?3, since = CASE WHEN summary = ?1 THEN since ELSE ?4 END "
    "WHERE key = ?5"
)


@implementer(ILedger)
@attrs.define(eq=False)
class Ledger:
    """The todos in a file, between ``open`` and ``close``."""

    _path: str
    _connection: sqlite3.Connection = attrs.field(init=False)

    def open(self) -> None:
        """See ``database.open_database``."""
        self._connection = open_database(self._path, MIGRATIONS)

    def check(self) -> None:
        """Read it all. Raises StoreError: it is damaged."""
        check(self._path, self._connection)

    def close(self) -> None:
        """Give the file up."""
        self._connection.close()

    def put(self, key: str, todo: Todo, now: float) -> tuple[int, bool]:
        old = self._connection.execute("SELECT id, summary FROM todo WHERE key = ?", (key,)).fetchone()
        values = todo.summary, todo.detail, todo.state.value, now, key
        changes: list[Change] = [(_MAKE if old is None else _CHANGE, values)]
        if todo.state.final and (old is None or old[1] != todo.summary):
            changes.append(("UPDATE turn SET due = 1, begun = 0", ()))
        write_all(self._connection, *changes)
        (number,) = self._connection.execute("SELECT id FROM todo WHERE key = ?", (key,)).fetchone()
        return number, old is None

    def remove(self, key: str) -> bool:
        return write(self._connection, "DELETE FROM todo WHERE key = ?", (key,)) > 0

    def cancel(self, number: int) -> bool:
        return write(self._connection, "DELETE FROM todo WHERE id = ?", (number,)) > 0

    def open_ends(self) -> Sequence[LooseEnd]:
        rows = self._connection.execute("SELECT id, key, summary, detail, state, since FROM todo ORDER BY id")
        return [
            LooseEnd(number, key, Todo(summary, detail, State(state)), since)
            for number, key, summary, detail, state, since in rows
        ]

    def turn_due(self) -> bool:
        due, begun = self._connection.execute("SELECT due, begun FROM turn").fetchone()
        return bool(due) and begun < limits.TURN_TRIES

    def begin_turn(self) -> None:
        write(self._connection, "UPDATE turn SET begun = begun + 1")

    def end_turn(self) -> None:
        # A change meanwhile has set the count back.
        write(self._connection, "UPDATE turn SET due = 0 WHERE begun > 0")
