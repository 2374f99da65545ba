"""The one place that decides a task's transitions.

Rank 1: a typed Automat machine, no I/O.

Theory of operation. A task is born *pending* and runs once a slot is free. Whoever wants it to end before it does so
by itself asks: with *kill*, because its time is over (*expire*), or because the daemon stops (*halt*). The first to
ask decides what the end will be called; a later one may only press harder. Therefore there is a state for each, and
the outcome is never guessed from an exit code: a program that catches the signal and exits 0 was killed all the same.
The end itself is always the leader's: *exited*, told by wait(2); or *lost*, when a new daemon finds the task of a dead
one. Each state answers what is asked of it (``state``, ``asked``, ``end``); nobody looks inside.

Effects only send signals and must not raise, because the machine has moved before they run.

============ ========================= ============================================
from         input                     to (effect)
============ ========================= ============================================
pending      start                     running
pending      fail                      done, could not start
pending      kill                      killed
pending      halt, lost                interrupted
running      exited                    done
running      kill                      killing (interrupt, or destroy with force)
running      expire                    expiring (terminate)
running      halt                      halting (terminate)
running      lost                      interrupted
killing      exited                    killed (sweep)
killing      kill                      killing (interrupt, or destroy)
killing      expire, halt              killing (terminate)
expiring     exited                    timed_out (sweep)
halting      exited                    interrupted (sweep)
killing      lost                      killed
expiring     lost                      timed_out
halting      lost                      interrupted
expiring,    kill                      the same (interrupt, or destroy)
halting
any other    kill, expire, halt        the same
============ ========================= ============================================
"""

from __future__ import annotations

from typing import Protocol

import attrs
from automat import TypeMachineBuilder

from hivebash.task import Cause, End, Exit, State, Task


class Effects(Protocol):
    """What the lifecycle does to the processes of its task. None of these raises or waits."""

    def interrupt(self) -> None:
        """SIGINT to the process group."""

    def terminate(self) -> None:
        """SIGTERM to every process; after the grace period SIGKILL to those that are left."""

    def destroy(self) -> None:
        """SIGKILL to every process."""

    def sweep(self) -> None:
        """The leader is gone: see that nothing else stays."""


class Life(Protocol):
    """One task's life: inputs first, then the questions every state answers."""

    def start(self) -> None:
        """The leader runs."""

    def fail(self, detail: str) -> None:
        """There could be no leader, for the reason given in words."""

    def kill(self, *, force: bool) -> None:
        """Somebody wants it to end."""

    def expire(self) -> None:
        """Its time is over."""

    def halt(self) -> None:
        """The daemon stops."""

    def exited(self, exit_: Exit) -> None:
        """The leader ended."""

    def lost(self) -> None:
        """The daemon that ran it is gone, and so is whatever it would have seen."""

    def state(self) -> State:
        """The state as clients see it."""

    def asked(self) -> Cause | None:
        """What somebody asked for, of a task that has not ended yet."""

    def end(self) -> End | None:
        """The end, once there is one."""


@attrs.define
class Core:
    """What the machine works on."""

    effects: Effects


_builder = TypeMachineBuilder(Life, Core)

_pending = _builder.state("pending")
_running = _builder.state("running")
_killing = _builder.state("killing")
_expiring = _builder.state("expiring")
_halting = _builder.state("halting")


# How each way to end becomes an End. The parameters bear the inputs' names, as Automat wants them.


def _by_itself(life: Life, core: Core, exit_: Exit) -> End:
    return End(State.DONE, exit_)


def _not_started(life: Life, core: Core, detail: str) -> End:
    return End(State.DONE, cause=Cause.COULD_NOT_START, detail=detail)


def _cancelled(life: Life, core: Core, force: bool) -> End:
    return End(State.KILLED, cause=Cause.KILL)


def _killed(life: Life, core: Core, exit_: Exit) -> End:
    return End(State.KILLED, exit_, Cause.KILL)


def _killed_unseen(life: Life, core: Core) -> End:
    return End(State.KILLED, cause=Cause.KILL)


def _out_of_time(life: Life, core: Core, exit_: Exit) -> End:
    return End(State.TIMED_OUT, exit_, Cause.TIME_LIMIT)


def _out_of_time_unseen(life: Life, core: Core) -> End:
    return End(State.TIMED_OUT, cause=Cause.TIME_LIMIT)


def _halted(life: Life, core: Core, exit_: Exit) -> End:
    return End(State.INTERRUPTED, exit_, Cause.DAEMON_STOPPED)


def _halted_unseen(life: Life, core: Core) -> End:
    return End(State.INTERRUPTED, cause=Cause.DAEMON_STOPPED)


def _orphaned(life: Life, core: Core) -> End:
    return End(State.INTERRUPTED, cause=Cause.DAEMON_DIED)


_done = _builder.state("done", _by_itself)
_unstartable = _builder.state("unstartable", _not_started)
_cancelled_pending = _builder.state("cancelled", _cancelled)
_killed_state = _builder.state("killed", _killed)
_killed_unseen_state = _builder.state("killed unseen", _killed_unseen)
_timed_out = _builder.state("timed out", _out_of_time)
_timed_out_unseen = _builder.state("timed out unseen", _out_of_time_unseen)
_interrupted = _builder.state("interrupted", _halted)
_interrupted_unseen = _builder.state("interrupted unseen", _halted_unseen)
_orphan = _builder.state("orphan", _orphaned)

_LIVE = (_pending, _running, _killing, _expiring, _halting)


@_running.upon(Life.kill).to(_killing)
@_killing.upon(Life.kill).loop()
@_expiring.upon(Life.kill).loop()
@_halting.upon(Life.kill).loop()
def _signal(life: Life, core: Core, force: bool) -> None:
    if force:
        core.effects.destroy()
    else:
        core.effects.interrupt()


@_running.upon(Life.expire).to(_expiring)
@_running.upon(Life.halt).to(_halting)
@_killing.upon(Life.expire).loop()
@_killing.upon(Life.halt).loop()
def _terminate(life: Life, core: Core) -> None:
    core.effects.terminate()


@_killing.upon(Life.exited).to(_killed_state)
@_expiring.upon(Life.exited).to(_timed_out)
@_halting.upon(Life.exited).to(_interrupted)
def _sweep(life: Life, core: Core, exit_: Exit) -> None:
    core.effects.sweep()


_pending.upon(Life.start).to(_running).returns(None)
_pending.upon(Life.fail).to(_unstartable).returns(None)
_pending.upon(Life.kill).to(_cancelled_pending).returns(None)
_pending.upon(Life.halt).to(_interrupted_unseen).returns(None)
_pending.upon(Life.lost).to(_orphan).returns(None)
_running.upon(Life.exited).to(_done).returns(None)
_running.upon(Life.lost).to(_orphan).returns(None)
_killing.upon(Life.lost).to(_killed_unseen_state).returns(None)
_expiring.upon(Life.lost).to(_timed_out_unseen).returns(None)
_halting.upon(Life.lost).to(_interrupted_unseen).returns(None)

# The ladder that is under way goes on as it is.
_pending.upon(Life.expire).loop().returns(None)
_expiring.upon(Life.expire).loop().returns(None)
_expiring.upon(Life.halt).loop().returns(None)
_halting.upon(Life.expire).loop().returns(None)
_halting.upon(Life.halt).loop().returns(None)

_pending.upon(Life.state).loop().returns(State.PENDING)
_running.upon(Life.state).loop().returns(State.RUNNING)
_killing.upon(Life.state).loop().returns(State.RUNNING)
_expiring.upon(Life.state).loop().returns(State.RUNNING)
_halting.upon(Life.state).loop().returns(State.RUNNING)

_pending.upon(Life.asked).loop().returns(None)
_running.upon(Life.asked).loop().returns(None)
_killing.upon(Life.asked).loop().returns(Cause.KILL)
_expiring.upon(Life.asked).loop().returns(Cause.TIME_LIMIT)
_halting.upon(Life.asked).loop().returns(Cause.DAEMON_STOPPED)

for _state in _LIVE:
    _state.upon(Life.end).loop().returns(None)


def _final_end(life: Life, core: Core, end: End) -> End:
    return end


def _final_state(life: Life, core: Core, end: End) -> State:
    return end.state


for _final in (
    _done,
    _unstartable,
    _cancelled_pending,
    _killed_state,
    _killed_unseen_state,
    _timed_out,
    _timed_out_unseen,
    _interrupted,
    _interrupted_unseen,
    _orphan,
):
    _final.upon(Life.end).loop()(_final_end)
    _final.upon(Life.state).loop()(_final_state)
    _final.upon(Life.asked).loop().returns(None)
    _final.upon(Life.kill).loop().returns(None)
    _final.upon(Life.expire).loop().returns(None)
    _final.upon(Life.halt).loop().returns(None)

_new_life = _builder.build()


def new_life(effects: Effects) -> Life:
    """The life of a task that was just submitted."""
    return _new_life(Core(effects))


class _NoEffects:
    """For a task whose processes are not this daemon's: the recovery looks after them itself."""

    def interrupt(self) -> None:
        """Nothing to signal."""

    terminate = destroy = sweep = interrupt


def end_of_lost(task: Task) -> End:
    """How a task ends that an earlier daemon left ``pending`` or ``running`` on disk."""
    life = new_life(_NoEffects())
    if task.state is State.RUNNING:
        life.start()
        if task.asked is Cause.KILL:
            life.kill(force=False)
        elif task.asked is Cause.TIME_LIMIT:
            life.expire()
        elif task.asked is Cause.DAEMON_STOPPED:
            life.halt()
    life.lost()
    end = life.end()
    if end is None:  # pragma: no cover - each live state has a transition for lost
        raise AssertionError(f"task {task.id} was lost and has no end")
    return end
