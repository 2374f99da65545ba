"""Which finished tasks are forgotten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from hivebash import limits
from hivebash.retention import Finished, Retention

RULES = settings(deadline=None, derandomize=True, database=None, max_examples=300)
NOW = 100 * limits.DAYS
DAYS_AGO = st.lists(st.integers(0, 12), max_size=20)
"""When tasks ended, in the order of their end; the wall clock may have been set back between."""


def finished(days_ago: list[int]) -> list[Finished]:
    return [Finished(str(index), NOW - days * limits.DAYS) for index, days in enumerate(days_ago)]


def forgotten(days_ago: list[int], **keep: float) -> list[str]:
    return Retention(**keep).forgettable(finished(days_ago), len(days_ago), NOW)  # type: ignore[arg-type]


class RetentionTests(SynchronousTestCase):
    """Finished tasks beyond either limit are forgotten, the oldest first."""

    def test_defaults(self) -> None:
        """A thousand tasks, for a week."""
        self.assertEqual((Retention().count, Retention().days), (1000, 7.0))

    @RULES
    @given(DAYS_AGO.map(lambda days: sorted(days, reverse=True)), st.integers(0, 20), st.integers(0, 12))
    def test_both_limits(self, days_ago: list[int], count: int, days: int) -> None:
        """What is left is exactly the newest ``count`` that are not too old."""
        ids = [one.id for one in finished(days_ago)]
        newest = ids[len(ids) - count :] if count < len(ids) else ids
        left = [task_id for task_id, ago in zip(ids, days_ago, strict=True) if task_id in newest and ago <= days]
        self.assertEqual(forgotten(days_ago, count=count, days=days), [one for one in ids if one not in left])

    @RULES
    @given(DAYS_AGO, st.integers(0, 20), st.integers(0, 12))
    def test_never_before_an_earlier_one(self, days_ago: list[int], count: int, days: int) -> None:
        """Whatever the wall clock did, those that ended first go first, and none that is within both limits."""
        gone = forgotten(days_ago, count=count, days=days)
        self.assertEqual(gone, [one.id for one in finished(days_ago)][: len(gone)])
        self.assertGreaterEqual(len(gone), len(days_ago) - count)
        self.assertTrue(all(ago > days for ago in days_ago[max(0, len(days_ago) - count) : len(gone)]))
        self.assertFalse(len(gone) < len(days_ago) and days_ago[len(gone)] > days)

    @RULES
    @given(DAYS_AGO, st.integers(0, 20), st.integers(0, 20))
    def test_in_batches(self, days_ago: list[int], count: int, batch: int) -> None:
        """Shown only the oldest, it forgets of these what it would forget of all."""
        keep, tasks = Retention(count, 5), finished(days_ago)
        of_all = keep.forgettable(tasks, len(tasks), NOW)
        self.assertEqual(keep.forgettable(tasks[:batch], len(tasks), NOW), of_all[:batch])

    def test_edge(self) -> None:
        """A task is kept to the end of its last day, and the last that the count allows is kept."""
        keep = Retention(2, 1)
        self.assertEqual(keep.forgettable([Finished("a", NOW - limits.DAYS)], 1, NOW), [])
        self.assertEqual(keep.forgettable([Finished("a", NOW - limits.DAYS - 1)], 1, NOW), ["a"])
        self.assertEqual(forgotten([0, 0], count=2), [])
        self.assertEqual(forgotten([0, 0, 0], count=2), ["0"])
