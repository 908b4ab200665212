"""Reading a backend's options: sizes with units, booleans, and a clear word on what is not known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

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

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)


def parse_size(name: str, value: Any) -> int:
    """Bytes of `value`: a number, or text with a unit of any case ("4gb", "512 MiB", "1.5T"); units are powers of 1024.

    Raises:
        BackendError: no size, or a negative one; the text names the option.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise BackendError(f"{name} is {value!r}; give bytes as a number, or with a unit as in '4gb' or '512mb'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_bool(name: str, value: Any) -> bool:
    """A boolean, 0 or 1, or one of the usual words in any case; BackendError for anything else."""
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise BackendError(f"{name} is {value!r}; use true or false")


def parse_count(name: str, value: Any, minimum: int = 1) -> int:
    """A whole number of at least `minimum`, also as text; BackendError for anything else."""
    try:
        count = int(str(value))
    except ValueError:
        count = minimum - 1
    if isinstance(value, bool) or count < minimum:
        raise BackendError(f"{name} is {value!r}; use a whole number of at least {minimum}")
    return count


def parse_choice(name: str, value: Any, choices: Iterable[str]) -> str:
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
