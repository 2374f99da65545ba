"""Every sentence for an agent.

Rank 1: pure. Written to be short: an agent pays for each word, those of the tools in every turn.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from hivebash import limits
from hivebash.task import Cause, Exit, KillReport, LooseEnd, Snapshot, State, Stream, Task, Todo

INSTRUCTIONS = (
    "Runs shell commands in the background. `run` answers with the result if the command ends within wait_seconds, "
    "else with its id; look again with `status`, or wait there instead of sleeping. stdin is empty and there is no "
    "terminal. Start servers as a task of their own, without `&`. Output is in files: read them for more than the "
    "last 4 KiB."
)

RUN = (
    "Run a command with `bash -c` in the background. Answers with its status and output if it ends within "
    "wait_seconds, else `task started: id=<id>` and it goes on."
)
RUN_CMD = "Shell command."
RUN_TIMEOUT = "Kill it after this many seconds. Default: no limit."
RUN_WAIT = "Wait up to this many seconds for its end, at most 30. Default 3."
RUN_NAME = "Use this as the id, free again once that task has ended: a-z, 0-9, -, at most 63. Default: a fresh id."

STATUS = "Status and last 4 KiB of output of a task. Without id: the pending, running and newest finished tasks."
STATUS_ID = "Task id."
STATUS_WAIT = "Wait up to this many seconds for its end, at most 30. Default 0."

WAITING = "waiting for the task to end"

KILL = "End a task and its processes. Returns at once; `status` shows the end."
KILL_ID = "Task id."
KILL_FORCE = "false: SIGINT, so that it can clean up. true: SIGKILL."


HYPERHIVE_INSTRUCTIONS = (
    "Loose ends are what you have to look at: tasks that ended, and those that go on. Cancel one once it is dealt with."
)
GET_LOOSE_ENDS = "All open loose ends, the oldest first."
CANCEL_LOOSE_END = "Drop a loose end that is dealt with."
CANCEL_KIND = "As get_loose_ends shows it."
CANCEL_ID = "Its id."


def loose_end_object(end: LooseEnd) -> dict[str, object]:
    """One loose end in an answer."""
    since = datetime.datetime.fromtimestamp(end.since, datetime.UTC)
    return {
        "id": end.id,
        "kind": "todo",
        "key": end.key,
        "summary": end.todo.summary,
        "detail": end.todo.detail,
        "state": end.todo.state.value,
        "since": since.isoformat(timespec="seconds"),
    }


def loose_ends_text(ends: Iterable[LooseEnd]) -> str:
    """All loose ends for the model."""
    return "\n".join(f"todo {end.id}: {end.todo.summary}\n{end.todo.detail}" for end in ends) or "No loose ends."


def unknown_loose_end(number: int) -> str:
    return f"There is no loose end todo {number}: get_loose_ends lists those that are open."


def cancelled_loose_end(number: int) -> str:
    return f"todo {number} is cancelled."


def not_cancelled(why: str) -> str:
    return f"The loose end was not cancelled, because that could not be written down: {why}."


def reason(task: Task) -> str | None:
    """Why the daemon ended the task, or could not start it."""
    match task.cause:
        case None:
            return None
        case Cause.KILL:
            return "kill" if task.leader is not None else "kill, before it started"
        case Cause.TIME_LIMIT:
            return f"time limit of {number(task.timeout_secs or 0.0)} s"
        case Cause.DAEMON_STOPPED:
            return "daemon stopped"
        case Cause.DAEMON_DIED:
            return "daemon died"
        case Cause.COULD_NOT_START:
            return f"could not start: {task.detail}"


def number(value: float) -> str:
    """Seconds as a person writes them: 5, 0.25, 0.003."""
    if value < 0.01:
        return f"{value:.1g}"
    if value >= 1e15:
        return f"{value:g}"
    return f"{value:.2f}".rstrip("0").rstrip(".")


def shown_command(cmd: str) -> str:
    return cmd if len(cmd) <= limits.CMD_SHOWN else cmd[: limits.CMD_SHOWN - 1] + "…"


def status_object(snapshot: Snapshot) -> dict[str, object]:
    """The status object of an answer; without tails where the snapshot has none."""
    task = snapshot.task
    tails = {"stdout_tail": snapshot.stdout.tail, "stderr_tail": snapshot.stderr.tail}
    return {
        "id": task.id,
        "status": task.state.value,
        "exit_code": task.exit.code,
        "signal": task.exit.signal_name,
        "reason": reason(task),
        "duration_secs": round(snapshot.duration_secs, 3),
        **{name: text for name, text in tails.items() if text is not None},
        "stdout_path": snapshot.stdout.path,
        "stderr_path": snapshot.stderr.path,
        "stdout_bytes": snapshot.stdout.size,
        "stderr_bytes": snapshot.stderr.size,
        "processes": snapshot.processes,
        "cmd": shown_command(task.cmd),
    }


def status_text(snapshot: Snapshot, *, capped: bool = False) -> str:
    """One task for the model: a line about it, then its output. ``capped``: more wait was asked for than there is."""
    lines = [_headline(snapshot)]
    if capped:
        lines.append(_capped())
    lines += _streams(snapshot)
    return "\n".join(lines)


def started_text(snapshot: Snapshot, waited: float, *, capped: bool = False) -> str:
    """The answer of run while its task goes on."""
    task = snapshot.task
    lines = [f"task started: id={task.id}"]
    if task.state is State.PENDING:
        lines.append("It waits for a free slot: as many tasks as may run at once are running.")
    elif waited:
        lines.append(f"Still running after {number(waited)} s.")
    lines.append("A todo will tell its end.")
    if capped:
        lines.append(_capped())
    if snapshot.stdout.size or snapshot.stderr.size:
        lines += _streams(snapshot)
    return "\n".join(lines)


def todo(snapshot: Snapshot) -> Todo:
    """What the harness is told: that the task goes on, or how it ended and where its output is."""
    task = snapshot.task
    if not task.state.final:
        # The same for one that still is in the queue: nothing more is told when it leaves it.
        return Todo(f"{task.id}: {State.RUNNING}", f"$ {_one_line(task.cmd)}", State.RUNNING)
    parts = [f"{task.id}: {task.state}"]
    if (why := reason(task)) is not None:
        parts[0] += f" ({why})"
    if (how := _exit(task.exit)) is not None:
        parts.append(how)
    lines = [f"$ {_one_line(task.cmd)}"]
    lines += [f"Read({stream.path})" for stream in (snapshot.stdout, snapshot.stderr) if stream.size]
    if len(lines) == 1 and not task.could_not_start:
        lines.append(f"Read({snapshot.stdout.path}) (empty)")
    return Todo(", ".join(parts), "\n".join(lines), task.state)


def table_text(snapshots: Iterable[Snapshot], hidden: int) -> str:
    """All there is, a line each; ``hidden`` more are not in the list."""
    lines = [f"{_headline(snapshot)}: {_one_line(snapshot.task.cmd)}" for snapshot in snapshots]
    if hidden:
        lines.append(f"and {hidden} more that are pending or running")
    return "\n".join(lines) or "No tasks."


def kill_text(report: KillReport, grace: float) -> str:
    """What a kill did."""
    if report.cancelled:
        return f"{report.id}: cancelled before it started."
    ended = report.state.final
    had_ended = f"{report.id} had already ended ({report.state})" if ended else report.id
    sent = report.sent
    if sent is None:
        return f"{had_ended}: nothing to signal."
    left = " that it left running" if ended else ""
    text = f"{had_ended}: sent {sent.signal} to {_count(sent.processes, 'process', 'processes')}{left}."
    if sent.signal == "SIGINT" and sent.processes > 1:
        text += " Children started with & ignore SIGINT; they are ended after their leader."
    if sent.signal == "SIGTERM":
        text += f" SIGKILL follows after {number(grace)} s."
    return text


def kill_object(report: KillReport) -> dict[str, object]:
    """What a kill did, as the structured answer."""
    return {
        "id": report.id,
        "status": report.state.value,
        "signal": None if report.sent is None else report.sent.signal,
        "processes": 0 if report.sent is None else report.sent.processes,
    }


def busy_name(name: str, state: State) -> str:
    return f"name {name!r} is in use by a {state} task: wait for its end, kill it, or take another name."


def unknown_id(task_id: str, count: int, days: float) -> str:
    return (
        f"There is no task {task_id!r}: it never was, or it is forgotten (the newest {count} finished tasks are kept, "
        f"for {number(days)} days). status without id lists what there is."
    )


STOPPING = "The daemon is stopping and starts nothing new: try again in a few seconds."


def not_recorded(why: str) -> str:
    return f"The task was not started, because it could not be written down: {why}."


def internal_error(tool: str) -> str:
    return f"{tool} failed inside the daemon; its log says why. Tasks are not affected."


def _headline(snapshot: Snapshot) -> str:
    task = snapshot.task
    parts = [f"{task.id}: {task.state}"]
    if (why := reason(task)) is not None:
        parts[0] += f" ({why})"
    if (how := _exit(task.exit)) is not None:
        parts.append(how)
    if task.state is not State.PENDING and not task.could_not_start:
        parts.append(f"{number(snapshot.duration_secs)} s")
    if task.state.final and snapshot.processes:
        still = "left running" if task.state is State.DONE else "being ended"
        parts.append(f"{_count(snapshot.processes, 'process', 'processes')} {still}")
    elif snapshot.processes > 1:
        parts.append(f"{snapshot.processes} processes")
    return ", ".join(parts)


def _exit(exit_: Exit) -> str | None:
    if exit_.code is not None:
        return f"exit code {exit_.code}"
    if exit_.signal is not None:
        return f"ended by {exit_.signal_name}"
    return None


def _streams(snapshot: Snapshot) -> list[str]:
    if not snapshot.stdout.size and not snapshot.stderr.size:
        if snapshot.task.state is State.PENDING or snapshot.task.could_not_start:
            return []
        # A program may hold its output back, so of one that still runs only the files are spoken of.
        return ["no output" if snapshot.task.state.final and not snapshot.processes else "0 bytes of output so far"]
    lines: list[str] = []
    for name, stream in (("stdout", snapshot.stdout), ("stderr", snapshot.stderr)):
        if stream.size:
            lines.append(f"{name}{_extent(stream)}:\n{(stream.tail or '').removesuffix(chr(10))}")
    return lines


def _extent(stream: Stream) -> str:
    # Bytes that are no text grow when they are shown, so that a small file may not fit either.
    if stream.size <= limits.TAIL_BYTES and len((stream.tail or "").encode()) <= limits.TAIL_BYTES - 4:
        return ""
    return f" (the end of {stream.size} bytes in {stream.path})"


def _capped() -> str:
    return f"wait_seconds counts as {number(limits.WAIT_MAX)} at most."


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _one_line(cmd: str) -> str:
    line = " ".join(cmd.split())
    return line if len(line) <= limits.CMD_IN_TABLE else line[: limits.CMD_IN_TABLE - 1] + "…"
