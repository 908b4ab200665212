"""A shard without Ray: reservations, leases, eviction, quotas, TTL, damage, restart (docs/design.md 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.storage.shard.arena import Arena
from hicache_ray.storage.shard.eviction import SHARD_POLICIES
from hicache_ray.storage.shard.grants import EXISTING, GRANTED, MISSING, REFUSED, NamespaceLimit, namespace_label
from hicache_ray.storage.shard.layout import VALID, ArenaGeometry
from hicache_ray.storage.shard.page_copy import checksum_of, load_page, store_page
from hicache_ray.storage.shard.shard import Shard

PAGE = 2048


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(number: int) -> bytes:
    return number.to_bytes(48, "big")


def content(number: int, length: int = PAGE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8)


Make = Callable[..., Shard]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Make]:
    made: list[Shard] = []

    def build(pages: int = 8, segments: int = 1, page: int = PAGE, reopen: bool = False, **options: object) -> Shard:
        path = tmp_path / "shard.arena"
        if reopen:
            made[-1].arena.close()
            arena = Arena.open(path)
        else:
            arena = Arena.create(path, ArenaGeometry(segments, pages // segments * page))
        made.append(Shard(arena, lease_seconds=30, clock=clock, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for shard in made:
        shard.arena.close()


def write(shard: Shard, numbers: list[int], length: int = PAGE, label: bytes = b"") -> list[int]:
    """Stores pages; the statuses of the reservation."""
    reservation = shard.reserve([key(n) for n in numbers], length, label)
    granted = [i for i, status in enumerate(reservation.grants["status"]) if status == GRANTED]
    checksums = [
        store_page(shard.arena.data(int(reservation.grants["offset"][i]), length), content(numbers[i], length))
        for i in granted
    ]
    assert shard.commit(reservation.id, np.array(checksums, np.uint64)).all()
    shard.check_integrity()
    return reservation.grants["status"].tolist()


def read(shard: Shard, numbers: list[int], length: int = PAGE) -> list[bool]:
    """Reads pages and compares them with what was written; True where they were there."""
    lease = shard.acquire([key(n) for n in numbers], length)
    found = []
    for number, grant in zip(numbers, lease.grants, strict=True):
        found.append(bool(grant["status"] == GRANTED))
        if found[-1]:
            page = np.empty(length, np.uint8)
            assert load_page(page, shard.arena.data(int(grant["offset"]), length)) == grant["checksum"]
            assert np.array_equal(page, content(number, length))
            assert shard.arena.headers["generation"][grant["cell"]] == grant["generation"]
    shard.release(lease.id)
    shard.check_integrity()
    return found


def stored(shard: Shard, numbers: list[int]) -> list[int]:
    return [n for n, there in zip(numbers, shard.exists([key(n) for n in numbers]), strict=True) if there]


def test_a_page_is_seen_from_its_commit_on(make: Make) -> None:
    shard = make()
    reservation = shard.reserve([key(1)], PAGE)
    assert not shard.exists([key(1)])[0]
    assert shard.acquire([key(1)], PAGE).grants["status"].tolist() == [MISSING]
    store_page(shard.arena.data(int(reservation.grants["offset"][0]), PAGE), content(1))
    assert shard.commit(reservation.id, np.array([checksum_of(content(1))], np.uint64)).tolist() == [True]
    assert read(shard, [1, 2]) == [True, False]


def test_storing_what_exists_moves_no_bytes(make: Make) -> None:
    shard = make()
    assert write(shard, [1, 2]) == [GRANTED, GRANTED]
    assert write(shard, [2, 3]) == [EXISTING, GRANTED]
    reservation = shard.reserve([key(1), key(2)], PAGE)
    assert reservation.id == 0 and reservation.grants["status"].tolist() == [EXISTING] * 2


def test_two_writers_of_one_key(make: Make) -> None:
    """Both get a cell, the first commit is what is served, the second is a success that changes nothing."""
    shard = make()
    first, second = shard.reserve([key(1)], PAGE), shard.reserve([key(1)], PAGE)
    assert first.grants["offset"][0] != second.grants["offset"][0]
    for reservation in (second, first):
        store_page(shard.arena.data(int(reservation.grants["offset"][0]), PAGE), content(1))
        assert shard.commit(reservation.id, np.array([checksum_of(content(1))], np.uint64)).all()
        shard.check_integrity()
    assert read(shard, [1]) == [True]
    assert shard.stats().pages == 1


def test_one_key_twice_in_a_call(make: Make) -> None:
    shard = make()
    write(shard, [1, 1, 2])
    assert shard.stats().pages == 2 and read(shard, [1, 1, 2]) == [True] * 3


def test_mutations_are_idempotent(make: Make) -> None:
    """A call whose answer was lost may be made again ("may have run"): the same answer, the same state."""
    shard = make()
    reservation = shard.reserve([key(1)], PAGE)
    checksums = np.array([store_page(shard.arena.data(int(reservation.grants["offset"][0]), PAGE), content(1))], "u8")
    for _ in range(2):
        assert shard.commit(reservation.id, checksums).tolist() == [True]
        shard.release(reservation.id)
    lease = shard.acquire([key(1)], PAGE)
    for _ in range(2):
        shard.release(lease.id)
    shard.release(0)
    shard.check_integrity()
    assert read(shard, [1]) == [True]


def test_commit_of_an_unknown_reservation_stores_nothing(make: Make) -> None:
    assert make().commit(77, np.zeros(2, np.uint64)).tolist() == [False, False]


def test_commit_needs_a_checksum_per_page(make: Make) -> None:
    shard = make()
    reservation = shard.reserve([key(1), key(2)], PAGE)
    with pytest.raises(ValueError, match="1 checksums for a reservation of 2 pages"):
        shard.commit(reservation.id, np.zeros(1, np.uint64))


def test_pages_that_went_wrong_are_left_out(make: Make) -> None:
    shard = make()
    reservation = shard.reserve([key(1), key(2)], PAGE)
    sums = [store_page(shard.arena.data(int(reservation.grants["offset"][i]), PAGE), content(i + 1)) for i in (0, 1)]
    assert shard.commit(reservation.id, np.array(sums, "u8"), np.array([True, False])).tolist() == [True, False]
    shard.check_integrity()
    assert read(shard, [1, 2]) == [True, False]


@pytest.mark.parametrize(("keys", "length"), [([b""], PAGE), ([b"x" * 81], PAGE), ([b"k"], 0), ([b"k"], 8 * PAGE + 1)])
def test_what_fits_no_cell_is_refused(make: Make, keys: list[bytes], length: int) -> None:
    with pytest.raises(ValueError, match=r"must have 1 to 80|does not fit"):
        make().reserve(keys, length)


def test_exactly_full_and_one_page_more(make: Make) -> None:
    shard = make(pages=4)
    assert write(shard, [1, 2, 3, 4]) == [GRANTED] * 4
    assert shard.stats().used_bytes == shard.stats().total_bytes == 4 * PAGE
    write(shard, [5])
    assert shard.stats().evicted == 1 and shard.stats().pages == 4


def test_a_batch_larger_than_the_arena_gets_what_fits(make: Make) -> None:
    shard = make(pages=3)
    reservation = shard.reserve([key(n) for n in range(5)], PAGE)
    assert reservation.grants["status"].tolist() == [GRANTED] * 3 + [REFUSED] * 2
    shard.release(reservation.id)
    shard.check_integrity()
    assert shard.stats().used_bytes == 0


def test_leased_pages_are_never_evicted(make: Make) -> None:
    shard = make(pages=4)
    write(shard, [1, 2, 3, 4])
    lease = shard.acquire([key(1), key(2), key(3)], PAGE)
    assert shard.reserve([key(n) for n in (5, 6)], PAGE).grants["status"].tolist() == [GRANTED, REFUSED]
    assert stored(shard, [1, 2, 3, 4]) == [1, 2, 3]
    shard.release(lease.id)
    shard.check_integrity()


def test_leases_of_a_dead_reader_expire(make: Make, clock: Clock) -> None:
    shard = make(pages=1)
    write(shard, [1])
    lease = shard.acquire([key(1)], PAGE)
    assert shard.reserve([key(2)], PAGE).grants["status"].tolist() == [REFUSED]
    clock.now += 31
    assert write(shard, [2]) == [GRANTED]
    shard.release(lease.id)
    shard.check_integrity()
    assert shard.stats().abandoned == 1


def test_reservations_of_a_dead_writer_expire(make: Make, clock: Clock) -> None:
    shard = make(pages=1)
    late = shard.reserve([key(1)], PAGE)
    clock.now += 31
    assert write(shard, [2]) == [GRANTED]
    assert shard.commit(late.id, np.zeros(1, np.uint64)).tolist() == [False]
    assert read(shard, [1, 2]) == [False, True]


def test_a_late_writer_spoils_no_page_unnoticed(make: Make, clock: Clock) -> None:
    """A client that was paused past its reservation scribbles over a cell that is another page's by now."""
    shard = make(pages=1)
    late = shard.reserve([key(1)], PAGE)
    clock.now += 31
    write(shard, [2])
    store_page(shard.arena.data(int(late.grants["offset"][0]), PAGE), content(1))
    lease = shard.acquire([key(2)], PAGE)
    page = np.empty(PAGE, np.uint8)
    assert load_page(page, shard.arena.data(int(lease.grants["offset"][0]), PAGE)) != lease.grants["checksum"][0]
    shard.release(lease.id, [int(lease.grants["cell"][0])])
    assert not shard.exists([key(2)])[0] and shard.stats().corrupt == 1
    assert write(shard, [2]) == [GRANTED] and read(shard, [2]) == [True]


def test_a_wrong_suspicion_drops_nothing(make: Make) -> None:
    shard = make()
    write(shard, [1])
    lease = shard.acquire([key(1)], PAGE)
    shard.release(lease.id, [int(lease.grants["cell"][0])])
    assert read(shard, [1]) == [True] and shard.stats().corrupt == 0


def test_a_flipped_byte_is_found_by_the_audit(make: Make) -> None:
    shard = make()
    write(shard, [1])
    grant = shard.acquire([key(1)], PAGE).grants[0]
    shard.check_integrity(read_pages=True)
    shard.arena.data(int(grant["offset"]), PAGE)[100] ^= 1
    text = rf"^1 pages \(cell {int(grant['cell'])}, key {key(1).hex()}\) do not match their checksums$"
    with pytest.raises(AssertionError, match=text):
        shard.check_integrity(read_pages=True)


@pytest.mark.parametrize("part", ["state", "key", "length", "checksum", "label", "expires"])
def test_damaged_headers_are_counted_and_named_by_the_audit(make: Make, part: str) -> None:
    shard = make(pages=16)
    write(shard, list(range(16)))
    cells = shard.acquire([key(n) for n in range(12)], PAGE).grants["cell"]
    shard.arena.data(int(shard.acquire([key(15)], PAGE).grants["offset"][0]), PAGE)[0] ^= 1
    for cell in cells:
        shard.arena.headers[part][cell] = 0 if part == "state" else 77
    with pytest.raises(AssertionError) as raised:
        shard.check_integrity(read_pages=True)
    text = str(raised.value)
    assert text.startswith("12 pages (cell ") and "and 2 more) have damaged headers; 1 pages (" in text
    assert text.count("key ") == 11 and key(15).hex() in text


def test_clear_while_pages_are_read_and_written(make: Make) -> None:
    shard = make(pages=4)
    write(shard, [1, 2])
    lease, reservation = shard.acquire([key(1)], PAGE), shard.reserve([key(3)], PAGE)
    assert shard.clear() == 2
    shard.check_integrity()
    assert shard.commit(reservation.id, np.zeros(1, np.uint64)).tolist() == [False]
    taken = shard.reserve([key(n) for n in range(4, 8)], PAGE)
    assert taken.grants["status"].tolist() == [GRANTED] * 3 + [REFUSED]
    shard.release(lease.id)
    shard.release(taken.id)
    shard.check_integrity()
    assert shard.stats().pages == shard.stats().used_bytes == 0


def test_clear_of_one_namespace(make: Make) -> None:
    shard = make()
    write(shard, [1, 2], label=b"a")
    write(shard, [3], label=b"b")
    assert shard.clear(b"a") == 2
    assert stored(shard, [1, 2, 3]) == [3]


def test_quota_evicts_the_namespaces_own_pages(make: Make) -> None:
    shard = make(pages=8, limits={"small": NamespaceLimit(quota_bytes=2 * PAGE)})
    write(shard, [1, 2, 3], label=b"big")
    assert write(shard, [11, 12, 13], label=b"small") == [GRANTED, GRANTED, REFUSED]
    assert write(shard, [14], label=b"small") == [GRANTED]
    assert stored(shard, [1, 2, 3, 11, 12, 14]) == [1, 2, 3, 11, 14]
    assert shard.stats().used_bytes_by_namespace == {"big": 3 * PAGE, "small": 2 * PAGE}
    shard.check_integrity()


def test_quota_of_less_than_a_page_stores_nothing(make: Make) -> None:
    shard = make(limits={"none": NamespaceLimit(quota_bytes=PAGE - 1)})
    assert shard.reserve([key(1)], PAGE, b"none").grants["status"].tolist() == [REFUSED]


def test_ttl_of_a_namespace(make: Make, clock: Clock) -> None:
    shard = make(limits={"brief": NamespaceLimit(ttl=10)})
    write(shard, [1], label=b"brief")
    write(shard, [2])
    clock.now += 9
    assert read(shard, [1, 2]) == [True, True]
    clock.now += 2
    assert read(shard, [1, 2]) == [False, True]
    assert shard.stats().expired == 1


def test_a_page_that_expires_while_it_is_read(make: Make, clock: Clock) -> None:
    shard = make(pages=1, limits={"brief": NamespaceLimit(ttl=10)})
    write(shard, [1], label=b"brief")
    lease = shard.acquire([key(1)], PAGE)
    clock.now += 11
    assert shard.reserve([key(2)], PAGE).grants["status"].tolist() == [REFUSED]
    shard.release(lease.id)
    assert write(shard, [2]) == [GRANTED]


def test_a_long_namespace_has_a_label_of_its_own() -> None:
    assert namespace_label("acme") == b"acme"
    long = [namespace_label("x" * 57), namespace_label("x" * 58)]
    assert long[0] != long[1] and max(map(len, long)) <= 56


@pytest.mark.parametrize("policy", sorted(SHARD_POLICIES))
def test_restart_serves_what_was_whole(make: Make, clock: Clock, policy: str) -> None:
    shard = make(policy=policy, limits={"t": NamespaceLimit(ttl=10, quota_bytes=4 * PAGE)})
    write(shard, [1, 2])
    write(shard, [3], label=b"t")
    shard.reserve([key(4)], PAGE)
    again = make(reopen=True, policy=policy, limits={"t": NamespaceLimit(ttl=10, quota_bytes=4 * PAGE)})
    again.check_integrity(read_pages=True)
    assert again.stats().reopened == 3 and again.stats().reserved == 0
    assert read(again, [1, 2, 3, 4]) == [True, True, True, False]
    clock.now += 11
    assert read(again, [1, 2, 3]) == [True, True, False]
    assert write(again, list(range(10, 18)))[:1] == [GRANTED]


def test_commit_after_a_restart_stores_nothing(make: Make) -> None:
    reservation = make().reserve([key(1)], PAGE)
    again = make(reopen=True)
    assert again.commit(reservation.id, np.zeros(1, np.uint64)).tolist() == [False]
    assert not again.exists([key(1)])[0]


def test_restart_with_one_key_in_two_cells_keeps_the_newer(make: Make) -> None:
    shard = make()
    write(shard, [1])
    cells = np.array([shard.reserve([key(9)], PAGE).grants["cell"][0]])
    shard.arena.mark_valid(cells, [key(1)], np.array([5], np.uint64), b"", np.inf)
    again = make(reopen=True)
    again.check_integrity()
    lease = again.acquire([key(1)], PAGE)
    assert lease.grants["cell"][0] == cells[0]
    assert int((again.arena.headers["state"][:8] == VALID).sum()) == 1


def test_unknown_policy(make: Make) -> None:
    with pytest.raises(ValueError, match="known are fifo, lfu, lru, s3fifo"):
        make(policy="best")


def test_pages_of_several_sizes_share_an_arena(make: Make) -> None:
    shard = make(pages=8, segments=4)
    write(shard, [1, 2])
    write(shard, [3], length=2 * PAGE)
    assert read(shard, [1, 2]) == [True, True] and read(shard, [3], length=2 * PAGE) == [True]
    assert read(shard, [3]) == [False], "a page of another length is no page"


def test_a_new_size_takes_the_coldest_segment(make: Make) -> None:
    shard = make(pages=8, segments=4)
    write(shard, list(range(8)))
    assert read(shard, [0, 1]) == [True, True]
    write(shard, [20], length=2 * PAGE)
    assert stored(shard, list(range(8))) == [0, 1, 2, 3, 4, 5]
    assert read(shard, [0, 1]) == [True, True]
    for number in range(21, 25):
        write(shard, [number], length=2 * PAGE)
    assert shard.stats().used_bytes == 8 * PAGE
    assert stored(shard, list(range(8))) == []


def test_a_segment_that_is_read_is_not_taken(make: Make) -> None:
    shard = make(pages=2, segments=2)
    write(shard, [1])
    lease = shard.acquire([key(1)], PAGE)
    write(shard, [2], length=PAGE // 2)
    assert shard.reserve([key(n) for n in range(5, 9)], PAGE // 2).grants["status"].tolist()[-1] == REFUSED
    shard.release(lease.id)
    shard.check_integrity()


def test_children_go_before_their_parents(make: Make) -> None:
    """Pages of one chain are stored in one call, root first; under LRU the deepest is evicted first."""
    shard = make(pages=4)
    write(shard, [1, 2, 3, 4])
    write(shard, [10, 11])
    assert stored(shard, [1, 2, 3, 4]) == [1, 2]
