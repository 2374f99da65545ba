"""The lifecycle, by example and against a model in random sequences."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
from automat import NoTransition
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from hivebash.lifecycle import Life, end_of_lost, new_life
from hivebash.task import Cause, End, Exit, State, Task

RULES = settings(deadline=None, derandomize=True, database=None, max_examples=300)

Input = tuple[str, Any]
"""The name of an input and its argument, if it takes one."""

POLITE: Input = ("kill", False)
FORCE: Input = ("kill", True)
START: Input = ("start", None)
EXPIRE: Input = ("expire", None)
HALT: Input = ("halt", None)
LOST: Input = ("lost", None)
EXITS = [Exit(0), Exit(3), Exit(signal=2), Exit(signal=9), Exit()]
INPUTS = st.one_of(
    st.sampled_from([POLITE, FORCE, EXPIRE, HALT]),
    st.sampled_from([START, START, LOST, ("fail", "no bash")]),
    st.sampled_from([("exited", exit_) for exit_ in EXITS]),
)
FINAL_STATE = {
    Cause.KILL: State.KILLED,
    Cause.TIME_LIMIT: State.TIMED_OUT,
    Cause.DAEMON_STOPPED: State.INTERRUPTED,
}


class Recorder:
    """Effects that only say that they happened."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def interrupt(self) -> None:
        self.done.append("interrupt")

    def terminate(self) -> None:
        self.done.append("terminate")

    def destroy(self) -> None:
        self.done.append("destroy")

    def sweep(self) -> None:
        self.done.append("sweep")


def give(life: Life, what: Input) -> None:
    name, argument = what
    if name == "kill":
        life.kill(force=argument)
    elif argument is None:
        getattr(life, name)()
    else:
        getattr(life, name)(argument)


def lived(*inputs: Input) -> tuple[Life, list[str]]:
    """A life after these inputs, and its effects."""
    effects = Recorder()
    life = new_life(effects)
    for what in inputs:
        give(life, what)
    return life, effects.done


@attrs.define
class Model:
    """The contract's rules: the first to ask decides, the leader's end ends it, an end stays."""

    running: bool = False
    asked: Cause | None = None
    end: End | None = None

    @property
    def state(self) -> State:
        if self.end is not None:
            return self.end.state
        return State.RUNNING if self.running else State.PENDING

    def takes(self, name: str) -> bool:
        """Whether the input can come now at all."""
        if name in ("kill", "expire", "halt"):
            return True
        if name == "lost":
            return self.end is None
        return self.end is None and self.running == (name == "exited")

    def give(self, what: Input) -> list[str]:
        """Take an input; the effects that it has."""
        name, argument = what
        if name in ("kill", "expire", "halt"):
            return self._ask(name, argument) if self.end is None else []
        if name == "start":
            self.running = True
        elif name == "fail":
            self.end = End(State.DONE, cause=Cause.COULD_NOT_START, detail=argument)
        elif self.asked is not None:
            self.end = End(FINAL_STATE[self.asked], argument or Exit(), self.asked)
            return ["sweep"] if name == "exited" else []
        else:
            self.end = End(State.DONE, argument) if argument else End(State.INTERRUPTED, cause=Cause.DAEMON_DIED)
        return []

    def _ask(self, name: str, force: bool) -> list[str]:
        cause = {"kill": Cause.KILL, "expire": Cause.TIME_LIMIT, "halt": Cause.DAEMON_STOPPED}[name]
        if not self.running:
            if name != "expire":
                self.end = End(FINAL_STATE[cause], cause=cause)
            return []
        first, self.asked = self.asked is None, self.asked or cause
        if name == "kill":
            return ["destroy" if force else "interrupt"]
        return ["terminate"] if first or self.asked is Cause.KILL else []


class SequenceTests(SynchronousTestCase):
    """Whatever happens in whatever order, a task has one end, and it is the right one."""

    @RULES
    @given(st.booleans(), st.lists(INPUTS, max_size=12))
    def test_against_the_model(self, started: bool, inputs: list[Input]) -> None:
        """State, what was asked, end and effects are as the rules say, after each input."""
        effects, model = Recorder(), Model()
        life = new_life(effects)
        for what in [START, *inputs] if started else inputs:
            if model.takes(what[0]):
                effects.done.clear()
                give(life, what)
                expected = model.give(what)
                if what != LOST:  # of a lost task the processes are not this daemon's
                    self.assertEqual(effects.done, expected)
            else:
                self.assertRaises(NoTransition, give, life, what)
            asked = model.asked if model.end is None else None
            self.assertEqual((life.state(), life.asked(), life.end()), (model.state, asked, model.end))

    @RULES
    @given(st.lists(INPUTS, max_size=15))
    def test_one_end(self, inputs: list[Input]) -> None:
        """There are never two ends, and a final state never changes, nor is anything signalled after it."""
        effects = Recorder()
        life = new_life(effects)
        end, signals = None, 0
        for what in inputs:
            with contextlib.suppress(NoTransition):
                give(life, what)
            if end is None:
                end, signals = life.end(), len(effects.done)
            self.assertEqual((life.end(), life.state().final), (end, end is not None))
            self.assertEqual(len(effects.done), signals)


class EndTests(SynchronousTestCase):
    """What the end is called."""

    def assert_end(self, end: End, *inputs: Input) -> list[str]:
        life, effects = lived(*inputs)
        self.assertEqual((life.end(), life.state(), life.asked()), (end, end.state, None), inputs)
        return effects

    def test_by_itself(self) -> None:
        """A task that nobody asked to end is done, whether by exit code or by signal."""
        for exit_ in EXITS:
            self.assertEqual(self.assert_end(End(State.DONE, exit_), START, ("exited", exit_)), [])

    def test_asked(self) -> None:
        """Once asked for, the end bears that name whatever the exit code, and nothing stays."""
        for ask, effect, cause in [
            (POLITE, "interrupt", Cause.KILL),
            (FORCE, "destroy", Cause.KILL),
            (EXPIRE, "terminate", Cause.TIME_LIMIT),
            (HALT, "terminate", Cause.DAEMON_STOPPED),
        ]:
            for exit_ in EXITS:
                effects = self.assert_end(End(FINAL_STATE[cause], exit_, cause), START, ask, ("exited", exit_))
                self.assertEqual(effects, [effect, "sweep"])
            self.assert_end(End(FINAL_STATE[cause], cause=cause), START, ask, LOST)

    def test_first_to_ask_decides(self) -> None:
        """A later one may press harder, and the end keeps its name."""
        ended = ("exited", Exit(0))
        killed, late = End(State.KILLED, Exit(0), Cause.KILL), End(State.TIMED_OUT, Exit(0), Cause.TIME_LIMIT)
        for inputs, end, effects in [
            ([POLITE, FORCE], killed, ["interrupt", "destroy"]),
            ([POLITE, EXPIRE], killed, ["interrupt", "terminate"]),
            ([POLITE, HALT], killed, ["interrupt", "terminate"]),
            ([EXPIRE, HALT], late, ["terminate"]),
            ([EXPIRE, FORCE], late, ["terminate", "destroy"]),
            ([HALT, EXPIRE], End(State.INTERRUPTED, Exit(0), Cause.DAEMON_STOPPED), ["terminate"]),
        ]:
            self.assertEqual(self.assert_end(end, START, *inputs, ended), [*effects, "sweep"], inputs)

    def test_pending(self) -> None:
        """A task that never ran is cancelled, interrupted or could not start, and nothing is signalled."""
        for what, end in [
            (POLITE, End(State.KILLED, cause=Cause.KILL)),
            (FORCE, End(State.KILLED, cause=Cause.KILL)),
            (HALT, End(State.INTERRUPTED, cause=Cause.DAEMON_STOPPED)),
            (LOST, End(State.INTERRUPTED, cause=Cause.DAEMON_DIED)),
            (("fail", "no bash"), End(State.DONE, cause=Cause.COULD_NOT_START, detail="no bash")),
        ]:
            self.assertEqual(self.assert_end(end, what), [], what)

    def test_asked_while_it_runs(self) -> None:
        """It is told what was asked for, until the end; the state stays running."""
        for ask, cause in [(POLITE, Cause.KILL), (EXPIRE, Cause.TIME_LIMIT), (HALT, Cause.DAEMON_STOPPED)]:
            life, _ = lived(START, ask)
            self.assertEqual((life.state(), life.asked(), life.end()), (State.RUNNING, cause, None))

    def test_after_the_end(self) -> None:
        """Whoever asks of an ended task changes and signals nothing, and it cannot start or end again."""
        ended = ("exited", Exit(0))
        for before in ([START, ended], [START, POLITE, ended], [START, EXPIRE, ended], [START, HALT, LOST], [LOST]):
            life, effects = lived(*before)
            end, signalled = life.end(), list(effects)
            for what in (POLITE, FORCE, EXPIRE, HALT):
                give(life, what)
            for what in (START, ended, LOST, ("fail", "late")):
                self.assertRaises(NoTransition, give, life, what)
            self.assertEqual((life.end(), effects), (end, signalled))


class LostTests(SynchronousTestCase):
    """A new daemon names the end of what an earlier one left behind."""

    def test_running(self) -> None:
        """As it was asked for, else interrupted because the daemon died; how the leader ended is not known."""
        for asked, end in [
            (None, End(State.INTERRUPTED, cause=Cause.DAEMON_DIED)),
            *((cause, End(state, cause=cause)) for cause, state in FINAL_STATE.items()),
        ]:
            self.assertEqual(end_of_lost(Task("a", "true", 0.0, state=State.RUNNING, asked=asked)), end)

    def test_pending(self) -> None:
        """A task that had not started is interrupted."""
        self.assertEqual(end_of_lost(Task("a", "true", 0.0)), End(State.INTERRUPTED, cause=Cause.DAEMON_DIED))
