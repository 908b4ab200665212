"""A request as one rank knows it, from admission to its end, and which steps its state allows.

Whether a step can be done is looked at before the reduction, alike on every rank, so that nothing is half applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_ray.hashing import EMPTY_NAMESPACE, TOKEN_BYTES, Namespace
from hicache_ray.index import Match
from hicache_ray.pages import NO_PAGES
from hicache_ray.radix.key import Key
from hicache_ray.radix.node import Node
from hicache_ray.rank.prefetch import Prefetch
from hicache_ray.rank.step import NEXT_STEP, Admit, StepRequest


class RequestError(ValueError):
    """A step names a request in a state in which that can't be done; nothing of the step was applied."""


@dataclass(eq=False)
class Request:
    """State of one request on one rank. The tree owns `pages` up to `prefix_pages`, the request those after."""

    rid: str
    tokens: np.ndarray
    """The prompt, uint32 [tokens]."""
    key: Key
    """Whole pages of the prompt that may come from the cache: at least one token is left to compute."""
    namespace: Namespace = EMPTY_NAMESPACE
    priority: int = 0
    max_new_tokens: int = 0
    prefetch: Prefetch | None = None
    match: Match | None = None
    node: Node | None = None
    """The node this request has locked while it runs."""
    pages: np.ndarray = field(default_factory=lambda: NO_PAGES)
    """L1 pages of prompt and answer, in order."""
    prefix_pages: int = 0
    """Leading pages that came from the cache."""

    @property
    def running(self) -> bool:
        """Whether it holds L1 pages and a lock."""
        return self.node is not None

    @property
    def storage_pages(self) -> int:
        """Pages its prefetch attached to L2."""
        return self.prefetch.attached_pages if self.prefetch else 0


@dataclass(frozen=True)
class Forward:
    """What an engine runs after a step: the requests just scheduled, and the load it has to wait for.

    Attributes:
        requests: in scheduling order.
        consumer: index for `LayerDoneCounter.set_consumer`; -1 when nothing is being loaded.
    """

    requests: tuple[Request, ...]
    consumer: int


def check_step(
    request: StepRequest, requests: Mapping[str, Request], *, generation: int, next_step: int, room: int
) -> None:
    """Raises RequestError when a step can't be done on a rank in this state.

    Args:
        request: the step.
        requests: what the rank serves, by request id.
        generation, next_step: where the rank is.
        room: tokens of L1.
    """
    if request.generation != generation or request.step not in (next_step, NEXT_STEP):
        raise RequestError(
            f"step {request.step} of generation {request.generation}: this rank is at step {next_step} of "
            f"generation {generation}"
        )
    ended = [*request.aborts, *(finish.rid for finish in request.finishes)]
    admits = [admit.rid for admit in request.admits]
    chunks = [chunk.rid for chunk in request.chunks]
    named = (("aborts and finishes", ended), ("admits", admits), ("chunks", chunks))
    for name, rids in (*named, ("polls", request.polls), ("schedules", request.schedules)):
        _check_named_once(name, rids)
    _check_goes_on("chunk", set(chunks).intersection(ended))
    for name, rids in (("poll", request.polls), ("schedule", request.schedules)):
        _check_goes_on(name, set(rids).intersection(ended).difference(admits))
    _check_states(request, requests, ended, admits)
    for admit in request.admits:
        _check_size(admit, room)


def _check_named_once(name: str, rids: Sequence[str]) -> None:
    if len(set(rids)) < len(rids):
        for rid, times in Counter(rids).most_common(1):
            raise RequestError(f"{name}: request {rid!r} is named {times} times in one step; name it once")


def _check_goes_on(name: str, ending: Collection[str]) -> None:
    """A request may end, or go on, once a step; what ends may only be admitted again."""
    if ending:
        raise RequestError(f"{name}: request {min(ending)!r} ends in the same step")


def _check_states(
    request: StepRequest, requests: Mapping[str, Request], ended: Sequence[str], admits: Sequence[str]
) -> None:
    for name, rows in (("finish", request.finishes), ("chunk", request.chunks)):
        for row in rows:
            _expect(requests, row.rid, True, name)
    arriving = set(admits)
    for rid in sorted(arriving.difference(ended)):
        if rid in requests and requests[rid].running:
            raise RequestError(f"request {rid!r} is running: abort or finish it before it is admitted again")
    for name, rids in (("poll", request.polls), ("schedule", request.schedules)):
        for rid in rids:
            if rid not in arriving:
                _expect(requests, rid, False, name)


def _expect(requests: Mapping[str, Request], rid: str, running: bool, operation: str) -> None:
    request = requests.get(rid)
    if request is None:
        raise RequestError(f"{operation}: request {rid!r} is unknown here: admit it first")
    if request.running is not running:
        state = "running" if request.running else "waiting"
        raise RequestError(f"{operation}: request {rid!r} is {state}")


def _check_size(admit: Admit, room: int) -> None:
    if admit.max_new_tokens < 0:
        raise RequestError(f"request {admit.rid!r}: max_new_tokens is {admit.max_new_tokens}; it can't be negative")
    tokens = len(admit.tokens) // TOKEN_BYTES + admit.max_new_tokens
    if tokens > room:
        raise RequestError(f"request {admit.rid!r} needs {tokens} tokens of L1, which has {room}: it can never run")
