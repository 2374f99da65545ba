"""An ASGI application as the answer to a twisted.web request.

Rank 4. One of the two places that meet asyncio.

ASGI specification 3.0, HTTP section: ``scope`` describes the request, ``receive`` gives its body, and after that
``http.disconnect`` when the client leaves, ``send`` takes the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote_to_bytes

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFDSet
from twisted.internet.tcp import Connection
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.server import Request
from zope.interface import implementer

from hivebash import limits
from hivebash.interfaces import RECEIPT, IReceipt

_log = Logger()

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_TCP_CLOSE = 7
"""The state of a connection that is no more; include/net/tcp_states.h of Linux."""

Application = Callable[[Message, Receive, Send], Awaitable[None]]


async def answer(application: Application, request: Request, body: bytes, reactor: IReactorFDSet) -> None:
    """Have ``application`` answer ``request``, whose body was read. The scope has an IReceipt in it.

    Returns when the answer is written or the client gone. Cancelling cancels the application. An application that
    fails gives a 500, or the end of the connection if its answer had begun.
    """
    exchange = _Exchange(request, body, reactor)
    try:
        await Deferred.fromFuture(asyncio.ensure_future(exchange.run(application)))
    except asyncio.CancelledError:
        return
    finally:
        exchange.receipt.settle(written=False)  # unless it was settled before


@implementer(IReceipt)
class Receipt:
    """Tells those who asked what became of an answer."""

    def __init__(self) -> None:
        self._waiting: list[Deferred[bool]] = []
        self._written: bool | None = None

    @property
    def asked(self) -> bool:
        return bool(self._waiting)

    def written(self) -> Deferred[bool]:
        told: Deferred[bool] = Deferred()
        if self._written is None:
            self._waiting.append(told)
        else:
            told.callback(self._written)
        return told

    def settle(self, *, written: bool) -> None:
        """It is decided; only the first time counts."""
        if self._written is None:
            self._written = written
        while self._waiting:
            self._waiting.pop(0).callback(self._written)


class _Exchange:
    """One request and its answer."""

    def __init__(self, request: Request, body: bytes, reactor: IReactorFDSet) -> None:
        self.receipt = Receipt()
        self._request = request
        self._reactor = reactor
        self._body: bytes | None = body
        self._begun = False
        self._gone = asyncio.Event()
        request.notifyFinish().addBoth(self._finished)

    async def run(self, application: Application) -> None:
        try:
            await application({**_scope(self._request), RECEIPT: self.receipt}, self._receive, self._send)
        except Exception:  # noqa: BLE001 - an application's failure is one request's
            _log.failure("a request failed")
            self._fail()
        else:
            if not self._gone.is_set():
                _log.error("an answer was not finished")
                self._fail()

    def _fail(self) -> None:
        if self._gone.is_set():
            return
        if self._begun:
            self._request.loseConnection()
            return
        self._request.setResponseCode(500)
        self._request.setHeader(b"content-type", b"text/plain; charset=utf-8")
        self._request.write(b"The daemon failed at this request; its log says why.\n")
        self._request.finish()

    def _finished(self, result: Failure | None) -> None:
        self._gone.set()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self._begun = True
            self._request.setResponseCode(message["status"])
            for name, value in message.get("headers", ()):
                # The connection is the server's business.
                if name.lower() not in {b"connection", b"transfer-encoding"}:
                    self._request.responseHeaders.addRawHeader(name, value)
        elif message["type"] == "http.response.body":
            if body := message.get("body", b""):
                self._request.write(body)
            if not message.get("more_body", False):
                if self.receipt.asked:
                    self.receipt.settle(written=await self._flushed())
                if not self._gone.is_set():
                    self._request.finish()

    async def _flushed(self) -> bool:
        """Whether all that was written has left for a client that is still there.

        As long as the request is not finished its connection tells when it breaks. On loopback and unix sockets what
        the kernel took for a connection that is whole is in the client's hands; one that the client closed answers with
        a reset at once.
        """
        transport: object = self._request.transport
        waited, pause = 0.0, 0.0
        while not self._gone.is_set() and any(transport is writer for writer in self._reactor.getWriters()):
            if waited > limits.RECEIPT_PATIENCE:
                return False
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(pause * 2 or 0.001, 0.1)
        return not self._gone.is_set() and not _was_reset(transport)


def _was_reset(transport: object) -> bool:
    """Whether a TCP connection is over, though nobody has noticed; TCP_INFO of tcp(7) begins with the state."""
    handle = transport.getHandle() if isinstance(transport, Connection) else None
    if handle is None or handle.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        state = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return True
    return bool(state[0] == _TCP_CLOSE)


def _scope(request: Request) -> Message:
    path, _, query = request.uri.partition(b"?")
    peer, host = request.getClientAddress(), request.getHost()
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.clientproto.removeprefix(b"HTTP/").decode("ascii"),
        "method": request.method.decode("ascii"),
        "scheme": "https" if request.isSecure() else "http",
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [
            (name.lower(), value) for name, values in request.requestHeaders.getAllRawHeaders() for value in values
        ],
        "client": _address(peer),
        "server": _address(host),
        "state": {},
    }


def _address(address: object) -> tuple[str, int] | None:
    with contextlib.suppress(AttributeError):
        return address.host, address.port  # type: ignore[attr-defined]  # those that are no internet address have none
    return None
