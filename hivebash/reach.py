"""All processes of a task, found in /proc: by session, and by the mark in their environment.

Rank 3: implements IReach.

Theory of operation. A process is its pid, its start time and the boot (proc(5)); pids alone come back. Signals go
through a pidfd (pidfd_open(2)) that was checked after it was opened, so they reach the process that was meant or none;
only the group of a leader that was not reaped yet is signalled as a group. Processes that left their session and
cleared their environment too are not found here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import attrs
from zope.interface import implementer

from hivebash import limits
from hivebash.interfaces import IReach
from hivebash.task import Identity

_DEAD = frozenset(b"ZXx")
_CHUNK = 65536
_SPARES = 3
"""Descriptors: a pidfd, and a file of /proc while it is read; one more, since a system call may need one for itself."""
T = TypeVar("T")
_TICKS = os.sysconf("SC_CLK_TCK")


@attrs.frozen
class _Entry:
    """One line of the process table."""

    identity: Identity
    group: int
    session: int
    dead: bool


@implementer(IReach)
@attrs.define(eq=False)
class ProcReach:
    """What /proc tells of the processes of tasks."""

    _variable: str
    """The name of the variable whose value is the mark."""
    boot_id: str = attrs.field(init=False)
    _spares: list[int] = attrs.field(factory=list, init=False)
    """Descriptors kept for when the daemon has none left: it is to be able to end tasks then above all."""
    _shared: _Look | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.boot_id = _read("/proc/sys/kernel/random/boot_id").decode().strip()
        self._take_spares()

    def identify(self, pid: int) -> Identity | None:
        entry = self._surely(lambda: _entry(pid, self.boot_id))
        return None if entry is None else entry.identity

    def members(self, leader: Identity | None, mark: str, known: Iterable[Identity]) -> Sequence[Identity]:
        return self._surely(
            lambda: self._look(leader, None if leader is None else _pids_since(leader)).members(leader, mark, known)
        )

    def counts(self, tasks: Mapping[str, tuple[Identity | None, Iterable[Identity]]]) -> Mapping[str, int]:
        if not tasks:
            return {}

        def count() -> Mapping[str, int]:
            look = self._look()
            return {mark: len(look.members(leader, mark, known)) for mark, (leader, known) in tasks.items()}

        return self._surely(count)

    def marks(self) -> Mapping[str, Sequence[Identity]]:
        return self._surely(lambda: self._look().marks())

    @contextlib.contextmanager
    def one_look(self) -> Iterator[None]:
        self._shared = self._surely(self._look)
        try:
            yield
        finally:
            self._shared = None

    def interrupt(self, leader: Identity) -> int:
        try:
            count = self._surely(
                lambda: sum(entry.group == leader.pid and not entry.dead for entry in self._look().table)
            )
        except OSError:  # the daemon cannot look, but the leader is one
            count = 1
        try:
            os.killpg(leader.pid, signal.SIGINT)
            os.killpg(leader.pid, signal.SIGCONT)  # one that is stopped could not act on it
        except (ProcessLookupError, PermissionError):
            return 0
        return count

    def signal(self, processes: Iterable[Identity], number: int) -> int:
        return sum(self._surely(partial(self._signal, process, number)) for process in processes)

    def destroy(
        self, leader: Identity | None, mark: str, known: Iterable[Identity], *, held: bool
    ) -> Sequence[Identity]:
        members, group = self._surely(lambda: self._look(leader).members_and_group(leader, mark, known))
        if leader is not None and (held or group):
            # One stroke, under which none can fork away. A group that was just seen keeps its number.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader.pid, signal.SIGKILL)
        hit = [process for process in members if process in group]
        return hit + [process for process in members if process not in group and self.signal([process], signal.SIGKILL)]

    def _look(self, leader: Identity | None = None, pids: Iterable[int] | None = None) -> _Look:
        """The processes that may be of a leader's task, or all; ``pids``: those that are enough to look at."""
        if self._shared is not None:
            return self._shared
        since = 0 if leader is None else leader.start_time
        return _Look(_all_pids() if pids is None else pids, since, self._variable.encode() + b"=", self.boot_id)

    def _signal(self, process: Identity, number: int) -> bool:
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        try:
            entry = _entry(process.pid, self.boot_id)
            if entry is None or entry.identity != process or entry.dead:
                return False
            signal.pidfd_send_signal(pidfd, number)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(pidfd)
        return True

    def _surely(self, act: Callable[[], T]) -> T:
        """Do what needs a few descriptors, if need be with those that were kept for it."""
        try:
            return act()
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE}:
                raise
        while self._spares:
            os.close(self._spares.pop())
        try:
            return act()
        finally:
            self._take_spares()

    def _take_spares(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._spares) < _SPARES:
                self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


class _Look:
    """The process table at a moment, and the marks in it."""

    def __init__(self, pids: Iterable[int], since: int, assignment: bytes, boot_id: str) -> None:
        self._assignment = assignment
        self._by_mark: dict[str, list[_Entry]] | None = None
        self._by_identity: dict[Identity, _Entry] = {}
        self._by_session: dict[int, list[_Entry]] = {}
        for pid in pids:
            # The daemon itself may have been started by a task of an earlier one; it is nobody's to end.
            entry = None if pid == os.getpid() else _entry(pid, boot_id)
            if entry is not None and entry.identity.start_time >= since:
                self._by_identity[entry.identity] = entry
                self._by_session.setdefault(entry.session, []).append(entry)

    @property
    def table(self) -> Iterable[_Entry]:
        return self._by_identity.values()

    def members(self, leader: Identity | None, mark: str, known: Iterable[Identity]) -> Sequence[Identity]:
        members, _ = self.members_and_group(leader, mark, known)
        return members

    def members_and_group(
        self, leader: Identity | None, mark: str, known: Iterable[Identity]
    ) -> tuple[Sequence[Identity], Collection[Identity]]:
        """The members, and those of them that are in the leader's group."""
        session = -1 if leader is None else leader.pid
        found = {entry.identity: entry for entry in self._marked(mark)}
        for identity in (leader, *known):
            if identity is not None and (entry := self._by_identity.get(identity)) is not None:
                found[identity] = entry
        # A session's number cannot be given again while a process is in it, so one that is ours vouches for all.
        if any(entry.session == session for entry in found.values()):
            found |= {entry.identity: entry for entry in self._by_session[session]}
        live = [entry for entry in found.values() if not entry.dead]
        return tuple(entry.identity for entry in live), {entry.identity for entry in live if entry.group == session}

    def marks(self) -> Mapping[str, Sequence[Identity]]:
        self._marked("")
        return {mark: [entry.identity for entry in entries] for mark, entries in (self._by_mark or {}).items()}

    def _marked(self, mark: str) -> Sequence[_Entry]:
        if self._by_mark is None:
            self._by_mark = {}
            for entry in self.table:
                if not entry.dead and (found := self._mark(entry.identity)):
                    self._by_mark.setdefault(found, []).append(entry)
        return self._by_mark.get(mark, ())

    def _mark(self, process: Identity) -> str:
        """The mark in a process's environment, or nothing."""
        try:
            environment = b"\0" + _read(f"/proc/{process.pid}/environ")
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return ""
        _, found, rest = environment.partition(b"\0" + self._assignment)
        return rest.partition(b"\0")[0].decode("ascii", "replace") if found else ""


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


_GONE = frozenset((errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM))
"""How /proc says that a process went away, or is another user's."""


def _pids_since(leader: Identity) -> Iterable[int] | None:
    """The pids that were given since a leader started, if these are few; None if they are not known.

    The kernel gives pids in order, and the last one that it gave ends ``/proc/loadavg`` (proc(5)). It begins anew
    after at least 32,768, so what a young leader may have started is between its own and that one.
    """
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - leader.start_time / _TICKS
    last = int(_read("/proc/loadavg").rpartition(b" ")[2])
    if 0 <= age <= limits.YOUNG and leader.pid <= last <= leader.pid + limits.FEW_PIDS:
        return range(leader.pid, last + 1)
    return None


def _entry(pid: int, boot_id: str) -> _Entry | None:
    """What is known of a process, None if there is none. Raises OSError: the daemon cannot look."""
    try:
        stat = _read(f"/proc/{pid}/stat")
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
    try:
        # Field 2, the name, is in parentheses and may hold anything. After it: state, ppid, pgrp, session; start is 22.
        fields = stat[stat.rindex(b")") + 2 :].split(None, 20)
        identity = Identity(pid, int(fields[19]), boot_id)
        return _Entry(identity, int(fields[2]), int(fields[3]), fields[0][0] in _DEAD)
    except (ValueError, IndexError):  # it went away while it was read
        return None


def _read(path: str) -> bytes:
    """A file of /proc, whole."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(descriptor, _CHUNK)]
        while len(parts[-1]) == _CHUNK:
            parts.append(os.read(descriptor, _CHUNK))
        return b"".join(parts)
    finally:
        os.close(descriptor)
