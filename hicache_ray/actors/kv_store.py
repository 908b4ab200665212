"""A torch store over Ray's internal KV: ranks find each other without a server and without depending on rank 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from ray.experimental import internal_kv
from torch import distributed

KV_NAMESPACE = "hicache"
"""Namespace of all our keys in Ray's internal KV."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02


class InternalKVStore(distributed.Store):
    """What one rank needs to meet its peers: keys under a prefix, waited for until a fixed deadline."""

    def __init__(self, prefix: str, deadline: float) -> None:
        """
        Args:
            prefix: put before every key; equal on all ranks that meet, and never used again.
            deadline: `time.monotonic()` after which waiting for a peer's key fails.
        """
        super().__init__()
        self.prefix = prefix
        self.deadline = deadline
        self._written: list[str] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Publishes a key."""
        self._written.append(key)
        internal_kv._internal_kv_put(self.prefix + key, value, namespace=KV_NAMESPACE)

    def get(self, key: str) -> bytes:
        """The value of a key, once a peer has published it."""
        pause = _FIRST_PAUSE
        while True:
            value: bytes | None = internal_kv._internal_kv_get(self.prefix + key, namespace=KV_NAMESPACE)
            if value is not None:
                return value
            if time.monotonic() >= self.deadline:
                raise TimeoutError(f"no rank published {self.prefix + key!r} in time: a peer did not join")
            # The internal KV has no way to wait for a key.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys exist. The store's own deadline holds, not torch's limit for each key."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now."""
        return all(internal_kv._internal_kv_exists(self.prefix + key, namespace=KV_NAMESPACE) for key in keys)

    def delete_key(self, key: str) -> bool:
        """Deletes a key; False when it did not exist."""
        return bool(internal_kv._internal_kv_del(self.prefix + key, namespace=KV_NAMESPACE))

    def delete_written(self) -> None:
        """Deletes the keys that this rank published."""
        for key in self._written:
            self.delete_key(key)
        self._written.clear()


def delete_keys(prefix: str) -> int:
    """Deletes all our keys under a prefix; returns how many there were."""
    return int(internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=KV_NAMESPACE))


def list_keys(prefix: str) -> list[str]:
    """Our keys under a prefix."""
    return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=KV_NAMESPACE)]
