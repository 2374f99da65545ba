"""The bridge between twisted.web and ASGI applications, over a real connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request, Site

from hivebash import asgi, limits
from hivebash.interfaces import RECEIPT
from tests.daemon import asynchronous, eventually, read_reply


class Mounted(Resource):
    """A resource that has an application answer, as Klein would."""

    isLeaf = True

    def __init__(self, application: asgi.Application) -> None:
        super().__init__()
        self.application = application

    def render(self, request: Request) -> int:
        answering = Deferred.fromCoroutine(asgi.answer(self.application, request, request.content.read(), reactor))
        request.notifyFinish().addErrback(lambda _: answering.cancel())
        return NOT_DONE_YET


class BridgeCase(TestCase):
    """A server on a port of its own, and connections to it."""

    timeout = 20

    def mount(self, application: asgi.Application) -> None:
        self.listening = reactor.listenTCP(0, Site(Mounted(application)), interface="127.0.0.1")
        self.addCleanup(self.listening.stopListening)

    @contextlib.asynccontextmanager
    async def sent(self, text: bytes) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listening.getHost().port)
        writer.write(text)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            await asyncio.sleep(0)


class BridgeTests(BridgeCase):
    """What applications see, and what becomes of their answers."""

    @asynchronous
    async def test_scope(self) -> None:
        """An application sees the request as it was sent, and its answer is sent as it gave it."""
        scopes: list[asgi.Message] = []

        async def application(scope: asgi.Message, receive: asgi.Receive, send: asgi.Send) -> None:
            scopes.append(scope)
            body = (await receive())["body"]
            headers = [(b"x-one", b"1"), (b"x-one", b"2"), (b"content-type", b"text/x")]
            await send({"type": "http.response.start", "status": 202, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b" end"})

        self.mount(application)
        text = b"POST /a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-Some: 1\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
        async with self.sent(text) as (reader, _):
            reply = await read_reply(reader)
        self.assertEqual((reply.status, reply.body, reply.headers["content-type"]), (202, b"hi end", "text/x"))
        (scope,) = scopes
        self.assertEqual(
            {name: scope[name] for name in ("type", "method", "path", "raw_path", "query_string", "http_version")},
            {
                "type": "http",
                "method": "POST",
                "path": "/a b",
                "raw_path": b"/a%20b",
                "query_string": b"c=d",
                "http_version": "1.1",
            },
        )
        self.assertIn((b"x-some", b"1"), scope["headers"])
        self.assertEqual(scope["client"][0], "127.0.0.1")
        self.assertEqual(scope["server"], ("127.0.0.1", self.listening.getHost().port))

    @asynchronous
    async def test_client_leaves(self) -> None:
        """When the client leaves the application is cancelled, and its clean-up runs."""
        events: list[str] = []

        async def application(scope: asgi.Message, receive: asgi.Receive, send: asgi.Send) -> None:
            await receive()
            events.append("waits")
            try:
                await asyncio.sleep(60)
            finally:
                events.append("cleaned up")

        self.mount(application)
        async with self.sent(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            await eventually(lambda: events)
        await eventually(lambda: events == ["waits", "cleaned up"])
        self.assertEqual(self.flushLoggedErrors(), [])

    @asynchronous
    async def test_failure(self) -> None:
        """An application that fails is a 500 without its trace, and the next request is served."""

        async def application(scope: asgi.Message, receive: asgi.Receive, send: asgi.Send) -> None:
            raise RuntimeError("secret")

        self.mount(application)
        for _ in range(2):
            async with self.sent(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as (reader, _writer):
                reply = await read_reply(reader)
            self.assertEqual(reply.status, 500)
            self.assertNotIn(b"secret", reply.body)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 2)

    @asynchronous
    async def test_failure_in_the_middle(self) -> None:
        """If the answer had begun, its end is missing: the client cannot take it for whole."""

        async def application(scope: asgi.Message, receive: asgi.Receive, send: asgi.Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise RuntimeError

        self.mount(application)
        async with self.sent(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as (reader, _):
            data = await reader.read()
        self.assertIn(b"half", data)
        self.assertFalse(data.endswith(b"0\r\n\r\n"))
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    @asynchronous
    async def test_unfinished(self) -> None:
        """An application that returns without an answer is a 500 too."""

        async def application(scope: asgi.Message, receive: asgi.Receive, send: asgi.Send) -> None:
            await receive()

        self.mount(application)
        async with self.sent(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as (reader, _):
            self.assertEqual((await read_reply(reader)).status, 500)


class ReceiptTests(BridgeCase):
    """Who asks for a receipt learns what became of the answer."""

    fates: list[bool]

    def application(self, *bodies: bytes, ask: bool = True) -> asgi.Application:
        self.fates = []

        async def application(scope: asgi.Message, receive: asgi.Receive, send: asgi.Send) -> None:
            await receive()
            if ask:
                scope[RECEIPT].written().addCallback(self.fates.append)
            length = str(sum(map(len, bodies))).encode()
            await self.before_answer()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
            for body in bodies:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body"})

        return application

    async def before_answer(self) -> None:
        """What happens between the receipt and the answer."""

    @asynchronous
    async def test_written(self) -> None:
        """An answer that was read was written, on a connection that is kept as on one that is closed."""
        self.mount(self.application(b"one", b"two"))
        for how in (b"", b"Connection: close\r\n"):
            async with self.sent(b"GET / HTTP/1.1\r\nHost: x\r\n" + how + b"\r\n") as (reader, _):
                self.assertTrue((await reader.readuntil(b"onetwo")).endswith(b"onetwo"))
                await eventually(lambda: self.fates)
            self.assertEqual(self.fates.pop(), True)

    @asynchronous
    async def test_left_before(self) -> None:
        """An answer to a client that left was not written."""
        left = asyncio.Event()

        async def wait() -> None:
            await left.wait()

        self.before_answer = wait  # type: ignore[method-assign]
        self.mount(self.application(b"x"))
        async with self.sent(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            await asyncio.sleep(0)
        await eventually(lambda: self.fates)
        self.assertEqual(self.fates, [False])
        left.set()

    @asynchronous
    async def test_left_unseen(self) -> None:
        """A client that left in this very moment, so that nobody has noticed, is not told either."""

        async def leave() -> None:
            # With a linger of 0 it resets at once, and this turn of the loop goes on without having seen it.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.close()

        self.before_answer = leave  # type: ignore[method-assign]
        self.mount(self.application(b"x"))
        raw = socket.create_connection(("127.0.0.1", self.listening.getHost().port))
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: self.fates)
        self.assertEqual(self.fates, [False])

    @asynchronous
    async def test_not_taken(self) -> None:
        """What a client does not take counts as not written, after a while."""
        self.patch(limits, "RECEIPT_PATIENCE", 0.05)
        self.mount(self.application(b"x" * 30_000_000))
        async with self.sent(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            await eventually(lambda: self.fates)
        self.assertEqual(self.fates, [False])

    @asynchronous
    async def test_failed(self) -> None:
        """An application that fails has told nothing."""

        async def fail() -> None:
            raise RuntimeError

        self.before_answer = fail  # type: ignore[method-assign]
        self.mount(self.application(b"x"))
        async with self.sent(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as (reader, _):
            self.assertEqual((await read_reply(reader)).status, 500)
        self.assertEqual(self.fates, [False])
        self.flushLoggedErrors(RuntimeError)
