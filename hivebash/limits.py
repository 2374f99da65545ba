"""Every number of the daemon: its name, unit, default, and why it is that.

Rank 0: no I/O, no Twisted.
"""

from __future__ import annotations

from typing import Final

SECONDS: Final = 1.0
DAYS: Final = 86_400 * SECONDS
KIB: Final = 1024
MIB: Final = 1024 * KIB

LISTEN: Final = "tcp:8712:interface=127.0.0.1"
"""Endpoint string: loopback only, on a port of its own."""

MAX_RUNNING: Final = 64
"""Tasks. More than an agent starts on purpose, fewer than what exhausts a container's process slots."""

KILL_GRACE: Final = 5 * SECONDS
"""Between a polite signal and SIGKILL: most programs clean up within it, and nobody waits long for the rest."""

KEEP_COUNT: Final = 1000
"""Finished tasks. A day of a busy agent."""

KEEP_DAYS: Final = 7.0
"""Days. A week's work stays readable."""

PRUNE_INTERVAL: Final = 3600 * SECONDS
"""Between two looks for tasks that grew older than KEEP_DAYS; the count is looked at after each end."""

PRUNE_PAUSE: Final = 0.1 * SECONDS
"""From an end until the count is looked at: a burst of ends costs one look."""

PRUNE_BATCH: Final = 200
"""Tasks forgotten in one turn of the reactor: two unlinks each, so a few milliseconds."""

WAIT_DEFAULT: Final = 3 * SECONDS
"""``wait_seconds`` of run when it is not given: most commands are over by then."""

WAIT_MAX: Final = 30 * SECONDS
"""The longest inline wait. Below the shortest request limit that clients are known to have (60 s)."""

PROGRESS_INTERVAL: Final = 1 * SECONDS
"""Between two progress notifications during a wait."""

TAIL_BYTES: Final = 4 * KIB
"""Of each stream in an answer, UTF-8: what an agent can read without losing its context to it."""

TAIL_WINDOW: Final = 64 * KIB
"""Read from the end of a file to make a tail: progress bars write many times what they show."""

ID_LENGTH: Final = 8
"""Hex digits of a fresh id: short to read and write, and a collision is looked for."""

CMD_SHOWN: Final = 200
"""Characters of the command in an answer."""

CMD_IN_TABLE: Final = 80
"""Characters of the command in a line of the table."""

ARGUMENT_MAX: Final = 131_072
"""Bytes: Linux refuses one argument of this length or more (MAX_ARG_STRLEN, execve(2)), its final NUL counted."""

REQUEST_BODY: Final = 4 * MIB
"""Bytes of one POST: a command of a few megabytes passes, a mistake does not fill the memory."""

TABLE_ACTIVE: Final = 50
"""Pending and running tasks in the table of ``status()``."""

TABLE_FINISHED: Final = 10
"""Newest finished tasks in the table of ``status()``."""

HAUNTED_MOST: Final = 64
"""Finished tasks with processes that are remembered until it is looked who still has any."""

STORE_RETRY: Final = 1 * SECONDS
"""Between two tries to write an end down while the disk refuses it."""

STORE_PATIENCE: Final = 0.1 * SECONDS
"""How long a statement waits for somebody else's lock on the database. Nothing else happens meanwhile."""

STOP_MARGIN: Final = 1 * SECONDS
"""On top of the kill grace until a stopping daemon gives up on a process that SIGKILL does not end."""

ANSWER_MARGIN: Final = 0.5 * SECONDS
"""A stopping daemon lets answers that are ready be written for this long."""

LOOK_FIRST: Final = 0.02 * SECONDS
"""Until the first look whether signalled processes are gone; each next pause is twice as long, up to LOOK_MAX."""

LOOK_MAX: Final = 0.5 * SECONDS
"""The longest pause between two such looks."""

LOOK_KILL: Final = 0.05 * SECONDS
"""The longest pause once SIGKILL is being sent: what outlives it forks, and each look is a chance."""

EMPTY_LOOKS: Final = 3
"""So many looks one after the other have to find nothing until a task's processes count as gone."""

KILL_ROUNDS: Final = 8
"""Looks for processes that were forked during SIGKILL, in one turn of the reactor."""

KILL_GIVE_UP: Final = 30 * SECONDS
"""After this long with SIGKILL a process waits in the kernel, and no further signal changes that."""

TIMEOUT_MAX: Final = 10 * 365 * DAYS
"""A longer ``timeout_secs`` is no limit: timers and formats need not bear every float."""

IDLE_CONNECTION: Final = 300 * SECONDS
"""A kept connection without a request. Longer than clients keep theirs, so that none sends into one that closes."""

YOUNG: Final = 0.5 * SECONDS
"""The age of a leader up to which the pids given since its start are surely less than a whole round of them."""

FEW_PIDS: Final = 64
"""So many pids are looked at one by one; above that the list of all is the shorter way."""

RETRY_FIRST: Final = 0.2 * SECONDS
"""From the first failure at the harness until the next try at the latest; each next pause is twice as long."""

RETRY_MOST: Final = 30 * SECONDS
"""The longest pause between two tries: a harness that comes back unseen is told within it."""

HARNESS_PATIENCE: Final = 10 * SECONDS
"""For one request to the harness, from the connection to the answer's last byte."""

HARNESS_ANSWER: Final = 64 * KIB
"""Bytes of the harness's answer: it has a number in it."""

SENDS_AT_ONCE: Final = 8
"""Requests to the harness under way: a burst of ends goes out quickly and does not delay answers to the agent."""

RECEIPT_PATIENCE: Final = 10 * SECONDS
"""An answer that its client did not take for this long was not told."""

SEND_MARGIN: Final = 0.4 * SECONDS
"""A stopping daemon lets requests to the harness come to their end for this long."""

TURN_PAUSE: Final = 0.1 * SECONDS
"""From a change until the turn it sets off: tasks that end together are told together."""

TURN_LIMIT: Final = 15 * 60 * SECONDS
"""For one turn: an agent's work on a todo, and yet one that hangs must not end all turns."""

TURN_TRIES: Final = 3
"""Starts of one turn, if the daemon dies during it: it may be the turn that ends the daemon."""

TODO_TEXT: Final = 16 * KIB
"""Characters of a todo's summary or detail that the built-in harness takes."""
