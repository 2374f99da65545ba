"""All processes of a task, found in /proc: by session, and by the mark in their environment.

Rank 3: implements IReach.

Theory of operation. A process is its pid, its start time and the boot (proc(5)); pids alone come back. Signals go
through a pidfd (pidfd_open(2)) that was checked after it was opened, so they reach the process that was meant or none;
only the group of a leader that was not reaped yet is signalled as a group. Processes that left their session and
cleared their environment too are not found here.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence

import attrs
from zope.interface import implementer

from hivebash import limits
from hivebash.interfaces import IReach
from hivebash.task import Identity

_DEAD = frozenset(b"ZXx")
_CHUNK = 65536
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

    def __attrs_post_init__(self) -> None:
        self.boot_id = _read("/proc/sys/kernel/random/boot_id").decode().strip()

    def identify(self, pid: int) -> Identity | None:
        entry = _entry(pid, self.boot_id)
        return None if entry is None else entry.identity

    def members(self, leader: Identity | None, mark: str, known: Iterable[Identity]) -> Sequence[Identity]:
        return self._look(None if leader is None else _pids_since(leader)).members(leader, mark, known)

    def counts(self, tasks: Mapping[str, tuple[Identity | None, Iterable[Identity]]]) -> Mapping[str, int]:
        if not tasks:
            return {}
        look = self._look()
        return {mark: len(look.members(leader, mark, known)) for mark, (leader, known) in tasks.items()}

    def marks(self) -> Mapping[str, Sequence[Identity]]:
        look = self._look()
        marks: dict[str, list[Identity]] = {}
        for entry in look.table:
            if mark := look.mark(entry.identity):
                marks.setdefault(mark, []).append(entry.identity)
        return marks

    def interrupt(self, leader: Identity) -> int:
        try:
            count = sum(entry.group == leader.pid and not entry.dead for entry in self._look().table)
        except OSError:  # the daemon cannot look, but the leader is one
            count = 1
        try:
            os.killpg(leader.pid, signal.SIGINT)
            os.killpg(leader.pid, signal.SIGCONT)  # one that is stopped could not act on it
        except (ProcessLookupError, PermissionError):
            return 0
        return count

    def signal(self, processes: Iterable[Identity], number: int) -> int:
        return sum(self._signal(process, number) for process in processes)

    def _look(self, pids: Iterable[int] | None = None) -> _Look:
        return _Look(_all_pids() if pids is None else pids, self._variable.encode() + b"=", self.boot_id)

    def _signal(self, process: Identity, number: int) -> bool:
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:  # it is gone, or no descriptor is left; then the next look finds it again
            return False
        try:
            entry = _entry(process.pid, self.boot_id)
            if entry is None or entry.identity != process or entry.dead:
                return False
            signal.pidfd_send_signal(pidfd, number)
        except OSError:
            return False
        finally:
            os.close(pidfd)
        return True


class _Look:
    """The process table at a moment, and the marks of those that were asked for."""

    def __init__(self, pids: Iterable[int], assignment: bytes, boot_id: str) -> None:
        self._assignment = assignment
        self._marks: dict[Identity, str] = {}
        # The daemon itself may have been started by a task of an earlier one; it is nobody's to end.
        self.table = [entry for pid in pids if pid != os.getpid() and (entry := _entry(pid, boot_id)) is not None]

    def members(self, leader: Identity | None, mark: str, known: Iterable[Identity]) -> Sequence[Identity]:
        session = None if leader is None else leader.pid
        since = 0 if leader is None else leader.start_time
        held = {leader, *known}
        # A session's number cannot be given again while a process is in it, so one that is known vouches for all.
        ours = any(entry.session == session and entry.identity in held for entry in self.table)
        return tuple(
            entry.identity
            for entry in self.table
            if not entry.dead
            and entry.identity.start_time >= since
            and ((ours and entry.session == session) or entry.identity in held or self.mark(entry.identity) == mark)
        )

    def mark(self, process: Identity) -> str:
        """The mark in a process's environment, or nothing."""
        if process not in self._marks:
            try:
                environment = b"\0" + _read(f"/proc/{process.pid}/environ")
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                environment = b""
            _, found, rest = environment.partition(b"\0" + self._assignment)
            self._marks[process] = rest.partition(b"\0")[0].decode("ascii", "replace") if found else ""
        return self._marks[process]


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
