"""What is known of a task: frozen values, the states, and the rules for ids.

Rank 0: no I/O, no Twisted.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Iterable

import attrs

NAME_MAX = 63
_NAME = re.compile(r"[a-z0-9-]{1,63}")


def valid_name(name: str) -> bool:
    """Whether ``name`` may be a task's id: 1 to 63 of lowercase ASCII letters, digits and hyphens."""
    return _NAME.fullmatch(name) is not None


class State(enum.StrEnum):
    """Where a task is in its life. The last four are final and never change."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    KILLED = "killed"

    @property
    def final(self) -> bool:
        return self not in (State.PENDING, State.RUNNING)


class Cause(enum.StrEnum):
    """Why the daemon ended a task, or could not start it. A task that ended by itself has none."""

    KILL = "kill"
    """Somebody asked for it with the kill tool."""
    TIME_LIMIT = "time_limit"
    """Its own ``timeout_secs`` were over."""
    DAEMON_STOPPED = "daemon_stopped"
    """The daemon was told to stop."""
    DAEMON_DIED = "daemon_died"
    """The daemon was gone without a stop; found by its successor."""
    COULD_NOT_START = "could_not_start"
    """There never was a process."""


@attrs.frozen
class Exit:
    """How the leader ended, as wait(2) told it. At most one of the two is set; neither: it is not known."""

    code: int | None = None
    """0 to 255, when it exited by itself."""
    signal: int | None = None
    """The number of the signal that ended it."""

    @property
    def signal_name(self) -> str | None:
        """``"SIGKILL"`` and the like; ``"SIGRTMIN+3"`` where the number has no name of its own."""
        return None if self.signal is None else signal_name(self.signal)


def signal_name(number: int) -> str:
    """The name of a signal as signal(7) writes it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        # Two below SIGRTMIN are the C library's own and have no names.
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"SIG{number}"


@attrs.frozen
class End:
    """A task's end, decided once by the lifecycle."""

    state: State
    exit: Exit = Exit()
    cause: Cause | None = None
    detail: str = ""
    """For COULD_NOT_START: what was in the way."""


@attrs.frozen
class Identity:
    """One process, told apart from any later one with the same pid."""

    pid: int
    start_time: int
    """Clock ticks between boot and its start: field 22 of ``/proc/PID/stat``, proc(5)."""
    boot_id: str
    """``/proc/sys/kernel/random/boot_id``: the boot these ticks count from."""


@attrs.frozen
class Task:
    """One task as it is kept on disk. Changes make a new value with ``attrs.evolve``."""

    id: str
    cmd: str
    submitted_at: float
    """Seconds since the epoch, to show only."""
    mark: str = ""
    """Borne by its processes in their environment, and by those of no other run: ids can be used again."""
    timeout_secs: float | None = None
    state: State = State.PENDING
    asked: Cause | None = None
    """What will be the cause of its end, from the moment somebody asked for it."""
    leader: Identity | None = None
    started_clock: float | None = None
    """Seconds on the monotonic clock of the leader's boot."""
    duration_secs: float | None = None
    """Running time in all; None until the end."""
    finished_at: float | None = None
    """Seconds since the epoch."""
    exit: Exit = Exit()
    cause: Cause | None = None
    detail: str = ""
    left: tuple[Identity, ...] = ()
    """The processes that it left behind when it ended."""

    def ended(self, end: End, *, duration_secs: float, finished_at: float, left: Iterable[Identity] = ()) -> Task:
        """This task with its end."""
        return attrs.evolve(
            self,
            state=end.state,
            exit=end.exit,
            cause=end.cause,
            detail=end.detail,
            duration_secs=duration_secs,
            finished_at=finished_at,
            left=tuple(left),
        )

    @property
    def could_not_start(self) -> bool:
        return self.cause is Cause.COULD_NOT_START


@attrs.frozen
class Stream:
    """One output file of a task."""

    path: str
    """Absolute."""
    size: int
    """Bytes in the file."""
    tail: str | None = None
    """Its end as a terminal would show it; None where it was not asked for."""


@attrs.frozen
class Snapshot:
    """One task as it is at a moment."""

    task: Task
    duration_secs: float
    """Running time so far, or in all."""
    processes: int
    """Live processes that belong to it, the leader among them."""
    stdout: Stream
    stderr: Stream


@attrs.frozen
class Sent:
    """A signal that was sent."""

    signal: str
    """Its name."""
    processes: int
    """How many processes got it."""


@attrs.frozen
class KillReport:
    """What a kill really did."""

    id: str
    state: State
    """After it."""
    sent: Sent | None = None
    """None where there was nothing to signal."""
    cancelled: bool = False
    """Whether the task was pending and will never start."""


@attrs.frozen
class Todo:
    """What the agent's harness is told of a task."""

    summary: str
    """One line; its change is what the harness wakes the agent for."""
    detail: str
    state: State


class Phase(enum.StrEnum):
    """How far a notice has come. One that is held back while somebody waits inline is DUE on disk: a crash frees it."""

    DUE = "due"
    """The harness has to be told."""
    SENT = "sent"
    """The harness has it."""
    WITHDRAWN = "withdrawn"
    """An answer told the end; the harness has to drop it."""
    REFUSED = "refused"
    """The harness does not want it, and asking again would change nothing."""


@attrs.frozen
class Notice:
    """What is owed to the harness about the newest task of an id, as it is kept on disk."""

    key: str
    """The task's id."""
    mark: str
    """The task's mark: ids can be used again."""
    todo: Todo
    phase: Phase = Phase.DUE
    exposed: bool = False
    """Whether the harness may hold anything under this key."""
    problem: str = ""
    """Why it was refused."""


@attrs.frozen
class LooseEnd:
    """A todo that the built-in harness holds open."""

    id: int
    key: str
    todo: Todo
    since: float
    """Seconds since the epoch: when its summary came to be what it is."""
