"""One tensor-parallel rank as a Ray actor: a HiRadixCache, its place in the reduction, and a model's hook."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from hicache_ray.actors.collective import ReductionGroup
from hicache_ray.build import build_cache
from hicache_ray.cache import alone
from hicache_ray.config import HiCacheConfig
from hicache_ray.engine import Engine, load_engine
from hicache_ray.protocol import StepRequest


CONCURRENCY_GROUPS = {"health": 1, "peer": 1}
"""Threads beside the one that steps: for signs of life, and for pages that other ranks ask for."""


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank's process needs to come up, also after a restart.

    Attributes:
        group: name of the group, unique in the Ray cluster.
        rank: this rank's number, 0 to tp_size - 1.
        config: the resolved configuration, equal on all ranks.
        storage: options of the shared store that only exist at run time (actor handles, addresses).
        engine: import path of the model's hook, or "".
        engine_options: given to the engine.
    """

    group: str
    rank: int
    config: HiCacheConfig
    storage: Mapping[str, Any] = field(default_factory=dict)
    engine: str = ""
    engine_options: Mapping[str, Any] = field(default_factory=dict)


class RankServer:
    """The actor's class. Steps run one at a time, in the order in which they were sent."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.cache = build_cache(spec.config, rank=spec.rank, storage_options=spec.storage)
        self.engine: Engine | None = load_engine(spec.engine, self.cache, spec.engine_options) if spec.engine else None
        self.reduction: ReductionGroup | None = None

    def join(self, generation: int) -> int:
        """Enters the group's reduction of this generation, leaving an older one first; returns this process's id.

        All ranks of the group have to call it at about the same time.
        """
        self.leave()
        self.cache.generation = generation
        config = self.spec.config
        if config.tp_size > 1:
            self.reduction = ReductionGroup.join(
                self.spec.group,
                generation,
                rank=self.spec.rank,
                world_size=config.tp_size,
                timeout=config.collective_timeout,
                backend=config.collective_backend,
            )
        return os.getpid()

    def leave(self) -> None:
        """Leaves the reduction, which frees ranks that wait in it. May be called twice."""
        if self.reduction is not None:
            self.reduction.close()
            self.reduction = None

    def step(self, message: bytes) -> bytes:
        """One step: `StepRequest.encode()` in, `StepAnswer.encode()` out."""
        began = time.perf_counter()
        request = StepRequest.decode(message)
        if self.engine is not None:
            self.engine.before_step(self.cache, request)
        prepared = time.perf_counter()
        answer = self.cache.step(request, self._reduce)
        stepped = time.perf_counter()
        if self.engine is not None:
            answer.engine.update(self.engine.forward(self.cache, self.cache.forward))
        ended = time.perf_counter()
        answer.timings_us["engine"] = (prepared - began + ended - stepped) * 1e6
        answer.timings_us["total"] = (ended - began) * 1e6
        return answer.encode()

    def position(self) -> tuple[int, int]:
        """(generation, number of the next step): where a caller that takes this group over has to go on."""
        return self.cache.generation, self.cache.next_step

    def stats(self) -> dict[str, Any]:
        """Counters of this rank, and the ledger of its pools; plain numbers under stable names."""
        return self.cache.stats()

    def check_integrity(self) -> None:
        """Raises AssertionError when the tree, the allocators or the ledger don't add up."""
        self.cache.check_integrity()

    @ray.method(concurrency_group="health")
    def ping(self) -> int:
        """The process id; answered beside a running step."""
        return os.getpid()

    def close(self) -> None:
        """Ends threads, leaves the reduction, closes the store. May be called twice."""
        self.leave()
        self.cache.close()

    def _reduce(self, vector: np.ndarray) -> np.ndarray:
        if self.reduction is None:
            return alone(vector)
        return self.reduction.allreduce_min(vector)
