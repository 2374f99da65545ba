"""The twistd service: options, the object graph, and the order of start and stop.

Rank 5: the only place that names a reactor.

All that can be wrong with a start is found in ``makeService``, which runs before twistd goes into the background: there
is still a terminal to tell. What must not cross that fork(2), the open database, is opened in ``startService``.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import math
import os
import pwd
import random
import re
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, NoReturn

import attrs
from twisted.application.service import IService, Service
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort
from twisted.logger import Logger
from twisted.python import usage
from twisted.python.failure import Failure

from hivebash import limits
from hivebash.access import Access, host_name
from hivebash.interfaces import StoreError
from hivebash.retention import Retention

if TYPE_CHECKING:
    from twisted.internet.asyncioreactor import AsyncioSelectorReactor
    from twisted.web.server import Site

    from hivebash.ledger import Ledger
    from hivebash.notices import Notices
    from hivebash.process import Processes
    from hivebash.reach import ProcReach
    from hivebash.runner import TaskRunner
    from hivebash.store import TaskStore
    from hivebash.turns import Turns
    from hivebash.web import McpEndpoint

_log = Logger()

DATABASE = "hivebash.sqlite"
LEDGER = "loose-ends.sqlite"
AGENT_SOCKET = "agent.sock"
SPOOL = "harness/bash-tasks"
LOCK = "lock"
UNIX_PATH_MAX = 107
"""Bytes of a socket's path; unix(7)."""
_DIGITS = 15
"""Of a whole number: more than any count needs."""
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
_WORLD_WRITABLE = 0o002


def _whole(name: str, least: int) -> Callable[[str], int]:
    def coerce(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS and int(text) >= least):
            raise usage.UsageError(f"--{name} takes a whole number, {least} or more, not {text!r}")
        return int(text)

    return coerce


def _number(name: str, unit: str) -> Callable[[str], float]:
    def coerce(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise usage.UsageError(f"--{name} takes a number of {unit}, 0 or more, not {text!r}")
        return number

    return coerce


def default_state_dir(environment: Mapping[str, str]) -> str:
    """Where the daemon keeps things if nobody says."""
    if given := environment.get("HIVEBASH_STATE_DIR"):
        return given
    if given := environment.get("STATE_DIRECTORY"):
        return given.split(":")[0]  # systemd.exec(5): one path for each directory of the unit
    if given := environment.get("XDG_STATE_HOME"):
        return f"{given}/hivebash"
    return os.path.expanduser("~/.local/state/hivebash")


_STATE_DIR_HELP = (
    "Directory for everything the daemon keeps, made 0700. "
    "[default: $HIVEBASH_STATE_DIR, $STATE_DIRECTORY, $XDG_STATE_HOME/hivebash or ~/.local/state/hivebash]"
)


class Options(usage.Options):
    """The command line. Its faults end the program with one line."""

    synopsis = "[options]"
    longdesc = "Runs shell commands in the background for one agent, which reaches it over MCP at POST /mcp."

    optParameters = [  # noqa: RUF012 - as usage.Options wants it
        [
            "state-dir",
            None,
            None,
            _STATE_DIR_HELP,
        ],
        [
            "agent-socket",
            None,
            None,
            "Unix socket of the agent's harness. Without one, a built-in harness runs. [default: $HIVE_AGENT_SOCKET]",
        ],
        ["on-todo", None, None, "Built-in harness: command to run when a task has ended; see README."],
        ["workdir", None, None, "Working directory of tasks. [default: where the daemon is started]"],
        [
            "max-running",
            None,
            limits.MAX_RUNNING,
            "More tasks than this wait, first come first served.",
            _whole("max-running", 1),
        ],
        [
            "kill-grace",
            None,
            limits.KILL_GRACE,
            "Seconds between a polite signal and SIGKILL where the daemon itself ends a task.",
            _number("kill-grace", "seconds"),
        ],
        ["keep", None, limits.KEEP_COUNT, "Finished tasks beyond this many are forgotten.", _whole("keep", 0)],
        [
            "keep-days",
            None,
            limits.KEEP_DAYS,
            "Tasks that finished longer ago than this many days are forgotten.",
            _number("keep-days", "days"),
        ],
    ]

    def __init__(self) -> None:
        super().__init__()
        self.listen: list[str] = []
        self.environment_changes: list[tuple[str, str]] = []
        self.allowed_hosts: set[str] = set()

    def opt_listen(self, endpoint: str) -> None:
        """Twisted server endpoint to serve on; may be repeated. [default: tcp:8712:interface=127.0.0.1]"""
        self.listen.append(endpoint)

    def opt_env(self, assignment: str) -> None:
        """NAME=VALUE sets a variable for tasks, NAME= unsets it; may be repeated."""
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise usage.UsageError(f"--env takes NAME=VALUE, or NAME= to unset, not {assignment!r}")
        self.environment_changes.append((name, value))

    def opt_allow_host(self, host: str) -> None:
        """A Host, and its Origin, that is accepted besides the loopback names; may be repeated."""
        name = host_name(f"//{host}") or host_name(f"//[{host}]")
        if name is None or name != host.lower().strip("[]") or not _HOST.fullmatch(name):
            raise usage.UsageError(f"--allow-host takes a host name or an address, without a port, not {host!r}")
        self.allowed_hosts.add(name)

    def parseArgs(self, *arguments: str) -> None:  # noqa: N802 - the name that usage.Options calls
        """No arguments but options."""
        if arguments:
            raise usage.UsageError(f"unexpected argument {arguments[0]!r}; see twistd hivebash --help")

    def postOptions(self) -> None:
        """Paths are meant from the directory the daemon is started in."""
        try:
            self["state-dir"] = os.path.abspath(self["state-dir"] or default_state_dir(os.environ))
            self["workdir"] = os.path.abspath(self["workdir"] or ".")
            given = self["agent-socket"] or os.environ.get("HIVE_AGENT_SOCKET")
            self["agent-socket"] = os.path.abspath(given) if given else None
        except FileNotFoundError:
            raise usage.UsageError("the directory it is started in is gone") from None
        self.listen = self.listen or [limits.LISTEN]
        if self["on-todo"] is not None and self["agent-socket"] is not None:
            raise usage.UsageError("--on-todo is for the built-in harness, and with --agent-socket there is another")
        if self["on-todo"] is not None and (not self["on-todo"].strip() or "\0" in self["on-todo"]):
            raise usage.UsageError("--on-todo takes a shell command, and this one is blank")
        path = self["agent-socket"] or f"{self['state-dir']}/{AGENT_SOCKET}"
        if (length := len(os.fsencode(path))) > UNIX_PATH_MAX:
            raise usage.UsageError(
                f"the harness's socket {path} has a path of {length} bytes, and it may have {UNIX_PATH_MAX} at most"
            )

    def parseOptions(self, options: list[str] | None = None) -> None:
        """Raises SystemExit with one line, where twistd would print its whole usage."""
        try:
            super().parseOptions(options)
        except usage.UsageError as error:
            _refuse(str(error))


def _refuse(sentence: str) -> NoReturn:
    """One line on stderr, exit status 1."""
    raise SystemExit(f"hivebash: {' '.join(sentence.split())}")


def makeService(options: Options) -> IService:
    """The daemon, checked, bound to its addresses and ready to start.

    Raises SystemExit, whose text is one line: an unusable state or working directory, a second daemon, an address.
    """
    _open_standard_descriptors()
    reactor = _install_reactor()
    _check_workdir(options["workdir"])
    lock = _claim(options["state-dir"])

    # The reactor is in place, and these import it.
    from hivebash.harness import Harness
    from hivebash.notices import Notices
    from hivebash.process import TASK_MARK, Processes, task_environment
    from hivebash.reach import ProcReach
    from hivebash.runner import TaskRunner
    from hivebash.spool import Spool
    from hivebash.store import TaskStore
    from hivebash.tools import Tools
    from hivebash.web import McpEndpoint, Web, site

    state_dir = options["state-dir"]
    store = TaskStore(f"{state_dir}/{DATABASE}")
    _check_store(store)
    reach = ProcReach(TASK_MARK)
    processes = Processes(reactor, reach, task_environment(os.environ, options.environment_changes), options["workdir"])
    own = None if options["agent-socket"] is not None else _own_harness(options, reactor, processes, reach)
    notices = Notices(
        clock=reactor,
        chance=random.random,
        outbox=store,
        harness=Harness(reactor, options["agent-socket"] or f"{state_dir}/{AGENT_SOCKET}"),
    )
    runner = TaskRunner(
        clock=reactor,
        now=time.time,
        fresh_token=_fresh_token,
        processes=processes,
        reach=reach,
        spool=Spool(f"{state_dir}/{SPOOL}"),
        store=store,
        notices=notices,
        max_running=options["max-running"],
        kill_grace=options["kill-grace"],
        retention=Retention(options["keep"], options["keep-days"]),
    )
    version = version_of("hivebash")
    mcp = McpEndpoint(Tools(runner).server(version), reactor)
    web = Web(runner, mcp, version, None if own is None else own.mcp)
    own_socket = f"{state_dir}/{AGENT_SOCKET}"
    if own is not None:
        own.port = _listen_privately(reactor, own_socket, own.site)
    try:
        ports = _listen(reactor, options.listen, site(web, Access(options.allowed_hosts)))
    except SystemExit:
        if own is not None:
            os.unlink(own_socket)
        raise
    return Daemon(reactor, store, runner, notices, mcp, ports, own, lock)


def _fresh_token() -> str:
    return secrets.token_hex(16)


def _own_harness(
    options: Options, reactor: AsyncioSelectorReactor, processes: Processes, reach: ProcReach
) -> BuiltInHarness:
    """The harness for an agent that has none."""
    from hivebash.ledger import Ledger
    from hivebash.loose_ends import LooseEnds
    from hivebash.todos import Todos
    from hivebash.turns import Turns
    from hivebash.web import McpEndpoint

    ledger = Ledger(f"{options['state-dir']}/{LEDGER}")
    _check_store(ledger)
    turns = None
    if options["on-todo"] is not None:
        turns = Turns(
            clock=reactor,
            fresh_token=_fresh_token,
            processes=processes,
            reach=reach,
            ledger=ledger,
            command=options["on-todo"],
            series=f"turn-{_name_of(options['state-dir'])}-",
            grace=options["kill-grace"],
        )
    todos = Todos(ledger, time.time, (lambda: None) if turns is None else turns.look)
    mcp = McpEndpoint(LooseEnds(ledger).server(version_of("hivebash")), reactor)
    return BuiltInHarness(ledger, turns, mcp, todos.site())


def _name_of(state_dir: str) -> str:
    """The same for each daemon on this directory, and no other."""
    status = os.stat(state_dir)
    return f"{status.st_dev:x}-{status.st_ino:x}"


@attrs.define(eq=False)
class BuiltInHarness:
    """The parts of the built-in harness."""

    ledger: Ledger
    turns: Turns | None
    mcp: McpEndpoint
    site: Site
    port: IListeningPort | None = None

    def start(self) -> None:
        """Open what must not cross a fork(2)."""
        self.ledger.open()

    def serve(self) -> None:
        """Begin. To be called in the running event loop."""
        self.mcp.start()
        if self.turns is not None:
            self.turns.start()


@attrs.define(eq=False)
class Daemon(Service):
    """Starts and stops the parts in their order."""

    _reactor: AsyncioSelectorReactor
    _store: TaskStore
    _runner: TaskRunner
    _notices: Notices
    _mcp: McpEndpoint
    _ports: list[IListeningPort]
    _harness: BuiltInHarness | None
    _lock: int

    def startService(self) -> None:
        """Settle what an earlier daemon left, then serve."""
        super().startService()
        _close_on_exec()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever it was started with: it is to be stoppable
        logging.getLogger().addHandler(_ToTwisted(logging.WARNING))
        self._store.open()
        if self._harness is not None:
            self._harness.start()
        self._runner.recover()
        # What is there now stays: the collector need not look at it again and again while tasks wait.
        gc.collect()
        gc.freeze()
        # Not callWhenRunning, which calls before the event loop runs: what asks for "the" loop then may get another.
        self._reactor.callLater(0, self._serve)
        for port in self._ports:
            _log.info("serving MCP at {address}", address=_shown(port.getHost()))

    def _serve(self) -> None:
        self._mcp.start()
        if self._harness is not None:
            self._harness.serve()
        self._notices.start()
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            # The end of the terminal is no reason to leave tasks behind.
            signal.signal(signal.SIGHUP, lambda *_: self._reactor.callFromThread(self._reactor.stop))

    def stopService(self) -> Deferred[None]:
        """Take no more connections, end the tasks, let answers and todos be written: within the grace and 2 seconds."""
        super().stopService()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # once is enough
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        """Each step is taken, whatever became of the one before."""
        for port in self._ports:
            await _step("closing an address", port.stopListening)
        turns = None if self._harness is None else self._harness.turns
        ending_turn = None if turns is None else Deferred.fromCoroutine(_step("ending the turn", turns.stop))
        await _step("ending the tasks", self._runner.stop)
        if ending_turn is not None:
            await ending_turn
        served = [self._mcp] if self._harness is None else [self._mcp, self._harness.mcp]
        answers = [
            Deferred.fromCoroutine(_step("ending the answers", partial(mcp.stop, self._reactor))) for mcp in served
        ]
        for ending in answers:
            await ending
        await _step("ending the todos", self._notices.stop)
        if self._harness is not None:
            own = self._harness
            if own.port is not None:
                await _step("closing the harness's socket", own.port.stopListening)
            await _step("closing the ledger", own.ledger.close)
        await _step("closing the database", self._store.close)
        os.close(self._lock)


class _ToTwisted(logging.Handler):
    """The standard library's log, where the SDK writes, into Twisted's."""

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        log = Logger(namespace=record.name)
        log.warn("{message}", message=record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            log.failure("", Failure(record.exc_info[1]))


async def _step(name: str, act: Callable[[], object]) -> None:
    try:
        result = act()
        if isinstance(result, Awaitable):
            await result
    except Exception:  # noqa: BLE001 - the next steps must not depend on it
        _log.failure("{step} failed", step=name)


def _shown(address: object) -> str:
    """Where clients find the daemon."""
    if isinstance(address, IPv4Address | IPv6Address):
        host = f"[{address.host}]" if isinstance(address, IPv6Address) else address.host
        return f"http://{host}:{address.port}/mcp"
    return str(address)


def _open_standard_descriptors() -> None:
    """See that nothing else ever gets 0, 1 or 2."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _close_on_exec() -> None:
    """What the daemon was started with is not for tasks."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2:
            try:
                os.set_inheritable(descriptor, False)
            except OSError:  # the one of the listing itself
                continue


def _install_reactor() -> AsyncioSelectorReactor:
    """The asyncio reactor, on the monotonic clock: a step of the wall clock must not end a task."""
    if "twisted.internet.reactor" not in sys.modules:
        from twisted.internet.asyncioreactor import AsyncioSelectorReactor
        from twisted.internet.main import installReactor

        installReactor(AsyncioSelectorReactor())
    from twisted.internet import reactor
    from twisted.internet.asyncioreactor import AsyncioSelectorReactor

    if not isinstance(reactor, AsyncioSelectorReactor):
        _refuse(f"the asyncio reactor is needed, and {type(reactor).__name__} is installed")
    reactor.seconds = time.monotonic
    return reactor


def _check_workdir(path: str) -> None:
    if not os.path.isdir(path):
        _refuse(f"--workdir {path} is no directory")
    if not os.access(path, os.X_OK):
        _refuse(f"--workdir {path}: permission denied")


def _claim(state_dir: str) -> int:
    """Make the state directory, and lock it for this daemon; the descriptor that holds the lock."""
    from hivebash.spool import make_private_directory

    try:
        _check_owner(state_dir)
        make_private_directory(state_dir)
        make_private_directory(f"{state_dir}/{SPOOL}")
        lock = os.open(f"{state_dir}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _refuse(f"--state-dir {state_dir}: {error.strerror}: {error.filename}")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        _refuse(f"--state-dir {state_dir} is in use by another daemon")
    return lock


def _check_owner(state_dir: str) -> None:
    """A directory that was there before is changed only if it can be meant."""
    try:
        status = os.stat(state_dir)
    except FileNotFoundError:
        return
    if status.st_uid != os.geteuid():
        _refuse(f"--state-dir {state_dir} belongs to {_user_name(status.st_uid)}")
    if stat.S_ISDIR(status.st_mode) and status.st_mode & _WORLD_WRITABLE:
        _refuse(f"--state-dir {state_dir} can be written by everyone; take one of its own")


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _check_store(store: TaskStore | Ledger) -> None:
    try:
        store.open()
        store.check()
    except StoreError as error:
        _refuse(str(error))
    store.close()


def _listen(reactor: AsyncioSelectorReactor, descriptions: list[str], factory: Site) -> list[IListeningPort]:
    """Bind all addresses; connections are taken once the reactor runs."""
    from twisted.internet.endpoints import serverFromString

    ports: list[IListeningPort] = []
    sockets: list[str] = []
    failures: list[Failure] = []
    for description in descriptions:
        try:
            if description.startswith("unix:"):
                path, mode, backlog = unix_arguments(description)
                _make_way(path)
                ports.append(reactor.listenUNIX(path, factory, backlog=backlog, mode=mode, wantPID=False))
                sockets.append(path)
            else:
                listening = serverFromString(reactor, description).listen(factory)
                listening.addCallbacks(ports.append, failures.append)
            if failures:
                failures[0].raiseException()
        except Exception as error:  # noqa: BLE001 - each kind of endpoint has its own ways to fail
            for path in sockets:
                os.unlink(path)
            _refuse(f"--listen {description}: {error or type(error).__name__}")
    return ports


def _listen_privately(reactor: AsyncioSelectorReactor, path: str, factory: Site) -> IListeningPort:
    """Bind a socket for the daemon's own user."""
    try:
        _make_way(path)
        port: IListeningPort = reactor.listenUNIX(path, factory, mode=0o600, wantPID=False)
    except Exception as error:  # noqa: BLE001 - as in _listen
        _refuse(f"{path}: {error or type(error).__name__}")
    return port


def unix_arguments(description: str) -> tuple[str, int, int]:
    """Path, mode and backlog of a ``unix:`` endpoint; it is for its owner unless a mode is given.

    Raises ValueError.
    """
    path, mode, backlog = "", "600", "50"
    for number, part in enumerate(re.findall(r"(?:[^\\:]|\\.)+", description.removeprefix("unix:"))):
        name, equals, value = re.sub(r"\\(.)", r"\1", part).partition("=")
        if not equals and number == 0:
            path = name
        elif equals and name == "address":
            path = value
        elif equals and name == "mode":
            mode = value
        elif equals and name == "backlog":
            backlog = value
        else:
            raise ValueError("unix: takes a path, mode= and backlog=")
    path = os.path.abspath(path) if path else ""
    if not path or not re.fullmatch("[0-7]{3,4}", mode) or not re.fullmatch("[0-9]{1,6}", backlog):
        raise ValueError("unix: takes a path, mode= in octal digits and backlog= as a number")
    if (length := len(os.fsencode(path))) > UNIX_PATH_MAX:
        raise ValueError(f"the path has {length} bytes, and a socket's at most {UNIX_PATH_MAX}")
    return path, int(mode, 8), int(backlog)


def _make_way(path: str) -> None:
    """Remove a socket that nobody listens on any more. Raises ValueError: somebody does, or it is no socket."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ValueError("there is something else than a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # so many wait there already
    raise ValueError("another program listens there")
