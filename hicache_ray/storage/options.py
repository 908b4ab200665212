"""Reads the options of a backend: what does not fit is a BackendError that names the option."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hicache_ray.config.option import SIZE_FORMS, parse_bool, parse_size
from hicache_ray.storage.registry import BackendError

SHARED_OPTIONS = frozenset(
    {
        "backend_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
    }
)
"""Names in the extra config that the cache itself reads; every backend lets them pass."""

KEY_STYLES = ("full", "sglang")
"""Storage keys with the whole model identity, or exactly SGLang's (to share a store with it; cases 9, 10)."""


def read_size(name: str, value: Any, *, kilo: int = 1000) -> int:
    """Bytes as `parse_size` reads them; BackendError, which names the option, for what is no size."""
    try:
        return parse_size(value, kilo=kilo)
    except (ValueError, OverflowError):
        raise BackendError(f"{name} is {value!r}; {SIZE_FORMS}") from None


def read_bool(name: str, value: Any) -> bool:
    """A boolean as `parse_bool` reads it, or empty text, which is false; BackendError for anything else."""
    try:
        return value != "" and parse_bool(value)
    except ValueError:
        raise BackendError(f"{name} is {value!r}; give true or false") from None


def read_count(name: str, value: Any, minimum: int = 1) -> int:
    """A whole number of at least `minimum`, also as text; BackendError for anything else."""
    try:
        count = int(str(value))
    except ValueError:
        count = minimum - 1
    if isinstance(value, bool) or count < minimum:
        raise BackendError(f"{name} is {value!r}; use a whole number of at least {minimum}")
    return count


def read_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """`value` when it is one of the choices; BackendError, with the choices, when not."""
    known = tuple(choices)
    if value not in known:
        raise BackendError(f"{name} is {value!r}; use one of {', '.join(known)}")
    return str(value)


def refuse_unknown(backend: str, extra: Mapping[str, Any], known: Iterable[str]) -> None:
    """BackendError when `extra` has an option that neither the backend nor the cache knows: a typing error would
    otherwise silently leave a default in force."""
    names = sorted(known)
    unknown = sorted(set(extra) - set(names) - SHARED_OPTIONS)
    if unknown:
        raise BackendError(
            f"storage backend {backend!r} has no option {', '.join(map(repr, unknown))}; it has {', '.join(names)}"
        )
