"""What a replay found, under names that stay: the JSON of `hicache-ray replay --json` is `ReplayReport.as_dict()`.

Every number was measured during the run. What a mode does not have (bytes, without memory) is empty, not zero.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

POOL_NAMES = {"device": "l1", "host": "l2"}
"""Names of the ranks' pools in reports."""

STEP_PARTS = ("total", "message", "reduction", "work", "engine")
"""Parts of a step's time: `total` is what the caller waited for the step."""


@dataclass
class TokenCounts:
    """Where the prompts' tokens came from, summed over requests as they are scheduled.

    Attributes:
        requests: prompts served.
        blocks: pages (index only: trace blocks) their tokens lie in, a part of one counted as one.
        hit_blocks: of those, found in any tier.
        tokens: prompt tokens; the four below add up to it.
        tokens_l1, tokens_l2, tokens_l3: found in that tier, and really used.
        tokens_computed: found nowhere.
    """

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    tokens_l1: int = 0
    tokens_l2: int = 0
    tokens_l3: int = 0
    tokens_computed: int = 0


class StepTimes:
    """Step times in microseconds, by part, of every step of a run."""

    def __init__(self) -> None:
        self._samples: dict[str, array[float]] = {}

    def add(self, timings_us: Mapping[str, float]) -> None:
        """Notes one step's parts; what it does not name is left out of that part's percentiles."""
        for part in STEP_PARTS:
            if part in timings_us:
                self._samples.setdefault(part, array("f")).append(timings_us[part])

    def percentiles(self) -> dict[str, dict[str, float]]:
        """p50 and p99 of each part that was measured."""
        return {
            part: {
                "p50": round(float(np.percentile(samples, 50)), 1),
                "p99": round(float(np.percentile(samples, 99)), 1),
            }
            for part, samples in self._samples.items()
        }


@dataclass(frozen=True)
class ReplayReport:
    """The outcome of one replay.

    Attributes:
        workload: what was replayed.
        mode: "index", "local" or "ray".
        settings: the options of the run by name.
        counts: tokens by source.
        seconds: wall time of the replay without start and stop.
        pages_verified, pages_mismatched: cached pages compared in every layer before use, and those that held anything
            else than they must; summed over ranks.
        bytes: bytes moved by path ("l1_to_l2", ...), summed over ranks.
        step_us: p50 and p99 of a step by part.
        ledger: pages of each pool, summed over ranks.
        unbalanced: a sentence for each rank and pool whose ledger did not add up.
        digest_checks: steps in which the tree digests of several ranks were compared, and found equal.
        restarts: times that a group was rebuilt; its requests in flight were sent again and count again.
        evictions: pages evicted or dropped, by kind, of one rank of each instance.
        storage: counters of the L3 backends, summed over ranks.
    """

    workload: str
    mode: str
    settings: dict[str, Any]
    counts: TokenCounts
    seconds: float
    pages_verified: int = 0
    pages_mismatched: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    step_us: dict[str, dict[str, float]] = field(default_factory=dict)
    ledger: dict[str, dict[str, int]] = field(default_factory=dict)
    unbalanced: tuple[str, ...] = ()
    digest_checks: int = 0
    restarts: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    storage: dict[str, float] = field(default_factory=dict)

    @property
    def block_hit_rate(self) -> float:
        """Hit blocks of all blocks, 0 to 1."""
        return _ratio(self.counts.hit_blocks, self.counts.blocks)

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens that were not computed, 0 to 1."""
        return _ratio(self.counts.tokens - self.counts.tokens_computed, self.counts.tokens)

    @property
    def faults(self) -> tuple[str, ...]:
        """A sentence for each thing that must never be: a wrong page, a pool that does not balance."""
        wrong = self.pages_mismatched
        mismatches = (f"{wrong} cached pages held other bytes than they must",) if wrong else ()
        return mismatches + self.unbalanced

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        counts = self.counts
        return {
            "workload": self.workload,
            "mode": self.mode,
            "settings": self.settings,
            "seconds": round(self.seconds, 3),
            "requests": counts.requests,
            "blocks": counts.blocks,
            "hit_blocks": counts.hit_blocks,
            "block_hit_rate": round(self.block_hit_rate, 6),
            "tokens": counts.tokens,
            "token_hit_rate": round(self.token_hit_rate, 6),
            "tokens_l1": counts.tokens_l1,
            "tokens_l2": counts.tokens_l2,
            "tokens_l3": counts.tokens_l3,
            "tokens_computed": counts.tokens_computed,
            "pages_verified": self.pages_verified,
            "pages_mismatched": self.pages_mismatched,
            "bytes": self.bytes,
            "step_us": self.step_us,
            "ledger": self.ledger,
            "ledger_balanced": not self.unbalanced,
            "digest_checks": self.digest_checks,
            "restarts": self.restarts,
            "evictions": self.evictions,
            "storage": self.storage,
        }


def add_up(parts: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """Sums of counters by name, in the order of first appearance."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    return total


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
