"""A request as one rank knows it, from admission to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace
from hicache_ray.index import Match
from hicache_ray.prefetch import NO_PAGES, Prefetch
from hicache_ray.radix.key import Key
from hicache_ray.radix.node import Node


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
