"""Where a model docks to a rank: what a step calls before and after the cache has done its part."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from hicache_ray.rank.cache import HiRadixCache
from hicache_ray.rank.request import Forward
from hicache_ray.rank.step import StepRequest


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
