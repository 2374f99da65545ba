"""Arguments as clients send them: what is understood, and each refusal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from hivebash import limits
from hivebash.requests import (
    KILL_ARGUMENTS,
    NAME_PATTERN,
    RUN_ARGUMENTS,
    STATUS_ARGUMENTS,
    Kill,
    Refusal,
    Run,
    Status,
    Wait,
    parse_cancel,
    parse_kill,
    parse_run,
    parse_status,
    parse_todo,
    without_lone_surrogates,
)
from hivebash.task import State, Todo, valid_name

RULES = settings(deadline=None, derandomize=True, database=None, max_examples=200)
PARSERS: dict[str, tuple[Callable[[dict[str, Any]], object], tuple[str, ...], dict[str, Any]]] = {
    "run": (parse_run, RUN_ARGUMENTS, {"cmd": "true"}),
    "status": (parse_status, STATUS_ARGUMENTS, {}),
    "kill": (parse_kill, KILL_ARGUMENTS, {"id": "a"}),
}
"""Of each tool: its parser, its arguments, and the least that it takes."""
NUMBERS = [("run", "timeout_secs"), ("run", "wait_seconds"), ("status", "wait_seconds")]
SENTENCE = re.compile(r"[ -~]{1,250}[.]")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def parse(tool: str, **arguments: Any) -> Any:
    """The request of these arguments, and of the least that the tool takes besides."""
    parser, _, least = PARSERS[tool]
    return parser(least | arguments)


def number_of(tool: str, argument: str, value: object) -> Any:
    request = parse(tool, **{argument: value})
    return request.timeout_secs if argument == "timeout_secs" else request.wait.seconds


class RequestsCase(SynchronousTestCase):
    """What a refusal is."""

    def assert_refused(self, words: str, tool: str, **arguments: Any) -> str:
        """It is refused, in one short sentence of plain ASCII that begins with these words."""
        refusal = str(self.assertRaises(Refusal, parse, tool, **arguments))
        self.assertTrue(refusal.startswith(words), f"{refusal!r} does not start with {words!r}")
        self.assertRegex(refusal, rf"\A(?:{SENTENCE.pattern})\Z")
        return refusal


class AcceptedTests(RequestsCase):
    """What a tool understands."""

    def test_defaults(self) -> None:
        """Only the command is needed to run, only the id to kill, and nothing for status."""
        self.assertEqual(parse("run"), Run("true", None, Wait(3.0), None))
        self.assertEqual(parse("status"), Status(None, Wait(0.0)))
        self.assertEqual(parse("kill"), Kill("a", force=False))

    def test_all(self) -> None:
        """Each argument reaches its place."""
        run = parse("run", cmd="ls\n", timeout_secs=1.5, wait_seconds=2, name="b-1")
        self.assertEqual(run, Run("ls\n", 1.5, Wait(2.0), "b-1"))
        self.assertEqual(parse("status", id="b", wait_seconds="4"), Status("b", Wait(4.0)))
        self.assertEqual(parse("kill", id="b", force=True), Kill("b", force=True))

    def test_null(self) -> None:
        """An optional argument given as null is not given."""
        for tool, (parser, names, least) in PARSERS.items():
            self.assertEqual(parser(dict.fromkeys(names) | least), parse(tool))

    @RULES
    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.text(" \t\n"))
    def test_command(self, cmd: str, space: str) -> None:
        """A command is taken as it is, with its spaces."""
        self.assertEqual(parse("run", cmd=f"{space}x{cmd}{space}").cmd, f"{space}x{cmd}{space}")

    @RULES
    @given(st.floats(0, 1e300) | st.integers(0, 10**30), st.sampled_from(NUMBERS))
    def test_numbers(self, value: float, where: tuple[str, str]) -> None:
        """A number may have a fraction and may come as a numeric string; only a wait is cut, at 30."""
        expected = float(value) if where[1] == "timeout_secs" else min(float(value), 30.0)
        self.assertEqual(number_of(*where, value), expected)
        self.assertEqual(number_of(*where, str(value)), expected)

    def test_numeric_strings(self) -> None:
        """Every common way to write one."""
        for text, value in [("60", 60), ("0", 0), ("007", 7), ("2.5", 2.5), (".5", 0.5), ("5.", 5), ("1e1", 10)]:
            self.assertEqual(number_of("run", "timeout_secs", text), value)
        self.assertEqual(number_of("run", "timeout_secs", "25E-1"), 2.5)

    def test_cap(self) -> None:
        """More than 30 seconds of wait counts as 30, and it is known that more was asked for."""
        self.assertEqual(limits.WAIT_MAX, 30)
        for tool in ("run", "status"):
            for value, wait in [
                (0, Wait(0.0)),
                (30, Wait(30.0)),
                (30.001, Wait(30.0, True)),
                ("600", Wait(30.0, True)),
            ]:
                self.assertEqual(parse(tool, wait_seconds=value).wait, wait)

    @RULES
    @given(st.text("ab09-A_. \n", max_size=66))
    def test_names(self, name: str) -> None:
        """A name or id is taken exactly if it may be a task's, and the schema's pattern says the same."""
        good = valid_name(name)
        self.assertEqual(re.fullmatch(NAME_PATTERN, name) is not None, good)
        for tool, argument, attribute in [("run", "name", "name"), ("status", "id", "id"), ("kill", "id", "id")]:
            if good:
                self.assertEqual(getattr(parse(tool, **{argument: name}), attribute), name)
            else:
                self.assert_refused(argument, tool, **{argument: name})


class RefusedTests(RequestsCase):
    """Every refusal names the argument and what it takes."""

    def test_blank(self) -> None:
        """There must be a command."""
        for cmd in ("", " ", "\n\t ", "\r\n"):
            self.assert_refused("cmd is blank", "run", cmd=cmd)
        self.assert_refused("cmd is missing", "run", cmd=None)
        self.assertIn("cmd is missing", str(self.assertRaises(Refusal, parse_run, {})))

    def test_impossible_command(self) -> None:
        """What bash cannot be given is refused by name, wherever in the command it is."""
        for cmd in ("\0", "echo a\0b", "\0echo"):
            self.assertIn("NUL", self.assert_refused("cmd has ", "run", cmd=cmd))
        for cmd in ("\ud800", "echo \udc80", "\udfffx", "\ude00\ud83d"):
            self.assertIn("lone surrogate", self.assert_refused("cmd has ", "run", cmd=cmd))

    def test_missing_id(self) -> None:
        """There must be something to kill."""
        self.assert_refused("id is missing", "kill", id=None)
        self.assertIn("id is missing", str(self.assertRaises(Refusal, parse_kill, {})))

    def test_unknown(self) -> None:
        """An unknown argument is named, and so are the known ones; even if it is null or another tool's."""
        for tool, (_, names, _) in PARSERS.items():
            for unknown in ("timeout", "Cmd", "", "é\n", "x" * 500, "\ud800", *({"cmd", "id", "force"} - set(names))):
                for value in (1, None):
                    refusal = self.assert_refused(f"{tool} has no argument ", tool, **{unknown: value})
                    self.assertIn(ascii(unknown)[:50], refusal)
                    self.assertTrue(refusal.endswith(f"it takes {', '.join(names)}."), refusal)

    def test_types(self) -> None:
        """A value of another type is refused and shown."""
        for value, shown in [(5, "5"), (True, "true"), (["a"], "['a']"), ({"a": 1}, "{'a': 1}"), (0.5, "0.5")]:
            for tool, argument in [("run", "cmd"), ("run", "name"), ("status", "id"), ("kill", "id")]:
                refusal = self.assert_refused(f"{argument} takes ", tool, **{argument: value})
                self.assertTrue(refusal.endswith(f"not {shown}."), refusal)
        for value in (0, 1, "", "true", "false", [], 1.0):
            refusal = self.assert_refused("force takes true or false, not ", "kill", force=value)
            self.assertIn(str(value), refusal)

    def test_names(self) -> None:
        """A bad name or id is refused with what a good one is made of."""
        for name in ("", "A", "a b", "a_b", "a/b", "..", "a\n", "é", "\ud800", "x" * 64):
            for tool, argument in [("run", "name"), ("status", "id"), ("kill", "id")]:
                refusal = self.assert_refused(f"{argument} ", tool, **{argument: name})
                self.assertIn("1 to 63 of a-z, 0-9 and -", refusal)

    def test_numbers(self) -> None:
        """What is not a number of seconds from 0 up is refused, in each argument that takes one."""
        negative = [-1, -0.001, "-1", "-0.5", -(10**5000)]
        endless = [math.inf, -math.inf, math.nan, "inf", "Infinity", "nan", "1e999", 10**400, 10**5000]
        text = [
            "",
            " ",
            "soon",
            "5s",
            "1,5",
            "1_0",
            "0x10",
            "+5",
            " 5",
            "5\n",
            "٣",
            ".",
            "1e",
            "5\0",
            "\ud800",
            "9" * 400,
        ]
        for value in [*negative, *endless, *text, True, False, [], [5], {}]:
            for tool, argument in NUMBERS:
                self.assert_refused(f"{argument} takes a number of seconds, 0 or more, not ", tool, **{argument: value})

    def test_shown_value(self) -> None:
        """The value is shown as the client wrote it, but not all of a long one."""
        for value, shown in [
            (-1, "-1"),
            ("soon", "'soon'"),
            (True, "true"),
            ("", "''"),
            ("x" * 99, "'" + "x" * 56 + "..."),
        ]:
            refusal = self.assert_refused("timeout_secs", "run", timeout_secs=value)
            self.assertTrue(refusal.endswith(f"not {shown}."), refusal)

    @RULES
    @given(st.sampled_from(list(PARSERS)), st.data())
    def test_anything(self, tool: str, data: st.DataObject) -> None:
        """Whatever JSON comes, there is a request with proper values or one sentence."""
        parser, names, least = PARSERS[tool]
        known = st.fixed_dictionaries({}, optional=dict.fromkeys(names, JSON))
        arguments = least | data.draw(known | st.dictionaries(st.text(st.characters()), JSON, max_size=2))
        try:
            request: Any = parser(arguments)
        except Refusal as refusal:
            self.assertRegex(str(refusal), rf"\A(?:{SENTENCE.pattern})\Z")
        else:
            self.assertTrue(0 <= getattr(request, "wait", Wait(0)).seconds <= 30)
            self.assertTrue(0 <= (getattr(request, "timeout_secs", None) or 0) < math.inf)


class HarnessTests(SynchronousTestCase):
    """What comes to the built-in harness."""

    def test_cancel(self) -> None:
        """A kind and a whole number, which may come as text."""
        for given_id in (7, "7", 7.0, "7.0"):
            self.assertEqual(parse_cancel({"kind": "todo", "id": given_id}), 7)

    @RULES
    @given(st.dictionaries(st.sampled_from(["kind", "id"]) | st.text(max_size=3), JSON | st.just("todo")))
    def test_any_cancel(self, arguments: dict[str, Any]) -> None:
        """Whatever comes, there is an id or one sentence."""
        try:
            number = parse_cancel(arguments)
        except Refusal as refusal:
            self.assertRegex(str(refusal), rf"\A(?:{SENTENCE.pattern})\Z")
        else:
            self.assertGreaterEqual(number, 0)

    @RULES
    @given(st.dictionaries(st.sampled_from(["summary", "detail", "state"]), JSON) | JSON)
    def test_any_todo(self, value: Any) -> None:
        """Whatever comes, there is a todo or one sentence."""
        body = json.dumps(value).encode()
        try:
            todo = parse_todo("a", body)
        except Refusal:
            pass
        else:
            self.assertEqual(
                (todo.summary, todo.detail, todo.state), (value["summary"], value["detail"], value["state"])
            )

    def test_todo(self) -> None:
        """A todo is three strings of a bounded length; more fields are passed over."""
        most = "é" * limits.TODO_TEXT
        value = {"summary": most, "detail": "d", "state": "timed_out", "more": 1}
        self.assertEqual(parse_todo("a", json.dumps(value).encode()), Todo(most, "d", State.TIMED_OUT))
        value["summary"] += "x"
        self.assertIn("summary", str(self.assertRaises(Refusal, parse_todo, "a", json.dumps(value).encode())))


class SurrogateTests(SynchronousTestCase):
    """Half a character in a JSON text does not spoil the text."""

    @RULES
    @given(st.text(st.sampled_from('a"\\u/é\n\ud83d\udbff\ude00\udc00😀'), max_size=12))
    def test_any_text(self, text: str) -> None:
        """Each lone half becomes a NUL; pairs, backslashes and the rest stay as they are."""
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        expected = "".join("\0" if "\ud800" <= one <= "\udfff" else one for one in whole)
        read = without_lone_surrogates(json.dumps({text: [text]}).encode())
        self.assertEqual(json.loads(read), {expected: [expected]})

    def test_upper_case(self) -> None:
        """Hexadecimal digits may be of either case."""
        for half in (b"\\uD83D", b"\\uDE00", b"\\udE00"):
            self.assertEqual(without_lone_surrogates(b'"%b"' % half), b'"\\u0000"')
        self.assertEqual(without_lone_surrogates(b'"\\uD83d\\uDe00"'), b'"\\uD83d\\uDe00"')
        self.assertEqual(without_lone_surrogates(b'"\\uDBFF\\uDC00"'), b'"\\uDBFF\\uDC00"')

    def test_untouched(self) -> None:
        """A text without such an escape is the same bytes, also if it is no JSON."""
        for body in (b"", b"\xff\\", b'{"a": "\\\\ud800"}', b'"\\ud83d\\ude00"', b'"\\u00e9"'):
            self.assertEqual(without_lone_surrogates(body), body)

    def test_then_refused(self) -> None:
        """A command with half a character is refused by name."""
        cmd = json.loads(without_lone_surrogates(b'"echo \\ud800"'))
        self.assertIn("lone surrogate", str(self.assertRaises(Refusal, parse_run, {"cmd": cmd})))
