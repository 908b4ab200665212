"""LocalGroup: the ranks of a group in this process, without Ray, stepped with the real protocol.

    group = LocalGroup.create(config, engine="hicache_ray.replay.engine:SyntheticEngine")
    answer = group.step(admits=[Admit("r1", tokens)])

It does what `actors.TPGroup` does: the request is encoded once and decoded by each rank, the ranks' progress is folded
with one MIN, each applies the agreed numbers, and the answers are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from hicache_ray.actors.control import RuntimeControl
from hicache_ray.actors.errors import DivergenceError, GroupError
from hicache_ray.config import HiCacheConfig
from hicache_ray.metrics import RankMetrics, Snapshot
from hicache_ray.rank import control
from hicache_ray.rank.audit import audit_of, status_of
from hicache_ray.rank.build import build_cache
from hicache_ray.rank.cache import HiRadixCache
from hicache_ray.rank.engine import Engine, load_engine
from hicache_ray.rank.progress import Progress
from hicache_ray.rank.step import (
    Admit,
    Chunk,
    Control,
    Finish,
    GroupAnswer,
    Peek,
    StepAnswer,
    StepRequest,
    differences,
    merge,
)


class LocalGroup(RuntimeControl):
    """Ranks in one process, stepped in lockstep by one caller. It takes the runtime commands of a group on Ray.

    Args:
        caches: one a rank, in rank order, all equally configured.
        engines: one a rank, or none at all.
        name: used in messages.

    Attributes:
        reductions: reductions done so far; exactly one a step.
    """

    def __init__(self, caches: Sequence[HiRadixCache], engines: Sequence[Engine] = (), name: str = "local") -> None:
        if engines and len(engines) != len(caches):
            raise ValueError(f"{len(engines)} engines for {len(caches)} ranks: give one a rank, or none")
        self.caches = tuple(caches)
        self.engines = tuple(engines)
        self.name = name
        self.reductions = 0
        self.broken: GroupError | None = None
        self._step = 0

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
        caches: list[HiRadixCache] = []
        try:
            for rank in range(config.tp_size):
                caches.append(build_cache(config, rank=rank, storage_options=storage_options))
            engines = [load_engine(engine, cache, engine_options or {}) for cache in caches] if engine else []
        except BaseException:
            for cache in caches:
                cache.close()
            raise
        return cls(caches, engines, name)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.caches)

    def step(
        self,
        *,
        aborts: Sequence[str] = (),
        finishes: Sequence[Finish] = (),
        admits: Sequence[Admit] = (),
        polls: Sequence[str] = (),
        schedules: Sequence[str] = (),
        controls: Sequence[Control] = (),
        chunks: Sequence[Chunk] = (),
        peeks: Sequence[Peek] = (),
    ) -> GroupAnswer:
        """One scheduling iteration on all ranks.

        Raises:
            RequestError: the step names a request in a state in which that can't be done; nothing was applied anywhere.
            DivergenceError: ranks answered differently; the group is broken and so is every later step of it.
        """
        if self.broken is not None:
            raise self.broken
        began = time.perf_counter()
        message = StepRequest(
            generation=self.caches[0].generation,
            step=self._step,
            aborts=tuple(aborts),
            finishes=tuple(finishes),
            admits=tuple(admits),
            polls=tuple(polls),
            schedules=tuple(schedules),
            controls=tuple(controls),
            chunks=tuple(chunks),
            peeks=tuple(peeks),
        ).encode()
        requests = [StepRequest.decode(message) for _ in self.caches]
        timings: dict[str, float] = {}
        answers = self._answers(requests, timings)
        self._step += 1
        self._compare(answers)
        timings["total"] = (time.perf_counter() - began) * 1e6
        timings["message"] = timings["total"] - sum(timings[part] for part in ("reduction", "work", "engine"))
        return merge(answers, timings)

    def stats(self) -> list[dict[str, Any]]:
        """Counters of every rank, by rank."""
        return [cache.stats() for cache in self.caches]

    def check_integrity(self) -> None:
        """Raises AssertionError when a rank's tree, allocators or ledger don't add up."""
        for cache in self.caches:
            cache.check_integrity()

    def stop(self) -> None:
        """Ends the ranks' threads and closes their stores. May be called twice."""
        for cache in self.caches:
            cache.close()
        self.broken = self.broken or GroupError(f"group {self.name} is stopped")

    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        calls: dict[str, Callable[..., Any]] = {
            "audit": lambda cache: audit_of(cache).as_dict(),
            "discard_storage": lambda cache, ticket: cache.stores.discard(ticket),
            "prepare_storage": control.prepare_storage,
            "snapshot": lambda cache: _metrics(cache, self.name),
            "status": status_of,
        }
        return [calls[method](cache, *arguments) for cache in self.caches]

    def _answers(self, requests: Sequence[StepRequest], timings: dict[str, float]) -> list[StepAnswer]:
        """The ranks' answers; notes the times of the parts, over all ranks, in microseconds."""
        clock = time.perf_counter
        marks = [clock()]
        for cache, request in zip(self.caches, requests, strict=True):
            cache.check(request)
        for engine, cache, request in zip(self.engines, self.caches, requests, strict=False):
            engine.before_step(cache, request)
        marks.append(clock())
        vectors = [cache.collect(request.polls).vector() for cache, request in zip(self.caches, requests, strict=True)]
        marks.append(clock())
        folded = self._folded(vectors)
        marks.append(clock())
        answers = [
            cache.apply(request, Progress.agreed(folded)) for cache, request in zip(self.caches, requests, strict=True)
        ]
        marks.append(clock())
        for engine, cache, answer in zip(self.engines, self.caches, answers, strict=False):
            answer.engine.update(engine.forward(cache, cache.forward))
        marks.append(clock())
        before, collect, fold, apply, forward = np.diff(marks) * 1e6
        timings.update(reduction=float(fold), work=float(collect + apply), engine=float(before + forward))
        return answers

    def _folded(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        lengths = [len(vector) for vector in vectors]
        if len(set(lengths)) > 1:
            self.broken = DivergenceError(f"group {self.name}: ranks report {lengths} numbers at step {self._step}")
            raise self.broken
        self.reductions += 1
        return reduce(np.minimum, vectors)

    def _compare(self, answers: Sequence[StepAnswer]) -> None:
        first = answers[0]
        for answer in answers[1:]:
            differing = differences(first, answer)
            if differing:
                self.broken = DivergenceError(
                    f"group {self.name}: ranks {first.rank} and {answer.rank} differ at step {first.step} "
                    f"in {', '.join(differing)}"
                )
                raise self.broken


def _metrics(cache: HiRadixCache, name: str) -> Snapshot:
    """The metrics of a rank that come from its own counters; nobody counts its steps."""
    metrics = RankMetrics(cache, service="local", group=name)
    metrics.collect()
    return metrics.registry.snapshot()
