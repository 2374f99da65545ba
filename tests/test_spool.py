"""Output files, on a real disk."""

from __future__ import annotations

import os
import pathlib
import stat

from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from hivebash import limits
from hivebash.interfaces import CannotStart, ISpool
from hivebash.spool import Spool
from hivebash.task import Stream


class SpoolTests(SynchronousTestCase):
    """Files of tasks, which do to them what they like."""

    def setUp(self) -> None:
        self.folder = os.path.abspath(self.mktemp())
        self.spool = Spool(self.folder)

    def create(self, task_id: str = "a") -> int:
        """New files; the descriptor of stdout."""
        out, err = self.spool.create(task_id)
        os.close(err)
        self.addCleanup(os.close, out)
        return out

    def out(self, *, tails: bool = True) -> Stream:
        return self.spool.streams("a", tails=tails)[0]

    def test_interface(self) -> None:
        """It provides what it says."""
        verifyObject(ISpool, self.spool)

    def test_private(self) -> None:
        """Files are the daemon's user's alone, whatever the umask, and are appended to."""
        for umask in (0, 0o022, 0o777):
            before = os.umask(umask)
            try:
                self.create(f"m{umask}")
                path = self.spool.script(f"m{umask}", "ä\r\n")
            finally:
                os.umask(before)
            for suffix in ("out", "err", "sh"):
                self.assertEqual(stat.S_IMODE(os.stat(f"{self.folder}/m{umask}.{suffix}").st_mode), 0o600)
            self.assertEqual(pathlib.Path(path).read_bytes(), "ä\r\n".encode())
        out = self.create()
        os.write(out, b"one")
        os.lseek(out, 0, os.SEEK_SET)
        os.write(out, b"two")
        self.assertEqual(self.out(), Stream(f"{self.folder}/a.out", 6, "onetwo"))
        self.assertEqual(self.out(tails=False), Stream(f"{self.folder}/a.out", 6))

    def test_again(self) -> None:
        """New files of a name are other files: who still writes into the old ones does not reach them."""
        old = self.create()
        self.create()
        os.write(old, b"late")
        self.assertEqual(self.out().size, 0)

    def test_tail(self) -> None:
        """Of a long file only the end is read."""
        out = self.create()
        os.truncate(out, 3 << 40)
        os.write(out, b"x" * limits.TAIL_WINDOW + b"\nthe end\n")
        stream = self.out()
        self.assertEqual(stream.size, (3 << 40) + limits.TAIL_WINDOW + 9)
        self.assertTrue(stream.tail.endswith("x\nthe end\n"))
        self.assertLessEqual(len(stream.tail), limits.TAIL_BYTES)

    def test_other_things(self) -> None:
        """What is no file of ours is neither followed nor waited for, and makes way for the next task of the name."""
        path = f"{self.folder}/a.out"
        secret = pathlib.Path(self.mktemp())
        secret.write_text("secret")
        for make in (
            lambda: os.symlink(secret.absolute(), path),
            lambda: os.mkfifo(path),
            lambda: os.makedirs(f"{path}/below"),
        ):
            os.makedirs(self.folder, exist_ok=True)
            make()
            self.assertEqual(self.out(), Stream(path, 0, ""))
            os.write(self.create(), b"new")
            self.assertEqual(self.out().tail, "new")
            self.spool.remove("a")
            self.assertEqual(os.listdir(self.folder), [])
        self.assertEqual(secret.read_text(), "secret")

    def test_no_directory(self) -> None:
        """The directory is made again if it is gone; if that cannot be, the sentence names the file."""
        self.create()
        self.assertEqual(stat.S_IMODE(os.stat(self.folder).st_mode), 0o700)
        spool = Spool(f"{self.folder}/a.out/below")
        self.assertIn("below/a.out", str(self.assertRaises(CannotStart, spool.create, "a")))
        self.assertIn("below/a.sh", str(self.assertRaises(CannotStart, spool.script, "a", "x")))
        self.spool.remove("never-there")
