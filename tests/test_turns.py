"""The built-in harness: its ledger on a real file, and its turns on a clock and in-memory fakes."""

from __future__ import annotations

import json
import os

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from hivebash import limits
from hivebash.interfaces import ILedger, StoreError
from hivebash.ledger import Ledger
from hivebash.task import LooseEnd, State, Todo
from hivebash.turns import Turns
from tests.fakes import FakeMachine

RUNNING = Todo("a: running", "$ x", State.RUNNING)
DONE = Todo("a: done, exit code 0", "$ x", State.DONE)


class LedgerCase(SynchronousTestCase):
    """A ledger in a new file."""

    def setUp(self) -> None:
        self.path = f"{self.mktemp()}.sqlite"
        self.ledger = Ledger(self.path)
        self.ledger.open()
        self.addCleanup(lambda: self.ledger.close())  # noqa: PLW0108 - the one there is then

    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.path)
        self.ledger.open()


class LedgerTests(LedgerCase):
    """Todos on disk."""

    def test_interface(self) -> None:
        verifyObject(ILedger, self.ledger)

    def test_put(self) -> None:
        """A key has one todo, which keeps its id, and its time as long as its summary stays; it survives."""
        self.assertEqual(self.ledger.put("a", RUNNING, 5.0), (1, True))
        self.assertEqual(self.ledger.put("a", RUNNING, 6.0), (1, False))
        self.assertEqual(self.ledger.open_ends(), [LooseEnd(1, "a", RUNNING, 5.0)])
        self.assertEqual(self.ledger.put("a", DONE, 7.0), (1, False))
        self.assertEqual(self.ledger.put("b", RUNNING, 8.0), (2, True))
        self.reopen()
        self.assertEqual(self.ledger.open_ends(), [LooseEnd(1, "a", DONE, 7.0), LooseEnd(2, "b", RUNNING, 8.0)])

    def test_remove(self) -> None:
        """By key or by id; an id is never given again."""
        self.ledger.put("a", DONE, 0.0)
        self.ledger.put("b", DONE, 0.0)
        self.assertTrue(self.ledger.remove("b"))
        self.assertFalse(self.ledger.remove("b"))
        self.assertEqual(self.ledger.put("b", DONE, 0.0), (3, True))
        self.assertTrue(self.ledger.cancel(3))
        self.assertFalse(self.ledger.cancel(3))
        self.assertEqual([end.key for end in self.ledger.open_ends()], ["a"])

    def test_private(self) -> None:
        """Nobody else can read the file."""
        self.assertEqual(os.stat(self.path).st_mode & 0o777, 0o600)

    def test_newer_version(self) -> None:
        """A file of a newer daemon is left alone."""
        self.ledger._connection.execute("PRAGMA user_version = 99")
        self.assertIn("version is 99", str(self.assertRaises(StoreError, Ledger(self.path).open)))

    def test_turn_is_due(self) -> None:
        """A summary that changed to that of an end calls for a turn; nothing else does."""
        for todo, due in [
            (RUNNING, False),
            (DONE, True),
            (DONE, False),
            (Todo(DONE.summary, "other", State.DONE), False),
            (Todo("a: running again", "", State.RUNNING), False),
            (Todo("a: done, exit code 1", "", State.DONE), True),
        ]:
            self.ledger.put("a", todo, 0.0)
            self.assertEqual(self.ledger.turn_due(), due, todo)
            self.ledger.begin_turn()
            self.ledger.end_turn()
            self.assertFalse(self.ledger.turn_due())

    def test_change_during_a_turn(self) -> None:
        """What changes while a turn runs calls for another."""
        self.ledger.put("a", DONE, 0.0)
        self.ledger.begin_turn()
        self.ledger.put("b", DONE, 0.0)
        self.ledger.end_turn()
        self.assertTrue(self.ledger.turn_due())

    def test_cut_off(self) -> None:
        """A turn that never ends, because the daemon does, is begun again a few times."""
        self.ledger.put("a", DONE, 0.0)
        for _ in range(limits.TURN_TRIES):
            self.assertTrue(self.ledger.turn_due())
            self.ledger.begin_turn()
            self.reopen()
        self.assertFalse(self.ledger.turn_due())


class TurnsTests(LedgerCase):
    """One at a time, with all that is open."""

    def setUp(self) -> None:
        super().setUp()
        self.clock, self.machine = Clock(), FakeMachine()
        self.turns = self.new_turns()
        self.turns.start()

    def new_turns(self) -> Turns:
        tokens = iter("0123456789")
        return Turns(
            clock=self.clock,
            fresh_token=lambda: next(tokens),
            processes=self.machine,
            reach=self.machine,
            ledger=self.ledger,
            command="turn",
            series="turn-feed-",
            grace=5.0,
        )

    def change(self, key: str = "a", summary: str = "done") -> None:
        self.ledger.put(key, Todo(summary, "", State.DONE), 0.0)
        self.turns.look()

    def advance(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / 0.125))):
            self.clock.advance(min(seconds, 0.125))
            self.machine.bury()

    def test_turn(self) -> None:
        """The command gets all open loose ends as JSON on its standard input."""
        self.ledger.put("r", RUNNING, 0.0)
        self.change()
        self.assertEqual(self.machine.processes, [])
        self.advance(limits.TURN_PAUSE)
        (turn,) = self.machine.processes
        self.assertEqual(turn.words, ("-c", "--", "turn"))
        self.assertTrue(turn.mark.startswith("turn-feed-"))
        told = json.loads(turn.stdin)
        self.assertEqual(
            [(end["kind"], end["key"], end["state"]) for end in told], [("todo", "r", "running"), ("todo", "a", "done")]
        )
        self.machine.exit(turn)
        self.assertTrue(turn.released)
        self.advance(60)
        self.assertEqual(len(self.machine.processes), 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_together(self) -> None:
        """What changes at about the same time is one turn; what changes meanwhile is the next, all of it."""
        for key in "abc":
            self.change(key)
        self.advance(limits.TURN_PAUSE)
        for key in "def":
            self.change(key)
            self.advance(1)
        self.assertEqual(len(self.machine.processes), 1)
        self.machine.exit(self.machine.processes[0])
        self.advance(limits.TURN_PAUSE)
        self.assertEqual([len(json.loads(turn.stdin)) for turn in self.machine.processes], [3, 6])

    def test_dealt_with(self) -> None:
        """If nothing is open any more there is nothing to run for."""
        self.change()
        self.ledger.remove("a")
        self.advance(1)
        self.assertEqual(self.machine.processes, [])
        self.assertFalse(self.ledger.turn_due())

    def test_failing(self) -> None:
        """A command that fails is not run again, until something changes."""
        self.change()
        self.advance(1)
        self.machine.exit(self.machine.processes[0], 1)
        self.advance(3600)
        self.assertEqual(len(self.machine.processes), 1)
        self.change(summary="done again")
        self.advance(1)
        self.assertEqual(len(self.machine.processes), 2)

    def test_cannot_start(self) -> None:
        """Neither is one that cannot be started."""
        self.machine.trouble = "no process slot"
        self.change()
        self.advance(60)
        self.machine.trouble = None
        self.assertFalse(self.ledger.turn_due())
        self.change(summary="done again")
        self.advance(1)
        self.assertEqual(len(self.machine.processes), 1)

    def test_hanging(self) -> None:
        """One that hangs is ended with all its processes, also those that ignore SIGTERM; then the next may run."""
        self.change()
        self.advance(limits.TURN_PAUSE)
        (turn,) = self.machine.processes
        turn.stubborn = True
        self.machine.fork(turn)
        self.change("b")
        self.clock.advance(limits.TURN_LIMIT - 1)
        self.assertTrue(turn.alive)
        self.advance(1.5)
        self.assertEqual(turn.signals[0], 15)
        self.assertTrue(turn.alive)
        self.advance(7)
        self.assertEqual((turn.alive, turn.children, turn.released), (False, set(), True))
        self.assertEqual(len(self.machine.processes), 2)

    def test_leftover(self) -> None:
        """What an earlier daemon's turn left is ended before the next one begins."""
        self.change()
        self.clock = Clock()
        mark = "turn-feed-old"
        self.machine.foreign[mark] = {self.machine.new_identity()}
        self.turns = self.new_turns()
        self.turns.start()
        self.advance(4)
        self.assertEqual(self.machine.processes, [])
        self.advance(3)
        self.assertEqual(self.machine.foreign[mark], set())
        self.assertEqual(len(self.machine.processes), 1)

    def test_stop(self) -> None:
        """A daemon that stops ends the turn, and the next one begins it again."""
        self.change()
        self.advance(1)
        stopping = Deferred.fromCoroutine(self.turns.stop())
        self.assertNoResult(stopping)
        self.advance(1)
        self.successResultOf(stopping)
        self.assertFalse(self.machine.processes[0].alive)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.turns = self.new_turns()
        self.turns.start()
        self.advance(1)
        self.assertEqual(len(self.machine.processes), 2)

    def test_stop_before_it_begins(self) -> None:
        """Nothing is begun by a daemon that stops."""
        self.change()
        self.successResultOf(Deferred.fromCoroutine(self.turns.stop()))
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.change("b")
        self.advance(1)
        self.assertEqual(self.machine.processes, [])
