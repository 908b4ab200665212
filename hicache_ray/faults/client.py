"""Requests under faults: each ends served or failed with a named error, and every cached page it uses is verified."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from hicache_ray.rank.group import Group, GroupError
from hicache_ray.replay.chat import ChatSpec, chat_requests
from hicache_ray.replay.driver import Driver, DriveSettings, RequestSource, Tally
from hicache_ray.replay.requests import ReplayRequest

REQUEST_ATTEMPTS = 2
"""A request that is lost with its group is sent once more."""

PAUSE_SECONDS, BROKEN_SECONDS = 0.002, 0.2
"""Pauses after a step in which nothing moved, and after one that failed otherwise than by a rebuilt group."""


def endless_chat(spec: ChatSpec, seed: int) -> Iterator[ReplayRequest]:
    """A chat, round after round of the same shape."""
    number = 0
    while True:
        for request in chat_requests(replace(spec, seed=None), seed + number):
            after = None if request.after is None else f"{number}:{request.after}"
            yield replace(request, rid=f"{number}:{request.rid}", after=after)
        number += 1


@dataclass
class Outcomes(Tally):
    """What became of the requests of one client, and of its steps.

    Attributes:
        unnamed: errors that are no GroupError, by name and text: each is a fault of the run.
        longest_step: seconds from a step's call to its end, however it ended.
        hung: steps that did not end within the limit.
    """

    unnamed: Counter[str] = field(default_factory=Counter)
    longest_step: float = 0.0
    hung: int = 0


class ChaosClient(threading.Thread):
    """Sends requests to one group until told to stop, then waits for the last of them.

    Args:
        name: of the group.
        group: stepped by this thread only.
        source: where requests come from; clients may share it.
        concurrency: most requests in flight.
        step_limit: seconds after which a step counts as hung.
        stepped: told of each answered step when it began.
    """

    def __init__(
        self,
        name: str,
        group: Group,
        source: RequestSource,
        *,
        concurrency: int,
        step_limit: float,
        stepped: Callable[[str, float], None] = lambda group, began: None,
    ) -> None:
        super().__init__(name=f"chaos-{name}", daemon=True)
        self.outcomes = Outcomes()
        self._step_limit = step_limit
        self._step_began = 0.0
        self._gone = threading.Event()
        settings = DriveSettings(
            concurrency=concurrency, in_flight=concurrency, attempts=REQUEST_ATTEMPTS, stall_seconds=math.inf
        )
        self._driver = Driver(
            group, source, settings, tally=self.outcomes, answered=lambda answer: stepped(name, self._step_began)
        )

    @property
    def unended(self) -> int:
        """Requests sent that have not ended."""
        return self._driver.unended

    def drain(self) -> None:
        """Take no more requests; the thread ends with the last one under way."""
        self._driver.drain()

    def leave(self, seconds: float) -> None:
        """End with the step under way, whatever is in flight, for at most so many seconds."""
        self._gone.set()
        if self.ident is not None:
            self.join(seconds)

    def run(self) -> None:
        """The thread."""
        while self._driver.busy and not self._gone.is_set():
            self._gone.wait(self._advance())

    def _advance(self) -> float:
        """Does one step. Returns the seconds until the next."""
        self._step_began, began = time.time(), time.monotonic()
        try:
            return 0.0 if self._driver.advance() else PAUSE_SECONDS
        except Exception as error:
            if not isinstance(error, GroupError):
                self.outcomes.unnamed[f"{type(error).__name__}: {str(error)[:200]}"] += 1
            self._driver.send_again(error)
            return BROKEN_SECONDS
        finally:
            took = time.monotonic() - began
            self.outcomes.longest_step = max(self.outcomes.longest_step, took)
            self.outcomes.hung += took > self._step_limit
