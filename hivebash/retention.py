"""Which finished tasks are forgotten.

Rank 1: pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from hivebash import limits


@attrs.frozen
class Finished:
    """What retention needs to know of a finished task."""

    id: str
    finished_at: float
    """Seconds since the epoch."""


@attrs.frozen
class Retention:
    """Finished tasks beyond either limit are forgotten, the oldest first."""

    count: int = limits.KEEP_COUNT
    days: float = limits.KEEP_DAYS

    def forgettable(self, oldest: Sequence[Finished], kept: int, now: float) -> list[str]:
        """Of ``oldest``, the first of ``kept`` finished tasks in the order of their end, the ids to forget.

        The answer is a prefix of ``oldest``: a task is never forgotten before one that ended earlier.
        """
        surplus = max(0, kept - self.count)
        horizon = now - self.days * limits.DAYS
        ids: list[str] = []
        for index, finished in enumerate(oldest):
            if index >= surplus and finished.finished_at >= horizon:
                break
            ids.append(finished.id)
        return ids
