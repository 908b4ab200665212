"""Requests under faults: each ends served or failed with a named error, and every cached page it uses is verified."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from hicache_ray.actors.errors import GroupError
from hicache_ray.actors.group import TPGroup
from hicache_ray.hashing import token_bytes
from hicache_ray.rank.step import Admit, Finish, GroupAnswer
from hicache_ray.replay.chat import ChatSpec, chat_requests
from hicache_ray.replay.requests import ReplayRequest

WINDOW = 64
"""Requests that are drawn ahead of those that may be sent."""
IDLE_SECONDS = 0.002
BROKEN_SECONDS = 0.2
"""Pauses after a step in which nothing moved, and after one that failed."""


class ChatSource:
    """An endless chat that several clients share, round after round of the same shape. Thread-safe."""

    def __init__(self, spec: ChatSpec, seed: int) -> None:
        self._requests = self._rounds(spec, seed)
        self._window: deque[ReplayRequest] = deque()
        self._ended: set[str] = set()
        self._lock = threading.Lock()

    def take(self) -> ReplayRequest | None:
        """The next request that does not build on an answer still to come; None when there is none now."""
        with self._lock:
            while len(self._window) < WINDOW:
                self._window.append(next(self._requests))
            for place, request in enumerate(self._window):
                if request.after is None or request.after in self._ended:
                    del self._window[place]
                    return request
            return None

    def end(self, rid: str) -> None:
        """A request has ended, one way or the other: those that build on it may be sent."""
        with self._lock:
            self._ended.add(rid)

    @staticmethod
    def _rounds(spec: ChatSpec, seed: int) -> Iterator[ReplayRequest]:
        number = 0
        while True:
            for request in chat_requests(replace(spec, seed=None), seed + number):
                after = None if request.after is None else f"{number}:{request.after}"
                yield replace(request, rid=f"{number}:{request.rid}", after=after)
            number += 1


@dataclass
class Outcomes:
    """What became of the requests of one client, and of its steps.

    Attributes:
        ok: requests served to their end.
        failed: requests given up, by the name of the error.
        unnamed: errors that are no GroupError, by name and text: each is a fault of the run.
        again: requests sent a second time.
        steps, restarts: steps answered; steps that ended in a rebuilt group.
        longest_step: seconds from a step's call to its end, however it ended.
        hung: steps that did not end within the limit.
        verified, wrong: cached pages compared with what they must hold, and those that were different.
        hit_tokens, tokens: of the prompts served: from the cache, and all.
    """

    ok: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    unnamed: Counter[str] = field(default_factory=Counter)
    again: int = 0
    steps: int = 0
    restarts: int = 0
    longest_step: float = 0.0
    hung: int = 0
    verified: int = 0
    wrong: int = 0
    hit_tokens: int = 0
    tokens: int = 0


@dataclass
class _InFlight:
    request: ReplayRequest
    attempts: int = 1


class ChaosClient(threading.Thread):
    """Sends requests to one group until told to stop, and ends those it has sent.

    Args:
        name: of the group.
        group: stepped by this thread only.
        source: where requests come from.
        concurrency: most requests in flight.
        step_limit: seconds after which a step counts as hung.
        stepped: told of each answered step when it began.
    """

    def __init__(
        self,
        name: str,
        group: TPGroup,
        source: ChatSource,
        *,
        concurrency: int,
        step_limit: float,
        stepped: Callable[[str, float], None],
    ) -> None:
        super().__init__(name=f"chaos-{name}", daemon=True)
        self.outcomes = Outcomes()
        self.group_name = name
        self.group = group
        self.step_limit = step_limit
        self.step_began: float | None = None
        self._source = source
        self._concurrency = concurrency
        self._stepped = stepped
        self._again: deque[_InFlight] = deque()
        self._flying: dict[str, _InFlight] = {}
        self._waiting: list[str] = []
        self._ready: list[str] = []
        self._running: list[str] = []
        self._stop_taking = threading.Event()
        self._gone = threading.Event()

    @property
    def unended(self) -> int:
        """Requests sent that have not ended."""
        return len(self._flying) + len(self._again)

    def drain(self) -> None:
        """Take no more requests; the thread ends with those it has."""
        self._stop_taking.set()

    def leave(self, seconds: float) -> None:
        """End with the step under way, whatever is in flight, for at most so many seconds."""
        self._gone.set()
        if self.ident is not None:
            self.join(seconds)

    def run(self) -> None:
        """The thread."""
        while not self._gone.is_set() and (self.unended or not self._stop_taking.is_set()):
            self._gone.wait(0 if self._advance() else IDLE_SECONDS)

    def _advance(self) -> bool:
        """One step; whether anything moved."""
        finishes = [Finish(rid, token_bytes(self._flying[rid].request.output[:-1])) for rid in self._running]
        admits = list(self._arrivals())
        schedules = self._ready[: self._concurrency]
        answer = self._step(finishes, admits, schedules)
        if answer is None:
            return False
        self._count_pages(answer)
        for finished in answer.finished:
            self._source.end(finished.rid)
            del self._flying[finished.rid]
            self.outcomes.ok += 1
        self._running = [row.rid for row in answer.scheduled if row.ok]
        for row in answer.scheduled:
            if row.ok:
                self.outcomes.tokens += len(self._flying[row.rid].request.prompt)
                self.outcomes.hit_tokens += row.device_tokens + row.host_tokens + row.storage_tokens
        ready = [row.rid for row in answer.polled if row.ready]
        self._ready = [rid for rid in self._ready if rid not in self._running] + ready
        self._waiting = [rid for rid in self._waiting if rid not in ready] + [admit.rid for admit in admits]
        return bool(finishes or admits or ready or self._running)

    def _arrivals(self) -> Iterator[Admit]:
        while len(self._flying) < self._concurrency:
            flying = self._again.popleft() if self._again else self._taken()
            if flying is None:
                return
            request = flying.request
            self._flying[request.rid] = flying
            yield Admit(
                request.rid,
                token_bytes(request.prompt),
                request.namespace,
                request.priority,
                max(0, len(request.output) - 1),
            )

    def _taken(self) -> _InFlight | None:
        request = None if self._stop_taking.is_set() else self._source.take()
        return None if request is None else _InFlight(request)

    def _step(self, finishes: list[Finish], admits: list[Admit], schedules: list[str]) -> GroupAnswer | None:
        began, moment = time.monotonic(), time.time()
        self.step_began = began
        try:
            answer = self.group.step(finishes=finishes, admits=admits, polls=self._waiting, schedules=schedules)
        except GroupError as error:
            self._lost(type(error).__name__)
            return None
        except Exception as error:
            self.outcomes.unnamed[f"{type(error).__name__}: {str(error)[:200]}"] += 1
            self._lost(type(error).__name__)
            return None
        finally:
            self.step_began = None
            took = time.monotonic() - began
            self.outcomes.longest_step = max(self.outcomes.longest_step, took)
            self.outcomes.hung += took > self.step_limit
        self.outcomes.steps += 1
        self._stepped(self.group_name, moment)
        return answer

    def _lost(self, error: str) -> None:
        """The group was rebuilt or is broken: what was in flight is sent once more, or has failed."""
        self.outcomes.restarts += 1
        for flying in self._flying.values():
            if flying.attempts > 1:
                self.outcomes.failed[error] += 1
                self._source.end(flying.request.rid)
                continue
            self.outcomes.again += 1
            self._again.append(_InFlight(flying.request, flying.attempts + 1))
        self._flying.clear()
        self._waiting, self._ready, self._running = [], [], []
        if error != "GroupRestarted":
            threading.Event().wait(BROKEN_SECONDS)

    def _count_pages(self, answer: GroupAnswer) -> None:
        for counters in answer.engine:
            self.outcomes.verified += counters["pages_verified"]
            self.outcomes.wrong += counters["pages_mismatched"]
