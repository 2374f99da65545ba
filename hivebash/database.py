"""SQLite files: how they are opened, brought up to date and checked.

Rank 2.

Write-ahead log with synchronous=NORMAL: a change that was committed survives the end of the daemon in any way; after a
loss of power the last ones may be missing, never half of one. Whoever opens one holds the lock of the state directory.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence

from hivebash import limits
from hivebash.interfaces import StoreError

Values = Sequence[object] | dict[str, object]
Change = tuple[str, Values]
"""A statement and its values."""


def open_database(path: str, migrations: Sequence[str]) -> sqlite3.Connection:
    """Open or make a file, mode 0600, and bring its schema up to date. Not to be held open over a fork(2).

    ``migrations``: from each version of the schema to the next; user_version says how many were applied. Raises
    StoreError: it cannot be read or written, or a newer version of the daemon wrote it.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path, isolation_level=None, timeout=limits.STORE_PATIENCE)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    except sqlite3.Error as error:
        raise StoreError(f"{path}: {error}") from None
    try:
        _prepare(connection, migrations)
    except (sqlite3.Error, StoreError) as error:
        connection.close()
        raise StoreError(f"{path}: {error}") from None
    return connection


def _prepare(connection: sqlite3.Connection, migrations: Sequence[str]) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        raise StoreError(f"its version is {version}, and this daemon knows those up to {len(migrations)}")
    for number in range(version, len(migrations)):
        connection.executescript(f"BEGIN;{migrations[number]};PRAGMA user_version = {number + 1};COMMIT")


def check(path: str, connection: sqlite3.Connection) -> None:
    """Read it all. Raises StoreError: it is damaged."""
    try:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"{path}: {error}") from None
    if verdict != "ok":
        raise StoreError(f"{path} is damaged: {verdict}")


def write(connection: sqlite3.Connection, statement: str, values: Values = ()) -> int:
    """Make one change; how many rows it touched. Raises StoreError."""
    try:
        return connection.execute(statement, values).rowcount
    except sqlite3.Error as error:
        raise StoreError(str(error)) from None


def write_all(connection: sqlite3.Connection, *changes: Change) -> None:
    """Make all of the changes, or none. Raises StoreError."""
    write(connection, "BEGIN IMMEDIATE")
    try:
        for change in changes:
            write(connection, *change)
        write(connection, "COMMIT")
    except StoreError:
        if connection.in_transaction:  # SQLite ends it itself after some errors
            write(connection, "ROLLBACK")
        raise
