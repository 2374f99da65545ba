"""The HTTP side: one door, and the routes behind it.

Rank 4.
"""

from __future__ import annotations

import asyncio
import json
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes

import attrs
from klein import Klein
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import INVALID_REQUEST, ErrorData, JSONRPCError
from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFDSet, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest
from twisted.web.resource import IResource, Resource
from twisted.web.server import Request, Site
from werkzeug.exceptions import HTTPException, NotFound

from hivebash import asgi, limits
from hivebash.access import Access, Denial
from hivebash.requests import without_lone_surrogates
from hivebash.runner import TaskRunner

_log = Logger()

_BATCH = JSONRPCError(
    jsonrpc="2.0",
    id=None,
    error=ErrorData(code=INVALID_REQUEST, message="Send one JSON-RPC message a request: arrays are not read."),
)


_REASONS = {421: b"Misdirected Request"}
"""Those that twisted.web does not know."""


class McpEndpoint:
    """The SDK's server side for one MCP server: POST only and without sessions, so a restart ends none.

    Answers are plain JSON, unless the client asked for progress and reads event streams.
    """

    def __init__(self, server: Server[Any], reactor: IReactorFDSet) -> None:
        self._reactor = reactor
        self._plain, self._streaming = (
            StreamableHTTPSessionManager(
                server, stateless=True, json_response=plain, max_request_body_size=limits.REQUEST_BODY
            )
            for plain in (True, False)
        )
        self._started = asyncio.Event()
        self._stopping = asyncio.Event()
        self._running: asyncio.Future[None] | None = None
        self._requests = 0
        self._idle: list[Deferred[None]] = []

    def start(self) -> None:
        """Serve. To be called in the running event loop."""
        self._running = asyncio.ensure_future(self._run())
        self._running.add_done_callback(_log_failure)

    async def _run(self) -> None:
        # The SDK's task groups are entered and left by one asyncio task.
        async with self._plain.run(), self._streaming.run():
            self._started.set()
            await self._stopping.wait()

    async def stop(self, clock: IReactorTime) -> None:
        """End: answers that are under way may be written for a moment, the rest is cut off."""
        if self._requests:
            idle: Deferred[None] = Deferred()
            self._idle.append(idle)
            try:
                await idle.addTimeout(limits.ANSWER_MARGIN, clock)
            except defer.TimeoutError:
                _log.warn("{count} requests are cut off", count=self._requests)
        self._stopping.set()
        if self._running is not None:
            await Deferred.fromFuture(self._running)

    async def answer(self, request: Request, body: bytes) -> bytes | None:
        """Answer one POST; bytes that are still to be written, None where all is done."""
        if body.lstrip()[:1] == b"[":
            return reply(request, 400, "application/json", _BATCH.model_dump_json(by_alias=True))
        self._requests += 1
        try:
            await asgi.answer(self._application(request, body), request, without_lone_surrogates(body), self._reactor)
        finally:
            self._requests -= 1
            while self._idle and not self._requests:
                self._idle.pop().callback(None)
        return None

    def _application(self, request: Request, body: bytes) -> asgi.Application:
        accept = b",".join(request.requestHeaders.getRawHeaders(b"accept", ()))
        streams = b'"progressToken"' in body and b"text/event-stream" in accept
        manager = self._streaming if streams else self._plain

        async def application(scope: asgi.Message, receive: asgi.Receive, send: asgi.Send) -> None:
            await self._started.wait()
            await manager.handle_request(scope, receive, send)

        return application


def show_refused(request: IRequest, failure: Failure) -> bytes:
    """A path or method that is not served."""
    error = failure.value
    if not isinstance(error, HTTPException):
        failure.raiseException()
    for name, value in error.get_headers():
        if name.lower() == "allow":
            request.setHeader(b"allow", value.encode())
    return reply(request, error.code or 500, "text/plain; charset=utf-8", f"{error.name}\n")


@attrs.define(eq=False)
class Web:
    """The routes."""

    _runner: TaskRunner
    _mcp: McpEndpoint
    _version: str
    _hyperhive: McpEndpoint | None = None
    """Of the built-in harness, where it runs."""

    app = Klein()

    @app.route("/mcp", methods=["POST"])
    async def mcp(self, request: Request) -> bytes | None:
        return await self._mcp.answer(request, read_body(request))

    @app.route("/hyperhive/mcp", methods=["POST"])
    async def hyperhive(self, request: Request) -> bytes | None:
        if self._hyperhive is None:
            raise NotFound
        return await self._hyperhive.answer(request, read_body(request))

    @app.route("/healthz", methods=["GET"])
    def healthz(self, request: Request) -> bytes:
        running, pending = self._runner.load()
        health = {"status": "ok", "version": self._version, "running": running, "pending": pending}
        return reply(request, 200, "application/json", json.dumps(health))

    @app.handle_errors(HTTPException)
    def refused(self, request: IRequest, failure: Failure) -> bytes:
        return show_refused(request, failure)


class Door(Resource):
    """All that comes in comes through here, so that no route can forget to ask."""

    isLeaf = True

    def __init__(self, access: Access, inside: IResource) -> None:
        super().__init__()
        self._access = access
        self._inside = inside

    def render(self, request: Request) -> bytes | int:
        """See IResource.render."""
        headers = request.requestHeaders
        denial = self._access.check(_values(headers, "host"), _values(headers, "origin"))
        if denial is None and not _is_text(request.path):
            denial = Denial(400, "The path is not UTF-8.")
        if denial is None and isinstance(request, BoundedRequest) and request.oversized:
            denial = Denial(413, f"The body has more than {limits.REQUEST_BODY} bytes.")
        if denial is None:
            rendered: bytes | int = self._inside.render(request)
            return rendered
        return reply(request, denial.code, "text/plain; charset=utf-8", f"{denial.sentence}\n")


class BoundedRequest(Request):
    """A request whose body stays in memory, and within bounds."""

    oversized = False

    def gotLength(self, length: int | None) -> None:
        """The body is about to come; what its sender says of its length does not count."""
        self.content = BytesIO()

    def handleContentChunk(self, data: bytes) -> None:
        """A piece of the body. One that is too long is read on, or its sender would not see the answer."""
        content = self.content
        if content is None or self.oversized:
            return
        if content.tell() + len(data) > limits.REQUEST_BODY:
            self.oversized = True
            content.seek(0)
            content.truncate()
        else:
            content.write(data)


class QuietSite(Site):
    """A site without a log line for each request."""

    def log(self, request: object) -> None:
        """The tasks are the record of what was asked."""


def site(web: Web, access: Access) -> Site:
    """The factory for the listening endpoints."""
    return QuietSite(Door(access, web.app.resource()), requestFactory=BoundedRequest, timeout=limits.IDLE_CONNECTION)


def _values(headers: Any, name: str) -> list[str]:
    return [value.decode("latin-1") for value in headers.getRawHeaders(name.encode(), ())]


def _is_text(path: bytes) -> bool:
    try:
        unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        return False
    return True


def read_body(request: Request) -> bytes:
    """The whole body of a request that has come in."""
    return b"" if request.content is None else bytes(request.content.read())


def reply(request: IRequest, code: int, content_type: str, text: str) -> bytes:
    """The body of an answer, whose status and headers are set."""
    body = text.encode()
    request.setResponseCode(code, _REASONS.get(code))
    request.setHeader(b"content-type", content_type.encode())
    request.setHeader(b"content-length", b"%d" % len(body))
    return body


def _log_failure(future: asyncio.Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        _log.failure("MCP is not served any more", Failure(error))
