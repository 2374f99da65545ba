"""Tells the harness what became of tasks: holds, sends, withdraws and retries notices.

Rank 2: the clock, chance, the outbox on disk and the harness are passed in.

Theory of operation. There is one notice a key, the newest; it is on disk before anything is sent, together with the
change that it tells. While somebody waits inline for a task's end, or an answer that shows it is being written, the
notice is held: an answer that was written withdraws it, one that was lost lets it go. Holds are in memory alone, so a
crash lets all go. One request a key is under way at any time, and what it brought is written down only if the notice
is still the same; otherwise the newer one follows. A harness that cannot be reached is tried with one key at a time,
less and less often, or as soon as it can be seen to be back; one that fails at a key is left alone with that key only.
Nothing is scheduled while nothing is owed.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from hivebash import limits
from hivebash.interfaces import (
    HarnessAway,
    HarnessFailed,
    HarnessRefused,
    INotices,
    IReceipt,
    ITodoSink,
    StoreError,
)
from hivebash.task import Notice, Phase, Task, Todo

_log = Logger()


@attrs.define(eq=False)
class Hold:
    """Keeps the end of one task from being sent, until it is released or withdrawn."""

    _notices: Notices
    key: str
    mark: str
    _open: bool = True

    def follow(self, receipt: IReceipt | None) -> None:
        """The answer shows the end: what becomes of it decides. None: nobody can tell whether it was written."""
        if receipt is None:
            self.release()
        else:
            receipt.written().addCallback(self._settle)

    def release(self) -> None:
        """Nobody was told."""
        self._settle(told=False)

    def _settle(self, told: bool) -> None:
        if self._open:
            self._open = False
            self._notices.settle(self, told=told)


@attrs.define(eq=False)
class Notices:
    """The outbox and its way to the harness."""

    _clock: IReactorTime
    _chance: Callable[[], float]
    """A number from 0 to 1, so that retries of several daemons do not meet."""
    _outbox: INotices
    _harness: ITodoSink
    _holds: dict[str, int] = attrs.field(factory=dict, init=False)
    """How many hold a task's end, by its mark."""
    _ready: dict[str, None] = attrs.field(factory=dict, init=False)
    """Keys to be looked at, in their order."""
    _busy: dict[str, Deferred[float | None]] = attrs.field(factory=dict, init=False)
    """What is under way, by key."""
    _resting: dict[str, IDelayedCall] = attrs.field(factory=dict, init=False)
    """Keys at which the harness failed."""
    _failures: dict[str, int] = attrs.field(factory=dict, init=False)
    """How often, one after the other."""
    _away: int = attrs.field(default=0, init=False)
    """How many tries in a row did not reach the harness."""
    _gate: IDelayedCall | None = attrs.field(default=None, init=False)
    """The next try, while it is away."""
    _back: Deferred[None] | None = attrs.field(default=None, init=False)
    _settling: set[IDelayedCall] = attrs.field(factory=set, init=False)
    """What the disk refused to take, to be tried again."""
    _serving: bool = attrs.field(default=False, init=False)

    def start(self) -> None:
        """Send what is owed, also by an earlier daemon."""
        self._serving = True
        for key in self._outbox.owed():
            self._ready[key] = None
        self._pump()

    async def stop(self) -> None:
        """Let what is under way come to its end for a moment; what is owed then stays so on disk."""
        self._serving = False
        for call in (self._gate, *self._resting.values(), *self._settling):
            if call is not None:
                call.cancel()
        if self._back is not None:
            self._back.cancel()
        sending = list(self._busy.values())
        # When the time is over this list cancels what it waits for, and fires all the same.
        await DeferredList(sending).addTimeout(limits.SEND_MARGIN, self._clock)
        await self._harness.close()

    def hold(self, key: str, mark: str) -> Hold:
        """Keep a task's end from being sent for now."""
        self._holds[mark] = self._holds.get(mark, 0) + 1
        return Hold(self, key, mark)

    def draft(self, task: Task, todo: Todo) -> Notice:
        """The notice of a task, to be kept in the same transaction as what it tells; ``post`` comes after it."""
        old = self._outbox.notice(task.id)
        return Notice(task.id, task.mark, todo, exposed=old is not None and old.exposed)

    def keep(self, notice: Notice) -> None:
        """Keep a notice that goes with no other change, and send it. Raises StoreError."""
        self._outbox.keep(notice)
        self.post(notice.key)

    def post(self, key: str) -> None:
        """There is a new notice on disk."""
        self._failures.pop(key, None)
        resting = self._resting.pop(key, None)
        if resting is not None:
            resting.cancel()
        self._enqueue(key)

    def settle(self, hold: Hold, *, told: bool) -> None:
        """A hold is over; ``told``: an answer that shows the end was written."""
        notice = self._outbox.notice(hold.key)
        if notice is not None and notice.mark == hold.mark and notice.todo.state.final:
            try:
                if told:
                    self._withdraw(notice)
            except StoreError as error:
                _log.error("the notice of {key} cannot be withdrawn yet: {error}", key=hold.key, error=str(error))
                self._again(lambda: self.settle(hold, told=told))  # and it is held until then
                return
        self._holds[hold.mark] -= 1
        if not self._holds[hold.mark]:
            del self._holds[hold.mark]
            if notice is not None:
                self._enqueue(hold.key)

    def _withdraw(self, notice: Notice) -> None:
        if notice.phase is Phase.WITHDRAWN:
            return
        if notice.exposed:
            self._outbox.keep(attrs.evolve(notice, phase=Phase.WITHDRAWN))
            self.post(notice.key)
        else:
            self._outbox.drop(notice.key)

    def _again(self, act: Callable[[], None]) -> None:
        def run() -> None:
            self._settling.discard(call)
            act()

        call = self._clock.callLater(limits.STORE_RETRY, run)
        self._settling.add(call)

    # On the way to the harness.

    def _enqueue(self, key: str) -> None:
        if key not in self._busy and key not in self._resting:
            self._ready[key] = None
            self._pump()

    def _pump(self) -> None:
        """Send what may be sent."""
        if self._gate is not None:
            return
        while self._serving and self._ready and len(self._busy) < (1 if self._away else limits.SENDS_AT_ONCE):
            key = next(iter(self._ready))
            del self._ready[key]
            notice = self._outbox.notice(key)
            if notice is not None and self._may_go(notice):
                sending: Deferred[float | None] = Deferred.fromCoroutine(self._send(notice))
                self._busy[key] = sending
                sending.addErrback(_unexpected).addCallback(self._sent, key)

    def _may_go(self, notice: Notice) -> bool:
        if notice.phase is Phase.DUE:
            return not (notice.todo.state.final and notice.mark in self._holds)
        return notice.phase is Phase.WITHDRAWN

    async def _send(self, notice: Notice) -> float | None:
        """One try; after how many seconds the next is due, None: there is none unless the notice is another one."""
        key = notice.key
        outcome: Notice | None = None
        try:
            if notice.phase is Phase.WITHDRAWN:
                await self._harness.remove(key)
            else:
                if not notice.exposed:
                    notice = attrs.evolve(notice, exposed=True)
                    self._outbox.keep(notice)
                await self._harness.put(key, notice.todo)
                outcome = attrs.evolve(notice, phase=Phase.SENT)
        except HarnessAway as error:
            self._missed(str(error))
            return None
        except HarnessFailed as error:
            self._reached()
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            _log.warn("the harness failed at the todo {key}: {error}", key=key, error=str(error))
            return self._pause(failures)
        except HarnessRefused as error:
            _log.error("the harness refuses the todo {key}: {error}", key=key, error=str(error))
            outcome = attrs.evolve(notice, phase=Phase.REFUSED, problem=str(error))
        except StoreError as error:
            _log.error("the todo {key} is not sent yet: {error}", key=key, error=str(error))
            return limits.STORE_RETRY
        except CancelledError:  # the daemon stops
            return None
        self._reached()
        self._failures.pop(key, None)
        await self._note(notice, outcome)
        return None

    async def _note(self, sent: Notice, outcome: Notice | None) -> None:
        """Write down what became of a notice, if it is the newest; it is not sent again while the disk is full."""
        while self._outbox.notice(sent.key) == sent:
            try:
                if outcome is None:
                    self._outbox.drop(sent.key)
                else:
                    self._outbox.keep(outcome)
            except StoreError as error:
                _log.error("the harness's answer to {key} is not on disk yet: {error}", key=sent.key, error=str(error))
            else:
                return
            try:
                await deferLater(self._clock, limits.STORE_RETRY)
            except CancelledError:  # the daemon stops
                return

    def _sent(self, pause: float | None, key: str) -> None:
        """A try is over: a newer notice of its key follows at once, the same after the pause."""
        del self._busy[key]
        if pause is not None and self._serving:
            self._resting[key] = self._clock.callLater(pause, self._rested, key)
        else:
            self._ready[key] = None
        self._pump()

    def _rested(self, key: str) -> None:
        del self._resting[key]
        self._enqueue(key)

    def _reached(self) -> None:
        if self._away:
            _log.info("the harness is back")
            self._away = 0
        if self._back is not None:
            self._back.cancel()
            self._back = None

    def _missed(self, why: str) -> None:
        """Nobody answered: try again later, with one request."""
        if self._gate is not None or not self._serving:
            return  # another of those that were under way saw it before
        self._away += 1
        if self._away == 1:
            _log.warn("the harness cannot be reached, and is tried again: {why}", why=why)
        self._gate = self._clock.callLater(self._pause(self._away), self._open_gate)
        if self._back is None:
            self._back = self._harness.when_back()
            self._back.addCallbacks(self._seen, lambda _: None)

    def _seen(self, result: None) -> None:
        """The harness may be back."""
        self._back = None
        if self._gate is not None:
            self._gate.cancel()
            self._away = 1  # what listens may not answer yet
            self._open_gate()

    def _open_gate(self) -> None:
        self._gate = None
        self._pump()

    def _pause(self, failures: int) -> float:
        longest = min(limits.RETRY_MOST, limits.RETRY_FIRST * 2.0 ** min(failures - 1, 30))
        return longest * (0.5 + self._chance() / 2)


def _unexpected(failure: Failure) -> float:
    _log.failure("a todo could not be sent", failure)
    return limits.RETRY_MOST
