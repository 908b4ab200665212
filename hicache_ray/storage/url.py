"""Storage URLs: an L3 backend and its options in one word, for command lines.

| URL | backend |
|---|---|
| `ray`, `ray://NAME?OPTION=...` | the Ray storage pool, the one called NAME |
| `file:///DIR?max_bytes=100gb` | page files under /DIR |
| `mooncake://HOST:PORT?metadata=http://HOST:PORT/metadata` | a Mooncake store by its master's address |
| `dynamic://package.module/Class?interface_v1=1` | a class of another package |

Everything after `?` is an option of the backend; Mooncake's have short names too: metadata, segment, device, tag.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from hicache_ray.storage.registry import BackendError

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
