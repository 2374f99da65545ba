"""The three tools as an MCP server: schemas, and calls into the runner.

Rank 3. One of the two places that meet asyncio, on which the SDK runs: a call waits for a Deferred as for a future,
and when it is cancelled the Deferred is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import attrs
from mcp.server.lowlevel import Server
from mcp_types import CallToolResult, Tool, ToolAnnotations
from twisted.internet.defer import Deferred

from hivebash import limits, wording
from hivebash.interfaces import RECEIPT, IReceipt
from hivebash.requests import NAME_PATTERN, Arguments, parse_kill, parse_run, parse_status
from hivebash.runner import TaskRunner
from hivebash.task import Snapshot, State
from hivebash.toolbox import Context, Schema, answer, object_schema, tool_server

SERVER_NAME = "bash"


def _text(description: str, **more: object) -> Schema:
    return {"type": "string", "description": description, **more}


def _seconds(description: str) -> Schema:
    return {"type": "number", "minimum": 0, "description": description}


_INTEGER: Schema = {"type": "integer", "minimum": 0}
_STRING: Schema = {"type": "string"}
_FIELDS: dict[str, Schema] = {
    "id": _STRING,
    "status": {"enum": [state.value for state in State]},
    "exit_code": {"type": ["integer", "null"]},
    "signal": {"type": ["string", "null"]},
    "reason": {"type": ["string", "null"]},
    "duration_secs": {"type": "number", "minimum": 0},
    "stdout_tail": _STRING,
    "stderr_tail": _STRING,
    "stdout_path": _STRING,
    "stderr_path": _STRING,
    "stdout_bytes": _INTEGER,
    "stderr_bytes": _INTEGER,
    "processes": _INTEGER,
    "cmd": _STRING,
}
_IN_TABLE = [name for name in _FIELDS if not name.endswith("_tail")]

_STATUS_OBJECT = object_schema(_FIELDS, list(_FIELDS))
_ROW = object_schema({name: _FIELDS[name] for name in _IN_TABLE}, _IN_TABLE)
_STATUS_OR_TABLE: Schema = {
    "type": "object",
    "properties": {**_FIELDS, "tasks": {"type": "array", "items": _ROW}},
    "anyOf": [{"required": list(_FIELDS)}, {"required": ["tasks"]}],
    "additionalProperties": False,
}
_KILL_OBJECT = object_schema(
    {name: _FIELDS[name] for name in ("id", "status", "signal", "processes")}, ["id", "status", "signal", "processes"]
)

TOOLS = (
    Tool(
        name="run",
        title="Run a command",
        description=wording.RUN,
        input_schema=object_schema(
            {
                "cmd": _text(wording.RUN_CMD),
                "timeout_secs": _seconds(wording.RUN_TIMEOUT),
                "wait_seconds": _seconds(wording.RUN_WAIT),
                "name": _text(wording.RUN_NAME, pattern=NAME_PATTERN),
            },
            ["cmd"],
        ),
        output_schema=_STATUS_OBJECT,
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
        ),
    ),
    Tool(
        name="status",
        title="Look at a task",
        description=wording.STATUS,
        input_schema=object_schema({"id": _text(wording.STATUS_ID), "wait_seconds": _seconds(wording.STATUS_WAIT)}, []),
        output_schema=_STATUS_OR_TABLE,
        annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False),
    ),
    Tool(
        name="kill",
        title="End a task",
        description=wording.KILL,
        input_schema=object_schema(
            {"id": _text(wording.KILL_ID), "force": {"type": "boolean", "description": wording.KILL_FORCE}}, ["id"]
        ),
        output_schema=_KILL_OBJECT,
        annotations=ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        ),
    ),
)


@attrs.frozen(eq=False)
class Tools:
    """What the tools do."""

    _runner: TaskRunner

    def server(self, version: str) -> Server[Any]:
        """The server object of the SDK."""
        return tool_server(
            SERVER_NAME,
            version=version,
            title="hivebash",
            instructions=wording.INSTRUCTIONS,
            tools=TOOLS,
            handlers={"run": self._run, "status": self._status, "kill": self._kill},
        )

    async def _run(self, context: Context, arguments: Arguments) -> CallToolResult:
        request = parse_run(arguments)
        wait = request.wait
        snapshot = await _finish(context, self._runner.run(request, receipt_of(context)), wait.seconds)
        if snapshot.task.state.final:
            return _told(snapshot, capped=wait.capped)
        return answer(wording.started_text(snapshot, wait.seconds, capped=wait.capped), wording.status_object(snapshot))

    async def _status(self, context: Context, arguments: Arguments) -> CallToolResult:
        request = parse_status(arguments)
        if request.id is None:
            table = self._runner.table()
            return answer(
                wording.table_text(table.snapshots, table.hidden),
                {"tasks": [wording.status_object(snapshot) for snapshot in table.snapshots]},
            )
        observing = self._runner.observe(request.id, request.wait.seconds, receipt_of(context))
        snapshot = await _finish(context, observing, request.wait.seconds)
        return _told(snapshot, capped=request.wait.capped)

    async def _kill(self, context: Context, arguments: Arguments) -> CallToolResult:
        report = self._runner.kill(parse_kill(arguments))
        return answer(wording.kill_text(report, self._runner.kill_grace), wording.kill_object(report))


def receipt_of(context: Context) -> IReceipt | None:
    """What will become of the answer, where the transport can tell."""
    scope: Mapping[str, Any] = getattr(context.request, "scope", {})
    return scope.get(RECEIPT)


async def _finish(context: Context, waiting: Coroutine[Deferred[Any], Any, Snapshot], seconds: float) -> Snapshot:
    """The result of what the runner does, with a sign of life each second for a client that asked for one."""
    future = Deferred.fromCoroutine(waiting).asFuture(asyncio.get_running_loop())
    try:
        passed = 0.0
        while _wants_progress(context) and passed < seconds:
            done, _ = await asyncio.wait({future}, timeout=limits.PROGRESS_INTERVAL)
            if done:
                break
            passed += limits.PROGRESS_INTERVAL
            await context.session.report_progress(min(passed, seconds), seconds, wording.WAITING)
        return await future
    finally:
        future.cancel()


def _wants_progress(context: Context) -> bool:
    return context.meta is not None and context.meta.get("progress_token") is not None


def _told(snapshot: Snapshot, *, capped: bool) -> CallToolResult:
    return answer(
        wording.status_text(snapshot, capped=capped),
        wording.status_object(snapshot),
        is_error=snapshot.task.could_not_start,
    )
