"""The arena file: layout, locking, what survives a crash (docs/design.md 6)."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.storage.shard import files as files_module
from hicache_ray.storage.shard.arena import Arena, ArenaMapping
from hicache_ray.storage.shard.files import read_owner, remove_if_unlocked, sweep
from hicache_ray.storage.shard.layout import (
    EMPTY,
    FILE_HEADER_BYTES,
    VALID,
    WRITING,
    ArenaError,
    ArenaGeometry,
    ArenaLocked,
    cell_bytes_for,
)

PAGE = 4096
GEOMETRY = ArenaGeometry(segments=4, segment_bytes=8 * PAGE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hicache-test.arena"


@pytest.fixture
def arena(path: Path) -> Iterator[Arena]:
    made = Arena.create(path, GEOMETRY, {"service": "test"})
    yield made
    made.close()


def fill(arena: Arena, keys: list[bytes], label: bytes = b"") -> np.ndarray:
    cells = np.array(list(arena.divide_segment(0, PAGE))[: len(keys)])
    arena.mark_writing(cells, arena.next_generation(len(keys)), PAGE)
    arena.mark_valid(cells, keys, np.arange(len(keys), dtype=np.uint64), label, np.inf)
    return cells


def reopened(arena: Arena) -> Arena:
    arena.close()
    return Arena.open(arena.path)


def test_geometry_of_a_budget_has_at_least_eight_segments() -> None:
    assert ArenaGeometry.of(1 << 30) == (16, 64 << 20)
    assert ArenaGeometry.of(1 << 20) == (8, 128 << 10)
    assert ArenaGeometry.of(100 << 30).segments == 64
    assert ArenaGeometry.of(10_000, segment_bytes=4096) == (2, 4096)


@pytest.mark.parametrize(("budget", "segment"), [(0, None), (1023, None), (4096, 8192), (4096, 100)])
def test_geometry_refuses_what_holds_no_cell(budget: int, segment: int | None) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        ArenaGeometry.of(budget, segment)


def test_cells_are_aligned_and_hold_the_page() -> None:
    assert [cell_bytes_for(n) for n in (1, 1024, 1025, 4096)] == [1024, 1024, 1088, 4096]


def test_file_is_private_and_names_its_maker(arena: Arena, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_owner(path) == arena.owner == {"service": "test"}
    assert list(path.parent.iterdir()) == [path]


def test_cells_of_all_classes_are_disjoint_and_inside(arena: Arena) -> None:
    first, second = arena.divide_segment(0, PAGE), arena.divide_segment(1, 1024)
    assert (len(first), len(second)) == (8, 32)
    offsets = arena.offsets(np.array([*first, *second]))
    ends = offsets + np.array([PAGE] * 8 + [1024] * 32)
    assert offsets[0] == GEOMETRY.data_start and ends.max() <= GEOMETRY.file_bytes
    assert np.all(offsets[1:] == ends[:-1])


def test_owner_and_client_see_the_same_bytes(arena: Arena) -> None:
    client = ArenaMapping.attach(arena.path, arena.arena_id)
    client.prefault()
    (cell,) = fill(arena, [b"k"])
    offset = int(arena.offsets(np.array([cell]))[0])
    client.data(offset, PAGE)[:] = 7
    assert np.all(arena.data(offset, PAGE) == 7)
    assert client.headers["state"][cell] == VALID


def test_attach_refuses_another_arena(arena: Arena) -> None:
    with pytest.raises(ArenaError, match="not"):
        ArenaMapping.attach(arena.path, arena.arena_id + 1)


def test_a_living_owner_keeps_others_out(arena: Arena, path: Path) -> None:
    for attempt in (lambda: Arena.open(path), lambda: Arena.create(path, GEOMETRY), lambda: remove_if_unlocked(path)):
        with pytest.raises(ArenaLocked, match="living process"):
            attempt()
    assert list(path.parent.iterdir()) == [path]
    arena.close()
    assert remove_if_unlocked(path)
    assert not remove_if_unlocked(path)


def test_reopening_keeps_whole_pages_and_drops_the_rest(arena: Arena) -> None:
    cells = fill(arena, [b"a", b"b", b"c"], label=b"tenant")
    arena.mark_writing(cells[1:2], arena.next_generation(1), PAGE)
    again = reopened(arena)
    assert [(s.cell, s.key, s.label, s.length) for s in again.survivors()] == [
        (cells[0], b"a", b"tenant", PAGE),
        (cells[2], b"c", b"tenant", PAGE),
    ]
    assert again.headers["state"][cells].tolist() == [VALID, EMPTY, VALID]
    again.close()


def test_generations_are_never_used_again(arena: Arena) -> None:
    before = arena.next_generation(3)
    again = reopened(arena)
    assert again.next_generation(1)[0] > before.max()
    again.close()


@pytest.mark.parametrize("field", ["key", "length", "checksum", "generation", "label", "expires", "key_bytes", "seal"])
def test_a_damaged_header_is_ignored(arena: Arena, field: str) -> None:
    cells = fill(arena, [b"a", b"b"])
    raw = arena.headers[cells[0] : cells[0] + 1][field].view(np.uint8).reshape(-1)
    raw[0] ^= 0x40
    again = reopened(arena)
    assert [survivor.key for survivor in again.survivors()] == [b"b"]
    again.close()


def test_a_damaged_segment_table_loses_that_segment_only(arena: Arena) -> None:
    fill(arena, [b"a"])
    cells = np.array(arena.divide_segment(1, PAGE)[:1])
    arena.mark_writing(cells, arena.next_generation(1), PAGE)
    arena.mark_valid(cells, [b"b"], np.zeros(1, np.uint64), b"", np.inf)
    arena.segment_cell_bytes[0] = 12345
    again = reopened(arena)
    assert [survivor.key for survivor in again.survivors()] == [b"b"]
    assert again.cells_in(0) == 0
    again.close()


@pytest.mark.parametrize("length", [0, 100, FILE_HEADER_BYTES, GEOMETRY.file_bytes - 1])
def test_a_truncated_file_is_no_arena(arena: Arena, length: int) -> None:
    arena.close()
    os.truncate(arena.path, length)
    with pytest.raises(ArenaError, match=r"no arena|bytes, its header"):
        Arena.open(arena.path)


def test_more_than_the_file_system_holds_is_refused(path: Path) -> None:
    with pytest.raises(ArenaError, match="does not fit"):
        Arena.create(path, ArenaGeometry(1 << 20, 1 << 40))
    assert not list(path.parent.iterdir())


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="does not exist"):
        Arena.create(tmp_path / "none" / "a.arena", GEOMETRY)


def test_owner_killed_while_writing(path: Path) -> None:
    """kill -9 between reserve and commit: the lock is gone, the whole page is there, the torn one is not."""
    code = f"""
        import numpy as np, sys
        from pathlib import Path
        from hicache_ray.storage.shard.arena import Arena
        from hicache_ray.storage.shard.layout import ArenaGeometry
        arena = Arena.create(Path({str(path)!r}), ArenaGeometry{tuple(GEOMETRY)})
        cells = np.array(arena.divide_segment(0, {PAGE})[:2])
        arena.mark_writing(cells, arena.next_generation(2), {PAGE})
        arena.mark_valid(cells[:1], [b"whole"], np.zeros(1, np.uint64), b"", np.inf)
        print("ready", flush=True)
        sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    with pytest.raises(ArenaLocked):
        Arena.open(path)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=30)
    arena = Arena.open(path)
    assert arena.headers["state"][:2].tolist() == [VALID, WRITING]
    assert [survivor.key for survivor in arena.survivors()] == [b"whole"]
    arena.close()


@pytest.mark.parametrize("deletes", [True, False])
def test_a_sweep_that_meets_an_arena_in_the_making_does_not_fail_its_maker(
    path: Path, monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    """Actors of a pool start at once: one sweeps while another has made its file and not locked it yet."""
    lock, met = files_module.lock_file, []

    def lock_after_a_sweep(file: Path, descriptor: int) -> None:
        if not met:
            met.append(os.open(file, os.O_RDWR))
            if deletes:
                assert sweep(path.parent, lambda facts: False) == [file]
            else:
                fcntl.flock(met[0], fcntl.LOCK_EX)  # it is about to
        lock(file, descriptor)

    monkeypatch.setattr(files_module, "lock_file", lock_after_a_sweep)
    made = Arena.create(path, GEOMETRY, {"service": "test"})
    assert met and read_owner(path) == {"service": "test"}
    with pytest.raises(ArenaLocked):
        Arena.open(path)
    made.close()
    os.close(met[0])
