"""What a client sent → a request, or one sentence of refusal.

Rank 1: no I/O, no Twisted. Clients are language models: a number may come as a numeric string, an optional argument
as null, and nearly anything by mistake; the sentence names the argument and what it takes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping

import attrs

from hivebash import limits
from hivebash.task import NAME_MAX, State, Todo, valid_name

Arguments = Mapping[str, object]

RUN_ARGUMENTS = ("cmd", "timeout_secs", "wait_seconds", "name")
STATUS_ARGUMENTS = ("id", "wait_seconds")
KILL_ARGUMENTS = ("id", "force")
CANCEL_ARGUMENTS = ("kind", "id")

_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_SHOWN = 60
_ID_MOST = 2**53
"""Whole numbers up to it are exact in every JSON reader."""

NAME_PATTERN = f"^[a-z0-9-]{{1,{NAME_MAX}}}$"
"""For a JSON schema."""


class Refusal(Exception):  # noqa: N818 - a refusal is an answer
    """Raised if a request cannot be carried out. Its text is one sentence that the agent can act on."""


@attrs.frozen
class Wait:
    """How long an answer may wait for a task's end."""

    seconds: float
    """At most ``limits.WAIT_MAX``."""
    capped: bool = False
    """Whether more was asked for."""


@attrs.frozen
class Run:
    """Start ``cmd``; the answer waits for its end."""

    cmd: str
    timeout_secs: float | None = None
    wait: Wait = Wait(limits.WAIT_DEFAULT)
    name: str | None = None


@attrs.frozen
class Status:
    """Tell about one task, or with no ``id`` about all there are."""

    id: str | None = None
    wait: Wait = Wait(0.0)


@attrs.frozen
class Kill:
    """End a task: politely, or with force."""

    id: str
    force: bool = False


_LONE_SURROGATE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


def without_lone_surrogates(body: bytes) -> bytes:
    """A JSON text with NUL for each escape of half a character.

    Some JSON readers refuse such a text as a whole; so it is read, and the argument is refused by its name.
    """
    if b"\\ud" not in body and b"\\uD" not in body:
        return body
    return _LONE_SURROGATE.sub(lambda match: b"\\u0000" if match[1] else match[0], body)


def parse_run(arguments: Arguments) -> Run:
    """The request in the arguments of the run tool.

    Raises Refusal: unknown argument; cmd missing, blank, or with what bash cannot be given; a bad number or name.
    """
    _only("run", arguments, RUN_ARGUMENTS)
    return Run(
        cmd=_command(arguments.get("cmd")),
        timeout_secs=_seconds(arguments, "timeout_secs"),
        wait=_wait(arguments, limits.WAIT_DEFAULT),
        name=_name(arguments.get("name")),
    )


def parse_status(arguments: Arguments) -> Status:
    """The request in the arguments of the status tool. Raises Refusal: unknown argument, bad id or number."""
    _only("status", arguments, STATUS_ARGUMENTS)
    given = arguments.get("id")
    return Status(None if given is None else _id(given), _wait(arguments, 0.0))


def parse_kill(arguments: Arguments) -> Kill:
    """The request in the arguments of the kill tool. Raises Refusal: unknown argument, id missing, bad values."""
    _only("kill", arguments, KILL_ARGUMENTS)
    force = arguments.get("force")
    if force is not None and not isinstance(force, bool):
        raise Refusal(f"force takes true or false, not {_show(force)}.")
    return Kill(_id(arguments.get("id")), bool(force))


def parse_nothing(arguments: Arguments) -> None:
    """Raises Refusal: get_loose_ends takes nothing."""
    if arguments:
        raise Refusal(f"get_loose_ends takes no arguments, not {_show(next(iter(arguments)))}.")


def parse_cancel(arguments: Arguments) -> int:
    """The id in the arguments of the cancel_loose_end tool. Raises Refusal: unknown argument, bad kind or id."""
    _only("cancel_loose_end", arguments, CANCEL_ARGUMENTS)
    kind = arguments.get("kind")
    if kind != "todo":
        raise Refusal(f"kind takes 'todo', not {_show(kind)}." if kind is not None else "kind is missing: give 'todo'.")
    given = arguments.get("id")
    if given is None:
        raise Refusal("id is missing: give a loose end's id; get_loose_ends lists them.")
    number = _number(given)
    if number is None or not number.is_integer() or not 0 <= number <= _ID_MOST:
        raise Refusal(f"id takes a loose end's id as a whole number, not {_show(given)}.")
    return int(number)


def parse_todo(key: str, body: bytes) -> Todo:
    """What a program puts on the list: ``summary``, ``detail`` and ``state`` in a JSON object.

    Raises Refusal: a bad key, or a body that is something else.
    """
    if not valid_name(key):
        raise Refusal(f"The key {_show(key)} is not 1 to {NAME_MAX} of a-z, 0-9 and -.")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal("The body is no JSON text.") from None
    if not isinstance(value, dict):
        raise Refusal("The body is no JSON object.")
    for name in ("summary", "detail", "state"):
        text = value.get(name)
        if not isinstance(text, str) or len(text) > limits.TODO_TEXT or not _encodable(text):
            raise Refusal(f"{name} is not a string of at most {limits.TODO_TEXT} characters.")
    try:
        state = State(value["state"])
    except ValueError:
        raise Refusal(f"state is not one of {', '.join(State)}.") from None
    return Todo(value["summary"], value["detail"], state)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _only(tool: str, arguments: Arguments, known: Collection[str]) -> None:
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise Refusal(f"{tool} has no argument {_show(unknown[0])}; it takes {', '.join(known)}.")


def _command(value: object) -> str:
    if value is None:
        raise Refusal("cmd is missing: give the shell command as a string.")
    if not isinstance(value, str):
        raise Refusal(f"cmd takes the shell command as a string, not {_show(value)}.")
    if not value.strip():
        raise Refusal("cmd is blank: give a shell command.")
    if "\0" in value:
        raise Refusal("cmd has a NUL character or a lone surrogate (half a character), which bash cannot be given.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refusal("cmd has a lone surrogate (half a character), which bash cannot be given.") from None
    return value


def _id(value: object) -> str:
    if value is None:
        raise Refusal("id is missing: give a task's id; status without id lists them.")
    if not isinstance(value, str):
        raise Refusal(f"id takes a task's id as a string, not {_show(value)}.")
    if not valid_name(value):
        raise Refusal(f"id {_show(value)} cannot be a task's id: those are 1 to {NAME_MAX} of a-z, 0-9 and -.")
    return value


def _name(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not valid_name(value):
        raise Refusal(f"name takes 1 to {NAME_MAX} of a-z, 0-9 and -, not {_show(value)}.")
    return value


def _wait(arguments: Arguments, default: float) -> Wait:
    seconds = _seconds(arguments, "wait_seconds")
    if seconds is None:
        return Wait(default)
    return Wait(min(seconds, limits.WAIT_MAX), capped=seconds > limits.WAIT_MAX)


def _seconds(arguments: Arguments, name: str) -> float | None:
    value = arguments.get(name)
    if value is None:
        return None
    seconds = _number(value)
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        raise Refusal(f"{name} takes a number of seconds, 0 or more, not {_show(value)}.")
    return seconds


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value) else None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def _show(value: object) -> str:
    """The value as the client wrote it, near enough, short and in ASCII."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > _SHOWN:
        return "a number that large"
    shown = {True: "true", False: "false"}[value] if isinstance(value, bool) else ascii(value)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
