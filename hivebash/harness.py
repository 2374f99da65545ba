"""The agent's harness, behind its unix socket.

Rank 3: implements ITodoSink.

HTTP/1.1 with JSON; docs/harness-protocol.md describes it for those who write the other side. A few connections are
kept. An answer counts once all of it has come.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.inotify import IN_CREATE, IN_MOVED_TO, INotify, INotifyError
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.python.filepath import FilePath
from twisted.web.client import URI, Agent, HTTPConnectionPool, ResponseDone
from twisted.web.http import INTERNAL_SERVER_ERROR, MULTIPLE_CHOICE, NOT_FOUND, PotentialDataLoss
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from hivebash import limits
from hivebash.interfaces import HarnessAway, HarnessFailed, HarnessRefused, ITodoSink
from hivebash.task import Todo

if TYPE_CHECKING:
    from twisted.internet.asyncioreactor import AsyncioSelectorReactor

_AGAIN = frozenset((408, 425, 429))
"""Client errors that are about the moment; RFC 9110, RFC 8470, RFC 6585."""


@implementer(IAgentEndpointFactory)
class _Socket:
    """Every address is the same socket."""

    def __init__(self, reactor: AsyncioSelectorReactor, path: str) -> None:
        self._reactor = reactor
        self._path = path

    def endpointForURI(self, uri: URI) -> UNIXClientEndpoint:  # noqa: N802 - the interface's name
        return UNIXClientEndpoint(self._reactor, self._path, timeout=limits.HARNESS_PATIENCE)


class _QuietFactory(HTTPConnectionPool._factory):  # type: ignore[valid-type, misc]  # noqa: SLF001 - the log is its business
    noisy = False


class _Pool(HTTPConnectionPool):
    """Without log lines for each connection."""

    _factory = _QuietFactory


@implementer(ITodoSink)
class Harness:
    """Todos of the source ``bash`` at the harness that listens on ``path``."""

    def __init__(self, reactor: AsyncioSelectorReactor, path: str) -> None:
        self._reactor = reactor
        self._path = path
        self._pool = _Pool(reactor)
        self._pool.maxPersistentPerHost = limits.SENDS_AT_ONCE
        self._http = HTTPClient(Agent.usingEndpointFactory(reactor, _Socket(reactor, path), self._pool))

    def put(self, key: str, todo: Todo) -> Deferred[None]:
        body = {"summary": todo.summary, "detail": todo.detail, "state": todo.state.value}
        return self._ask(self._request("PUT", key, json=body))

    def remove(self, key: str) -> Deferred[None]:
        return self._ask(self._request("DELETE", key))

    def when_back(self) -> Deferred[None]:
        try:
            watch = INotify(self._reactor)
        except (INotifyError, OSError):  # as many as may be are in use; then the next try finds out
            return Deferred()
        back: Deferred[None] = Deferred(lambda _: watch.loseConnection())
        name = FilePath(self._path)

        def seen(_: object, path: FilePath[bytes], mask: int) -> None:
            if path.basename() == name.asBytesMode().basename() and not back.called:
                watch.loseConnection()
                back.callback(None)

        watch.startReading()
        # A folder that is not there cannot be watched; then the next try finds out.
        with contextlib.suppress(INotifyError, OSError):
            watch.watch(name.parent(), IN_CREATE | IN_MOVED_TO, callbacks=[seen])
        return back

    def close(self) -> Deferred[None]:
        closed: Deferred[None] = self._pool.closeCachedConnections()
        return closed

    def _ask(self, request: Coroutine[Deferred[Any], Any, None]) -> Deferred[None]:
        asked: Deferred[None] = Deferred.fromCoroutine(request)
        return asked.addTimeout(limits.HARNESS_PATIENCE, self._reactor)

    async def _request(self, method: str, key: str, **more: Any) -> None:
        url = f"http://localhost/todos/bash/{key}"
        try:
            response = await self._http.request(method, url, unbuffered=True, allow_redirects=False, **more)
            answer = _Answer()
            response.deliverBody(answer)
            await answer.complete
        except CancelledError:
            raise HarnessAway(f"no whole answer within {limits.HARNESS_PATIENCE:g} s") from None
        except Exception as error:  # noqa: BLE001 - there are as many ways to fail as layers below
            raise HarnessAway(_reason(error)) from None
        if method == "DELETE" and response.code == NOT_FOUND:
            return
        if response.code >= INTERNAL_SERVER_ERROR or response.code in _AGAIN:
            raise HarnessFailed(f"status {response.code}")
        if response.code >= MULTIPLE_CHOICE:
            raise HarnessRefused(f"status {response.code}: {answer.text}")


class _Answer(Protocol):
    """Reads the body of an answer, and sees that it is all there."""

    def __init__(self) -> None:
        self.complete: Deferred[None] = Deferred(lambda _: self._abort())
        self._body = b""

    @property
    def text(self) -> str:
        return ascii(self._body[:200].decode("utf-8", "replace"))

    def dataReceived(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > limits.HARNESS_ANSWER:
            self._abort()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.complete.called:
            return
        whole = bool(reason.check(ResponseDone))
        if reason.check(PotentialDataLoss):
            # Only the end of the connection tells the end of the body, so the body itself has to.
            with contextlib.suppress(ValueError):
                json.loads(self._body or b"null")
                whole = True
        if whole:
            self.complete.callback(None)
        else:
            self.complete.errback(reason)

    def _abort(self) -> None:
        if (abort := getattr(self.transport, "abortConnection", None)) is not None:
            abort()


def _reason(error: BaseException) -> str:
    """What was in the way, in words; requests fail with lists of reasons."""
    reasons = getattr(error, "reasons", None)
    if reasons and (last := reasons[-1].value) is not None:
        error = last
    return f"{type(error).__name__}: {error}"
