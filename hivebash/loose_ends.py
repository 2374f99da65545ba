"""The MCP server of the built-in harness: the agent looks at its loose ends and cancels them.

Rank 3.
"""

from __future__ import annotations

from typing import Any

import attrs
from mcp.server.lowlevel import Server
from mcp_types import CallToolResult, Tool, ToolAnnotations

from hivebash import wording
from hivebash.interfaces import ILedger, StoreError
from hivebash.requests import Arguments, Refusal, parse_cancel, parse_nothing
from hivebash.toolbox import Context, Schema, answer, object_schema, tool_server

SERVER_NAME = "hyperhive"

_STRING: Schema = {"type": "string"}
_KIND: Schema = {"const": "todo"}
_ID: Schema = {"type": "integer", "minimum": 0}
_LOOSE_END: dict[str, Schema] = {
    "id": _ID,
    "kind": _KIND,
    "key": _STRING,
    "summary": _STRING,
    "detail": _STRING,
    "state": _STRING,
    "since": {"type": "string", "format": "date-time"},
}

TOOLS = (
    Tool(
        name="get_loose_ends",
        title="Look at loose ends",
        description=wording.GET_LOOSE_ENDS,
        input_schema=object_schema({}),
        output_schema=object_schema({"loose_ends": {"type": "array", "items": object_schema(_LOOSE_END)}}),
        annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False),
    ),
    Tool(
        name="cancel_loose_end",
        title="Cancel a loose end",
        description=wording.CANCEL_LOOSE_END,
        input_schema=object_schema(
            {
                "kind": {**_KIND, "description": wording.CANCEL_KIND},
                "id": {**_ID, "description": wording.CANCEL_ID},
            }
        ),
        output_schema=object_schema({"kind": _KIND, "id": _ID}),
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=False
        ),
    ),
)


@attrs.frozen(eq=False)
class LooseEnds:
    """What the tools do."""

    _ledger: ILedger

    def server(self, version: str) -> Server[Any]:
        """The server object of the SDK."""
        return tool_server(
            SERVER_NAME,
            version=version,
            title="hivebash loose ends",
            instructions=wording.HYPERHIVE_INSTRUCTIONS,
            tools=TOOLS,
            handlers={"get_loose_ends": self._get, "cancel_loose_end": self._cancel},
        )

    async def _get(self, context: Context, arguments: Arguments) -> CallToolResult:
        parse_nothing(arguments)
        ends = self._ledger.open_ends()
        return answer(wording.loose_ends_text(ends), {"loose_ends": [wording.loose_end_object(end) for end in ends]})

    async def _cancel(self, context: Context, arguments: Arguments) -> CallToolResult:
        number = parse_cancel(arguments)
        try:
            found = self._ledger.cancel(number)
        except StoreError as error:
            raise Refusal(wording.not_cancelled(str(error))) from None
        if not found:
            raise Refusal(wording.unknown_loose_end(number))
        return answer(wording.cancelled_loose_end(number), {"kind": "todo", "id": number})
