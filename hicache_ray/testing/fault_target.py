"""Whom a fault is about: ranks, storage actors, the supervisor, by number, all of them, or one that is drawn."""

from __future__ import annotations

import re
from typing import NamedTuple

from hicache_ray.testing.fault_kinds import ANY, RANK, STORAGE, SUPERVISOR

_RANK = re.compile(r"rank (\d+|\*|any)(?: of (\S+))?")
_STORAGE = re.compile(r"storage (\d+|\*|any)")


class FaultPlanError(ValueError):
    """A fault plan that can't be carried out; the text says what is wrong and what would do."""


class Identity(NamedTuple):
    """One process of a service: "rank 1 of instance-0", "storage 0", "supervisor"."""

    role: str
    number: int = 0
    group: str = ""

    def __str__(self) -> str:
        if self.role == SUPERVISOR:
            return self.role
        return f"{self.role} {self.number}" + (f" of {self.group}" if self.group else "")

    @classmethod
    def parse(cls, text: str) -> Identity:
        """The process of that name; FaultPlanError for anything else."""
        target = Target.parse(text)
        if target.number is None:
            raise FaultPlanError(f"{text!r} is more than one process; give a number")
        return cls(target.role, target.number, target.group)


class Target(NamedTuple):
    """Whom a fault is about.

    Attributes:
        role: "rank", "storage", "supervisor" or "any".
        number: None: all of the role.
        group: of ranks; "": every group.
        drawn: one of those it fits, drawn by the plan's seed.
    """

    role: str
    number: int | None = None
    group: str = ""
    drawn: bool = False

    @classmethod
    def parse(cls, text: object) -> Target:
        """Reads "rank 1 of instance-0", "rank 1", "rank *", "rank any", "storage 0", "supervisor", "any".

        Raises:
            FaultPlanError: anything else.
        """
        if text == ANY:
            return cls(ANY, drawn=True)
        if text == SUPERVISOR:
            return cls(SUPERVISOR, 0)
        for role, pattern in ((RANK, _RANK), (STORAGE, _STORAGE)):
            match = pattern.fullmatch(str(text))
            if match:
                number, group = match[1], (match[2] if role == RANK else None) or ""
                return cls(role, int(number) if number.isdigit() else None, group, number == ANY)
        raise FaultPlanError(
            f"who is {text!r}; use 'rank 1 of instance-0', 'rank 1', 'rank *', 'rank any', 'storage 0', 'storage *', "
            "'supervisor' or 'any' (which is one of all, drawn)"
        )

    def __str__(self) -> str:
        if self.role in (ANY, SUPERVISOR):
            return self.role
        number = ANY if self.drawn else "*" if self.number is None else self.number
        return f"{self.role} {number}" + (f" of {self.group}" if self.group else "")

    def matches(self, one: Identity) -> bool:
        """Whether the process is among those it fits."""
        return (
            self.role in (ANY, one.role)
            and self.number in (None, one.number)
            and (not self.group or self.group == one.group)
        )
