"""Bytes of output → the last 4 KiB as a terminal would show them.

Rank 0: no I/O, no Twisted. The rules: what is cut off at the front never leaves half a character or half an
escape sequence behind; ``\\r`` and backspace overwrite; escape sequences and other controls are gone; the result
is never longer than asked once it is UTF-8.
"""

from __future__ import annotations

import re

# ECMA-48 control functions: CSI with parameter, intermediate and final bytes; the string sequences (OSC, DCS, SOS,
# PM, APC) up to ST or BEL; two-character and charset escapes. A sequence that the end of the text cuts counts too.
# A terminal swallows whatever follows a string sequence that is not ended; here lines of output are not given up for
# one: it ends with its line, and the one-byte forms, which misread text has, count only where they are ended there.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*(?:[@-~]|$)"
    r"|\x1b[\]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c|(?=[\x1b\n])|$)"
    r"|[\x90\x98\x9d-\x9f][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*(?:[0-~]|$)"
    r"|\x1b"
)
_ERASE_LINE = re.compile(r"(?:\x1b\[|\x9b)([0-2]?)K")
_CONTROL = re.compile(r"[\x01-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_NEEDS_CURSOR = re.compile(r"[\r\x08]")
_CURSOR_PARTS = re.compile(r"\r|\x08|\ufdd0[0-2]|[^\r\x08\ufdd0]+")
_ERASE_MARK = "\ufdd0"
"""Stands for an erase-line while the other sequences are removed: a noncharacter, so no text has it by right."""


def tail(data: bytes, limit: int, *, cut: bool = False) -> str:
    """The end of ``data`` as a terminal would show it: at most ``limit`` bytes of UTF-8.

    ``cut`` says that ``data`` itself is only the end of a longer output: then its first bytes may belong to a
    character, and its first line to a line, that began before.
    """
    if cut:
        newline = data.find(b"\n") + 1
        if newline and len(data) - newline >= limit:
            data = data[newline:]  # a whole line to begin with
        else:
            # What is before the first return was overwritten, or is the rest of an escape sequence.
            line = data[: newline or len(data)]
            data = data[line.find(b"\r") + 1 or _continuation(data) :]
    text = data.decode("utf-8", "replace")
    if not text.isprintable():
        text = _shown(text)
    return clip_start(text, limit)


def _continuation(data: bytes) -> int:
    """How many bytes at the front of ``data`` can only be the rest of a character."""
    count = 0
    while count < min(3, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count


def clip_start(text: str, limit: int) -> str:
    """The end of ``text`` that fits into ``limit`` bytes of UTF-8, cut at a character."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit:
        return text
    encoded = encoded[len(encoded) - limit :]
    return encoded[_continuation(encoded) :].decode("utf-8")


def _shown(text: str) -> str:
    text = text.replace("\x00", "\N{REPLACEMENT CHARACTER}").replace(_ERASE_MARK, "\N{REPLACEMENT CHARACTER}")
    if "\x1b" in text or "\x9b" in text or _CONTROL.search(text):
        text = _ERASE_LINE.sub(lambda match: _ERASE_MARK + (match[1] or "0"), text)
        text = _CONTROL.sub("", _ESCAPE.sub("", text))
    if _NEEDS_CURSOR.search(text) or _ERASE_MARK in text:
        text = "\n".join(_overwritten(line) for line in text.split("\n"))
    return text


def _overwritten(line: str) -> str:
    """One line after its carriage returns, backspaces and erasures, as it stands at the end."""
    if not _NEEDS_CURSOR.search(line) and _ERASE_MARK not in line:
        return line
    shown: list[str] = []
    base = 0  # the column of shown[0]: what is left of it is blank, and costs nothing
    column = 0
    for part in _CURSOR_PARTS.findall(line):
        if part == "\r":
            column = 0
        elif part == "\x08":
            column = max(0, column - 1)
        elif part[0] == _ERASE_MARK:
            if part[1] == "0":
                del shown[max(0, column - base) :]
            elif part[1] == "2" or column + 1 - base >= len(shown):
                shown.clear()
                base = column
            elif column + 1 > base:
                del shown[: column + 1 - base]
                base = column + 1
        else:
            if column < base:
                shown[:0] = " " * (base - column)
                base = column
            start = column - base
            shown.extend(" " * (start - len(shown)))
            shown[start : start + len(part)] = part
            column += len(part)
    text = " " * base + "".join(shown)
    return text.rstrip(" ") if _ERASE_MARK in line else text
