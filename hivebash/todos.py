"""The built-in harness's socket: the protocol of docs/harness-protocol.md, from its other side.

Rank 4.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import attrs
from klein import Klein
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.iweb import IRequest
from twisted.web.server import Request, Site
from werkzeug.exceptions import HTTPException

from hivebash import limits
from hivebash.interfaces import ILedger, StoreError
from hivebash.requests import Refusal, parse_todo
from hivebash.web import BoundedRequest, QuietSite, read_body, reply, show_refused

_log = Logger()


@attrs.define(eq=False)
class Todos:
    """The routes. Whoever can open the socket may use them: it is in a directory of its owner's, mode 0600."""

    _ledger: ILedger
    _now: Callable[[], float]
    """Seconds since the epoch."""
    _changed: Callable[[], None]
    """Called after each change."""

    app = Klein()

    @app.route("/todos/bash/<key>", methods=["PUT"])
    def put(self, request: Request, key: str) -> bytes:
        if isinstance(request, BoundedRequest) and request.oversized:
            return _error(request, 413, f"The body has more than {limits.REQUEST_BODY} bytes.")
        try:
            number, new = self._ledger.put(key, parse_todo(key, read_body(request)), self._now())
        except Refusal as refusal:
            return _error(request, 400, str(refusal))
        except StoreError as error:
            return _error(request, 503, f"It could not be written down: {error}.")
        self._changed()
        return reply(request, 201 if new else 200, "application/json", json.dumps({"id": number}))

    @app.route("/todos/bash/<key>", methods=["DELETE"])
    def delete(self, request: Request, key: str) -> bytes:
        try:
            found = self._ledger.remove(key)
        except StoreError as error:
            return _error(request, 503, f"It could not be written down: {error}.")
        if not found:
            return _error(request, 404, "There is no such todo.")
        request.setResponseCode(204)
        return b""

    @app.handle_errors(HTTPException)
    def refused(self, request: IRequest, failure: Failure) -> bytes:
        return show_refused(request, failure)

    def site(self) -> Site:
        """The factory for the socket."""
        return QuietSite(self.app.resource(), requestFactory=BoundedRequest, timeout=limits.IDLE_CONNECTION)


def _error(request: Request, code: int, sentence: str) -> bytes:
    if code >= 500:
        _log.error("a todo was not taken: {why}", why=sentence)
    return reply(request, code, "application/json", json.dumps({"error": sentence}))
