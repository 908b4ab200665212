"""Fault plans: what breaks, whose, when and how often. Declarative, checked, and the same again from the same seed.

seed: 7
faults:
  - {kind: kill, who: rank 1 of instance-0, point: rank.reduce, call: 20}
  - {kind: kill, who: any, time: 5, every: 5}
  - {kind: slow, who: storage *, point: actor.acquire, seconds: 0.2, call: 1, every: 10}
  - {kind: partition, who: rank 0, peer: "*-1", time: 8, seconds: 4}
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from hicache_ray.faultpoints import POINTS
from hicache_ray.faults.kinds import ANY, HANG, KINDS, RANK, ROLES, STORAGE, SUPERVISOR, points_of, usual_points

_NAMES = {
    RANK: re.compile(r"rank (\d+|\*|any)(?: of (\S+))?"),
    STORAGE: re.compile(r"storage (\d+|\*|any)()"),
}


class FaultPlanError(ValueError):
    """A fault plan that can't be carried out; the text says why, and what would work."""


class Identity(NamedTuple):
    """One process of a service: "rank 1 of instance-0", "storage 0", "supervisor"."""

    role: str
    number: int = 0
    group: str = ""

    def __str__(self) -> str:
        return str(Target(*self))

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
        for role, pattern in _NAMES.items():
            if match := pattern.fullmatch(str(text)):
                number, group = match.groups()
                return cls(role, int(number) if number.isdigit() else None, group or "", drawn=number == ANY)
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


MOMENTS = ("step", "call", "time")
_LEAST = {"step": 1, "call": 1, "time": 0, "every": 0, "times": 0, "seconds": 0, "probability": 0}
SHORTEST = 0.01
"""Least seconds between two times that a fault happens."""
_WHOLE = ("step", "call", "times")


@dataclass(frozen=True)
class PlannedFault:
    """One entry of a plan.

    Attributes:
        kind: one of `KINDS`.
        who: whose process it happens in.
        point: where: a name of `faultpoints.POINTS` or a pattern of such names. "": the usual place for the kind; for
            `kill` and `hang` at a `time`: from outside, wherever the process is then.
        peer: pattern of the other side's name, at points that have one.
        step: from the n-th step of a rank's process on (the first is 1), counted since the plan was installed in it.
        call: from the n-th time on that the point is reached in a process.
        time: from so many seconds after the plan's start on. One of the three; none: call 1.
        every: steps, calls or seconds between two times that it happens; None: as soon as it can again.
        times: how often in a process; 0: without end. Default 1, with `every` 0.
        seconds: how long it lasts: `slow`, `partition`; `hang` without it lasts until somebody ends the process.
        probability: of happening, each time it could.
    """

    kind: str
    who: Target
    point: str = ""
    peer: str = "*"
    step: int | None = None
    call: int | None = None
    time: float | None = None
    every: float | None = None
    times: int | None = None
    seconds: float | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FaultPlanError(f"kind is {self.kind!r}; use one of {', '.join(KINDS)}")
        self._check_numbers()
        given = [name for name in MOMENTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise FaultPlanError(f"{self.kind}: {' and '.join(given)} are given; give one of {', '.join(MOMENTS)}")
        if self.step is not None and self.who.role != RANK:
            raise FaultPlanError(f"{self.kind} of {self.who}: only ranks have steps; give call or time")
        if self.seconds is None and KINDS[self.kind].needs_seconds:
            raise FaultPlanError(f"{self.kind}: give seconds, how long it lasts")
        self._check_place()

    @property
    def outside(self) -> bool:
        """Whether it is done to the process from outside, wherever it is."""
        return KINDS[self.kind].signal is not None and self.time is not None and not self.point

    @property
    def limit(self) -> int:
        """How often it happens in a process; 0: without end."""
        if self.times is not None:
            return self.times
        return 1 if self.every is None else 0

    @property
    def places(self) -> list[str]:
        """The points where it can happen."""
        pattern = self.point or usual_points(self.kind, self.who.role)
        return [point for point in points_of(self.kind, self.who.role) if fnmatchcase(point, pattern)]

    def can_hit(self, one: Identity) -> bool:
        """Whether it is about that process, and can happen in it."""
        if not self.who.matches(one):
            return False
        return self.outside or not set(self.places).isdisjoint(points_of(self.kind, one.role))

    @classmethod
    def parse(cls, entry: Any) -> PlannedFault:
        """A fault from a mapping as in a plan's file.

        Raises:
            FaultPlanError: the entry is no fault; the text says why, and what would work.
        """
        if not isinstance(entry, Mapping):
            raise FaultPlanError(f"a fault is {entry!r:.80}; give a mapping with kind, who and when")
        names = [field.name for field in fields(cls)]
        unknown = [str(name) for name in entry if name not in names]
        if unknown:
            raise FaultPlanError(f"a fault has {', '.join(unknown)}; known are {', '.join(names)}")
        if "kind" not in entry:
            raise FaultPlanError(f"a fault without a kind; use one of {', '.join(KINDS)}")
        values = {name: value for name, value in entry.items() if name != "who"}
        return cls(**values, who=Target.parse(entry.get("who", ANY)))

    def as_mapping(self) -> dict[str, Any]:
        """The mapping that `parse` reads, without fields at their defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        given = {name: value for name, value in asdict(self).items() if value != defaults.get(name)}
        return {**given, "who": str(self.who)}

    def _check_numbers(self) -> None:
        for name in ("point", "peer"):
            if not isinstance(getattr(self, name), str):
                raise FaultPlanError(f"{self.kind}: {name} is {getattr(self, name)!r}; give a name or a pattern")
        if self.time is not None and 0 < (self.every or 0) < SHORTEST:
            raise FaultPlanError(f"{self.kind}: every is {self.every}; give at least {SHORTEST} s")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            whole = name in _WHOLE
            if value is not None and not _is_number(value, least, whole):
                what = "a whole number" if whole else "a number"
                raise FaultPlanError(f"{self.kind}: {name} is {value!r}; give {what} from {least}")
        if self.probability > 1:
            raise FaultPlanError(f"{self.kind}: probability is {self.probability}; give 0 to 1")

    def _check_place(self) -> None:
        if self.outside or self.places:
            return
        where = f"at {self.point!r}" if self.point else "anywhere"
        hint = "unknown point" if self.point and not any(fnmatchcase(p, self.point) for p in POINTS) else "no place"
        allowed = ", ".join(points_of(self.kind, self.who.role)) or "no point"
        raise FaultPlanError(f"{self.kind} of {self.who} can't happen {where} ({hint}); it can at {allowed}")


def _is_number(value: Any, least: int, whole: bool) -> bool:
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool) and least <= value < 1e9


class Action(NamedTuple):
    """Something done to a process from outside, `at` seconds after the start; `fault` is its number in the plan."""

    at: float
    kind: str
    who: Identity
    seconds: float | None
    fault: int


@dataclass(frozen=True)
class FaultPlan:
    """Faults, and the seed of everything in them that is drawn."""

    faults: tuple[PlannedFault, ...] = ()
    seed: int = 0

    @classmethod
    def parse(cls, document: Any) -> FaultPlan:
        """A plan from what a YAML or JSON file holds.

        Raises:
            FaultPlanError: see `PlannedFault.parse`; names the number of the fault.
        """
        if not isinstance(document, Mapping) or not isinstance(document.get("faults", []), Sequence):
            raise FaultPlanError("a fault plan is a mapping with 'faults', a list, and optionally 'seed'")
        unknown = sorted(set(document) - {"faults", "seed"})
        seed = document.get("seed", 0)
        if unknown or not isinstance(seed, int):
            raise FaultPlanError(f"a fault plan has {unknown or f'seed {seed!r}'}; it takes faults, and seed, a number")
        faults = []
        for number, entry in enumerate(document.get("faults", [])):
            try:
                faults.append(PlannedFault.parse(entry))
            except (FaultPlanError, TypeError) as error:
                raise FaultPlanError(f"fault {number}: {error}") from None
        return cls(tuple(faults), seed)

    @classmethod
    def load(cls, path: str | Path) -> FaultPlan:
        """A plan from a YAML or JSON file. FaultPlanError when it holds none, OSError when it can't be read."""
        import yaml

        try:
            document = yaml.safe_load(Path(path).read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise FaultPlanError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
        return cls.parse(document)

    @classmethod
    def random(
        cls,
        who: Sequence[Identity],
        seconds: float,
        *,
        seed: int,
        period: float = 5.0,
        kinds: Mapping[str, float] | None = None,
    ) -> FaultPlan:
        """A plan that breaks something every `period` seconds; the same again from the same arguments.

        Args:
            who: the processes there are.
            seconds: how long it goes on.
            kinds: weights of the kinds; None: kills only. What is hit is drawn by role first: ranks half of the time,
                storage actors 3 of 10 times, the supervisor the rest.
        """
        rng = random.Random(f"plan {seed}")
        weights = dict(kinds or {"kill": 1.0})
        count = int(seconds // period) if period > 0 else 0
        faults = [_drawn(rng, who, weights, round(period * (number + 1), 3)) for number in range(count)]
        return cls(tuple(faults), seed)

    def as_mapping(self) -> dict[str, Any]:
        """The mapping that `parse` reads."""
        return {"seed": self.seed, "faults": [fault.as_mapping() for fault in self.faults]}

    def to_yaml(self) -> str:
        """The plan as a file that `load` reads: one fault a line."""
        import json

        lines = [f"  - {json.dumps(fault.as_mapping())}" for fault in self.faults]
        return "\n".join([f"seed: {self.seed}", "faults:" if lines else "faults: []", *lines, ""])

    def resolved(self, who: Sequence[Identity], *, partial: bool = False) -> FaultPlan:
        """The plan with every "any" drawn among the processes that are there (one that comes again and again from
        outside is drawn each time it comes: `actions`).

        Args:
            who: the processes.
            partial: there are others elsewhere; faults of theirs stay as they are.

        Raises:
            FaultPlanError: a fault is about a process that is not there.
        """
        faults = []
        for number, fault in enumerate(self.faults):
            there = [one for one in who if fault.can_hit(one)]
            if not there and not partial:
                names = ", ".join(map(str, who))
                raise FaultPlanError(f"fault {number} is about {fault.who}, and there are {names or 'no processes'}")
            if there and fault.who.drawn and not fault.outside:
                fault = replace(fault, who=Target(*random.Random(f"{self.seed} {number}").choice(there)))
            faults.append(fault)
        return replace(self, faults=tuple(faults))

    def actions(self, who: Sequence[Identity], seconds: float) -> list[Action]:
        """The faults from outside within so many seconds, in order of time."""
        actions: list[Action] = []
        for number, fault in enumerate(self.faults):
            if fault.outside:
                actions += _actions_of(fault, number, who, seconds, random.Random(f"{self.seed} {number}"))
        return sorted(actions, key=lambda action: (action.at, action.fault))


def _actions_of(
    fault: PlannedFault, number: int, who: Iterable[Identity], seconds: float, rng: random.Random
) -> Iterable[Action]:
    there = [one for one in who if fault.can_hit(one)]
    at, done = fault.time or 0.0, 0
    while at <= seconds and there and (not fault.limit or done < fault.limit):
        done += 1
        if rng.random() < fault.probability:
            for one in [rng.choice(there)] if fault.who.drawn else there:
                yield Action(at, fault.kind, one, fault.seconds, number)
        if not fault.every:
            return
        at += fault.every


ROLE_WEIGHTS = {RANK: 0.5, STORAGE: 0.3, SUPERVISOR: 0.2}
DRAWN_SECONDS = (0.5, 4.0)
"""Least and most seconds that a drawn fault lasts."""


def _drawn(rng: random.Random, who: Sequence[Identity], kinds: Mapping[str, float], at: float) -> PlannedFault:
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if kind not in KINDS:
        raise FaultPlanError(f"kind is {kind!r}; use one of {', '.join(KINDS)}")
    roles = [role for role in ROLES if any(one.role == role for one in who) and points_of(kind, role)]
    if not roles:
        raise FaultPlanError(f"nobody here can have {kind}: there are {', '.join(map(str, who)) or 'no processes'}")
    role = rng.choices(roles, [ROLE_WEIGHTS[role] for role in roles])[0]
    one = rng.choice([one for one in who if one.role == role])
    seconds = round(rng.uniform(*DRAWN_SECONDS), 2)
    lasts = KINDS[kind].needs_seconds or (kind == HANG and role == SUPERVISOR)
    return PlannedFault(kind, Target(*one), time=at, seconds=seconds if lasts else None)
