"""Ends the processes of one task: the effects of its lifecycle.

Rank 2: the clock is passed in, the processes are behind IReach.

Theory of operation. A polite kill is one SIGINT and no more: the leader may take as long as it likes. Everything else
is a ladder: SIGTERM to all, and once the grace is over SIGKILL to all, again and again until nothing is left, since a
process may fork while it is being killed. While a ladder is under way the processes are looked at now and then, so
that it is over as soon as they are; otherwise nothing is looked at.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

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
    _mark: str
    _grace: float
    """Seconds between SIGTERM and SIGKILL."""
    leader: Identity | None = None
    sent: Sent | None = None
    _known: Sequence[Identity] = ()
    _blind: bool = False
    """Whether the last look failed: then nothing is known to be gone."""
    _forced: bool = False
    _destroy_at: float | None = None
    """When the ladder gets to SIGKILL, on the monotonic clock."""
    _pause: float = 0.0
    _next_look: IDelayedCall | None = None
    _gone: list[Deferred[None]] = attrs.field(factory=list)

    @property
    def known(self) -> Iterable[Identity]:
        """What the last look found."""
        return self._known

    def members(self) -> Sequence[Identity]:
        """The live processes of the task, as the last look that succeeded found them."""
        try:
            self._known = self._reach.members(self.leader, self._mark, self._known)
            self._blind = False
        except OSError as error:
            _log.error("the processes of a task cannot be looked at: {error}", error=error)
            self._blind = True
        return self._known

    def interrupt(self) -> None:
        """SIGINT to the process group."""
        if self.leader is not None:
            self.sent = Sent("SIGINT", self._reach.interrupt(self.leader))

    def terminate(self) -> None:
        """SIGTERM to every process; after the grace SIGKILL to those that are left."""
        members = self.members()
        count = self._reach.signal(members, signal.SIGTERM)
        self._reach.signal(members, signal.SIGCONT)  # one that is stopped could not act on the other
        self.sent = Sent("SIGTERM", count) if count else None
        if self._destroy_at is None:
            self._destroy_at = self._clock.seconds() + self._grace
        self._watch()

    def destroy(self) -> None:
        """SIGKILL to every process."""
        killed = self._kill()
        self.sent = Sent("SIGKILL", killed) if killed else None
        self._forced = True
        self._destroy_at = self._clock.seconds()
        self._watch()

    def sweep(self) -> None:
        """The leader is gone: what is left of the task follows."""
        if not self.members() and not self._blind:
            self._over()
        elif self._forced or (self._destroy_at is not None and self._destroy_at <= self._clock.seconds()):
            self.destroy()
        else:
            self.terminate()

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

    def _kill(self) -> int:
        """SIGKILL to all, and to those that they forked meanwhile; how many got it."""
        hit: set[Identity] = set()
        killed = 0
        for _ in range(limits.KILL_ROUNDS):
            fresh = [process for process in self.members() if process not in hit]
            if not fresh:
                break
            killed += self._reach.signal(fresh, signal.SIGKILL)
            hit.update(fresh)
        return killed

    def _watch(self) -> None:
        self.abandon()
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
            self._over()
            return
        now = self._clock.seconds()
        if self._destroy_at is not None and now >= self._destroy_at:
            self._kill()
            if now >= self._destroy_at + limits.KILL_GIVE_UP:
                _log.error(
                    "{count} processes of a task outlive SIGKILL: {pids}",
                    count=len(self._known),
                    pids=[process.pid for process in self._known],
                )
                self._over()
                return
        self._later()

    def _over(self) -> None:
        self.abandon()
        self._destroy_at = None
        while self._gone:
            self._gone.pop(0).callback(None)
