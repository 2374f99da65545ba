"""Runs the operator's command when the built-in harness has something new: one turn at a time.

Rank 2: the clock, the processes and the ledger are passed in.

Theory of operation. A change makes a turn due, on disk, in one with itself. The turn begins a moment later, so that
changes that come together are told together; what changes while one runs makes the next one due. A turn that fails, or
is ended because its time is over, is logged and over: its todos stay open, and the next change tells them again. One
that the daemon's own end cut off is begun again, but not for ever.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import attrs
from twisted.internet import defer
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from hivebash import limits, wording
from hivebash.ending import Ending
from hivebash.interfaces import CannotStart, ILedger, IProcess, IProcesses, IReach, StoreError
from hivebash.task import Exit

_log = Logger()


@attrs.define(eq=False)
class Turns:
    """The turns of one built-in harness."""

    _clock: IReactorTime
    _fresh_token: Callable[[], str]
    _processes: IProcesses
    _reach: IReach
    _ledger: ILedger
    _command: str
    _series: str
    """What the marks of all its turns begin with, those of earlier daemons too."""
    _grace: float
    _next: IDelayedCall | None = attrs.field(default=None, init=False)
    _ending: Ending | None = attrs.field(default=None, init=False)
    """Of the turn that runs."""
    _limit: IDelayedCall | None = attrs.field(default=None, init=False)
    _expired: bool = attrs.field(default=False, init=False)
    _serving: bool = attrs.field(default=False, init=False)
    _over: Deferred[None] | None = attrs.field(default=None, init=False)
    """Fires when the turn that runs is over, while somebody waits for that."""

    def start(self) -> None:
        """End what an earlier daemon left of a turn, then run what is due."""
        leftovers = []
        try:
            marks = self._reach.marks()
        except OSError as error:
            _log.error("what is left of earlier turns cannot be looked for: {error}", error=error)
            marks = {}
        for mark in marks:
            if mark.startswith(self._series):
                ending = Ending(self._clock, self._reach, mark, self._grace)
                ending.terminate()
                leftovers.append(ending.when_gone())
        DeferredList(leftovers).addCallback(self._serve)

    def _serve(self, results: object) -> None:
        self._serving = True
        self.look()

    async def stop(self) -> None:
        """End the turn that runs, if there is one; it is begun again by the next daemon."""
        self._serving = False
        if self._next is not None and self._next.active():
            self._next.cancel()
        if self._ending is not None:
            self._over = Deferred()
            self._ending.terminate()
            try:
                await self._over.addTimeout(self._grace + limits.STOP_MARGIN, self._clock)
            except defer.TimeoutError:
                _log.error("a turn outlives the daemon")

    def look(self) -> None:
        """Something may be due."""
        if not self._serving or self._ending is not None or (self._next is not None and self._next.active()):
            return
        if self._ledger.turn_due():
            self._next = self._clock.callLater(limits.TURN_PAUSE, self._begin)

    def _begin(self) -> None:
        ends = self._ledger.open_ends()
        try:
            if not ends:  # dealt with in the meantime
                self._ledger.begin_turn()
                self._ledger.end_turn()
                return
            self._ledger.begin_turn()
        except StoreError as error:
            _log.error("a turn is not begun yet: {error}", error=str(error))
            self._next = self._clock.callLater(limits.STORE_RETRY, self._begin)
            return
        told = json.dumps([wording.loose_end_object(end) for end in ends])
        self._ending = ending = Ending(self._clock, self._reach, f"{self._series}{self._fresh_token()}", self._grace)
        try:
            process = self._spawn(ending.mark, told.encode())
        except (CannotStart, OSError) as error:
            _log.error("a turn could not be started: {error}", error=str(error))
            self._finished()
            return
        ending.leader, ending.held = process.identity, True
        self._expired = False
        self._limit = self._clock.callLater(limits.TURN_LIMIT, self._expire)
        process.ended.addCallback(lambda exit_: self._ended(process, ending, exit_))

    def _spawn(self, mark: str, told: bytes) -> IProcess:
        """Start the command. Its input is a file in memory, so that nobody waits for it to read."""
        stdin = os.memfd_create("loose-ends", os.MFD_CLOEXEC)
        null = -1
        try:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            with open(stdin, "wb", closefd=False) as file:
                file.write(told)
            os.lseek(stdin, 0, os.SEEK_SET)
            return self._processes.spawn(("-c", "--", self._command), None, mark, null, null, stdin)
        finally:
            os.close(stdin)
            if null != -1:
                os.close(null)

    def _expire(self) -> None:
        self._expired = True
        if self._ending is not None:
            self._ending.terminate()

    def _ended(self, process: IProcess, ending: Ending, exit_: Exit) -> None:
        if self._limit is not None and self._limit.active():
            self._limit.cancel()
        if self._expired:
            _log.error("a turn was ended after {limit} s", limit=limits.TURN_LIMIT)
        elif exit_.code != 0:
            how = f"exit code {exit_.code}" if exit_.code is not None else f"ended by {exit_.signal_name}"
            _log.error("a turn failed: {how}", how=how)
        if self._expired or not self._serving:
            ending.sweep()
        ending.when_gone().addCallback(lambda _: self._release(process, ending))

    def _release(self, process: IProcess, ending: Ending) -> None:
        ending.held = False
        process.release()
        self._finished()

    def _finished(self) -> None:
        self._ending = None
        if self._over is not None:
            self._over.callback(None)
            return
        try:
            self._ledger.end_turn()
        except StoreError as error:
            _log.error("the end of a turn is not on disk: {error}", error=str(error))
        self.look()
