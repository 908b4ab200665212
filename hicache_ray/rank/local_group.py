"""LocalGroup: the ranks of a group in this process, without Ray, stepped with the real protocol.

    group = LocalGroup.create(config, engine="hicache_ray.replay.engine:SyntheticEngine")
    answer = group.step(admits=[Admit("r1", tokens)])

It is a `Group` like one on Ray: each rank decodes the same bytes, the ranks' progress is folded with one MIN, each
applies the agreed numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy as np

from hicache_ray.config import HiCacheConfig
from hicache_ray.metrics import Snapshot
from hicache_ray.metrics.rank import RankMetrics
from hicache_ray.rank.build import build_cache
from hicache_ray.rank.cache import HiRadixCache
from hicache_ray.rank.engine import Engine, Rank, load_engine
from hicache_ray.rank.group import DivergenceError, Exchange, Group
from hicache_ray.rank.progress import Progress
from hicache_ray.rank.step import StepAnswer, StepRequest


class LocalRank(Rank):
    """A rank of a local group."""

    def __init__(self, cache: HiRadixCache, engine: Engine | None, group: str) -> None:
        super().__init__(cache, engine)
        self.group = group

    def snapshot(self) -> Snapshot:
        """The metrics of a rank that come from its own counters; nobody counts its steps."""
        metrics = RankMetrics(self.cache, service="local", group=self.group)
        metrics.collect()
        return metrics.registry.snapshot()


class LocalExchange(Exchange):
    """Calls ranks in this process, one after the other, half a step at a time."""

    def __init__(self, name: str, ranks: Sequence[LocalRank]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.reductions = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def generation(self) -> int:
        """The ranks' own."""
        return self.ranks[0].cache.generation

    def send(self, message: bytes) -> Sequence[StepAnswer]:
        """One step. The times in the answers are those of all ranks together: they share this thread."""
        requests = [StepRequest.decode(message) for _ in self.ranks]
        vectors = [rank.begin_step(request).vector() for rank, request in zip(self.ranks, requests, strict=True)]
        began = time.perf_counter()
        agreed = self._folded(vectors)
        fold = (time.perf_counter() - began) * 1e6
        answers = [
            rank.end_step(request, Progress.agreed(agreed)) for rank, request in zip(self.ranks, requests, strict=True)
        ]
        spent = {part: sum(answer.timings_us[part] for answer in answers) for part in ("work", "engine")}
        for answer in answers:
            answer.timings_us.update(spent, reduction=fold, total=fold + sum(spent.values()))
        return answers

    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Calls a method of every rank."""
        return [getattr(rank, method)(*arguments) for rank in self.ranks]

    def close(self) -> None:
        """Ends the ranks' threads and closes their stores."""
        for rank in self.ranks:
            rank.close()

    def _folded(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        lengths = [len(vector) for vector in vectors]
        if len(set(lengths)) > 1:
            step = self.ranks[0].cache.next_step
            raise DivergenceError(f"group {self.name}: ranks report {lengths} numbers at step {step}")
        self.reductions += 1
        return reduce(np.minimum, vectors)


class LocalGroup(Group):
    """Ranks in one process, stepped in lockstep by one caller.

    Args:
        caches: one a rank, in rank order, all equally configured.
        engines: one a rank, or none at all.
        name: used in messages.
    """

    exchange: LocalExchange

    def __init__(self, caches: Sequence[HiRadixCache], engines: Sequence[Engine] = (), name: str = "local") -> None:
        if engines and len(engines) != len(caches):
            raise ValueError(f"{len(engines)} engines for {len(caches)} ranks: give one a rank, or none")
        ranks = [LocalRank(cache, engine, name) for cache, engine in zip_longest(caches, engines)]
        super().__init__(LocalExchange(name, ranks))

    @classmethod
    def create(
        cls,
        config: HiCacheConfig,
        *,
        engine: str = "",
        engine_options: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        name: str = "local",
    ) -> LocalGroup:
        """A group of `config.tp_size` ranks.

        Args:
            config: a resolved configuration.
            engine: import path of the model's hook, or "".
            engine_options: given to each engine.
            storage_options: options of the L3 backend that come on top of the configured ones.
            name: used in messages.
        """
        with ExitStack() as undo:
            caches = []
            for rank in range(config.tp_size):
                caches.append(build_cache(config, rank=rank, storage_options=storage_options))
                undo.callback(caches[-1].close)
            engines = [load_engine(engine, cache, engine_options or {}) for cache in caches] if engine else []
            undo.pop_all()
        return cls(caches, engines, name)

    @property
    def caches(self) -> tuple[HiRadixCache, ...]:
        """The ranks' caches, in rank order."""
        return tuple(rank.cache for rank in self.exchange.ranks)

    @property
    def reductions(self) -> int:
        """Reductions done so far; exactly one a step."""
        return self.exchange.reductions
