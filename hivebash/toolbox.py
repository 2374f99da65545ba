"""What MCP servers have in common: schemas, answers, and the way from a call to its handler.

Rank 2.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

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
)
from twisted.logger import Logger

from hivebash import wording
from hivebash.requests import Arguments, Refusal

_log = Logger()

Schema = dict[str, Any]
Context = ServerRequestContext[Any, Any]
Handler = Callable[[Context, Arguments], Awaitable[CallToolResult]]


def object_schema(properties: Mapping[str, Schema], required: Sequence[str] | None = None) -> Schema:
    """The JSON schema of an object without other properties; all are required if it is not said which."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }


def answer(text: str, structured: Mapping[str, object], *, is_error: bool = False) -> CallToolResult:
    """A result, for the model and for programs."""
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content=dict(structured), is_error=is_error
    )


def tool_server(
    name: str, *, version: str, title: str, instructions: str, tools: Sequence[Tool], handlers: Mapping[str, Handler]
) -> Server[Any]:
    """The server object of the SDK.

    A handler's Refusal is the answer, as one sentence; so is any other error, and the log has its trace.
    """

    async def list_tools(context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=list(tools))

    async def call_tool(context: Context, params: CallToolRequestParams) -> CallToolResult:
        if params.name not in handlers:
            raise MCPError(INVALID_PARAMS, f"There is no tool {params.name!r}; there are {', '.join(handlers)}.")
        try:
            return await handlers[params.name](context, params.arguments or {})
        except Refusal as refusal:
            return _refused(str(refusal))
        except Exception:  # noqa: BLE001 - the agent gets a sentence and the operator the trace
            _log.failure("the tool {tool} failed", tool=params.name)
            return _refused(wording.internal_error(params.name))

    server: Server[Any] = Server(
        name,
        version=version,
        title=title,
        instructions=instructions,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    # An SDK that knows it looks a schema up here; one that does not, or without it, lists the tools for each call.
    server.get_tool_input_schema = {tool.name: tool.input_schema for tool in tools}.get
    return server


def _refused(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)
