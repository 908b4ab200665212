"""Serves requests on groups: admit, poll, schedule, finish, one step an iteration.

`drive` serves a workload on several groups at once. A `Driver` serves one group, for whoever needs a loop of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hicache_ray.deadline import wait_until
from hicache_ray.hashing import token_bytes
from hicache_ray.rank.group import Group, GroupAnswer, GroupRestarted
from hicache_ray.rank.step import Admit, Finish, Scheduled
from hicache_ray.replay.report import OnProgress, StepTimes, TokenCounts
from hicache_ray.replay.requests import ReplayRequest

logger = logging.getLogger("hicache_ray.replay")

ENGINE = "hicache_ray.replay.engine:SyntheticEngine"
"""The engine of a group whose cached pages are to be verified."""

MOST_AHEAD = 64
"""Most requests of one lane that are drawn before they can be sent."""

IDLE_SECONDS = 0.001
"""Pause after a step in which nothing moved, so that the transfers it waits for get the processor."""


class Stalled(TimeoutError):
    """No request came on for too long. The text names what the group was waiting for."""


class RequestSource:
    """Requests in order of arrival, dealt out in turn to lanes. Thread-safe.

    Args:
        requests: may be endless. A request that builds on another's answer is given out when that one has ended.
        lanes: every lane gets every so-manieth request. Drivers may share a lane.
        ahead: requests of a lane that are looked at for one that can be given out.
    """

    def __init__(self, requests: Iterable[ReplayRequest], lanes: int = 1, ahead: int = MOST_AHEAD) -> None:
        self._requests = iter(requests)
        self._ahead = ahead
        self._lanes: list[deque[ReplayRequest]] = [deque() for _ in range(lanes)]
        self._drawn = 0
        self._exhausted = False
        self._ended: set[str] = set()
        self._lock = threading.Lock()

    def take(self, lane: int = 0) -> ReplayRequest | None:
        """The lane's next request that can be sent now; None when there is none now."""
        with self._lock:
            waiting = self._lanes[lane]
            while len(waiting) < self._ahead and self._draw():
                pass
            for place, request in enumerate(waiting):
                if request.after is None or request.after in self._ended:
                    del waiting[place]
                    return request
            return None

    def end(self, rid: str) -> None:
        """A request has ended, one way or the other: requests that build on it may be sent."""
        with self._lock:
            self._ended.add(rid)

    def empty(self, lane: int = 0) -> bool:
        """Whether the lane will never get another request."""
        with self._lock:
            return self._exhausted and not self._lanes[lane]

    def waiting(self, lane: int = 0) -> int:
        """Requests of the lane that were drawn and not given out."""
        return len(self._lanes[lane])

    def _draw(self) -> bool:
        """Deals one more request. Returns False when there is none, or when a lane holds as many as it may."""
        if self._exhausted or max(map(len, self._lanes)) >= MOST_AHEAD:
            return False
        request = next(self._requests, None)
        if request is None:
            self._exhausted = True
            return False
        self._lanes[self._drawn % len(self._lanes)].append(request)
        self._drawn += 1
        return True


@dataclass(frozen=True)
class DriveSettings:
    """How requests are sent.

    Attributes:
        page_size: tokens a page, for counting blocks.
        concurrency: most requests of a group that run in one step.
        in_flight: most requests of a group that go on after a step; None: twice as many, half of them waiting for L3.
        attempts: how often a request is sent, should its group be rebuilt meanwhile; None: until it is served.
        stall_seconds: how long a group may go without any of its requests coming on.
    """

    page_size: int = 1
    concurrency: int = 4
    in_flight: int | None = None
    attempts: int | None = None
    stall_seconds: float = 60.0


@dataclass
class Tally:
    """What the steps of a run added up to.

    Attributes:
        served: requests served to their end.
        failed: requests given up, by the name of the error.
        again: times that a request was sent again.
        steps, restarts: steps answered; steps that ended in a rebuilt or broken group.
        counts: where the tokens of scheduled prompts came from.
        times: of the answered steps.
        verified, wrong: cached pages whose bytes were checked, and pages among them with wrong bytes.
    """

    served: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    again: int = 0
    steps: int = 0
    restarts: int = 0
    counts: TokenCounts = field(default_factory=TokenCounts)
    times: StepTimes = field(default_factory=StepTimes)
    verified: int = 0
    wrong: int = 0

    def add_step(self, answer: GroupAnswer) -> None:
        """Notes an answered step."""
        self.steps += 1
        self.served += len(answer.finished)
        self.times.add(answer.timings_us)
        for counters in answer.engine:
            self.verified += counters.get("pages_verified", 0)
            self.wrong += counters.get("pages_mismatched", 0)


@dataclass
class _Sent:
    request: ReplayRequest
    attempts: int = 0


class Driver:
    """Serves the requests of one lane on one group, which nobody else steps with requests of the same names.

    A request waits (for L3), then is ready (waits for room in L1), then runs (and finishes in the next step).

    Args:
        group: stepped by this driver.
        source: where requests come from.
        settings: how they are sent.
        lane: of the source.
        tally: counts are added to it; several drivers of one thread may share it.
        answered: called first with each step's answer; its exception leaves `advance`.

    Attributes:
        gave_up: the error by which the last request was lost that is not sent again.
    """

    def __init__(
        self,
        group: Group,
        source: RequestSource,
        settings: DriveSettings,
        *,
        lane: int = 0,
        tally: Tally | None = None,
        answered: Callable[[GroupAnswer], None] | None = None,
    ) -> None:
        self.group = group
        self.source = source
        self.settings = settings
        self.lane = lane
        self.tally = Tally() if tally is None else tally
        self._in_flight = 2 * settings.concurrency if settings.in_flight is None else settings.in_flight
        self.gave_up: Exception | None = None
        self._answered = answered
        self._draining = False
        self._again: deque[_Sent] = deque()
        self._sent: dict[str, _Sent] = {}
        self._waiting: list[str] = []
        self._ready: list[str] = []
        self._running: list[str] = []
        self._blocked = False
        self._moved_at = time.monotonic()

    @property
    def unended(self) -> int:
        """Requests sent that have not ended."""
        return len(self._sent) + len(self._again)

    @property
    def busy(self) -> bool:
        """Whether it has any request left."""
        return bool(self.unended) or not (self._draining or self.source.empty(self.lane))

    def drain(self) -> None:
        """Take no more requests from the source. Requests under way go on. May be called from another thread."""
        self._draining = True

    def advance(self) -> bool:
        """Does one step. Returns whether any request came on.

        Raises:
            Stalled: none has for `settings.stall_seconds`.
            GroupError, RequestError: of the step, GroupRestarted apart. After `send_again` the driver can go on.
        """
        finishes = [_finish(self._sent[rid].request) for rid in self._running]
        admits = self._arrivals()
        # A request that found no room is tried alone, and no other overtakes it: once the running ones end, it fits.
        schedules = self._ready[: 1 if self._blocked else self.settings.concurrency]
        polls = self._waiting[: self.settings.concurrency]
        try:
            answer = self.group.step(finishes=finishes, admits=admits, polls=polls, schedules=schedules)
        except GroupRestarted as restarted:
            self.send_again(restarted)
            return True
        if self._answered is not None:
            self._answered(answer)
        self.tally.add_step(answer)
        for finished in answer.finished:
            self.source.end(finished.rid)
            del self._sent[finished.rid]
        self._take_scheduled(answer.scheduled)
        came = [row.rid for row in answer.polled if row.ready]
        self._ready += came
        self._waiting = [rid for rid in self._waiting if rid not in came] + [admit.rid for admit in admits]
        moved = bool(finishes or admits or came or self._running)
        self._watch(moved)
        return moved

    def send_again(self, error: Exception) -> None:
        """The group has lost all requests in flight. They are sent again, or given up after `settings.attempts`."""
        self.tally.restarts += 1
        again = []
        for sent in self._sent.values():
            if self.settings.attempts is not None and sent.attempts >= self.settings.attempts:
                self.tally.failed[type(error).__name__] += 1
                self.source.end(sent.request.rid)
                self.gave_up = error
            else:
                again.append(sent)
        level = logging.WARNING if self.settings.attempts is None else logging.INFO  # with a count, losses are expected
        logger.log(level, "%d requests are sent again: %s", len(again), error)
        self.tally.again += len(again)
        self._again.extendleft(reversed(again))
        self._sent.clear()
        self._waiting, self._ready, self._running, self._blocked = [], [], [], False
        self._moved_at = time.monotonic()

    def _arrivals(self) -> list[Admit]:
        """Requests that enter in this step, as many as there are places; running requests leave in it."""
        admits = []
        while len(self._sent) - len(self._running) < self._in_flight and (sent := self._next()) is not None:
            sent.attempts += 1
            self._sent[sent.request.rid] = sent
            admits.append(_admit(sent.request))
        return admits

    def _next(self) -> _Sent | None:
        if self._again:
            return self._again.popleft()
        request = None if self._draining else self.source.take(self.lane)
        return None if request is None else _Sent(request)

    def _take_scheduled(self, rows: Sequence[Scheduled]) -> None:
        page_size = self.settings.page_size
        for row in rows:
            if row.ok:
                found = (row.device_tokens, row.host_tokens, row.storage_tokens)
                hits = sum(found) // page_size
                self.tally.counts.add(*found, row.computed_tokens, block_tokens=page_size, hit_blocks=hits)
        self._running = [row.rid for row in rows if row.ok]
        self._blocked = any(not row.ok for row in rows)
        self._ready = [rid for rid in self._ready if rid not in self._running]

    def _watch(self, moved: bool) -> None:
        now = time.monotonic()
        if moved or not self.busy:
            self._moved_at = now
        elif now - self._moved_at > self.settings.stall_seconds:
            raise Stalled(
                f"no request came on for {self.settings.stall_seconds:g} s: {len(self._waiting)} wait for L3, "
                f"{len(self._ready)} for room in L1, {self.source.waiting(self.lane)} for others to end"
            )


def drive(
    groups: Sequence[Group],
    requests: Iterable[ReplayRequest],
    settings: DriveSettings,
    progress: OnProgress | None = None,
) -> Tally:
    """Sends every request to one of the groups, round robin, until all have finished.

    Raises:
        Stalled: nothing came on for `settings.stall_seconds`.
        RequestError: a request can never run on its group.
    """
    source = RequestSource(requests, lanes=len(groups), ahead=settings.concurrency)
    tally = Tally()
    drivers = [Driver(group, source, settings, lane=lane, tally=tally) for lane, group in enumerate(groups)]
    while any(driver.busy for driver in drivers):
        # One with nothing to do is stepped too: its last writes still have to reach L3, where the others find them.
        moved = [driver.advance() for driver in drivers]
        if progress is not None:
            progress(tally.served)
        if not any(moved):
            time.sleep(IDLE_SECONDS)
    return tally


def settle(*groups: Group, seconds: float = 60.0) -> None:
    """Steps groups without requests until their engines say that no rank has a transfer in flight.

    Raises:
        Stalled: so many seconds were not enough for one of them.
    """
    for group in groups:
        if not wait_until(lambda group=group: _is_idle(group), seconds):  # type: ignore[misc]
            raise Stalled(f"transfers did not end within {seconds:g} s after the last request")


def _is_idle(group: Group) -> bool:
    return all(rank["idle"] for rank in group.step().engine)


def _admit(request: ReplayRequest) -> Admit:
    return Admit(
        rid=request.rid,
        tokens=token_bytes(request.prompt),
        namespace=request.namespace,
        priority=request.priority,
        max_new_tokens=max(0, len(request.output) - 1),
    )


def _finish(request: ReplayRequest) -> Finish:
    # The KV of an answer's last token is never computed: nothing was generated after it.
    return Finish(request.rid, token_bytes(request.output[:-1]))
