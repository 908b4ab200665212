"""Waits for the members of a storage pool to have moved pages to where they belong, and says how far they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hicache_ray.storage.channel import Deadline
from hicache_ray.storage.membership import Membership
from hicache_ray.storage.rebalance_plan import BalanceReport
from hicache_ray.storage.wire import Reply

POLL_SECONDS = 0.1


class Drained(NamedTuple):
    """What became of the pages of a member that left.

    Attributes:
        moved: pages it brought to other members; those that had them already are not counted.
        left: pages that members that should hold them did not get: there was no room, or no time. With replicas they
            may have other holders.
    """

    moved: int
    left: int


class Caller(Protocol):
    """Asks members of a pool, all at once."""

    def __call__(self, members: Sequence[str], method: str, *args: Any, seconds: float) -> Mapping[str, Any]:
        """Their answers; None for one that gave none."""


def reports_of(call: Caller, members: Sequence[str], seconds: float) -> dict[str, BalanceReport | None]:
    """How far each member is; None for one that is away."""
    answers = call(members, "balance", seconds=seconds)
    return {
        member: None if answer is None else BalanceReport.unpack(Reply.unpack(answer).payload)
        for member, answer in answers.items()
    }


class Balance:
    """One wait until all members have looked at all their pages, from now on, and left nothing to do."""

    def __init__(self, call: Caller) -> None:
        self._call = call
        self._numbers: dict[str, int] = {}
        self.reports: dict[str, BalanceReport | None] = {}

    def reached(self, membership: Membership, deadline: Deadline) -> bool:
        """Ask all members once."""
        new = [member for member in membership.everyone if member not in self._numbers]
        asked = self._call(new, "rebalance", seconds=deadline.remaining())
        self._numbers.update({member: number for member, number in asked.items() if number is not None})
        self.reports = reports_of(self._call, membership.everyone, deadline.remaining())
        return membership.settled and all(self._is_done(member, membership) for member in membership.everyone)

    def missing(self, membership: Membership) -> str:
        """What is not done, as text."""
        undone = [member for member in membership.everyone if not self._is_done(member, membership)]
        return "; ".join(_state(member, self.reports.get(member)) for member in undone) or "the pool is not settled"

    def _is_done(self, member: str, membership: Membership) -> bool:
        report, number = self.reports.get(member), self._numbers.get(member)
        if report is None or number is None:
            return False
        return report.clean and report.finished >= number and report.epoch == membership.epoch


def _state(member: str, report: BalanceReport | None) -> str:
    if report is None:
        return f"{member} is away"
    if report.away:
        return f"{member} can't reach {', '.join(report.away)}"
    return f"{member} has {report.to_move} pages to move"
