"""The output files of tasks.

Rank 3: implements ISpool.

A task writes its files itself and may do to them what it likes, so nothing is followed or waited for here: no symbolic
link, no named pipe in a file's place, no folder that is gone.
"""

from __future__ import annotations

import os
import shutil
import stat

import attrs
from twisted.logger import Logger
from zope.interface import implementer

from hivebash import limits
from hivebash.interfaces import CannotStart, ISpool
from hivebash.tail import tail
from hivebash.task import Stream

_log = Logger()

_CREATE = os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_STDOUT, _STDERR, _SCRIPT = ".out", ".err", ".sh"


def make_private_directory(path: str) -> None:
    """Make ``path`` and what is missing above it, and ``path`` itself 0700. Raises OSError."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    os.chmod(path, 0o700)


@implementer(ISpool)
@attrs.frozen(eq=False)
class Spool:
    """The files of all tasks, in one directory."""

    directory: str
    """Absolute."""

    def create(self, task_id: str) -> tuple[int, int]:
        stdout = self._create(task_id, _STDOUT, os.O_WRONLY)
        try:
            return stdout, self._create(task_id, _STDERR, os.O_WRONLY)
        except CannotStart:
            os.close(stdout)
            raise

    def script(self, task_id: str, cmd: str) -> str:
        with os.fdopen(self._create(task_id, _SCRIPT, os.O_WRONLY), "wb") as script:
            try:
                script.write(cmd.encode())
                script.flush()
            except OSError as error:
                raise CannotStart(f"its script {script.name}: {error.strerror}") from None
        return self._path(task_id, _SCRIPT)

    def streams(self, task_id: str, *, tails: bool) -> tuple[Stream, Stream]:
        return self._stream(task_id, _STDOUT, tails=tails), self._stream(task_id, _STDERR, tails=tails)

    def remove(self, task_id: str) -> None:
        for suffix in (_STDOUT, _STDERR, _SCRIPT):
            try:
                _discard(self._path(task_id, suffix))
            except OSError as error:
                _log.error("{path} cannot be removed: {error}", path=self._path(task_id, suffix), error=error.strerror)

    def _path(self, task_id: str, suffix: str) -> str:
        return f"{self.directory}/{task_id}{suffix}"

    def _create(self, task_id: str, suffix: str, access: int) -> int:
        path = self._path(task_id, suffix)
        try:
            try:
                descriptor = os.open(path, access | _CREATE, 0o600)
            except FileExistsError:  # of an earlier task
                _discard(path)
                descriptor = os.open(path, access | _CREATE, 0o600)
            except FileNotFoundError:  # a task removed the directory; the next one is not to suffer
                make_private_directory(self.directory)
                descriptor = os.open(path, access | _CREATE, 0o600)
            os.fchmod(descriptor, 0o600)  # whatever the umask took away
        except OSError as error:
            raise CannotStart(f"its file {path}: {error.strerror}") from None
        return descriptor

    def _stream(self, task_id: str, suffix: str, *, tails: bool) -> Stream:
        path = self._path(task_id, suffix)
        nothing = "" if tails else None
        try:
            status = os.lstat(path)
        except OSError:  # not there yet, or no more
            return Stream(path, 0, nothing)
        if not stat.S_ISREG(status.st_mode):
            return Stream(path, 0, nothing)
        if not tails or not status.st_size:
            return Stream(path, status.st_size, nothing)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            _log.error("{path} cannot be read: {error}", path=path, error=error.strerror)
            return Stream(path, status.st_size, nothing)
        try:
            size = os.fstat(descriptor).st_size
            start = max(0, size - limits.TAIL_WINDOW)
            data = os.pread(descriptor, limits.TAIL_WINDOW, start)
        except OSError as error:  # another kind of file has taken its place
            _log.error("{path} cannot be read: {error}", path=path, error=error.strerror)
            return Stream(path, status.st_size, nothing)
        finally:
            os.close(descriptor)
        return Stream(path, size, tail(data, limits.TAIL_BYTES, cut=start > 0))


def _discard(path: str) -> None:
    """Remove what a task left under a file's name, also if it is a directory by now. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        shutil.rmtree(path)
