"""Where a model docks to a rank: what a step calls before and after the cache has done its part."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from hicache_ray.rank.audit import audit_of, status_of
from hicache_ray.rank.cache import HiRadixCache
from hicache_ray.rank.progress import Progress
from hicache_ray.rank.request import Forward
from hicache_ray.rank.step import StepAnswer, StepRequest


@runtime_checkable
class Engine(Protocol):
    """The model part of one rank, in the rank's process. Constructed as `Engine(cache, options)`."""

    def before_step(self, cache: HiRadixCache, request: StepRequest) -> None:
        """Called before the step is applied, with the requests still in their old state: the place to put the KV of the
        answer tokens of `request.finishes` into the requests' pages. Must not change the cache. A step that was not
        applied may come again."""

    def forward(self, cache: HiRadixCache, batch: Forward) -> dict[str, Any]:
        """Runs the requests scheduled in this step: reads their prefix pages, writes the new ones. Called once a step,
        also with an empty batch. Returns counters that travel back in the answer (msgpack-able)."""


def load_engine(path: str, cache: HiRadixCache, options: Mapping[str, Any]) -> Engine:
    """An engine by its import path "package.module:Class".

    Raises:
        ValueError: the path has another form, or names nothing that can be imported.
    """
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"engine {path!r}: expected 'package.module:Class'")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"engine {path!r} can't be imported: {error}") from error
    return factory(cache, dict(options))


class Rank:
    """One rank of a group: a cache and the engine docked to it, stepped in two halves around the group's reduction.

    Its methods are what an `Exchange` calls.
    """

    def __init__(self, cache: HiRadixCache, engine: Engine | None = None) -> None:
        self.cache = cache
        self.engine = engine
        self._began = self._prepared = 0.0

    def begin_step(self, request: StepRequest) -> Progress:
        """Checks the step and takes this rank's progress, to be reduced; nothing is applied yet.

        Raises:
            RequestError: the step can't be done.
            CopyError: a copy between L1 and L2 failed; the rank must end.
        """
        self._began = time.perf_counter()
        self.cache.check(request)
        if self.engine is not None:
            self.engine.before_step(self.cache, request)
        self._prepared = time.perf_counter()
        return self.cache.collect(request.polls)

    def end_step(self, request: StepRequest, agreed: Progress) -> StepAnswer:
        """Applies the step that was begun, with what all ranks have reached, and runs the engine."""
        answer = self.cache.apply(request, agreed)
        applied = time.perf_counter()
        if self.engine is not None:
            answer.engine.update(self.engine.forward(self.cache, self.cache.forward))
        ended = time.perf_counter()
        answer.timings_us.update(
            engine=(self._prepared - self._began + ended - applied) * 1e6, total=(ended - self._began) * 1e6
        )
        return answer

    def stats(self) -> dict[str, Any]:
        """Counters of this rank, and the ledger of its pools; plain numbers under stable names."""
        return self.cache.stats()

    def status(self) -> dict[str, Any]:
        """State of this rank at a glance."""
        return status_of(self.cache)

    def audit(self) -> dict[str, Any]:
        """Counts everything this rank owns anew, between two steps; `faults` says what does not add up."""
        return asdict(audit_of(self.cache))

    def check_integrity(self) -> None:
        """Raises AssertionError when the tree, the allocators or the ledger don't add up."""
        self.cache.check_integrity()

    def prepare_storage(self, ticket: str, backend: str, options: dict[str, Any]) -> str:
        """Makes a storage backend for an attach to come. Returns "" or why it can't be had. May run beside the
        steps."""
        return self.cache.control.prepare_storage(ticket, backend, options)

    def discard_storage(self, ticket: str) -> None:
        """Closes a backend that was prepared and will not be attached. May run beside the steps."""
        self.cache.control.stores.discard(ticket)

    def close(self) -> None:
        """Ends the cache's threads and closes its store. May be called twice."""
        self.cache.close()
