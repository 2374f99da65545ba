"""Ids, states, and how an end is told."""

from __future__ import annotations

import signal
import string

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from hivebash.task import NAME_MAX, Cause, End, Exit, Identity, State, Task, signal_name, valid_name

RULES = settings(deadline=None, derandomize=True, database=None, max_examples=300)
ALPHABET = string.ascii_lowercase + string.digits + "-"


class NameTests(SynchronousTestCase):
    """A task's id is 1 to 63 of lowercase ASCII letters, digits and hyphens."""

    @RULES
    @given(st.text(ALPHABET, min_size=1, max_size=63))
    def test_good(self, name: str) -> None:
        """Each such name may be used."""
        self.assertTrue(valid_name(name))

    @RULES
    @given(st.text(ALPHABET, max_size=20), st.characters(exclude_characters=ALPHABET), st.text(ALPHABET, max_size=20))
    def test_one_bad_character(self, before: str, bad: str, after: str) -> None:
        """One other character anywhere spoils a name."""
        self.assertFalse(valid_name(before + bad + after))

    def test_edges(self) -> None:
        """Neither nothing, nor 64 characters, nor a newline at the end, nor a digit that is not ASCII."""
        self.assertEqual(NAME_MAX, 63)
        for name in ("", "a" * 64, "a\n", "\na", "A", "a_b", "a.b", "../a", "a/b", "a b", "é", "٣"):
            self.assertFalse(valid_name(name), name)


class StateTests(SynchronousTestCase):
    """The six states of the contract."""

    def test_values(self) -> None:
        """Clients see these words, and the last four are final."""
        live, final = ["pending", "running"], ["done", "timed_out", "interrupted", "killed"]
        self.assertEqual([str(state) for state in State], live + final)
        self.assertEqual([state.value for state in State if state.final], final)


class SignalTests(SynchronousTestCase):
    """A signal has the name that signal(7) gives it."""

    def test_named(self) -> None:
        """Every signal that Python knows."""
        for known in signal.Signals:
            self.assertEqual(signal_name(known.value), known.name)

    def test_real_time(self) -> None:
        """Real-time signals without a name are counted from SIGRTMIN."""
        self.assertEqual(signal_name(signal.SIGRTMIN + 3), "SIGRTMIN+3")

    def test_exit(self) -> None:
        """Only an end by a signal has a signal's name."""
        self.assertEqual(Exit(signal=9).signal_name, "SIGKILL")
        self.assertIsNone(Exit(code=9).signal_name)
        self.assertIsNone(Exit().signal_name)


class TaskTests(SynchronousTestCase):
    """A task is a value."""

    def setUp(self) -> None:
        self.task = Task(
            "a", "true", 5.0, "mark", 7.0, State.RUNNING, Cause.KILL, leader=Identity(1, 2, "boot"), started_clock=3.0
        )

    def test_ended(self) -> None:
        """Its end is added, and nothing else changes."""
        end = End(State.KILLED, Exit(0), Cause.KILL, "why")
        ended = self.task.ended(end, duration_secs=1.5, finished_at=9.0)
        self.assertEqual(
            {name: value for name, value in attrs.asdict(ended).items() if value != attrs.asdict(self.task)[name]},
            {
                "state": State.KILLED,
                "exit": {"code": 0, "signal": None},
                "cause": Cause.KILL,
                "detail": "why",
                "duration_secs": 1.5,
                "finished_at": 9.0,
            },
        )

    def test_frozen(self) -> None:
        """Nobody changes a task in place."""
        with self.assertRaises(attrs.exceptions.FrozenInstanceError):
            self.task.state = State.DONE  # type: ignore[misc]

    def test_could_not_start(self) -> None:
        """Only that cause says that there never was a process."""
        for cause in (None, *Cause):
            self.assertEqual(attrs.evolve(self.task, cause=cause).could_not_start, cause is Cause.COULD_NOT_START)
