"""What a run under faults came to: figures, the timeline, and a sentence for each thing that is wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache_ray.faults.client import Outcomes
from hicache_ray.faults.plan import FaultPlan
from hicache_ray.faults.watch import FaultRecord


@dataclass(frozen=True)
class Audit:
    """What was found when everything was at rest again.

    Attributes:
        leaked: pages of L1, L2 and L3 that nobody owns, or that somebody still holds.
        divergences: groups whose ranks have different trees and did not say so.
        faults: a sentence for each thing that does not add up.
        served: requests served after the last fault, when nothing was to fail any more.
    """

    leaked: int = 0
    divergences: int = 0
    faults: tuple[str, ...] = ()
    served: int = 0


@dataclass(frozen=True)
class ChaosReport:
    """A run under faults.

    Attributes:
        plan: with which it is repeated.
        records: faults in order of time.
        outcomes: of each client.
        audit: at the end.
        began: seconds since the epoch.
        seconds: that the plan went on.
        heal_limit: seconds within which everything has to be healed.
        unended: requests that neither were served nor failed.
        settings: of the run, by name.
    """

    plan: FaultPlan
    records: Sequence[FaultRecord]
    outcomes: Sequence[Outcomes]
    audit: Audit
    began: float
    seconds: float
    heal_limit: float
    unended: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def heals(self) -> list[float]:
        """Seconds from each fault to its end."""
        return [record.heal_seconds for record in self.records if record.heal_seconds is not None]

    @property
    def failed(self) -> Counter[str]:
        """Requests given up, by error."""
        return sum((outcome.failed for outcome in self.outcomes), Counter())

    @property
    def wrongs(self) -> list[str]:
        """A sentence for each thing that is wrong; empty when the service held what it promises."""
        return list(self._wrongs())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": not self.wrongs,
            "wrong": self.wrongs,
            "seed": self.plan.seed,
            "seconds": round(self.seconds, 1),
            "settings": self.settings,
            "faults": len(self.records),
            "faults_by_kind": dict(Counter(f"{record.kind} {record.who.role}" for record in self.records)),
            "requests_ok": self._sum("served"),
            "requests_failed": dict(self.failed),
            "requests_again": self._sum("again"),
            "requests_ok_at_the_end": self.audit.served,
            "wrong_pages": self._sum("wrong"),
            "leaked_slots": self.audit.leaked,
            "hung_steps": self._sum("hung"),
            "unnoticed_divergences": self.audit.divergences,
            "heal_s": _spread(self.heals),
            "notice_s": _spread([record.noticed - record.at for record in self.records if record.noticed is not None]),
            "heal_s_by_role": self._by_role(),
            "pages_verified": self._sum("verified"),
            "steps": self._sum("steps"),
            "restarts": self._sum("restarts"),
            "longest_step_s": round(max((outcome.longest_step for outcome in self.outcomes), default=0.0), 3),
            "hit_rate": round(self._hit_rate(), 3),
            "timeline": [self._row(record) for record in self.records],
            "plan": self.plan.as_mapping(),
        }

    def _wrongs(self) -> Iterator[str]:
        if self._sum("wrong"):
            yield f"{self._sum('wrong')} pages with wrong bytes were served"
        if self.audit.leaked:
            yield f"{self.audit.leaked} slots leaked"
        if self._sum("hung"):
            yield f"{self._sum('hung')} steps hung"
        if self.audit.divergences:
            yield f"{self.audit.divergences} groups have ranks with different trees, unnoticed"
        if self.unended:
            yield f"{self.unended} requests neither were served nor failed"
        for outcome in self.outcomes:
            yield from (f"{count} x an error without a name of ours: {text}" for text, count in outcome.unnamed.items())
        for record in self.records:
            if record.healed is None:
                yield f"{record.kind} of {record.who} at {record.at - self.began:.1f} s was never healed"
        late = [heal for heal in self.heals if heal > self.heal_limit]
        if late:
            yield f"{len(late)} heals took more than {self.heal_limit:g} s, the longest {max(late):.1f} s"
        yield from self.audit.faults

    def _row(self, record: FaultRecord) -> dict[str, Any]:
        def after(moment: float | None) -> float | None:
            return None if moment is None else round(moment - record.at, 3)

        return {
            "at": round(record.at - self.began, 3),
            "kind": record.kind,
            "who": str(record.who),
            "point": record.point,
            "noticed_after": after(record.noticed),
            "healed_after": after(record.healed),
        }

    def _by_role(self) -> dict[str, dict[str, float]]:
        found: dict[str, list[float]] = {}
        for record in self.records:
            if record.heal_seconds is not None:
                found.setdefault(f"{record.kind} {record.who.role}", []).append(record.heal_seconds)
        return {name: {"count": len(heals), **_spread(heals)} for name, heals in sorted(found.items())}

    def _hit_rate(self) -> float:
        counts = [outcome.counts for outcome in self.outcomes]
        tokens = sum(count.tokens for count in counts)
        return 1 - sum(count.tokens_computed for count in counts) / tokens if tokens else 0.0

    def _sum(self, name: str) -> int:
        return sum(getattr(outcome, name) for outcome in self.outcomes)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies (nearest rank); 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"max": round(max(seconds, default=0.0), 3), "p50": round(percentile(seconds, 0.5), 3)}
