"""A group's answer to a step, from its ranks' answers: the agreed part once, the ranks' own parts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hicache_ray.protocol import (
    AGREED_FIELDS,
    Admitted,
    Chunked,
    Finished,
    Peeked,
    Polled,
    Scheduled,
    StepAnswer,
)


@dataclass(frozen=True)
class GroupAnswer:
    """What a group answered to one step; `controlled` and `engine` by rank.

    `timings_us`: `total` (as the caller saw it); `reduction`, `work`, `engine` of the slowest rank; `message` is the
    rest: encoding, travel, decoding.
    """

    step: int
    digest: int
    admitted: tuple[Admitted, ...]
    polled: tuple[Polled, ...]
    scheduled: tuple[Scheduled, ...]
    finished: tuple[Finished, ...]
    chunked: tuple[Chunked, ...]
    peeked: tuple[Peeked, ...]
    controlled: tuple[tuple[Any, ...], ...]
    engine: tuple[dict[str, Any], ...]
    timings_us: dict[str, float]


def differences(one: StepAnswer, other: StepAnswer) -> list[str]:
    """Names of the fields in which two ranks differ though they must agree."""
    pairs = zip(AGREED_FIELDS, one.agreed(), other.agreed(), strict=True)
    return [name for name, a, b in pairs if a != b]


def merge(answers: Sequence[StepAnswer], timings_us: dict[str, float]) -> GroupAnswer:
    """The group's answer; the ranks' answers must agree."""
    first = answers[0]
    return GroupAnswer(
        **{name: getattr(first, name) for name in AGREED_FIELDS},
        controlled=tuple(answer.controlled for answer in answers),
        engine=tuple(answer.engine for answer in answers),
        timings_us=timings_us,
    )
