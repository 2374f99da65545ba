"""An ASGI application as the answer to a twisted.web request.

Rank 4. One of the two places that meet asyncio.

ASGI specification 3.0, HTTP section: ``scope`` describes the request, ``receive`` gives its body, and after that
``http.disconnect`` when the client leaves, ``send`` takes the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote_to_bytes

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.server import Request

_log = Logger()

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


async def answer(application: Application, request: Request, body: bytes) -> None:
    """Have ``application`` answer ``request``, whose body was read.

    Returns when the answer is written or the client gone. Cancelling cancels the application. An application that
    fails gives a 500, or the end of the connection if its answer had begun.
    """
    exchange = _Exchange(request, body)
    try:
        await Deferred.fromFuture(asyncio.ensure_future(exchange.run(application)))
    except asyncio.CancelledError:
        return


class _Exchange:
    """One request and its answer."""

    def __init__(self, request: Request, body: bytes) -> None:
        self._request = request
        self._body: bytes | None = body
        self._begun = False
        self._gone = asyncio.Event()
        request.notifyFinish().addBoth(self._finished)

    async def run(self, application: Application) -> None:
        try:
            await application(_scope(self._request), self._receive, self._send)
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
                self._request.finish()


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
