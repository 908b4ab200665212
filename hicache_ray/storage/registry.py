"""Names of L3 backends and how each is made. A backend's module is imported only when the backend is asked for."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from hicache_ray.storage.base import HiCacheStorage, StorageConfig


class BackendError(ValueError):
    """A backend that can't be had: unknown name, failing import, wrong class or an extra that is not installed."""


class _Entry(NamedTuple):
    target: str | type[HiCacheStorage]
    extra: str | None
    """Name of the optional dependency group of this package that the backend needs."""


_backends: dict[str, _Entry] = {
    "file": _Entry("hicache_ray.storage.file:FileStorage", None),
    "ray": _Entry("hicache_ray.storage.ray_pool:RayPoolStorage", None),
    "mooncake": _Entry("hicache_ray.storage.mooncake:MooncakeStorage", "mooncake"),
    "dynamic": _Entry("hicache_ray.storage.dynamic:make_dynamic_storage", None),
}


def register_backend(name: str, target: str | type[HiCacheStorage], *, extra: str | None = None) -> None:
    """Make a backend known under a name.

    Args:
        name: what `hicache_storage_backend` will say.
        target: a subclass of HiCacheStorage whose constructor takes a StorageConfig, or "module:Name" of one or of a
            function StorageConfig -> HiCacheStorage, imported when first used.
        extra: the optional dependency group to name when the import fails for want of a package.

    Raises:
        BackendError: the name is taken by something else, or the path is not "module:Name".
    """
    if isinstance(target, str) and target.count(":") != 1:
        raise BackendError(f"storage backend {name!r}: the path must be 'module:Class', not {target!r}")
    entry = _Entry(target, extra)
    if _backends.get(name, entry) != entry:
        raise BackendError(
            f"storage backend {name!r} is already registered as {_backends[name].target!r}; use another name"
        )
    _backends[name] = entry


def backend_names() -> list[str]:
    """The names that `create_backend` takes, sorted."""
    return sorted(_backends)


def create_backend(name: str, config: StorageConfig) -> HiCacheStorage:
    """Make the backend of that name.

    Raises:
        BackendError: unknown name (the text lists the known ones), or its module can't be imported (the text names the
            extra to install, where there is one), or what it gave is no HiCacheStorage.
    """
    entry = _backends.get(name)
    if entry is None:
        raise BackendError(f"unknown storage backend {name!r}; known are {', '.join(backend_names())}")
    target = entry.target
    try:
        factory = load_object(target) if isinstance(target, str) else target
        backend = factory(config)
    except ImportError as error:
        hint = f"; install it with: pip install 'hicache-ray[{entry.extra}]'" if entry.extra else ""
        raise BackendError(f"storage backend {name!r} can't be imported: {error}{hint}") from error
    if not isinstance(backend, HiCacheStorage):
        raise BackendError(f"storage backend {name!r} gave a {type(backend).__name__}, which is no HiCacheStorage")
    return backend


def load_object(path: str) -> Any:
    """The object "module:Name" names; ImportError when either part does not exist."""
    module_name, _, attribute = path.partition(":")
    module = importlib.import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ImportError(f"module {module_name!r} has no {attribute!r}") from None
