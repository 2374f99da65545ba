"""The seams: what has more than one side, in production or in a test. The table of contents.

Rank 2. Deferreds and values only; whoever implements one of these is rank 3 or a test's fake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from hivebash.retention import Finished
from hivebash.task import Exit, Identity, LooseEnd, Notice, Stream, Task, Todo


class CannotStart(Exception):  # noqa: N818 - the end of one task, not an error of the daemon
    """Raised if there can be no leader. Its text says what was in the way, and fits after "could not start: "."""


class StoreError(Exception):
    """Raised if the disk did not take a change. Its text is the reason, without a full stop."""


class IProcess(Interface):
    """One leader that was started."""

    identity: Identity = Attribute("Which process it is.")
    ended: Deferred[Exit] = Attribute(
        "Fires once it has ended, never before the call of IProcesses.spawn that made it has returned; never fails. It "
        "is a zombie then, so that its pid, group and session surely are its own, until release is called."
    )

    def release() -> None:
        """Reap it. Called once, after ``ended``, when nothing more has to be done to its group."""


class IProcesses(Interface):
    """Starts leaders."""

    def spawn(
        words: Sequence[str], task_id: str | None, mark: str, stdout: int, stderr: int, stdin: int | None = None
    ) -> IProcess:
        """Start ``bash`` with ``words``, in a session and process group of its own.

        ``stdout`` and ``stderr`` are open descriptors; they become 1 and 2 and stay the caller's to close; so does
        ``stdin``, without which it is ``/dev/null``. ``task_id``, where it is a task, and ``mark`` go into its
        environment.

        Raises CannotStart.
        """


class IReach(Interface):
    """All processes of a task, and signals to them."""

    boot_id: str = Attribute("The boot of all that is identified here.")

    def identify(pid: int) -> Identity | None:
        """Which process has ``pid`` now, a zombie too; None: none has. Raises OSError."""

    def members(leader: Identity | None, mark: str, known: Iterable[Identity]) -> Sequence[Identity]:
        """The live processes of a task, zombies not among them.

        Those that bear ``mark`` in their environment, wherever they went; those of ``known``, which an earlier look
        found; and those of the leader's session, as long as that surely still is the same: one of these is in it, or
        the leader, if only as a zombie. The daemon itself is never among them.

        Raises OSError: the daemon cannot look, so nothing is known.
        """

    def counts(tasks: Mapping[str, tuple[Identity | None, Iterable[Identity]]]) -> Mapping[str, int]:
        """How many live processes each of the tasks has, with a single look. Keys are marks. Raises OSError."""

    def marks() -> Mapping[str, Sequence[Identity]]:
        """Every mark that a live process bears, with those that bear it. Raises OSError."""

    def one_look() -> AbstractContextManager[None]:
        """Within this context all questions are answered from a single look. Raises OSError."""

    def interrupt(leader: Identity) -> int:
        """Send SIGINT to the process group of a leader that was not reaped yet; how many were in it."""

    def signal(processes: Iterable[Identity], number: int) -> int:
        """Send a signal to each that still is the same process; how many got it. Raises OSError."""

    def destroy(leader: Identity | None, mark: str, known: Iterable[Identity], *, held: bool) -> Sequence[Identity]:
        """SIGKILL to all members, to the leader's group at one stroke; who of those that were seen got it.

        ``held``: the leader was not reaped, so its group is its own even if none of it is seen. Raises OSError.
        """


class ISpool(Interface):
    """The output files."""

    def create(task_id: str) -> tuple[int, int]:
        """Make new files for a task, in place of any of that id; descriptors to append to them, the caller's to close.

        Raises CannotStart.
        """

    def script(task_id: str, cmd: str) -> str:
        """Write a command to a file, for one that is too long to be an argument; its absolute path.

        Raises CannotStart.
        """

    def streams(task_id: str, *, tails: bool) -> tuple[Stream, Stream]:
        """stdout and stderr of a task as they are now; files that are not there are empty ones."""

    def remove(task_id: str) -> None:
        """Remove the files of a task, if there are any."""


class ITaskStore(Interface):
    """The tasks on disk. Each change is there for good once its call has returned."""

    instance: str = Attribute("Tells this store from every other one; lowercase hex, the same for ever.")

    def add(task: Task) -> None:
        """Keep a new task, in place of a finished one of that id. Raises StoreError."""

    def save(task: Task, notice: Notice | None = None) -> None:
        """Keep what became of a task, and the notice of it: both or neither. Raises StoreError."""

    def get(task_id: str) -> Task | None:
        """The task of that id."""

    def marked(mark: str) -> Task | None:
        """The task of that mark."""

    def unfinished() -> Sequence[Task]:
        """Those that are pending or running, in the order of submission."""

    def left_behind() -> Sequence[Task]:
        """Finished tasks that left processes behind when they ended."""

    def newest(count: int) -> Sequence[Task]:
        """Finished tasks, the one that ended last first."""

    def oldest(count: int) -> Sequence[Finished]:
        """Finished tasks, the one that ended first first."""

    def finished() -> int:
        """How many finished tasks there are."""

    def forget(task_ids: Iterable[str]) -> None:
        """Drop those of the tasks that are finished, with their notices that wait for nothing. Raises StoreError."""


class INotices(Interface):
    """The outbox on disk: one notice a key, the newest. Each change is there for good once its call has returned."""

    def notice(key: str) -> Notice | None:
        """The notice of that key."""

    def keep(notice: Notice) -> None:
        """Keep a notice, in place of any of its key. Raises StoreError."""

    def drop(key: str) -> None:
        """Drop the notice of that key. Raises StoreError."""

    def owed() -> Sequence[str]:
        """The keys of those that are due or withdrawn, the oldest first."""


class HarnessAway(Exception):  # noqa: N818 - it comes back
    """Raised if the harness cannot be reached, or did not answer in time or in full. Its text is the reason."""


class HarnessFailed(Exception):  # noqa: N818 - it may work the next time
    """Raised if the harness failed at this request. Its text is the reason."""


class HarnessRefused(Exception):  # noqa: N818 - an answer
    """Raised if the harness does not want this request, now or ever. Its text is the reason."""


class ITodoSink(Interface):
    """The agent's harness. Each call may have taken effect even if it fails."""

    def put(key: str, todo: Todo) -> Deferred[None]:
        """Make or replace the todo of that key. Fails with HarnessAway, HarnessFailed or HarnessRefused."""

    def remove(key: str) -> Deferred[None]:
        """See that there is no todo of that key. Fails as put."""

    def when_back() -> Deferred[None]:
        """Fires when a harness that was away may have come back, if that can be seen. Can be cancelled."""

    def close() -> Deferred[None]:
        """Give up what is under way."""


RECEIPT = "hivebash.receipt"
"""Under this name the scope of a request holds its IReceipt."""


class IReceipt(Interface):
    """What becomes of the answer to one request."""

    def written() -> Deferred[bool]:
        """Fires with whether the whole answer was written to a client that was still there. Never fails.

        Asked for before the answer is given; a new Deferred for each call.
        """


class ILedger(Interface):
    """The todos of the built-in harness on disk, and the turns that they call for."""

    def put(key: str, todo: Todo, now: float) -> tuple[int, bool]:
        """Make or replace the todo of that key; its id, and whether there was none. Raises StoreError.

        A turn is due if its summary changed and its state is final.
        """

    def remove(key: str) -> bool:
        """Drop the todo of that key; whether there was one. Raises StoreError."""

    def cancel(number: int) -> bool:
        """Drop the todo of that id; whether there was one. Raises StoreError."""

    def open_ends() -> Sequence[LooseEnd]:
        """All todos, the oldest first."""

    def turn_due() -> bool:
        """Whether a turn has to be run, and has not been begun too often."""

    def begin_turn() -> None:
        """The turn that is due begins. Raises StoreError."""

    def end_turn() -> None:
        """It is over; another one is due if there was a change meanwhile. Raises StoreError."""
