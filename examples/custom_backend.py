"""A storage backend of one's own: pages in an SQLite database.

The class needs four methods. Run this file to see it at work through the `dynamic` backend, the way a configuration
names it, or put it through the conformance suite with one line:

    TestSqlite = storage_suite("examples.custom_backend:SqliteStorage", {"database": "{folder}/pages.db"})
"""

from __future__ import annotations

import hashlib
import sqlite3
import sys
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ray.hashing import ModelIdentity
from hicache_ray.pages import Bytes
from hicache_ray.storage.base import PageStorage, StorageConfig
from hicache_ray.storage.guard import GuardedStorage
from hicache_ray.storage.registry import create_backend
from hicache_ray.testing.host_pages import NumpyHostPages, PageShape


class SqliteStorage(PageStorage):
    """Pages in the table `page` of the database file that the option `database` names.

    What a backend has to promise: a page is there whole or not at all (each statement is a transaction), what comes
    back is what was stored under that key (a checksum over both), a key that exists is left alone, and a failure is
    `False`.
    """

    def __init__(self, config: StorageConfig) -> None:
        super().__init__(config)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            config.extra["database"], timeout=config.timeout, isolation_level=None, check_same_thread=False
        )
        self._database.execute("pragma journal_mode = wal")
        self._database.execute("pragma synchronous = off")
        self._database.execute("create table if not exists page (key text primary key, data blob, checksum integer)")

    def exists(self, key: str) -> bool:
        return bool(self._run("select 1 from page where key = ?", key))

    def get(self, key: str, out: Bytes) -> bool:
        rows = self._run("select data, checksum from page where key = ?", key)
        if not rows:
            return False
        data, checksum = rows[0]
        if len(data) != out.size or _checksum(key, data) != checksum:
            # Deleted, so that the page can be stored again: a key that exists is left alone.
            self.counters.add(corrupt=1)
            self._run("delete from page where key = ?", key)
            return False
        out[:] = np.frombuffer(data, dtype=np.uint8)
        return True

    def set(self, key: str, data: Bytes) -> bool:
        page = data.tobytes()
        return self._run("insert or ignore into page values (?, ?, ?)", key, page, _checksum(key, page)) is not None

    def clear(self, everything: bool = False) -> None:
        with self._lock:
            pattern = "%" if everything else f"{self.config.identity.digest}-%"
            self._database.execute("delete from page where key like ?", (pattern,))

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _run(self, statement: str, *values: str | bytes | int) -> list[Any] | None:
        """The rows, or None when the database fails."""
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.Error:
            self.counters.add(errors=1)
            return None


def _checksum(key: str, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(key.encode()))


def main() -> None:
    """Store four pages, read them back through a second backend, lose one."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend_name": "sqlite",
            "module_path": "custom_backend",
            "class_name": "SqliteStorage",
            "database": f"{folder}/pages.db",
        }
        shape = PageShape("mha", "page_first", page_size=16, layers=4, token_bytes=256)
        identity = ModelIdentity("org/model", page_size=16, layout="page_first")
        pool = NumpyHostPages(8, shape)
        pool.fill(range(4), seed=1)
        hashes = [hashlib.sha256(bytes([page])).digest() for page in range(4)]

        writer, reader = (GuardedStorage(create_backend("dynamic", StorageConfig(identity, options))) for _ in range(2))
        for storage in (writer, reader):
            storage.register_host_pool(pool)
        print("stored:", writer.store(hashes, np.arange(4)), "of", len(hashes))
        print("found: ", reader.lookup(hashes), "of", len(hashes))
        print("read:  ", reader.load(hashes, np.arange(4, 8)), "of", len(hashes))
        same = all(np.array_equal(pool.read(page), pool.read(page + 4)) for page in range(4))
        print("bytes: ", "the same" if same else "DIFFERENT")
        print("another model finds", _other_model(options, pool, hashes), "of them")
        for storage in (writer, reader):
            storage.close()


def _other_model(options: dict[str, str], pool: NumpyHostPages, hashes: list[bytes]) -> int:
    other = ModelIdentity("org/other", page_size=16, layout="page_first")
    storage = create_backend("dynamic", StorageConfig(other, options))
    storage.register_host_pool(pool)
    hits = storage.lookup(hashes)
    storage.close()
    return hits


if __name__ == "__main__":
    main()
