"""The sentences and objects of answers."""

from __future__ import annotations

import json
import re
from typing import Any

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from hivebash import limits, wording
from hivebash.task import (
    Cause,
    Exit,
    Identity,
    KillReport,
    LooseEnd,
    Sent,
    Snapshot,
    State,
    Stream,
    Task,
    Todo,
)

RULES = settings(deadline=None, derandomize=True, database=None, max_examples=200)
FIELDS = {
    "id": str,
    "status": str,
    "exit_code": int | None,
    "signal": str | None,
    "reason": str | None,
    "duration_secs": float | int,
    "stdout_tail": str,
    "stderr_tail": str,
    "stdout_path": str,
    "stderr_path": str,
    "stdout_bytes": int,
    "stderr_bytes": int,
    "processes": int,
    "cmd": str,
}
EXITS = [Exit(), Exit(0), Exit(3), Exit(signal=9)]
SNAPSHOTS = st.builds(
    Snapshot,
    st.builds(
        Task,
        id=st.just("a"),
        cmd=st.text(min_size=1),
        submitted_at=st.just(0.0),
        timeout_secs=st.none() | st.floats(0, 1e300),
        state=st.sampled_from(State),
        leader=st.sampled_from([None, Identity(1, 2, "boot")]),
        exit=st.sampled_from(EXITS),
        cause=st.none() | st.sampled_from(Cause),
        detail=st.text(),
    ),
    duration_secs=st.floats(0, 1e9),
    processes=st.integers(0, 5),
    stdout=st.builds(Stream, path=st.just("/s/a.out"), size=st.integers(0, 10**9), tail=st.text()),
    stderr=st.builds(Stream, path=st.just("/s/a.err"), size=st.integers(0, 10**9), tail=st.text()),
)


def snapshot(
    out: str | None = "", err: str | None = "", *, duration: float = 1.5, processes: int = 0, **task: Any
) -> Snapshot:
    """A task of id ``a`` that is done with 0, as far as not told otherwise."""
    fields: dict[str, Any] = {
        "leader": Identity(1, 2, "boot"),
        "state": State.DONE,
        "exit": Exit(0),
        "cmd": "true",
    } | task
    streams = [Stream(f"/s/a.{name}", len(text or ""), text) for name, text in (("out", out), ("err", err))]
    return Snapshot(Task("a", submitted_at=0.0, **fields), duration, processes, *streams)


def running(**more: Any) -> Snapshot:
    fields: dict[str, Any] = {"state": State.RUNNING, "exit": Exit(), "processes": 1} | more
    return snapshot(**fields)


def pending(**more: Any) -> Snapshot:
    return running(state=State.PENDING, leader=None, processes=0, **more)


def could_not_start() -> Snapshot:
    return snapshot(exit=Exit(), cause=Cause.COULD_NOT_START, leader=None, detail="too long", duration=0)


class ToolTests(SynchronousTestCase):
    """What the agent pays for in every turn is short and says what it must."""

    def words(self, text: str) -> int:
        return len(text.split())

    def test_short(self) -> None:
        """Instructions have 80 words at most, a tool 40, an argument 25."""
        self.assertLessEqual(self.words(wording.INSTRUCTIONS), 80)
        for tool in ("RUN", "STATUS", "KILL"):
            self.assertTrue(0 < self.words(getattr(wording, tool)) <= 40, tool)
            for name in vars(wording):
                if name.startswith(f"{tool}_"):
                    self.assertTrue(0 < self.words(getattr(wording, name)) <= 25, name)

    def test_true(self) -> None:
        """The numbers in them are those of the daemon."""
        for text in (wording.RUN_WAIT, wording.STATUS_WAIT):
            self.assertIn(f"at most {wording.number(limits.WAIT_MAX)}.", text)
        self.assertIn(f"Default {wording.number(limits.WAIT_DEFAULT)}.", wording.RUN_WAIT)
        for text in (wording.INSTRUCTIONS, wording.STATUS):
            self.assertIn(f"{limits.TAIL_BYTES // limits.KIB} KiB", text)
        for signal in ("SIGINT", "SIGKILL"):
            self.assertIn(signal, wording.KILL_FORCE)


class NumberTests(SynchronousTestCase):
    """Seconds are written as a person writes them."""

    def test_examples(self) -> None:
        """No needless zeros."""
        for value, text in [(5, "5"), (0.25, "0.25"), (0.0, "0"), (100.0, "100"), (2.5, "2.5"), (99.999, "100")]:
            self.assertEqual(wording.number(value), text)

    @RULES
    @given(st.floats(0, 1e308))
    def test_short_and_near(self, value: float) -> None:
        """At most 18 characters, and within half a hundredth, or a few digits for what no clock counts."""
        text = wording.number(value)
        self.assertLessEqual(len(text), 18)
        self.assertLessEqual(abs(float(text) - value), max(0.00501, value * 1e-5 if value >= 1e15 else 0))


class ReasonTests(SynchronousTestCase):
    """Why the daemon ended a task, in words."""

    def test_each(self) -> None:
        """Every cause has its words, and a task that ended by itself has none."""
        for cause, reason in [
            (None, None),
            (Cause.KILL, "kill"),
            (Cause.TIME_LIMIT, "time limit of 2.5 s"),
            (Cause.DAEMON_STOPPED, "daemon stopped"),
            (Cause.DAEMON_DIED, "daemon died"),
            (Cause.COULD_NOT_START, "could not start: no bash"),
        ]:
            task = snapshot(cause=cause, timeout_secs=2.5, detail="no bash").task
            self.assertEqual(wording.reason(task), reason)
        self.assertEqual(wording.reason(snapshot(cause=Cause.KILL, leader=None).task), "kill, before it started")


class StatusObjectTests(SynchronousTestCase):
    """The status object is the contract's."""

    @RULES
    @given(SNAPSHOTS)
    def test_fields(self, shot: Snapshot) -> None:
        """Exactly its fields, in its order, of its types, for any task; and it is JSON."""
        status = wording.status_object(shot)
        self.assertEqual(list(status), list(FIELDS))
        for name, value in status.items():
            self.assertIsInstance(value, FIELDS[name], name)
        self.assertEqual(json.loads(json.dumps(status)), status)

    def test_values(self) -> None:
        """Each is what it says."""
        self.assertEqual(
            wording.status_object(snapshot("out", "er", exit=Exit(7), duration=1.23456, processes=2, cmd="x")),
            {
                "id": "a",
                "status": "done",
                "exit_code": 7,
                "signal": None,
                "reason": None,
                "duration_secs": 1.235,
                "stdout_tail": "out",
                "stderr_tail": "er",
                "stdout_path": "/s/a.out",
                "stderr_path": "/s/a.err",
                "stdout_bytes": 3,
                "stderr_bytes": 2,
                "processes": 2,
                "cmd": "x",
            },
        )

    def test_end(self) -> None:
        """An exit code or a signal, and the reason, as the end was."""
        ends: list[tuple[dict[str, Any], object]] = [
            ({}, (0, None, None)),
            ({"exit": Exit(signal=15), "cause": Cause.DAEMON_STOPPED}, (None, "SIGTERM", "daemon stopped")),
            ({"exit": Exit(0), "cause": Cause.KILL}, (0, None, "kill")),
            ({"exit": Exit(), "cause": Cause.COULD_NOT_START, "detail": "no"}, (None, None, "could not start: no")),
        ]
        for more, expected in ends:
            status = wording.status_object(snapshot(**more))
            self.assertEqual((status["exit_code"], status["signal"], status["reason"]), expected)

    def test_without_tails(self) -> None:
        """In the table there are none."""
        status = wording.status_object(snapshot(None, None))
        self.assertEqual(list(status), [name for name in FIELDS if not name.endswith("_tail")])

    def test_command(self) -> None:
        """It is cut at 200 characters, and the cut is seen."""
        self.assertEqual(wording.shown_command("x" * 200), "x" * 200)
        for cmd in ("x" * 201, "é" * 5000):
            self.assertEqual(wording.shown_command(cmd), cmd[:199] + "…")
        self.assertEqual(wording.status_object(snapshot(cmd="x" * 300))["cmd"], "x" * 199 + "…")


class StatusTextTests(SynchronousTestCase):
    """One task for the model."""

    def first(self, shot: Snapshot) -> str:
        return wording.status_text(shot).split("\n")[0]

    def test_headline(self) -> None:
        """A line with all that is known of the end."""
        for shot, line in [
            (snapshot(), "a: done, exit code 0, 1.5 s"),
            (snapshot(exit=Exit(signal=11)), "a: done, ended by SIGSEGV, 1.5 s"),
            (snapshot(state=State.KILLED, cause=Cause.KILL), "a: killed (kill), exit code 0, 1.5 s"),
            (snapshot(processes=1), "a: done, exit code 0, 1.5 s, 1 process left running"),
            (
                snapshot(state=State.TIMED_OUT, cause=Cause.TIME_LIMIT, timeout_secs=1.0, processes=2),
                "a: timed_out (time limit of 1 s), exit code 0, 1.5 s, 2 processes being ended",
            ),
            (running(), "a: running, 1.5 s"),
            (running(processes=3), "a: running, 1.5 s, 3 processes"),
            (pending(), "a: pending"),
            (could_not_start(), "a: done (could not start: too long)"),
        ]:
            self.assertEqual(self.first(shot), line)

    def test_output(self) -> None:
        """Each stream that has bytes, under its name."""
        text = wording.status_text(snapshot("one\ntwo\n", "three"))
        self.assertEqual(text.split("\n")[1:], ["stdout:", "one", "two", "stderr:", "three"])
        self.assertEqual(wording.status_text(snapshot("", "x\n\n")).split("\n")[1:], ["stderr:", "x", ""])

    def test_no_output(self) -> None:
        """It is said that there is none; but not of a task that never ran, nor for good of one that may still write."""
        self.assertEqual(wording.status_text(snapshot()).split("\n")[1:], ["no output"])
        for shot in (pending(), could_not_start()):
            self.assertNotIn("\n", wording.status_text(shot))
        for shot in (running(), snapshot(processes=1)):
            self.assertRegex(wording.status_text(shot), r"\n.*output so far\Z")

    def test_long_output(self) -> None:
        """If there is more than is shown, it is said how much and where."""
        for size, extent in [(4096, ""), (4097, " (the end of 4097 bytes in /s/a.out)")]:
            shot = attrs.evolve(snapshot(), stdout=Stream("/s/a.out", size, "end\n"))
            self.assertEqual(wording.status_text(shot).split("\n")[1:], [f"stdout{extent}:", "end"])

    def test_capped(self) -> None:
        """Who asked for a longer wait than there is hears of it, before the output."""
        said = "wait_seconds counts as 30 at most."
        self.assertEqual(wording.status_text(snapshot("x"), capped=True).split("\n")[1:], [said, "stdout:", "x"])
        self.assertEqual(wording.started_text(running(), 30, capped=True).split("\n")[-1], said)
        for text in (wording.status_text(snapshot("x")), wording.started_text(running(), 30)):
            self.assertNotIn(said, text)


class StartedTextTests(SynchronousTestCase):
    """The answer of run while its task goes on."""

    def test_begins_with_the_id(self) -> None:
        """The first words are fixed."""
        for shot in (running(), pending(), running(out="x")):
            for waited in (0, 3):
                self.assertEqual(wording.started_text(shot, waited).split("\n")[0], "task started: id=a")

    def test_rest(self) -> None:
        """Then how long was waited, or that it waits for a slot, and the output there is."""
        for shot, waited, lines in [
            (running(), 0, ["A todo will tell its end."]),
            (running(), 0.5, ["Still running after 0.5 s.", "A todo will tell its end."]),
            (running(out="x\n"), 3.0, ["Still running after 3 s.", "A todo will tell its end.", "stdout:", "x"]),
            (running(err="x\n"), 0, ["A todo will tell its end.", "stderr:", "x"]),
        ]:
            self.assertEqual(wording.started_text(shot, waited).split("\n")[1:], lines)
        self.assertRegex(
            wording.started_text(pending(), 3), r"\A.*\n.*waits for a free slot.*\nA todo will tell its end\.\Z"
        )


class TodoTests(SynchronousTestCase):
    """What the harness is told."""

    def test_running(self) -> None:
        """A task that goes on is running, also while it waits for a slot."""
        for shot in (running(cmd="make\n  all"), pending(cmd="make\n  all")):
            self.assertEqual(wording.todo(shot), Todo("a: running", "$ make all", State.RUNNING))

    def test_ends(self) -> None:
        """The summary has the id, the state and how it ended; the detail where the output is, both if both have any."""
        out, err = "Read(/s/a.out)", "Read(/s/a.err)"
        for shot, summary, rest in [
            (snapshot("x"), "a: done, exit code 0", [out]),
            (snapshot("", "x", exit=Exit(3)), "a: done, exit code 3", [err]),
            (snapshot("x", "y", exit=Exit(signal=11)), "a: done, ended by SIGSEGV", [out, err]),
            (snapshot(), "a: done, exit code 0", [f"{out} (empty)"]),
            (
                snapshot("x", state=State.KILLED, exit=Exit(signal=9), cause=Cause.KILL),
                "a: killed (kill), ended by SIGKILL",
                [out],
            ),
            (
                snapshot("x", state=State.TIMED_OUT, exit=Exit(signal=15), cause=Cause.TIME_LIMIT, timeout_secs=2),
                "a: timed_out (time limit of 2 s), ended by SIGTERM",
                [out],
            ),
            (
                snapshot("x", state=State.INTERRUPTED, exit=Exit(), cause=Cause.DAEMON_DIED),
                "a: interrupted (daemon died)",
                [out],
            ),
            (could_not_start(), "a: done (could not start: too long)", []),
        ]:
            todo = wording.todo(shot)
            self.assertEqual((todo.summary, todo.state), (summary, shot.task.state))
            self.assertEqual(todo.detail.split("\n"), ["$ true", *rest])


class LooseEndTests(SynchronousTestCase):
    """What the agent sees of its loose ends."""

    def test_object(self) -> None:
        """All fields, with the time as ISO 8601."""
        end = LooseEnd(7, "a", Todo("a: done", "d", State.DONE), 86_400.0)
        self.assertEqual(
            wording.loose_end_object(end),
            {
                "id": 7,
                "kind": "todo",
                "key": "a",
                "summary": "a: done",
                "detail": "d",
                "state": "done",
                "since": "1970-01-02T00:00:00+00:00",
            },
        )

    def test_text(self) -> None:
        """Each with the kind and id that cancel it."""
        self.assertEqual(wording.loose_ends_text([]), "No loose ends.")
        end = LooseEnd(7, "a", Todo("a: done", "$ true", State.DONE), 0.0)
        self.assertEqual(wording.loose_ends_text([end]), "todo 7: a: done\n$ true")


class TableTests(SynchronousTestCase):
    """All there is, a line each."""

    def test_lines(self) -> None:
        """The headline and the command on one line, cut at 80 characters."""
        shots = [running(cmd="make\n  all"), snapshot(cmd="x" * 80), snapshot(cmd="x" * 81)]
        self.assertEqual(
            wording.table_text(shots, 0).split("\n"),
            [
                "a: running, 1.5 s: make all",
                "a: done, exit code 0, 1.5 s: " + "x" * 80,
                "a: done, exit code 0, 1.5 s: " + "x" * 79 + "…",
            ],
        )

    def test_empty(self) -> None:
        """Nothing is told as such."""
        self.assertEqual(wording.table_text([], 0), "No tasks.")

    def test_hidden(self) -> None:
        """What is left out is counted."""
        self.assertRegex(wording.table_text([running()], 7), r"\A.*\nand 7 more\b.*\Z")


class KillTests(SynchronousTestCase):
    """What a kill really did."""

    def test_texts(self) -> None:
        """What was signalled, to how many, and what follows."""
        children = " Children started with & ignore SIGINT; they are ended after their leader."
        follows = " SIGKILL follows after 2.5 s."
        for report, text in [
            (KillReport("a", State.KILLED, cancelled=True), "a: cancelled before it started."),
            (KillReport("a", State.RUNNING), "a: nothing to signal."),
            (KillReport("a", State.DONE), "a had already ended (done): nothing to signal."),
            (KillReport("a", State.RUNNING, Sent("SIGINT", 1)), "a: sent SIGINT to 1 process."),
            (KillReport("a", State.RUNNING, Sent("SIGINT", 2)), f"a: sent SIGINT to 2 processes.{children}"),
            (KillReport("a", State.RUNNING, Sent("SIGKILL", 2)), "a: sent SIGKILL to 2 processes."),
            (
                KillReport("a", State.DONE, Sent("SIGTERM", 1)),
                f"a had already ended (done): sent SIGTERM to 1 process that it left running.{follows}",
            ),
        ]:
            self.assertEqual(wording.kill_text(report, 2.5), text)

    def test_object(self) -> None:
        """The same for programs."""
        for report, told in [
            (KillReport("a", State.RUNNING, Sent("SIGINT", 2)), ("running", "SIGINT", 2)),
            (KillReport("a", State.KILLED, cancelled=True), ("killed", None, 0)),
        ]:
            expected = dict(zip(("id", "status", "signal", "processes"), ("a", *told), strict=True))
            self.assertEqual(wording.kill_object(report), expected)


class RefusalTests(SynchronousTestCase):
    """Each refusal is one sentence with what the agent needs to go on."""

    def test_words(self) -> None:
        """The name and the state, the id and how long tasks are kept, what failed."""
        for text, needed in [
            (wording.busy_name("web", State.RUNNING), ["'web'", "running", "another name"]),
            (wording.unknown_id("web", 1000, 7.0), ["'web'", "newest 1000", "7 days", "status"]),
            (wording.not_recorded("disk full"), ["not started", "disk full"]),
            (wording.internal_error("run"), ["run"]),
            (wording.STOPPING, ["stopping", "again"]),
        ]:
            for part in needed:
                self.assertIn(part, text)
            self.assertIsNotNone(re.fullmatch(r"[ -~]{1,250}\.", text), text)
