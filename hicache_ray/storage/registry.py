"""Names of L3 backends and how each is made, from its options or from a URL. A backend's module is imported only when
the backend is asked for.

A storage URL is a backend and its options in one word, for command lines:

| URL | backend |
|---|---|
| `ray`, `ray://NAME?OPTION=...` | the Ray storage pool, the one called NAME |
| `file:///DIR?max_bytes=100gb` | page files under /DIR |
| `mooncake://HOST:PORT?metadata=http://HOST:PORT/metadata` | a Mooncake store by its master's address |
| `dynamic://package.module/Class?interface_v1=1` | a class of another package |

Everything after `?` is an option of the backend; Mooncake's have short names too: metadata, segment, device, tag.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from hicache_ray.config.names import add_storage_backend
from hicache_ray.storage.base import Storage, StorageConfig


class BackendError(ValueError):
    """A backend that can't be had: unknown name, failing import, wrong class or an extra that is not installed."""


class _Entry(NamedTuple):
    target: str | type[Storage]
    extra: str | None
    """Name of the optional dependency group of this package that the backend needs."""


_backends: dict[str, _Entry] = {
    "file": _Entry("hicache_ray.storage.file.storage:FileStorage", None),
    "ray": _Entry("hicache_ray.storage.pool.storage:RayPoolStorage", None),
    "mooncake": _Entry("hicache_ray.storage.mooncake.storage:MooncakeStorage", "mooncake"),
    "dynamic": _Entry("hicache_ray.storage.dynamic:make_dynamic_storage", None),
}


def register_backend(name: str, target: str | type[Storage], *, extra: str | None = None) -> None:
    """Make a backend known under a name.

    Args:
        name: what `hicache_storage_backend` will say.
        target: a subclass of Storage whose constructor takes a StorageConfig, or "module:Name" of one or of a
            function StorageConfig -> Storage, imported when first used.
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
    add_storage_backend(name)


def backend_names() -> list[str]:
    """The names that `create_backend` takes, sorted."""
    return sorted(_backends)


def create_backend(name: str, config: StorageConfig) -> Storage:
    """Make the backend of that name.

    Raises:
        BackendError: unknown name (the text lists the known ones), or its module can't be imported (the text names the
            extra to install, where there is one), or what it gave is no Storage.
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
    if not isinstance(backend, Storage):
        raise BackendError(f"storage backend {name!r} gave a {type(backend).__name__}, which is no Storage")
    for method in ("lookup", "load", "store"):
        if not callable(getattr(backend, method)):
            raise BackendError(
                f"storage backend {name!r}: {type(backend).__name__} has an attribute {method!r} that hides the method "
                "of that name; give it another name"
            )
    return backend


def load_object(path: str) -> Any:
    """The object "module:Name" names; ImportError when either part does not exist."""
    module_name, _, attribute = path.partition(":")
    module = importlib.import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ImportError(f"module {module_name!r} has no {attribute!r}") from None


MOONCAKE_SHORT_NAMES = {
    "metadata": "metadata_server",
    "segment": "global_segment_size",
    "device": "device_name",
    "tag": "extra_backend_tag",
}


class StorageTarget(NamedTuple):
    """A parsed storage URL.

    Attributes:
        backend: name for `create_backend`.
        extra: options of the backend.
    """

    backend: str
    extra: dict[str, Any]


def parse_storage_url(url: str) -> StorageTarget:
    """Backend and options of a storage URL.

    Raises:
        BackendError: not one of the forms above; the text says what is missing.
    """
    parts = urlsplit(url)
    scheme = parts.scheme or parts.path
    parse = _PARSERS.get(scheme)
    if parse is None or (not parts.scheme and scheme != "ray"):
        raise BackendError(
            f"storage URL {url!r} is none of ray, file:///DIR, mooncake://HOST:PORT?metadata=URL, "
            "dynamic://MODULE/CLASS"
        )
    extra = dict(parse_qsl(parts.query, keep_blank_values=True))
    return StorageTarget(scheme, parse(url, parts, extra))


def _ray(url: str, parts: SplitResult, extra: dict[str, Any]) -> dict[str, Any]:
    if parts.netloc:
        extra["pool"] = unquote(parts.netloc)
    return extra


def _file(url: str, parts: SplitResult, extra: dict[str, Any]) -> dict[str, Any]:
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or path in ("", "/"):
        raise BackendError(f"storage URL {url!r} names no absolute folder: write file:///DIR, with three slashes")
    return {"directory": path, **extra}


def _mooncake(url: str, parts: SplitResult, extra: dict[str, Any]) -> dict[str, Any]:
    try:
        port = parts.port
    except ValueError as error:
        raise BackendError(f"storage URL {url!r}: {error}") from error
    if not parts.hostname or port is None:
        raise BackendError(f"storage URL {url!r} names no master: write mooncake://HOST:PORT?metadata=URL")
    named = {MOONCAKE_SHORT_NAMES.get(name, name): value for name, value in extra.items()}
    return {"master_server_address": parts.netloc, **named}


def _dynamic(url: str, parts: SplitResult, extra: dict[str, Any]) -> dict[str, Any]:
    class_name = parts.path.strip("/")
    if not parts.netloc or not class_name:
        raise BackendError(f"storage URL {url!r} names no class: write dynamic://package.module/Class")
    return {"backend_name": class_name, "module_path": parts.netloc, "class_name": class_name, **extra}


_PARSERS = {"ray": _ray, "file": _file, "mooncake": _mooncake, "dynamic": _dynamic}
