"""Tails against a naive terminal, and rule by rule."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from hivebash import limits
from hivebash.tail import clip_start, tail

RULES = settings(deadline=None, derandomize=True, database=None, max_examples=150)
ALL = 1 << 30
BAD = "\N{REPLACEMENT CHARACTER}"

Token = tuple[bytes, str]
"""A piece of output, and what a terminal does with it: shows it, or one of the words below, or nothing."""

TEXT = st.text("ab é€😀", min_size=1, max_size=6).map(lambda text: (text.encode(), text))
MOVES: list[Token] = [
    (b"\r", "home"),
    (b"\x08", "back"),
    (b"\n", "newline"),
    (b"\x1b[K", "erase right"),
    (b"\x1b[0K", "erase right"),
    (b"\x1b[2K", "erase all"),
    (b"\xc2\x9bK", "erase right"),
]
REPLACED: list[Token] = [(bad, BAD) for bad in (b"\0", b"\xff", b"\xe2\x82", b"\xc0", "\ufdd0".encode())]
UNSEEN: list[Token] = [
    (unseen, "")
    for unseen in (
        b"\x1b[1;31m",
        b"\x1b[m",
        b"\x1b[?25l",
        b"\x1b[2 q",
        b"\xc2\x9b32m",
        b"\x1b]0;a title\x07",
        b"\x1b]8;;http://x\x1b\\",
        b"\xc2\x9d0;a title\xc2\x9c",
        b"\x1bPq#0\x1b\\",
        b"\x1b_G\x1b\\",
        b"\x1b(B",
        b"\x1b=",
        b"\x1b7",
        b"\x07",
        b"\x0e",
        b"\x7f",
        b"\xc2\x85",
    )
]
TOKENS = st.lists(st.one_of(TEXT, st.sampled_from(MOVES), st.sampled_from(REPLACED + UNSEEN)), max_size=30)


def written(tokens: Sequence[Token]) -> bytes:
    return b"".join(data for data, _ in tokens)


def terminal(tokens: Sequence[Token]) -> str:
    """What a very wide terminal shows: for each line the cells by column, and one cursor."""
    lines: list[dict[int, str]] = [{}]
    column = 0
    for _, does in tokens:
        cells = lines[-1]
        if does == "newline":
            lines.append({})
            column = 0
        elif does == "home":
            column = 0
        elif does == "back":
            column = max(0, column - 1)
        elif does.startswith("erase"):
            lines[-1] = {at: cell for at, cell in cells.items() if does == "erase right" and at < column}
        else:
            for character in does:
                cells[column] = character
                column += 1
    return "\n".join("".join(cells.get(at, " ") for at in range(max(cells, default=-1) + 1)) for cells in lines)


def trimmed(text: str) -> str:
    """Without what nobody sees on a terminal: spaces at the ends of lines."""
    return "\n".join(line.rstrip(" ") for line in text.split("\n"))


def naive_clip(text: str, limit: int) -> str:
    while len(text.encode()) > limit:
        text = text[1:]
    return text


class TerminalTests(SynchronousTestCase):
    """Output is told as a terminal would show it."""

    @RULES
    @given(TOKENS)
    def test_against_a_terminal(self, tokens: list[Token]) -> None:
        """Overwriting, erasing, escape sequences, bad bytes and NUL, in any mixture."""
        self.assertEqual(trimmed(tail(written(tokens), ALL)), trimmed(terminal(tokens)))

    @RULES
    @given(st.text(st.characters(exclude_categories=["C"], include_characters="\n\t")))
    def test_plain(self, text: str) -> None:
        """Text without controls comes as it is, spaces, tabs and newlines too."""
        self.assertEqual(tail(text.encode(), ALL), text)

    def test_each_piece(self) -> None:
        """Each sequence is gone, each bad byte marked, and each move is made."""
        for token in MOVES + REPLACED + UNSEEN:
            for before in ([], MOVES[:1], MOVES[1:2] * 2, MOVES[1:2] * 4):
                tokens: list[Token] = [(b"abc", "abc"), *before, token]
                for after in ([], [(b"d", "d")], [(b"defg", "defg")]):
                    self.assertEqual(trimmed(tail(written(tokens + after), ALL)), trimmed(terminal(tokens + after)))

    def test_examples(self) -> None:
        """What well-known programs write."""
        for data, shown in [
            (b"", ""),
            (b"dos\r\nlines\r\n", "dos\nlines\n"),
            (b" 10%\r 50%\r100%\n", "100%\n"),
            (b" 10%\r100%", "100%"),
            (b"longer\rshort", "shortr"),
            (b"longer\r\x1b[Kshort", "short"),
            (b"\x1b[2K\rdone\n", "done\n"),
            (b"|\x08/\x08-\x08ok", "ok"),
            (b"\x08\x08a\n\x08b", "a\nb"),
            (b"\x1b[32mgreen\x1b[0m", "green"),
            (b"a\0b\xffc", f"a{BAD}b{BAD}c"),
            (b"\xed\xa0\x80", BAD * 3),
            (b"kept  \n\ttoo ", "kept  \n\ttoo "),
        ]:
            self.assertEqual(tail(data, ALL), shown, data)

    def test_unfinished_sequences(self) -> None:
        """A sequence that is still being written is not shown."""
        for end in (b"\x1b", b"\x1b[", b"\x1b[3", b"\x1b[38;5", b"\x1b(", b"\x1b]0;ti", b"\x1b]0;ti\x1b", b"\x1bPq"):
            self.assertEqual(tail(b"done" + end, ALL), "done", end)

    def test_unfinished_character(self) -> None:
        """Of a character that is still being written there is one mark."""
        self.assertEqual(tail("a€".encode()[:-1], ALL), "a" + BAD)


class LimitTests(SynchronousTestCase):
    """A tail is never longer than asked, and the end is what stays."""

    def test_four_kib(self) -> None:
        """An answer shows 4096 bytes of each stream."""
        self.assertEqual(limits.TAIL_BYTES, 4096)
        self.assertEqual(tail(b"x" * 5000, limits.TAIL_BYTES), "x" * 4096)
        self.assertEqual(tail(b"x" * 4096, limits.TAIL_BYTES), "x" * 4096)

    def test_after_encoding(self) -> None:
        """The limit counts bytes of the answer: a replaced byte is three."""
        self.assertEqual(tail(b"\xff" * 4096, limits.TAIL_BYTES), BAD * 1365)
        self.assertEqual(tail(b"\0" * 4096, limits.TAIL_BYTES), BAD * 1365)

    @RULES
    @given(TOKENS, st.integers(0, 60))
    def test_clipped_at_a_character(self, tokens: list[Token], limit: int) -> None:
        """What fits of the end, in whole characters, and no less."""
        data = written(tokens)
        self.assertEqual(tail(data, limit), naive_clip(tail(data, ALL), limit))

    @RULES
    @given(st.text(), st.integers(0, 40))
    def test_clip_start(self, text: str, limit: int) -> None:
        """As dropping characters one by one would do."""
        self.assertEqual(clip_start(text, limit), naive_clip(text, limit))

    @RULES
    @given(
        st.lists(st.one_of(st.binary(max_size=20), TOKENS.map(written))).map(b"".join),
        st.integers(0, 80),
        st.booleans(),
    )
    def test_any_bytes(self, data: bytes, limit: int, cut: bool) -> None:
        """Whatever is written: few enough bytes of UTF-8, and no control but newline and tab."""
        shown = tail(data, limit, cut=cut)
        self.assertLessEqual(len(shown.encode()), limit)
        controls = {character for character in shown if unicodedata.category(character) == "Cc"}
        self.assertLessEqual(controls, {"\n", "\t"})
        self.assertNotIn("\ufdd0", shown)


class CutTests(SynchronousTestCase):
    """A tail made from the end of a file is the tail of the file."""

    @RULES
    @given(st.text("aé€😀\n", min_size=1), st.integers(0, 40), st.integers(0, 40))
    def test_plain(self, text: str, limit: int, more: int) -> None:
        """No half character at the front, and none too few."""
        data = text.encode()
        window = limit + 3 + more  # three: the most that is left of a character
        end = data[-window:]
        self.assertEqual(tail(end, limit, cut=len(end) < len(data)), tail(data, limit))

    @RULES
    @given(TOKENS, st.integers(0, 40), TOKENS)
    def test_begins_at_a_line(self, line: list[Token], start: int, after: list[Token]) -> None:
        """Where enough follows its first newline, nothing of the line that was cut is seen."""
        rest = b"\n" + written(after)
        data = written([token for token in line if token[1] != "newline"])[start:] + rest
        self.assertEqual(tail(data, len(rest) - 1, cut=True), tail(rest[1:], len(rest) - 1))

    def test_one_long_line(self) -> None:
        """A line longer than the window is shown from its middle, at a character."""
        self.assertEqual(tail("é".encode()[1:] + b"abc", 10, cut=True), "abc")
        self.assertEqual(tail(b"abc\nde", 10, cut=True), "abc\nde")
        self.assertEqual(tail("€".encode()[1:] + "é".encode() * 8, 7, cut=True), "ééé")

    def test_continuation_bytes_of_a_whole_file(self) -> None:
        """Without a cut every bad byte is marked."""
        self.assertEqual(tail(b"\xa9\xa9ab", 10), BAD * 2 + "ab")


class WindowTests(SynchronousTestCase):
    """What a window that begins anywhere must not invent, and what a terminal would swallow."""

    def test_cut_in_a_progress_bar(self) -> None:
        """A window that begins inside a sequence of a progress bar shows the bar's last state, and nothing else."""
        bar = b"".join(b"\x1b[32m%3d%%\x1b[0m\r" % (number % 100) for number in range(9000)) + b"\n"
        self.assertEqual({tail(bar[start:], 4096, cut=True) for start in range(30000, 30040)}, {" 99%\n"})
        title = b"\x1b]0;tttttttt\x07ok\r" * 50
        self.assertEqual({tail(title[start:], 4096, cut=True) for start in range(40)}, {"ok"})

    def test_sequences_without_end(self) -> None:
        """A string sequence that is not ended costs at most its own line."""
        for opening in (b"\x1b]0;", b"\x1bX", b"\x1bP", "\x98".encode(), "\x9d".encode(), "\x90".encode()):
            self.assertTrue(tail(b"a" + opening + b"b\nerror: c\n", 4096).endswith("\nerror: c\n"), opening)
