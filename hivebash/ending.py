"""Ends the processes of one task: the effects of its lifecycle.

Rank 2: the clock is passed in, the processes are behind IReach.

Theory of operation. A polite kill is one SIGINT and no more: the leader may take as long as it likes. Everything else
is a ladder: SIGTERM to all, and once the grace is over SIGKILL to all, again and again until nothing is left, since a
process may fork while it is being killed. While a ladder is under way the processes are looked at now and then, so
that it is over as soon as they are; otherwise nothing is looked at.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from hivebash import limits
from hivebash.interfaces import IReach
from hivebash.task import Identity, Sent

_log = Logger()


@attrs.define(eq=False)
class Ending:
    """The processes of one task, and their end. Implements ``lifecycle.Effects``."""

    _clock: IReactorTime
    _reach: IReach
    mark: str
    _grace: float
    """Seconds between SIGTERM and SIGKILL."""
    leader: Identity | None = None
    held: bool = False
    """Whether the leader is this daemon's and was not reaped, so that its group is surely its own."""
    known: Sequence[Identity] = ()
    """What the last look that succeeded found."""
    sent: Sent | None = None
    """The signal that was sent last."""
    _blind: bool = False
    """Whether the last look failed: then nothing is known to be gone."""
    _forced: bool = False
    _asked: set[Identity] = attrs.field(factory=set)
    """Those that got SIGTERM: for some programs a second one means to hurry."""
    _destroy_at: float | None = None
    """When the ladder gets to SIGKILL, on the monotonic clock; None while no ladder is under way."""
    _pause: float = 0.0
    _empty_looks: int = 0
    _next_look: IDelayedCall | None = None
    _gone: list[Deferred[None]] = attrs.field(factory=list)

    def members(self) -> Sequence[Identity]:
        """The live processes of the task, as the last look that succeeded found them."""
        try:
            self.known = self._reach.members(self.leader, self.mark, self.known)
            self._blind = False
        except OSError as error:
            self._cannot(error)
        return self.known

    def interrupt(self) -> None:
        """SIGINT to the process group."""
        if self.leader is not None:
            self.sent = Sent("SIGINT", self._reach.interrupt(self.leader))

    def terminate(self) -> None:
        """SIGTERM to every process; after the grace SIGKILL to those that are left."""
        self._asked.clear()
        self.sent = None
        self._terminate_new()

    def destroy(self) -> None:
        """SIGKILL to every process."""
        killed = self._kill()
        self.sent = Sent("SIGKILL", killed) if killed else None
        self._forced = True
        self._watch(self._clock.seconds())

    def sweep(self) -> None:
        """The leader is gone: what is left of the task follows."""
        if self._forced or (self._destroy_at is not None and self._destroy_at <= self._clock.seconds()):
            self.destroy()
        else:
            self._terminate_new()

    def when_gone(self) -> Deferred[None]:
        """Fires when the ladder is over, at once when there is none. A new Deferred for each call; never fails."""
        gone: Deferred[None] = Deferred(self._gone.remove)
        self._gone.append(gone)
        if self._next_look is None:
            self._over()
        return gone

    def abandon(self) -> None:
        """Look no more."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _terminate_new(self) -> None:
        """SIGTERM to those that did not get it yet."""
        fresh = [process for process in self.members() if process not in self._asked]
        try:
            count = self._reach.signal(fresh, signal.SIGTERM)
            self._reach.signal(fresh, signal.SIGCONT)  # one that is stopped could not act on the other
        except OSError as error:
            self._cannot(error)
        else:
            self._asked.update(fresh)
            if count:
                self.sent = Sent("SIGTERM", count)
        self._watch(self._clock.seconds() + self._grace if self._destroy_at is None else self._destroy_at)

    def _kill(self) -> int:
        """SIGKILL to all, and to those that they forked meanwhile; how many got it."""
        hit: set[Identity] = set()
        try:
            for _ in range(limits.KILL_ROUNDS):
                fresh = set(self._reach.destroy(self.leader, self.mark, self.known, held=self.held)) - hit
                if not fresh:
                    break
                hit |= fresh
        except OSError as error:
            self._cannot(error)
        return len(hit)

    def _cannot(self, error: OSError) -> None:
        _log.error("the processes of a task cannot be looked at: {error}", error=error)
        self._blind = True

    def _watch(self, destroy_at: float) -> None:
        self.abandon()
        self._destroy_at = destroy_at
        self._empty_looks = 0
        self._pause = limits.LOOK_FIRST
        self._later()

    def _later(self) -> None:
        pause = self._pause
        if self._destroy_at is not None and self._destroy_at > self._clock.seconds():
            pause = min(pause, self._destroy_at - self._clock.seconds())
        self._pause = min(self._pause * 2, limits.LOOK_MAX)
        self._next_look = self._clock.callLater(pause, self._look)

    def _look(self) -> None:
        self._next_look = None
        if not self.members() and not self._blind:
            # A process that forks and ends all the time can slip through several looks; a last stroke ends its group.
            self._empty_looks += 1
            if self._empty_looks >= limits.EMPTY_LOOKS and not self._kill() and not self._blind:
                self._over()
                return
            self._pause = limits.LOOK_FIRST
            self._later()
            return
        self._empty_looks = 0
        now = self._clock.seconds()
        if self._destroy_at is None or now < self._destroy_at:
            self._later()
            return
        self._kill()
        if now >= self._destroy_at + limits.KILL_GIVE_UP:
            _log.error(
                "{count} processes of a task outlive SIGKILL: {pids}",
                count=len(self.known),
                pids=[process.pid for process in self.known],
            )
            self._over()
            return
        self._pause = min(self._pause, limits.LOOK_KILL)
        self._later()

    def _over(self) -> None:
        self.abandon()
        self._destroy_at = None
        self._asked.clear()
        while self._gone:
            self._gone.pop(0).callback(None)
