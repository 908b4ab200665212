"""One tensor-parallel rank as a Ray actor: a HiRadixCache, its place in the reduction, and a model's hook."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from hicache_ray import faultpoints
from hicache_ray.actors.collective import CollectiveError, ReductionGroup
from hicache_ray.actors.errors import StaleGeneration, StepCollision
from hicache_ray.actors.recovery import RankInfo
from hicache_ray.config import HiCacheConfig
from hicache_ray.events.rank import KVEvents
from hicache_ray.metrics import RayExporter, Snapshot
from hicache_ray.metrics.rank import RankMetrics
from hicache_ray.rank.build import build_cache
from hicache_ray.rank.cache import alone
from hicache_ray.rank.engine import Rank, load_engine
from hicache_ray.rank.progress import Progress
from hicache_ray.rank.rejoin import Peer, Rejoin
from hicache_ray.rank.step import StepRequest

_beside: Any = ray.method
"""Untyped: Ray's stubs would hide the methods' own types inside the class."""

logger = logging.getLogger("hicache_ray.rank")

PEER_TIMEOUT = 5.0
JOIN_SECONDS = 10.0

CONCURRENCY_GROUPS = {"health": 1, "peer": 1, "control": 1}
"""Threads beside the one that steps: for signs of life, for pages that other ranks ask for, and for what a runtime
command prepares."""


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


class RankServer(Rank):
    """The actor's class: a rank with its place in the reduction. Steps run one at a time, in the order of sending."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        cache = build_cache(spec.config, rank=spec.rank, storage_options=spec.storage)
        super().__init__(cache, load_engine(spec.engine, cache, spec.engine_options) if spec.engine else None)
        self.reduction: ReductionGroup | None = None
        self.rejoin = Rejoin(self.cache)
        self.joined = False
        self.events = KVEvents.of(self.cache, spec.config)
        service, _, group = spec.group.partition(":")
        self.metrics = RankMetrics(self.cache, self.events, service=service, group=group)
        self.exporter = RayExporter(self.metrics.registry, self.metrics.collect) if spec.config.enable_metrics else None

    def join(self, generation: int, within: float = JOIN_SECONDS) -> int:
        """Enters the group's reduction of this generation, leaving an older one first. Returns this process's id.

        All ranks of the group have to call it within so many seconds.
        """
        faultpoints.reach("rank.join")
        self.leave()
        self.cache.begin_generation(generation)
        config = self.spec.config
        if config.tp_size > 1:
            self.reduction = ReductionGroup.join(
                self.spec.group,
                generation,
                rank=self.spec.rank,
                world_size=config.tp_size,
                timeout=config.collective_timeout,
                backend=config.collective_backend,
                join_timeout=within,
            )
        self.joined = True
        return os.getpid()

    @_beside(concurrency_group="health")
    def leave(self) -> None:
        """Leaves the reduction, which frees ranks that wait in it. May be called twice, and beside a running step."""
        reduction, self.reduction = self.reduction, None
        if reduction is not None:
            reduction.close()

    # -- recovery, in this order -------------------------------------------------------------------------------------

    def survey(self) -> RankInfo:
        """Who this is now; answered when no step is running."""
        return self.ping()

    def quiesce(self, timeout: float) -> None:
        """Ends all requests and transfers of this rank; TimeoutError when one does not end in time."""
        faultpoints.reach("rank.quiesce")
        self.rejoin.quiesce(timeout)

    def settings(self) -> dict[str, Any]:
        """What was changed at run time."""
        return self.cache.control.settings()

    def adopt(self, settings: dict[str, Any]) -> None:
        """Takes over another rank's `settings`."""
        self.cache.control.adopt(settings)

    def catalog(self) -> bytes:
        """This rank's host tier as a message."""
        return self.rejoin.catalog()

    def claim(self, catalog: bytes, peers: Sequence[Any], seconds: float) -> bytes:
        """Which pages of the catalog this rank has, one byte a page, after fetching what it can (`Rejoin.claim`)."""
        faultpoints.reach("rank.claim")
        return self.rejoin.claim(catalog, [_peer(actor) for actor in peers], seconds)

    @_beside(concurrency_group="peer")
    def pages(self, hashes: Sequence[bytes]) -> np.ndarray | None:
        """Bytes of pages this rank has in L2, for another rank's `claim`; None when one is missing."""
        return self.rejoin.pages(hashes)

    def restore(self, catalog: bytes, retained: bytes) -> int:
        """Takes the retained pages as the new tree. Returns its digest."""
        faultpoints.reach("rank.restore")
        digest = self.rejoin.restore(catalog, retained)
        if self.events is not None:
            self.events.begin()
        return digest

    def step(self, message: bytes, driver: int = 0) -> bytes:
        """One step: `StepRequest.encode()` in, `StepAnswer.encode()` out.

        Args:
            message: the request.
            driver: number of who sent it. Two drivers' messages may reach the ranks in different orders; then their
                steps meet in one reduction, which shows it on every rank before anything is applied.

        Raises:
            StepCollision: nothing was applied on any rank; send the step again.
        """
        faultpoints.reach("rank.step")
        request = StepRequest.decode(message)
        if not self.joined:
            raise StaleGeneration(f"rank {self.spec.rank} was started again and has lost everything it held")
        if request.generation != self.cache.generation:
            raise StaleGeneration(
                f"step of generation {request.generation}, the group is at generation {self.cache.generation}"
            )
        progress = self.begin_step(request)
        answer = self.end_step(request, Progress.agreed(self._reduce(progress.vector(), driver)))
        if self.events is not None:
            self.events.flush()
        if self.exporter is not None:
            self.metrics.observe(answer)
        faultpoints.reach("rank.answer")
        return answer.encode()

    @_beside(concurrency_group="control")
    def prepare_storage(self, ticket: str, backend: str, options: dict[str, Any]) -> str:
        """As `Rank` says; beside the steps."""
        return super().prepare_storage(ticket, backend, options)

    @_beside(concurrency_group="control")
    def discard_storage(self, ticket: str) -> None:
        """As `Rank` says; beside the steps."""
        super().discard_storage(ticket)

    def status(self) -> dict[str, Any]:
        """State of this rank and of its process, between two steps."""
        info = self.ping()
        events = self.events.status() if self.events is not None else None
        if events is not None:
            for name in ("endpoint", "replay_endpoint"):
                events[name] = events[name].replace("//0.0.0.0:", f"//{ray.util.get_node_ip_address()}:")
        return {**super().status(), "pid": info.pid, "node_id": info.node_id, "events": events}

    def snapshot(self) -> Snapshot:
        """This rank's metrics now (`metrics.Registry.snapshot`)."""
        self.metrics.collect()
        return self.metrics.registry.snapshot()

    @_beside(concurrency_group="health")
    def ping(self) -> RankInfo:
        """Who this is; answered beside a running step."""
        node = ray.get_runtime_context().get_node_id()
        return RankInfo(os.getpid(), node, self.cache.generation, self.cache.next_step, fresh=not self.joined)

    def close(self) -> None:
        """Ends threads, leaves the reduction, closes the store. May be called twice."""
        self.leave()
        if self.exporter is not None:
            self.exporter.close()
        super().close()
        if self.events is not None:
            self.events.close()

    def _reduce(self, vector: np.ndarray, driver: int) -> np.ndarray:
        faultpoints.reach("rank.reduce")
        if self.spec.config.tp_size == 1:
            return alone(vector)
        reduction = self.reduction
        if reduction is None:
            raise CollectiveError(f"rank {self.spec.rank} of group {self.spec.group} has left its reduction")
        reduced = reduction.allreduce_min(np.append(vector, [driver, -driver]))
        if reduced[-2] != -reduced[-1]:
            raise StepCollision(f"drivers {reduced[-2]} and {-reduced[-1]} met in step {self.cache.next_step}")
        return reduced[:-2]


def _peer(actor: Any) -> Peer:
    def ask(hashes: Sequence[bytes]) -> np.ndarray | None:
        try:
            return ray.get(actor.pages.remote(list(hashes)), timeout=PEER_TIMEOUT)
        except ray.exceptions.RayError as error:
            logger.warning("a peer did not give its pages: %s", error)
            return None

    return ask
