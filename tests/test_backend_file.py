"""The file backend: the storage suite, and what only files have (D6, D9, kill -9, cap, floor, case 9)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.base import Storage
from hicache_ray.storage.file import format as file_format
from hicache_ray.storage.file import space as file_space
from hicache_ray.storage.file.format import PAGE_HEADER
from hicache_ray.storage.file.storage import FileStorage
from hicache_ray.storage.registry import BackendError
from hicache_ray.testing.host_pages import NumpyHostPages, PageShape
from hicache_ray.testing.subject import Damage, StorageSubject, Unsupported
from hicache_ray.testing.suite import storage_suite
from hicache_ray.testing.suite_base import eventually, identity_of, page_names

SHAPE = PageShape("mha", "page_first", page_size=4, layers=2, token_bytes=64)
FILE_BYTES = SHAPE.page_bytes + PAGE_HEADER.size


class FileSubject(StorageSubject):
    """Page files, damaged as disks and power cuts do."""

    def __init__(self, label: str = "file", **extra: Any) -> None:
        super().__init__("file", {"directory": "{folder}/pages", "min_free_bytes": 0, **extra}, label)

    def make_small(self, folder: Path, identity: ModelIdentity, page_bytes: int) -> tuple[Storage, int]:
        return self.make(folder, identity, max_bytes=16 * (page_bytes + PAGE_HEADER.size)), 16

    def damage(self, damage: Damage, storage: Storage, page_hash: bytes, folder: Path) -> None:
        assert isinstance(storage, FileStorage)
        path = folder / "pages" / storage.file_name(page_hash)
        data = path.read_bytes()
        if damage is Damage.LOST:
            path.unlink()
        elif damage is Damage.ANOTHER_PAGE:
            other = next(file for file in path.parents[1].rglob("*.page") if file != path)
            path.write_bytes(other.read_bytes())
        else:
            middle = len(data) // 2
            flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            kept = {Damage.TRUNCATED: data[:middle], Damage.EMPTIED: b"", Damage.FLIPPED_BYTE: flipped}
            path.write_bytes(kept[damage])

    def take_away(self, folder: Path) -> None:
        (folder / "pages").rename(folder / "gone")
        (folder / "pages").touch()  # a folder that is only missing would be made again

    def bring_back(self, folder: Path) -> None:
        (folder / "pages").unlink()
        (folder / "gone").rename(folder / "pages")

    def freeze(self, folder: Path) -> None:
        raise Unsupported("a local disk can't be stopped; hanging calls are in the fault matrix")


TestFile = storage_suite(FileSubject())
TestFileThroughToDisk = storage_suite(FileSubject("file, fsync", fsync=True, threads=1))


def open_store(folder: Path, pool: NumpyHostPages | None = None, **options: Any) -> tuple[FileStorage, NumpyHostPages]:
    subject = FileSubject(**options)
    store = subject.make(folder, identity_of(SHAPE))
    assert isinstance(store, FileStorage)
    pool = pool or NumpyHostPages(64, SHAPE)
    pool.fill(np.arange(pool.pages), 1)
    store.register_host_pool(pool)
    return store, pool


def put(store: FileStorage, pool: NumpyHostPages, names: list[bytes]) -> int:
    return store.store(names, np.arange(len(names)))


def test_case_28_each_page_is_one_file(tmp_path: Path) -> None:
    store, pool = open_store(tmp_path)
    names = page_names(4)
    put(store, pool, names)
    assert sorted(path.name for path in (tmp_path / "pages").rglob("*.page")) == sorted(
        f"{n.hex()}.page" for n in names
    )
    assert store.space.used_bytes == 4 * FILE_BYTES


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_case_9_sglang_files_have_its_names_and_bytes(tmp_path: Path, layout: str) -> None:
    """SGLang writes the flat page [K or V, layer, token, head, dim] of layer_first, and K then V of page_first."""
    shape = PageShape("mha", layout, page_size=4, layers=2, token_bytes=64)
    identity = ModelIdentity("org/m", layout=layout, page_size=4, tp_rank=1, tp_size=2)
    store = FileSubject(key_style="sglang").make(tmp_path, identity)
    pool = NumpyHostPages(4, shape)
    pool.fill(np.arange(2), 1)
    store.register_host_pool(pool)
    names = page_names(1)
    assert store.store(names, np.array([1])) == 1
    data = (tmp_path / "pages" / f"{names[0].hex()}_org-m_1_2.bin").read_bytes()
    memory = pool.buffer.reshape(2, 2, 4, 256) if layout == "layer_first" else pool.buffer.reshape(2, 4, 512)
    assert data == (memory[:, :, 1] if layout == "layer_first" else memory[:, 1]).tobytes()
    assert store.load(names, np.array([2])) == 1
    assert np.array_equal(pool.read(1), pool.read(2))
    os.truncate(tmp_path / "pages" / f"{names[0].hex()}_org-m_1_2.bin", 5)
    assert store.load(names, np.array([2])) == 0
    store.close()


@pytest.mark.parametrize("cap", [None, 6 * FILE_BYTES])
def test_a_folder_that_was_removed_is_made_again_by_the_next_write(tmp_path: Path, cap: int | None) -> None:
    parent, folder, names = tmp_path / "deep", tmp_path / "deep" / "pages", page_names(4)
    store, pool = open_store(parent, max_bytes=cap)
    other, other_pool = open_store(parent, max_bytes=cap)
    for round_number in range(2):
        assert put(store, pool, names) == 4
        shutil.rmtree(parent)
        assert store.lookup(names) == 0
        assert store.load(names, np.arange(4)) == 0
        assert not folder.exists(), "reads make nothing"
        assert put(other, other_pool, names[:2]) == 2
        assert put(store, pool, names) == 4
        assert store.load(names, np.arange(4)) == 4
        assert other.lookup(names) == 4
        assert len(list(folder.rglob("*.page"))) == 4
        assert store.space.used_bytes == other.space.used_bytes == 4 * FILE_BYTES, round_number
        store.clear()
    put(store, pool, names)
    put(store, pool, page_names(4, seed=1))
    if cap is not None:
        assert store.space.used_bytes <= cap and sum(file.stat().st_size for file in folder.rglob("*.page")) <= cap
    store.close()
    other.close()
    assert not list((folder / ".writing").iterdir())


def test_a_folder_that_can_not_be_made_again_is_a_miss_and_reserves_nothing(tmp_path: Path) -> None:
    folder, names = tmp_path / "pages", page_names(4)
    store, pool = open_store(tmp_path, max_bytes=6 * FILE_BYTES)
    shutil.rmtree(folder)
    folder.touch()
    for _ in range(3):
        assert put(store, pool, names) == 0
    folder.unlink()
    assert put(store, pool, names) == 4
    assert store.space.used_bytes == 4 * FILE_BYTES
    store.close()


def test_sglang_keys_with_pipeline_stages_are_refused(tmp_path: Path) -> None:
    """D9: SGLang's file names do not tell stages apart."""
    with pytest.raises(BackendError, match="pipeline stages"):
        FileSubject(key_style="sglang").make(tmp_path, ModelIdentity("m", pp_size=2))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "needs a folder"),
        ({"directory": "/proc/version/x"}, "can't use its folder"),
        ({"directory": "x", "max_bytes": "lots"}, "max_bytes is 'lots'"),
        ({"directory": "x", "threads": 0}, "threads is 0"),
        ({"directory": "x", "key_style": "short"}, "use one of full, sglang"),
        ({"directory": "x", "max_byte": 5}, "no option 'max_byte'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], text: str
) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BackendError, match=text):
        StorageSubject("file", extra).make(tmp_path, ModelIdentity())


class TestSpace:
    """The byte cap, the order of use, the floor."""

    def test_cap_evicts_the_least_recently_used(self, tmp_path: Path) -> None:
        store, pool = open_store(tmp_path, max_bytes=6 * FILE_BYTES)
        names = page_names(8)
        for name in names[:6]:
            put(store, pool, [name])
        assert store.load(names[:1], np.array([9])) == 1
        put(store, pool, names[6:7])
        put(store, pool, names[7:8])
        assert [store.lookup([name]) for name in names] == [1, 0, 0, 1, 1, 1, 1, 1]
        assert store.space.used_bytes == 6 * FILE_BYTES

    def test_a_chain_is_evicted_from_its_end(self, tmp_path: Path) -> None:
        store, pool = open_store(tmp_path, max_bytes=6 * FILE_BYTES)
        chain, more = page_names(6), page_names(2, seed=1)
        put(store, pool, chain)
        put(store, pool, more)
        assert (store.lookup(chain), store.lookup(more)) == (4, 2)

    def test_order_of_use_survives_a_restart(self, tmp_path: Path) -> None:
        store, pool = open_store(tmp_path)
        names = page_names(6)
        for name in names:
            put(store, pool, [name])
        store.load(names[:1], np.array([9]))
        store.close()
        store, pool = open_store(tmp_path, pool, max_bytes=6 * FILE_BYTES)
        assert len(store.space) == 6
        put(store, pool, page_names(1, seed=1))
        assert [store.lookup([name]) for name in names] == [1, 0, 1, 1, 1, 1]

    def test_what_another_process_used_is_passed_over(self, tmp_path: Path) -> None:
        store, pool = open_store(tmp_path, max_bytes=3 * FILE_BYTES)
        names = page_names(3)
        for name in names:
            put(store, pool, [name])
        other, _ = open_store(tmp_path, pool, max_bytes=3 * FILE_BYTES)
        assert other.load(names[:1], np.array([9])) == 1
        put(store, pool, page_names(1, seed=1))
        assert [store.lookup([name]) for name in names] == [1, 0, 1]

    def test_cap_holds_for_several_stores_on_one_folder(self, tmp_path: Path) -> None:
        """Each evicts the other's pages too, which it finds by a scan."""
        stores = [open_store(tmp_path, max_bytes=8 * FILE_BYTES) for _ in range(3)]
        for seed in range(12):
            for number, (store, pool) in enumerate(stores):
                assert put(store, pool, page_names(2, seed=100 * number + seed)) == 2
        assert len(list((tmp_path / "pages").rglob("*.page"))) <= 8
        assert stores[0][0].space.used_bytes <= 8 * FILE_BYTES

    @pytest.mark.parametrize("pages", [0, 1, 3])
    def test_capacity_edges(self, tmp_path: Path, pages: int) -> None:
        """A batch larger than the cap is refused, one as large fits."""
        store, pool = open_store(tmp_path, max_bytes=pages * FILE_BYTES)
        assert put(store, pool, page_names(pages + 1)) == 0
        assert put(store, pool, page_names(pages)) == pages
        assert store.space.used_bytes == pages * FILE_BYTES

    def test_free_space_floor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        free = 10 * FILE_BYTES
        monkeypatch.setattr(file_space, "free_bytes", lambda root: free)
        store, pool = open_store(tmp_path, min_free_bytes=8 * FILE_BYTES)
        names = page_names(4)
        assert put(store, pool, names[:2]) == 2
        free = 7 * FILE_BYTES
        assert put(store, pool, names[2:3]) == 1, "older pages were not given up for it"
        assert [store.lookup([name]) for name in names] == [0, 0, 1, 0]
        free = 0
        assert put(store, pool, names[3:]) == 0


class TestErrors:
    """What the operating system refuses is a miss."""

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
    def test_write_error_ends_the_batch_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        """Cases 12 and 30: pages before it stay stored, those after it are not stored."""
        store, pool = open_store(tmp_path, threads=1)
        writes = 0

        def writev(descriptor: int, buffers: list[memoryview]) -> int:
            nonlocal writes
            writes += 1
            if writes == 3:
                os.write(descriptor, b"torn")
                raise OSError(code, os.strerror(code))
            return os.writev(descriptor, buffers)

        monkeypatch.setattr(file_format, "write_buffers", writev)
        names = page_names(5)
        stored = put(store, pool, names)
        assert 0 <= stored < 5
        assert store.lookup(names) == stored
        assert store.get_stats().errors == 1
        assert store.space.used_bytes == stored * FILE_BYTES
        assert not list(store.space.writing.glob("*.tmp"))
        monkeypatch.undo()
        assert put(store, pool, names) == 5

    def test_read_error_is_a_miss(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store, pool = open_store(tmp_path)
        names = page_names(2)
        put(store, pool, names)

        def readv(descriptor: int, buffers: list[memoryview]) -> int:
            raise OSError(errno.EIO, "disk error")

        monkeypatch.setattr(file_format, "read_buffers", readv)
        assert store.load(names, np.array([8, 9])) == 0
        assert store.get_stats().errors >= 1
        monkeypatch.undo()
        assert store.load(names, np.array([8, 9])) == 2


WRITER = """
import sys
import numpy as np
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.test_backend_file import open_store, page_names, put
store, pool = open_store(Path(sys.argv[1]), max_bytes=int(sys.argv[3]))
seed = int(sys.argv[4])
print("up", flush=True)
while True:
    seed += 1
    put(store, pool, page_names(16, seed=seed))
"""


def page_files(folder: Path) -> list[Path]:
    return list((folder / "pages").rglob("*.page"))


def write_and_kill(folder: Path, attempt: int, cap: int) -> None:
    """Two processes write at once until there are pages of both, then get a -9."""
    repository = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-c", WRITER, str(folder), repository, str(cap)]
    seeds = [str(attempt * 100_000 + number * 10_000) for number in range(2)]
    writers = [subprocess.Popen([*command, seed], stdout=subprocess.PIPE) for seed in seeds]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
        newest = time.time_ns()
        eventually(lambda: count_newer(folder, newest) > 32, "nothing is written")
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


def count_newer(folder: Path, stamp: int) -> int:
    """Page files written since; files that are evicted meanwhile do not count."""
    count = 0
    for path in page_files(folder):
        with contextlib.suppress(FileNotFoundError):
            count += path.stat().st_mtime_ns > stamp
    return count


def test_killed_writers_leave_whole_pages(tmp_path: Path) -> None:
    """What is visible after kill -9 is whole, the count is right, and nothing half-written is left."""
    for attempt in range(3):
        write_and_kill(tmp_path, attempt, 400 * FILE_BYTES)
    store, pool = open_store(tmp_path)
    files = page_files(tmp_path)
    assert 32 < len(files) <= 432
    for path in files:
        assert store.load([bytes.fromhex(path.stem)], np.array([60])) == 1, f"{path.name} is torn"
    assert store.get_stats().corrupt == 0
    assert store.space.used_bytes == len(files) * FILE_BYTES
    assert [folder.name for folder in (tmp_path / "pages" / ".writing").iterdir()] == [store.space.writing.name]
