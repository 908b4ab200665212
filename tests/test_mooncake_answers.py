"""Mooncake options, and what the backend makes of each answer of the store; no Mooncake needed."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.base import StorageConfig
from hicache_ray.storage.mooncake import client as mooncake_client
from hicache_ray.storage.mooncake.objects import MAX_PIECES
from hicache_ray.storage.mooncake.options import MooncakeOptions
from hicache_ray.storage.mooncake.storage import MooncakeStorage
from hicache_ray.storage.options import read_size
from hicache_ray.storage.registry import BackendError
from hicache_ray.testing.host_pages import NumpyHostPages, PageShape
from hicache_ray.testing.suite_base import SHAPES, identity_of, page_names

SHAPE = PageShape("mha", "page_first")


class ScriptedStore:
    """The library's client, in this process's memory; `codes` are answered instead, once each, by method name."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.codes: dict[str, list[list[int] | None]] = {}
        self.calls: list[tuple[str, int]] = []
        self.registered: set[tuple[int, int]] = set()

    def setup(self, *arguments: Any) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.add((address, size))
        return 0

    def unregister_buffer(self, address: int) -> int:
        self.registered = {span for span in self.registered if span[0] != address}
        return 0

    def put(self, key: str, value: bytes) -> int:
        self.objects[key] = value
        return 0

    def get(self, key: str) -> bytes:
        return self.objects[key]

    def get_size(self, key: str) -> int:
        return len(self.objects[key]) if key in self.objects else -704

    def remove(self, key: str, force: bool) -> int:
        return 0 if self.objects.pop(key, None) is not None else -704

    def close(self) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return self._scripted("batch_is_exist", keys) or [int(key in self.objects) for key in keys]

    def batch_put_from_multi_buffers(self, keys: list[str], pointers: Any, sizes: Any) -> list[int]:
        codes = self._scripted("put", keys) or [0] * len(keys)
        for key, address, size, code in zip(keys, pointers, sizes, codes, strict=True):
            if code == 0:
                parts = [ctypes.string_at(a, s) for a, s in zip(address, size, strict=True)]
                self.objects.setdefault(key, b"".join(parts))
        return codes

    def batch_get_into_multi_buffers(self, keys: list[str], pointers: Any, sizes: Any) -> list[int]:
        scripted = self._scripted("get", keys)
        answers = []
        for key, address, size in zip(keys, pointers, sizes, strict=True):
            data, offset = self.objects.get(key), 0
            answers.append(-704 if data is None else len(data))
            for a, s in zip(address, size, strict=True) if data and len(data) == sum(size) else []:
                ctypes.memmove(a, data[offset : offset + s], s)
                offset += s
        return scripted or answers

    def _scripted(self, name: str, keys: list[str]) -> list[int] | None:
        self.calls.append((name, len(keys)))
        waiting = self.codes.get(name, [])
        return waiting.pop(0) if waiting else None


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ScriptedStore:
    store = ScriptedStore()
    monkeypatch.setattr(mooncake_client, "import_store", lambda timeout: lambda: store)
    monkeypatch.setattr(MooncakeOptions, "servers", lambda self: [])
    return store


def open_storage(pool: NumpyHostPages, shape: PageShape = SHAPE, timeout: float = 0.2) -> MooncakeStorage:
    storage = MooncakeStorage(StorageConfig(identity_of(shape), {"master_server_address": "test:1"}, timeout))
    storage.register_host_pool(pool)
    pool.fill(range(pool.pages), 1)
    return storage


NAMES = page_names(4)


@pytest.mark.parametrize(
    ("codes", "expected", "errors", "why"),
    [
        ([0, -704, 0, 0], 1, 0, "not found"),
        ([0, -703, 0, 0], 1, 0, "replica not ready: another client is writing it"),
        ([0, -712, 0, 0], 1, 0, "replica gone"),
        ([0, 0, -800, 0], 2, 1, "transfer failed"),
        ([-900, -900, -900, -900], 0, 1, "no master"),
        ([-901, -901, -901, -901], 0, 1, "master hangs"),
    ],
)
def test_read_answers(store: ScriptedStore, codes: list[int], expected: int, errors: int, why: str) -> None:
    """Case 12: bytes are success, anything else ends the prefix there."""
    pool = NumpyHostPages(8, SHAPE)
    storage = open_storage(pool)
    assert storage.store(NAMES, np.arange(4)) == 4
    size = SHAPE.page_bytes + 8
    store.codes["get"] = [[code or size for code in codes]]
    assert storage.load(NAMES, np.arange(4, 8)) == expected, why
    assert storage.get_stats().errors == errors
    storage.close()


@pytest.mark.parametrize("again", [True, False])
def test_a_lease_that_ran_out_is_asked_for_once_more(store: ScriptedStore, again: bool) -> None:
    """What came may be another page's bytes by then; the second time counts."""
    pool = NumpyHostPages(8, SHAPE)
    storage = open_storage(pool)
    storage.store(NAMES, np.arange(4))
    size = SHAPE.page_bytes + 8
    store.codes["get"] = [[size, -707, size, -707], None if again else [-707, -707]]
    expected = 4 if again else 1
    assert storage.load(NAMES, np.arange(4, 8)) == expected
    assert [count for name, count in store.calls if name == "get"] == [4, 2]
    storage.close()


@pytest.mark.parametrize(
    ("codes", "expected", "errors", "why"),
    [
        ([0, -705, 0, 0], 1, 0, "exists, yet is not there: another client is writing it and does not end"),
        ([0, 0, -200, -200], 2, 0, "no space"),
        ([-200, 0, 0, 0], 0, 0, "no space for the first, space for the rest"),
        ([0, -900, 0, 0], 1, 1, "no master"),
    ],
)
def test_write_answers(store: ScriptedStore, codes: list[int], expected: int, errors: int, why: str) -> None:
    """A failed page ends the batch, and what was stored after it is taken out again: it has no parent."""
    pool = NumpyHostPages(8, SHAPE)
    storage = open_storage(pool)
    store.codes["put"] = [codes]
    assert storage.store(NAMES, np.arange(4)) == expected, why
    assert len(store.objects) == expected
    assert storage.get_stats().errors == errors
    assert storage.get_stats().set_stored == expected
    storage.close()


def test_a_page_that_another_client_is_just_writing_is_waited_for(store: ScriptedStore) -> None:
    """The store says yes to it at once; it is stored when it is there."""
    pool = NumpyHostPages(8, SHAPE)
    storage = open_storage(pool, timeout=30.0)
    store.codes["batch_is_exist"] = [[0], [0], [0], None]
    assert storage.store(NAMES[:1], np.array([0])) == 1
    assert [name for name, _ in store.calls] == ["batch_is_exist", "put", *["batch_is_exist"] * 3]
    storage.close()


def test_lookup_errors_are_misses(store: ScriptedStore) -> None:
    pool = NumpyHostPages(8, SHAPE)
    storage = open_storage(pool)
    storage.store(NAMES, np.arange(4))
    store.codes["batch_is_exist"] = [[1, 1, -1, 1]]
    assert storage.lookup(NAMES) == 2
    assert storage.get_stats().errors == 1
    storage.close()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.attention}-{shape.layout}")
def test_calls_stay_below_the_transports_limit(store: ScriptedStore, shape: PageShape) -> None:
    deep = PageShape(shape.attention, shape.layout, layers=61)
    pool = NumpyHostPages(300, deep)
    storage = open_storage(pool, deep)
    names = page_names(300)
    assert storage.store(names, np.arange(300)) == 300
    assert storage.load(names, np.arange(300)) == 300
    pieces = int(np.prod(pool.segments.shape[1:-1])) + 1
    assert max(count for name, count in store.calls if name in ("put", "get")) * pieces <= MAX_PIECES
    storage.close()


def test_the_pool_is_registered_once_and_given_back(store: ScriptedStore) -> None:
    pool = NumpyHostPages(8, SHAPE)
    storage = open_storage(pool)
    other = open_storage(pool)
    span = (pool.buffer.ctypes.data, pool.buffer.nbytes)
    assert span in store.registered
    storage.register_host_pool(pool)
    another = NumpyHostPages(4, SHAPE)
    storage.register_host_pool(another)
    assert span in store.registered and (another.buffer.ctypes.data, another.buffer.nbytes) in store.registered
    other.close()
    assert span not in store.registered
    storage.close()
    assert not store.registered


def test_memory_that_the_transport_refuses_is_all_misses(store: ScriptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As RDMA does beyond the locked-memory limit: said once, and the rank goes on without L3."""
    monkeypatch.setattr(store, "register_buffer", lambda address, size: -1)
    storage = MooncakeStorage(StorageConfig(identity_of(SHAPE), {"master_server_address": "test:1"}))
    pool = NumpyHostPages(4, SHAPE)
    storage.register_host_pool(pool)
    assert storage.lookup(NAMES) == 0
    assert storage.store(NAMES, np.arange(4)) == 0
    assert storage.get_stats().errors == 2
    storage.close()


class TestOptions:
    """SGLang's names, from three sources."""

    def test_extra_config_wins_over_the_file_and_that_over_the_environment(self, tmp_path: Path) -> None:
        path = tmp_path / "mooncake.json"
        path.write_text(json.dumps({"master_server_address": "file:1", "protocol": "rdma", "device_name": "mlx5_0"}))
        environment = {
            "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": str(path),
            "MOONCAKE_MASTER": "env:1",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_TE_META_DATA_SERVER": "http://env:8080/metadata",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "2GB",
        }
        options = MooncakeOptions.parse({"master_server_address": "extra:1"}, environment)
        assert options.master_server_address == "extra:1"
        assert (options.protocol, options.device_name) == ("rdma", "mlx5_0")
        assert options.metadata_server == "http://env:8080/metadata"
        assert options.global_segment_size == 2 << 30
        assert (options.local_hostname, options.local_buffer_size) == ("localhost", 16 << 20)

    @pytest.mark.parametrize(
        ("value", "size"),
        [
            (4096, 4096),
            ("4096", 4096),
            ("4gb", 4 << 30),
            ("4GB", 4 << 30),
            ("4 Gb", 4 << 30),
            ("512MiB", 512 << 20),
            ("512m", 512 << 20),
            ("1.5g", 3 << 29),
            ("1kB", 1024),
            ("2T", 2 << 40),
            ("0", 0),
        ],
    )
    def test_sizes_with_units_of_any_case(self, value: Any, size: int) -> None:
        assert (
            MooncakeOptions.parse(
                {"master_server_address": "x:1", "global_segment_size": value}, {}
            ).global_segment_size
            == size
        )

    @pytest.mark.parametrize("value", ["", "gb", "-1", -1, "4 apples", None, True])
    def test_what_is_no_size_is_refused(self, value: Any) -> None:
        with pytest.raises(BackendError, match="global_segment_size is"):
            read_size("global_segment_size", value)

    @pytest.mark.parametrize(
        ("extra", "environment", "text"),
        [
            ({}, {}, "needs the master's address"),
            ({"master_server_adress": "x:1"}, {}, "no option 'master_server_adress'"),
            ({}, {"MOONCAKE_MASTER": "x:1", "MOONCAKE_CHECK_SERVER": "perhaps"}, "MOONCAKE_CHECK_SERVER is 'perhaps'"),
            ({}, {"MOONCAKE_CONFIG_PATH": "/no/such/file.json"}, "'/no/such/file.json' can't be read"),
            ({"master_server_address": "x:1", "key_style": "short"}, {}, "use one of full, sglang"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, extra: dict[str, Any], environment: dict[str, str], text: str) -> None:
        with pytest.raises(BackendError, match=text):
            MooncakeOptions.parse(extra, environment)

    def test_devices_and_memory_per_rank(self) -> None:
        devices = '{"0": "mlx5_0", "1": "mlx5_1,mlx5_2"}'
        extra = {"master_server_address": "x:1", "device_name": devices, "global_segment_size": "8gb"}
        options = MooncakeOptions.parse(extra, {})
        assert options.device_of(1) == "mlx5_1,mlx5_2"
        with pytest.raises(BackendError, match="names no devices for rank 2"):
            options.check(ModelIdentity(tp_rank=2, tp_size=4))
        assert options.segment_of(ModelIdentity(tp_size=4, pp_size=2)) == 1 << 30

    def test_servers_to_ask_before_connecting(self) -> None:
        extra = {"master_server_address": "m:50051", "metadata_server": "http://n:8080/metadata"}
        assert MooncakeOptions.parse(extra, {}).servers() == [("m", 50051), ("n", 8080)]
        extra = {"master_server_address": "etcd://e:2379", "metadata_server": "P2PHANDSHAKE"}
        assert MooncakeOptions.parse(extra, {}).servers() == []
