"""Backends of other packages: the worked example, a class written for SGLang, and what is refused, in which words."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.custom_backend import SqliteStorage
from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.base import Storage, StorageConfig
from hicache_ray.storage.registry import BackendError, create_backend
from hicache_ray.storage.sglang.storage import SGLangClassStorage
from hicache_ray.testing.host_pages import NumpyHostPages
from hicache_ray.testing.subject import Damage, StorageSubject
from hicache_ray.testing.suite import storage_suite
from hicache_ray.testing.suite_base import SHAPES, identity_of, page_names
from tests.sglang_store import STORES

REPOSITORY = Path(__file__).resolve().parent.parent


class SqliteSubject(StorageSubject):
    """The worked example, through the loader."""

    def __init__(self) -> None:
        where = {"backend_name": "sqlite", "module_path": "examples.custom_backend", "class_name": "SqliteStorage"}
        super().__init__("dynamic", {**where, "database": "{folder}/pages.db"}, "dynamic: example")

    def damage(self, damage: Damage, storage: Storage, page_hash: bytes, folder: Path) -> None:
        key = storage.storage_key(page_hash)
        with sqlite3.connect(folder / "pages.db", timeout=30) as connection:
            (data,) = connection.execute("select data from page where key = ?", (key,)).fetchone()
            (another,) = connection.execute("select data from page where key != ?", (key,)).fetchone()
            if damage is Damage.LOST:
                connection.execute("delete from page where key = ?", (key,))
            else:
                connection.execute("update page set data = ? where key = ?", (damaged(damage, data, another), key))
        connection.close()


class SGLangSubject(StorageSubject):
    """A class written for SGLang, through the loader."""

    clears_all = "SGLang's clear takes no identity"

    def __init__(self, label: str, **extra: Any) -> None:
        where = {"backend_name": "d", "module_path": "tests.sglang_store", "class_name": "DictionaryStore"}
        super().__init__("dynamic", {**where, "store": "{folder}", **extra}, label)

    def damage(self, damage: Damage, storage: Storage, page_hash: bytes, folder: Path) -> None:
        assert isinstance(storage, SGLangClassStorage)
        pages, key = STORES[str(folder)], storage.class_key(page_hash)
        if damage is Damage.LOST:
            del pages[key]
        else:
            another = next(page for other, page in pages.items() if other != key and not other.endswith(".sum"))
            pages[key] = damaged(damage, pages[key], another)


def damaged(damage: Damage, data: bytes, another: bytes) -> bytes:
    """What is left of a page."""
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    kept = {Damage.TRUNCATED: data[:middle], Damage.EMPTIED: b"", Damage.FLIPPED_BYTE: flipped}
    return kept.get(damage, another)


TestExample = storage_suite(SqliteSubject())
TestSGLangClass = storage_suite(SGLangSubject("dynamic: SGLang class"))
TestSGLangClassZeroCopy = storage_suite(SGLangSubject("dynamic: SGLang v1", interface_v1=1))


def test_the_example_runs() -> None:
    example = REPOSITORY / "examples" / "custom_backend.py"
    result = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True, cwd="/")
    assert "read:   4 of 4" in result.stdout
    assert "bytes:  the same" in result.stdout
    assert "another model finds 0" in result.stdout


def test_a_backend_outside_the_repository_joins_with_one_line(tmp_path: Path) -> None:
    """Its own module, its own test file, its own pytest run; the table names it and what was skipped."""
    (tmp_path / "elsewhere.py").write_text((REPOSITORY / "examples" / "custom_backend.py").read_text())
    (tmp_path / "test_elsewhere.py").write_text(
        "from hicache_ray.testing.suite import storage_suite\n"
        "TestElsewhere = storage_suite('elsewhere:SqliteStorage', {'database': '{folder}/pages.db'})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "layout or missing or killed"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout
    assert "elsewhere:SqliteStorage" in result.stdout and "round trip in any layout" in result.stdout
    assert "- elsewhere:SqliteStorage, store goes and comes back: there is no server to kill" in result.stdout


def config(**extra: Any) -> StorageConfig:
    where = {"backend_name": "mine", "module_path": "tests.sglang_store", "class_name": "DictionaryStore"}
    return StorageConfig(identity_of(SHAPES[1]), {**where, "store": "s", **extra})


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"module_path": ""}, "needs the options backend_name, module_path, class_name; missing: module_path"),
        ({"module_path": "no_such_package.store"}, r"'mine': module_path 'no_such_package.store' can't be imported"),
        ({"class_name": "NoStore"}, r"'mine': 'tests.sglang_store' has no class 'NoStore'"),
        ({"class_name": "STORES"}, r"has no class 'STORES'"),
        ({"class_name": "HalfAStore"}, r"HalfAStore is no storage backend: it lacks get, set, batch_get, batch_set"),
        ({"class_name": "UnwillingStore"}, r"could not be made: no server at 127.0.0.1:1"),
        ({"interface_v1": "perhaps"}, r"interface_v1 is 'perhaps'"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_message(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(BackendError, match=text) as caught:
        create_backend("dynamic", config(**extra))
    assert "\n" not in str(caught.value)


def test_a_class_of_ours_is_used_as_it_is(tmp_path: Path) -> None:
    extra = {"module_path": "examples.custom_backend", "class_name": "SqliteStorage", "database": str(tmp_path / "db")}
    backend = create_backend("dynamic", config(**extra))
    assert isinstance(backend, SqliteStorage)
    backend.close()


class Hiding(SqliteStorage):
    """Has an attribute by the name of a method."""

    def __init__(self, config: StorageConfig) -> None:
        super().__init__(config)
        self.store = {}  # type: ignore[method-assign, assignment]


def test_an_attribute_that_hides_a_method_is_told(tmp_path: Path) -> None:
    extra = {"module_path": __name__, "class_name": "Hiding", "database": str(tmp_path / "db")}
    with pytest.raises(BackendError, match=r"Hiding has an attribute 'store' that hides the method"):
        create_backend("dynamic", config(**extra))


def test_a_class_that_raises_is_all_misses() -> None:
    backend = SGLangSubject("").make(Path("raising"), identity_of(SHAPES[1]), class_name="RaisingStore")
    pool = NumpyHostPages(4, SHAPES[1])
    backend.register_host_pool(pool)
    names = page_names(2)
    assert backend.lookup(names) == 0
    assert backend.load(names, np.array([0, 1])) == 0
    assert backend.store(names, np.array([0, 1])) == 0
    assert backend.get_stats().errors == 4


def test_sglang_keys_are_the_bare_hashes(tmp_path: Path) -> None:
    """With `key_style` sglang and no checksum the class sees what SGLang would give it."""
    backend = SGLangSubject("").make(tmp_path, ModelIdentity("m", page_size=2), key_style="sglang", checksum=False)
    pool = NumpyHostPages(2, SHAPES[1])
    pool.fill(np.arange(1), 1)
    backend.register_host_pool(pool)
    names = page_names(1)
    assert backend.store(names, np.array([0])) == 1
    assert STORES[str(tmp_path)] == {names[0].hex(): pool.read(0).tobytes()}
