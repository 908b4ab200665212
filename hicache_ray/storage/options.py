"""Reads the options of a backend: what does not fit is a BackendError that names the option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hicache_ray.config.extra import PREFETCH_KEYS
from hicache_ray.config.option import SIZE_FORMS, parse_bool, parse_size
from hicache_ray.storage.registry import BackendError

SHARED_OPTIONS = frozenset({"backend_name", "interface_v1", *PREFETCH_KEYS})
"""Names in the extra config that the cache itself reads; every backend lets them pass."""

KEY_STYLES = ("full", "sglang")
"""Storage keys with the whole model identity, or exactly SGLang's (to share a store with it; cases 9, 10)."""


Reader = Callable[[str, Any], Any]
"""Reads the value of the option of that name; BackendError when it does not fit."""


def backend_options(backend: str, extra: Mapping[str, Any], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The options that `extra` gives, read; those that are None are left out.

    Raises:
        BackendError: a value that does not fit, or an option that neither the backend nor the cache knows: a typing
            error would otherwise silently leave a default in force.
    """
    unknown = sorted(set(extra) - set(readers) - SHARED_OPTIONS)
    if unknown:
        raise BackendError(
            f"storage backend {backend!r} has no option {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(sorted(readers))}"
        )
    return {name: read(name, extra[name]) for name, read in readers.items() if extra.get(name) is not None}


def read_text(name: str, value: Any) -> str:
    """The value as text, without blanks around it."""
    return str(value).strip()


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


def read_seconds(name: str, value: Any) -> float:
    """A number of seconds above 0, also as text; BackendError for anything else."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise BackendError(f"{name} is {value!r}; use a number of seconds above 0")
    return seconds


def read_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """`value` when it is one of the choices; BackendError, with the choices, when not."""
    known = tuple(choices)
    if value not in known:
        raise BackendError(f"{name} is {value!r}; use one of {', '.join(known)}")
    return str(value)
