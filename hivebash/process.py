"""Starts leaders: the process transport, its ProcessProtocol, and the environment of tasks.

Rank 3: implements IProcesses.

Theory of operation. posix_spawn(3) starts a leader in about the time that the kernel needs, at any size of the daemon:
nothing of the daemon is copied, and every descriptor of the daemon's but 0, 1 and 2 closes itself on exec. A pidfd
(pidfd_open(2)) becomes readable when the leader ends, so each end costs one event, and no child is waited for but the
one that ended. The leader stays a zombie until it is released: for that long its pid and its group surely are its own.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessDone, ProcessExitedAlready, ProcessTerminated
from twisted.internet.interfaces import IAddress, IProcessTransport, IReactorFDSet, IReadDescriptor
from twisted.internet.protocol import ProcessProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from hivebash import limits
from hivebash.interfaces import CannotStart, IProcess, IProcesses, IReach
from hivebash.task import Exit, Identity

_log = Logger()

TASK_ID = "HIVEBASH_TASK_ID"
TASK_MARK = "HIVEBASH_TASK_MARK"

_PRIVATE_PREFIXES = ("HIVEBASH_", "OTEL_", "LISTEN_", "WATCHDOG_")
_PRIVATE = frozenset((
    "HIVE_AGENT_SOCKET",
    # What systemd.exec(5) tells the daemon about itself.
    "CACHE_DIRECTORY",
    "CONFIGURATION_DIRECTORY",
    "CREDENTIALS_DIRECTORY",
    "FDSTORE",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LOGS_DIRECTORY",
    "MAINPID",
    "MANAGERPID",
    "MEMORY_PRESSURE_WATCH",
    "MEMORY_PRESSURE_WRITE",
    "NOTIFY_SOCKET",
    "RUNTIME_DIRECTORY",
    "STATE_DIRECTORY",
    "SYSTEMD_EXEC_PID",
))  # fmt: skip

_QUIET = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "SYSTEMD_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
}
"""Keeps programs from asking questions that nobody can answer."""


def task_environment(daemon: Mapping[str, str], changes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The variables of tasks, less those that tell one task from another.

    The daemon's own without its private ones, the quiet defaults over them, the operator's ``changes`` over both; an
    empty value unsets.
    """
    environment = {
        name: value for name, value in daemon.items() if name not in _PRIVATE and not name.startswith(_PRIVATE_PREFIXES)
    }
    environment |= _QUIET
    for name, value in changes:
        if value:
            environment[name] = value
        else:
            environment.pop(name, None)
    return environment


def exit_of(status: int) -> Exit:
    """How a process ended, from its wait status; wait(2)."""
    if os.WIFSIGNALED(status):
        return Exit(signal=os.WTERMSIG(status))
    return Exit(code=os.WEXITSTATUS(status))


@implementer(IProcess)
class TaskProtocol(ProcessProtocol):
    """Sees one leader's life. Its output never comes by: descriptors 1 and 2 of the leader are the files."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.started: Deferred[Identity] = Deferred()
        """Fires with who it is when it runs."""
        self.ended: Deferred[Exit] = Deferred()
        """Fires with how it ended."""

    def release(self) -> None:
        """See IProcess.release."""
        if isinstance(self.transport, LeaderTransport):
            self.transport.reap()

    def connectionMade(self) -> None:
        self.started.callback(self.identity)

    def processExited(self, reason: Failure) -> None:
        """The leader is dead and not reaped yet. Its files need no reading, so this is the end."""
        how = reason.value
        if isinstance(how, ProcessTerminated) and how.signal is not None:
            self.ended.callback(Exit(signal=how.signal))
        elif isinstance(how, ProcessTerminated | ProcessDone):
            self.ended.callback(Exit(code=how.exitCode))
        else:
            self.ended.callback(Exit())


@implementer(IProcessTransport, IReadDescriptor)
class LeaderTransport:
    """One started process whose end a pidfd tells, under an ordinary process protocol."""

    def __init__(self, reactor: IReactorFDSet, pid: int, pidfd: int, protocol: ProcessProtocol) -> None:
        self.pid: int | None = pid
        self._reactor = reactor
        self._pidfd = pidfd
        self._protocol = protocol
        self._reason: Failure | None = None
        protocol.makeConnection(self)
        reactor.addReader(self)

    # IReadDescriptor

    def fileno(self) -> int:
        return self._pidfd

    def logPrefix(self) -> str:
        return f"leader {self.pid}"

    def doRead(self) -> None:
        """The process has ended: tell how. It is reaped when that is asked for."""
        if self.pid is None:
            return
        try:
            seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            reason: Failure = Failure(ProcessTerminated())  # somebody else reaped it; how it ended is lost
        else:
            if seen is None:
                return
            reason = _reason(seen)
        self._reactor.removeReader(self)
        self._reason = reason
        self._protocol.processExited(reason)

    def reap(self) -> None:
        """Take the zombie of the process that was told to have ended, and end the connection."""
        if self.pid is None or self._reason is None:
            return
        pid, self.pid = self.pid, None
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            _log.debug("process {pid} was reaped by another", pid=pid)
        os.close(self._pidfd)
        self._protocol.processEnded(self._reason)

    def connectionLost(self, reason: Failure) -> None:
        """The reactor gives its descriptors up."""
        self._reactor.removeReader(self)

    # IProcessTransport

    def signalProcess(self, signalID: str | int) -> None:  # noqa: N803 - the interface's name
        """Send the leader a signal, by number or by a name like ``"TERM"``.

        Raises ProcessExitedAlready.
        """
        if self.pid is None:
            raise ProcessExitedAlready
        number = getattr(signal, f"SIG{signalID}") if isinstance(signalID, str) else signalID
        signal.pidfd_send_signal(self._pidfd, number)

    def closeStdin(self) -> None:
        """It never had one that is ours."""

    def closeChildFD(self, descriptor: int) -> None:
        """None of its descriptors is ours."""

    def loseConnection(self) -> None:
        """There is no connection."""

    closeStdout = closeStderr = closeStdin

    def write(self, data: bytes) -> None:
        """Its stdin is ``/dev/null``, and what is written is gone."""

    def writeSequence(self, data: Iterable[bytes]) -> None:
        """As write."""

    def getHost(self) -> IAddress:
        return _ProcessAddress()

    getPeer = getHost

    def writeToChild(self, childFD: int, data: bytes) -> None:  # noqa: N803 - the interface's name
        """Raises KeyError: there is no descriptor to write to."""
        raise KeyError(childFD)


@implementer(IAddress)
class _ProcessAddress:
    """A process has no address."""


def _reason(seen: os.waitid_result) -> Failure:
    if seen.si_code == os.CLD_EXITED:
        if seen.si_status == 0:
            return Failure(ProcessDone(0))
        return Failure(ProcessTerminated(exitCode=seen.si_status))
    return Failure(ProcessTerminated(signal=seen.si_status))


@implementer(IProcesses)
@attrs.define(eq=False)
class Processes:
    """Starts bash."""

    _reactor: IReactorFDSet
    _reach: IReach
    _environment: Mapping[str, str]
    _workdir: str
    """Absolute."""
    _bash: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._bash = shutil.which("bash", path=self._environment.get("PATH")) or "/bin/bash"

    def spawn(  # noqa: PLR0917 - the interface's order
        self,
        words: Sequence[str],
        task_id: str | None,
        mark: str,
        stdout: int,
        stderr: int,
        stdin: int | None = None,
    ) -> TaskProtocol:
        environment = {**self._environment, TASK_MARK: mark}
        if task_id is not None:
            environment[TASK_ID] = task_id
        bash = self._bash
        argv = [bash, *words]
        try:
            # posix_spawn cannot change the directory, and one that is gone or replaced is to be noticed.
            os.chdir(self._workdir)
        except OSError as error:
            raise CannotStart(f"the working directory {self._workdir}: {_strerror(error)}") from None
        try:
            pid = os.posix_spawn(
                bash,
                [os.fsencode(word) if word is bash else word.encode() for word in argv],
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
                    if stdin is None
                    else (os.POSIX_SPAWN_DUP2, stdin, 0),
                    (os.POSIX_SPAWN_DUP2, stdout, 1),
                    (os.POSIX_SPAWN_DUP2, stderr, 2),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=_RESETTABLE,
            )
        except OSError as error:
            raise CannotStart(_why(error, bash, argv, environment)) from None
        pidfd = -1
        try:
            pidfd = os.pidfd_open(pid)
            identity = self._identify(pid)
        except (OSError, CannotStart) as error:
            _discard(pid, pidfd)
            raise CannotStart(
                str(error) if isinstance(error, CannotStart) else _why(error, bash, argv, environment)
            ) from None
        protocol = TaskProtocol(identity)
        LeaderTransport(self._reactor, pid, pidfd, protocol)
        return protocol

    def _identify(self, pid: int) -> Identity:
        identity = self._reach.identify(pid)
        if identity is None:  # even its zombie would be there
            raise CannotStart(f"/proc does not show process {pid}")
        return identity


_RESETTABLE = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


def _discard(pid: int, pidfd: int) -> None:
    """End and reap a leader that cannot be watched."""
    if pidfd != -1:
        os.close(pidfd)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _why(error: OSError, bash: str, argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """What was in the way, in words."""
    match error.errno:
        case errno.ENOENT:
            return f"there is no {bash}"
        case errno.EAGAIN:
            return "no process slot is free (a limit of this user or container)"
        case errno.EMFILE | errno.ENFILE:
            return "no file descriptor is free in the daemon"
        case errno.ENOMEM:
            return "out of memory"
        case errno.E2BIG:
            size = sum(len(name) + len(value) + 2 for name, value in environment.items())
            longest = max(environment, key=lambda name: len(environment[name]))
            return (
                f"command ({sum(map(len, argv))} bytes) and environment ({size} bytes) together are longer than the "
                f"kernel takes, or one variable is {limits.ARGUMENT_MAX} bytes or more; the longest is {longest}"
            )
        case _:
            return f"{bash}: {_strerror(error)}"


def _strerror(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
