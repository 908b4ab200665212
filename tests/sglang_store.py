"""A storage class as somebody wrote it for SGLang: no base class of ours, tensors or pointers, a dictionary behind."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

STORES: dict[str, dict[str, bytes]] = {}
"""Pages by key, by the option `store`: the "server", which outlives its clients."""

_lock = threading.Lock()


class DictionaryStore:
    """Made as `cls(storage_config, {})`; the batch methods move tensors, the _v1 methods the host pool's memory."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        self.pages = STORES.setdefault(storage_config.extra_config["store"], {})
        self.pool: Any = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.pool = mem_pool_host
        assert mem_pool_host.kv_buffer.numel() > 0

    def exists(self, key: str) -> bool:
        return key in self.pages

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        assert extra_info is None or extra_info.prefix_keys is None
        return next((position for position, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        data = self.pages.get(key)
        return (
            None if data is None else torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        )

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        with _lock:
            self.pages[key] = value.contiguous().numpy().tobytes()
        return True

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        return [self.get(key) for key in keys] if self.exists(keys[0]) else None

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, sizes: Any = None) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        done = []
        for key, parts in zip(keys, self._parts(keys, host_indices), strict=True):
            data, offset = self.pages.get(key), 0
            done.append(data is not None and len(data) == sum(size for _, size in parts))
            for address, size in parts if done[-1] else []:
                assert data is not None
                ctypes.memmove(address, data[offset : offset + size], size)
                offset += size
        return done

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        for key, parts in zip(keys, self._parts(keys, host_indices), strict=True):
            data = b"".join(ctypes.string_at(address, size) for address, size in parts)
            with _lock:
                self.pages[key] = data
        return [True] * len(keys)

    def clear(self) -> None:
        self.pages.clear()

    def _parts(self, keys: list[str], host_indices: torch.Tensor) -> list[list[tuple[int, int]]]:
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        parts = list(zip(addresses, sizes, strict=True))
        step = len(parts) // len(keys)
        return [parts[start : start + step] for start in range(0, len(parts), step)]


class HalfAStore:
    """Lacks most of what SGLang asks for."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        self.config = storage_config

    def exists(self, key: str) -> bool:
        return False


class UnwillingStore(DictionaryStore):
    """Can't be made."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        raise ConnectionError("no server at 127.0.0.1:1")


class RaisingStore(DictionaryStore):
    """Raises in everything."""

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        raise ConnectionError("gone")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise ConnectionError("gone")

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, sizes: Any = None) -> bool:
        raise ConnectionError("gone")
