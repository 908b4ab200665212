"""The requests of a workload: as prompts and answers for a cache, as block ids for an index alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace

TokenArray = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class ReplayRequest:
    """A prompt and the answer the model will give to it.

    Attributes:
        rid: unique in the workload.
        prompt: token ids [prompt tokens], at least one.
        output: token ids [answer tokens].
        namespace: adapter, salt and tenant it belongs to.
        priority: of its KV in the cache.
        after: rid of a request whose answer is part of this prompt; that one has to end first.
    """

    rid: str
    prompt: TokenArray
    output: TokenArray
    namespace: Namespace = EMPTY_NAMESPACE
    priority: int = 0
    after: str | None = None


class BlockRequest(NamedTuple):
    """A request as its trace's blocks alone, for an index that takes one block as one page."""

    blocks: TokenArray
    """Block ids numbered in order of first appearance, one for each block of the prompt."""
    tokens: int
    """Prompt tokens."""


@dataclass(frozen=True, eq=False)
class BlockTrace:
    """A trace as block ids.

    Attributes:
        unique: distinct blocks.
        block_tokens: tokens a full block stands for.
        requests: in order of arrival.
    """

    unique: int
    block_tokens: int
    requests: tuple[BlockRequest, ...]


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival; iterating twice gives the same requests twice.

    Attributes:
        name: what the user named.
        total: number of requests.
        longest: tokens of the longest request with its answer.
        make: begins the requests from the first one.
        blocks: the trace a replay of the index alone walks; None where the workload has no blocks.
    """

    name: str
    total: int
    longest: int
    make: Callable[[], Iterator[ReplayRequest]] = field(repr=False)
    blocks: BlockTrace | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[ReplayRequest]:
        return self.make()

    @classmethod
    def of(cls, name: str, total: int, make: Callable[[], Iterator[ReplayRequest]]) -> Workload:
        """A workload without blocks; its requests are made once to find the longest."""
        return cls(name, total, max(len(request.prompt) + len(request.output) for request in make()), make)
