"""Drives groups through a workload, request by request: admit, poll, schedule, finish, one step an iteration.

A group is what has `step`, `stats` and `check_integrity`: `actors.TPGroup` over Ray, `testing.LocalGroup` in process.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hicache_ray.actors.errors import GroupRestarted
from hicache_ray.hashing import token_bytes
from hicache_ray.rank.step import Admit, Admitted, Finish, Finished, Polled, Scheduled
from hicache_ray.replay.report import StepTimes, TokenCounts
from hicache_ray.replay.requests import ReplayRequest

logger = logging.getLogger("hicache_ray.replay")

LOOK_AHEAD = 64
"""Requests of one instance that are drawn from the workload before they can be admitted."""

IDLE_SECONDS = 0.001
"""Pause after a step in which nothing moved, so that the transfers it waits for get the processor."""

PAGE_COUNTERS = ("pages_verified", "pages_mismatched", "pages_computed")
"""What every rank's engine counts in each step."""

Progress = Callable[[int], None]
"""Called with the number of requests finished so far."""


class ReplayStalled(RuntimeError):
    """No request came on for too long; the text names what the instance was waiting for."""


class StepResult(Protocol):
    """What a group answers to a step (`actors.group.GroupAnswer`)."""

    @property
    def admitted(self) -> tuple[Admitted, ...]:
        """Answers to the admits."""

    @property
    def polled(self) -> tuple[Polled, ...]:
        """Answers to the polls."""

    @property
    def scheduled(self) -> tuple[Scheduled, ...]:
        """Answers to the schedules."""

    @property
    def finished(self) -> tuple[Finished, ...]:
        """Answers to the finishes."""

    @property
    def engine(self) -> tuple[dict[str, Any], ...]:
        """Counters of the ranks' engines, by rank."""

    @property
    def timings_us(self) -> dict[str, float]:
        """Microseconds by part of the step."""


class SteppedGroup(Protocol):
    """A group of ranks, as the driver uses it."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def step(
        self,
        *,
        finishes: Sequence[Finish] = (),
        admits: Sequence[Admit] = (),
        polls: Sequence[str] = (),
        schedules: Sequence[str] = (),
    ) -> StepResult:
        """One scheduling iteration on all ranks."""

    def stats(self) -> list[dict[str, Any]]:
        """Counters by rank."""

    def check_integrity(self) -> None:
        """Raises AssertionError when a rank's tree, allocators or ledger don't add up."""


@dataclass(frozen=True)
class DriveSettings:
    """How requests are sent.

    Attributes:
        page_size: tokens a page, for counting blocks.
        concurrency: most requests of an instance that run in one step; as many more wait for L3 meanwhile.
        stall_seconds: how long an instance may go without any request coming on.
    """

    page_size: int
    concurrency: int = 4
    stall_seconds: float = 60.0


@dataclass
class Measured:
    """What the steps of a run added up to."""

    counts: TokenCounts = field(default_factory=TokenCounts)
    times: StepTimes = field(default_factory=StepTimes)
    engine: dict[str, int] = field(default_factory=dict)
    digest_checks: int = 0
    steps: int = 0
    restarts: int = 0

    def add(self, answer: StepResult, requests: Mapping[str, ReplayRequest], ranks: int, page_size: int) -> None:
        """Notes one step's answer."""
        self.steps += 1
        self.digest_checks += ranks > 1
        self.times.add(answer.timings_us)
        for counters in answer.engine:
            for name in PAGE_COUNTERS:
                self.engine[name] = self.engine.get(name, 0) + counters[name]
        for row in answer.scheduled:
            if row.ok:
                self._add_scheduled(row, len(requests[row.rid].prompt), page_size)

    def _add_scheduled(self, row: Scheduled, tokens: int, page_size: int) -> None:
        counts = self.counts
        counts.requests += 1
        counts.blocks += -(-tokens // page_size)
        counts.hit_blocks += (row.device_tokens + row.host_tokens + row.storage_tokens) // page_size
        counts.tokens += tokens
        counts.tokens_l1 += row.device_tokens
        counts.tokens_l2 += row.host_tokens
        counts.tokens_l3 += row.storage_tokens
        counts.tokens_computed += row.computed_tokens


class _Instance:
    """One group and its requests: waiting (admitted), ready (may be scheduled), running (finish in the next step)."""

    def __init__(self, group: SteppedGroup, settings: DriveSettings) -> None:
        self.group = group
        self.settings = settings
        self.queue: deque[ReplayRequest] = deque()
        self.requests: dict[str, ReplayRequest] = {}
        self.waiting: list[str] = []
        self.ready: list[str] = []
        self.running: list[str] = []
        self.blocked = False
        self.moved_at = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether it has any request left."""
        return bool(self.queue or self.requests)

    def advance(self, done: set[str], measured: Measured) -> bool:
        """One step; whether any request came on. `done` gains the requests that finished."""
        finishes = [self._finish(rid) for rid in self.running]
        admits = list(self._admissible(done))
        # While the first in line finds no room nobody overtakes it: what runs ends, and then it fits.
        schedules = self.ready[: 1 if self.blocked else self.settings.concurrency]
        try:
            answer = self.group.step(
                finishes=finishes,
                admits=[_admit(request) for request in admits],
                polls=self.waiting[: self.settings.concurrency],
                schedules=schedules,
            )
        except GroupRestarted as restarted:
            self._send_again(restarted)
            measured.restarts += 1
            return True
        measured.add(answer, self.requests, self.group.size, self.settings.page_size)
        self._take_finished(answer, done)
        self._take_scheduled(answer)
        ready = [row.rid for row in answer.polled if row.ready]
        self.waiting = [rid for rid in self.waiting if rid not in ready] + [request.rid for request in admits]
        self.ready += ready
        moved = bool(finishes or admits or ready or self.running)
        self._watch(moved)
        return moved

    def _finish(self, rid: str) -> Finish:
        # The KV of an answer's last token is never computed: nothing was generated after it.
        return Finish(rid, token_bytes(self.requests[rid].output[:-1]))

    def _admissible(self, done: set[str]) -> Iterator[ReplayRequest]:
        """Takes from the queue what may enter now: there is a place, and the answer it builds on has been given."""
        places = 2 * self.settings.concurrency - len(self.requests) + len(self.running)
        later: list[ReplayRequest] = []
        while places > 0 and self.queue:
            request = self.queue.popleft()
            if request.after is not None and request.after not in done:
                later.append(request)
                continue
            places -= 1
            self.requests[request.rid] = request
            yield request
        self.queue.extendleft(reversed(later))

    def _take_finished(self, answer: StepResult, done: set[str]) -> None:
        for row in answer.finished:
            done.add(row.rid)
            del self.requests[row.rid]

    def _take_scheduled(self, answer: StepResult) -> None:
        self.running = [row.rid for row in answer.scheduled if row.ok]
        self.blocked = any(not row.ok for row in answer.scheduled)
        self.ready = [rid for rid in self.ready if rid not in self.running]

    def _send_again(self, restarted: GroupRestarted) -> None:
        """Puts the requests that were in flight when a rank died back to the head of the queue."""
        logger.warning("%d requests are sent again: %s", len(self.requests), restarted)
        self.queue.extendleft(reversed(self.requests.values()))
        self.requests.clear()
        self.waiting, self.ready, self.running, self.blocked = [], [], [], False
        self.moved_at = time.monotonic()

    def _watch(self, moved: bool) -> None:
        now = time.monotonic()
        if moved:
            self.moved_at = now
        elif self.busy and now - self.moved_at > self.settings.stall_seconds:
            raise ReplayStalled(
                f"no request came on for {self.settings.stall_seconds:g} s: {len(self.waiting)} wait for L3, "
                f"{len(self.ready)} for room in L1, {len(self.queue)} for others to end"
            )


def drive(
    groups: Sequence[SteppedGroup],
    requests: Iterator[ReplayRequest],
    settings: DriveSettings,
    progress: Progress | None = None,
) -> Measured:
    """Sends every request to one of the groups, round robin, until all have finished.

    Raises:
        ReplayStalled: nothing came on for `settings.stall_seconds`.
        RequestError: a request can never run on its group.
    """
    instances = [_Instance(group, settings) for group in groups]
    measured, done = Measured(), set[str]()
    source = enumerate(requests)
    exhausted = False
    while not exhausted or any(instance.busy for instance in instances):
        exhausted = exhausted or _deal(source, instances)
        # One with nothing to do is stepped too: its last writes still have to reach L3, where the others find them.
        moved = [instance.advance(done, measured) for instance in instances]
        if progress is not None:
            progress(len(done))
        if not any(moved):
            time.sleep(IDLE_SECONDS)
    return measured


def settle(groups: Sequence[SteppedGroup], timeout: float = 60.0) -> None:
    """Steps groups without requests until their engines say that no rank has a transfer in flight.

    Raises:
        ReplayStalled: `timeout` seconds were not enough.
    """
    deadline = time.monotonic() + timeout
    for group in groups:
        while True:
            if all(rank["idle"] for rank in group.step().engine):
                break
            if time.monotonic() > deadline:
                raise ReplayStalled(f"transfers did not end within {timeout:g} s after the last request")
            time.sleep(10 * IDLE_SECONDS)


def _deal(source: Iterator[tuple[int, ReplayRequest]], instances: Sequence[_Instance]) -> bool:
    """Gives requests out in order until every instance has enough to look at; True when there are no more."""
    while any(len(instance.queue) < instance.settings.concurrency for instance in instances):
        if any(len(instance.queue) >= LOOK_AHEAD for instance in instances):
            return False
        item = next(source, None)
        if item is None:
            return True
        number, request = item
        instances[number % len(instances)].queue.append(request)
    return False


def _admit(request: ReplayRequest) -> Admit:
    return Admit(
        rid=request.rid,
        tokens=token_bytes(request.prompt),
        namespace=request.namespace,
        priority=request.priority,
        max_new_tokens=max(0, len(request.output) - 1),
    )
