"""The MCP server of the built-in harness: the agent looks at its loose ends and cancels them.

Rank 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)
from twisted.logger import Logger

from hivebash import wording
from hivebash.interfaces import ILedger, StoreError
from hivebash.requests import Refusal, parse_cancel, parse_nothing

_log = Logger()

SERVER_NAME = "hyperhive"

_STRING = {"type": "string"}
_KIND = {"const": "todo"}
_ID = {"type": "integer", "minimum": 0}
_LOOSE_END = {
    "id": _ID,
    "kind": _KIND,
    "key": _STRING,
    "summary": _STRING,
    "detail": _STRING,
    "state": _STRING,
    "since": {"type": "string", "format": "date-time"},
}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    """All of them are required, and there are no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TOOLS = (
    Tool(
        name="get_loose_ends",
        title="Look at loose ends",
        description=wording.GET_LOOSE_ENDS,
        input_schema=_object({}),
        output_schema=_object({"loose_ends": {"type": "array", "items": _object(_LOOSE_END)}}),
        annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False),
    ),
    Tool(
        name="cancel_loose_end",
        title="Cancel a loose end",
        description=wording.CANCEL_LOOSE_END,
        input_schema=_object(
            {
                "kind": {**_KIND, "description": wording.CANCEL_KIND},
                "id": {**_ID, "description": wording.CANCEL_ID},
            }
        ),
        output_schema=_object({"kind": _KIND, "id": _ID}),
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
        schemas = {tool.name: tool.input_schema for tool in TOOLS}
        server: Server[Any] = Server(
            SERVER_NAME,
            version=version,
            title="hivebash loose ends",
            instructions=wording.HYPERHIVE_INSTRUCTIONS,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )
        server.get_tool_input_schema = schemas.get
        return server

    async def _list(
        self, context: ServerRequestContext[Any, Any], params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=list(TOOLS))

    async def _call(self, context: ServerRequestContext[Any, Any], params: CallToolRequestParams) -> CallToolResult:
        calls = {"get_loose_ends": self._get, "cancel_loose_end": self._cancel}
        if params.name not in calls:
            raise MCPError(INVALID_PARAMS, f"There is no tool {params.name!r}; there are {', '.join(calls)}.")
        try:
            text, structured = calls[params.name](params.arguments or {})
        except Refusal as refusal:
            return CallToolResult(content=[TextContent(type="text", text=str(refusal))], is_error=True)
        except Exception:  # noqa: BLE001 - the agent gets a sentence and the operator the trace
            _log.failure("the tool {tool} failed", tool=params.name)
            sentence = wording.internal_error(params.name)
            return CallToolResult(content=[TextContent(type="text", text=sentence)], is_error=True)
        return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=structured)

    def _get(self, arguments: Mapping[str, object]) -> tuple[str, dict[str, object]]:
        parse_nothing(arguments)
        ends = self._ledger.open_ends()
        return wording.loose_ends_text(ends), {"loose_ends": [wording.loose_end_object(end) for end in ends]}

    def _cancel(self, arguments: Mapping[str, object]) -> tuple[str, dict[str, object]]:
        number = parse_cancel(arguments)
        try:
            found = self._ledger.cancel(number)
        except StoreError as error:
            raise Refusal(wording.not_cancelled(str(error))) from None
        if not found:
            raise Refusal(wording.unknown_loose_end(number))
        return wording.cancelled_loose_end(number), {"kind": "todo", "id": number}
