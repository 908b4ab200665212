"""Who holds which page, and the messages that say so (docs/design.md 6)."""

from __future__ import annotations

import contextlib
import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.rebalance_plan import BalanceReport
from hicache_ray.storage.pool.wire import Commit, KeyCall, Offer, Release, Reply, WireError
from hicache_ray.storage.shard.grants import GRANT

HASHES = [hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(4000)]


def names(membership: Membership) -> np.ndarray:
    return np.array(membership.members)[membership.owners(HASHES)]


def test_members_get_equal_shares() -> None:
    shares = np.unique(names(Membership(1, ("a", "b", "c", "d"))), return_counts=True)[1]
    assert shares.min() > 900 and shares.max() < 1100


def test_hashes_that_differ_in_their_last_bytes_only_are_spread() -> None:
    hashes = [number.to_bytes(32, "big") for number in range(1000)]
    shares = np.bincount(Membership(1, ("a", "b")).owners(hashes)[:, 0])
    assert shares.min() > 400


def test_holders_are_different_and_best_first() -> None:
    owners = names(Membership(1, ("a", "b", "c"), replicas=2))
    assert owners.shape == (4000, 2) and np.all(owners[:, 0] != owners[:, 1])
    assert np.array_equal(owners[:, :1], names(Membership(1, ("a", "b", "c"))))


def test_the_order_of_members_does_not_matter() -> None:
    assert np.array_equal(names(Membership(1, ("a", "b", "c"))), names(Membership(1, ("c", "a", "b"))))


def test_a_join_and_a_leave_move_one_share_only() -> None:
    before = Membership(1, ("a", "b", "c"))
    after = before.joined_by("d")
    moved = names(before) != names(after)
    assert after.epoch == 2 and 0.2 < moved.mean() < 0.3 and set(names(after)[moved]) == {"d"}
    assert np.array_equal(names(after.left_by("d")), names(before))


def test_placement_is_the_same_everywhere_and_for_ever() -> None:
    """Golden: clients of different versions and machines must agree."""
    assert Membership(1, ("pool-0", "pool-1", "pool-2")).owners(HASHES[:12])[:, 0].tolist() == [
        2,
        0,
        1,
        0,
        2,
        0,
        1,
        0,
        0,
        1,
        1,
        0,
    ]


def test_more_replicas_than_members() -> None:
    assert Membership(1, ("a",), replicas=3).owners(HASHES[:2]).tolist() == [[0], [0]]


@pytest.mark.parametrize("members", [(), ("a", "a")])
def test_bad_members(members: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="different names"):
        Membership(1, members)
    with pytest.raises(ValueError, match="at least 1"):
        Membership(1, ("a",), replicas=0)


def test_leaving_without_being_a_member() -> None:
    with pytest.raises(ValueError, match="'x' is no member"):
        Membership(1, ("a", "b")).left_by("x")


def test_messages_survive_the_wire() -> None:
    membership = Membership(3, ("a", "b"), 2, "t")
    assert Membership.unpack(membership.pack()) == membership
    changing = membership.joined_by("c").left_by("a")
    assert Membership.unpack(changing.pack()) == changing
    request = KeyCall(7, [b"abc", b"def"], 4096, b"tenant")
    assert KeyCall.unpack(request.pack()) == request
    assert KeyCall.unpack(KeyCall(1, []).pack()) == KeyCall(1, [])
    reply = Reply(0, 1, 2, 3, np.zeros(2, GRANT).tobytes())
    assert Reply.unpack(reply.pack()) == reply and len(reply.grants) == 2
    commit = Commit(9, [1, 2**64 - 1], [True, False])
    assert Commit.unpack(commit.pack()) == commit
    release = Release(2**63, [3, 4])
    assert Release.unpack(release.pack()) == release


def test_offers_survive_the_wire() -> None:
    request = KeyCall(7, [b"abc", b"def"], 4096, b"tenant")
    offer = Offer.unpack(Offer(request, [1.5, np.inf], True).pack())
    assert (offer.call, offer.expires, offer.displace) == (request, [1.5, np.inf], True)
    one_time = msgspec.msgpack.decode(offer.pack())
    one_time[2] = [1.0]
    for message in (b"", b"\xff" * 64, msgspec.msgpack.encode(one_time)):
        with pytest.raises(WireError, match="can't be read"):
            Offer.unpack(message)


@given(message=st.binary(max_size=200))
def test_no_message_breaks_a_parser_in_another_way(message: bytes) -> None:
    for parser in (KeyCall, Offer, Reply, Commit, Release, Membership, BalanceReport):
        with contextlib.suppress(ValueError):
            parser.unpack(message)


def test_who_held_pages_before() -> None:
    joined = Membership(1, ("a", "b")).joined_by("c")
    assert joined.previous == (("a", "b"),) and joined.everyone == ("a", "b", "c") and not joined.settled
    before = joined.owned_before(HASHES)
    now = joined.owners(HASHES)[:, 0]
    assert np.array_equal(before.any(axis=1), now == 2), "only what the new member owns was elsewhere"
    assert not before[:, 2].any() and before.sum(axis=1).max() == 1
    leaving = joined.left_by("a")
    assert leaving.members == ("b", "c") and leaving.everyone == ("b", "c", "a")
    asked = leaving.owned_before(HASHES)
    assert asked.any(axis=0).tolist() == [True, False, True], "b gave pages to c, a gives its own to both"
    assert np.array_equal(asked[:, 2], Membership(1, ("a", "b")).owners(HASHES)[:, 0] == 0)
    assert leaving.settle().everyone == ("b", "c") and not leaving.settle().owned_before(HASHES).any()


def test_a_member_whose_pages_are_gone_is_not_asked_for_them() -> None:
    changing = Membership(1, ("a", "b")).joined_by("c").left_by("a")
    assert changing.without("a").everyone == ("b", "c") and changing.without("a").previous == (("b",),)
    assert Membership(1, ("a", "b")).joined_by("c").without("c").settled
    with pytest.raises(ValueError, match="'x' is no member"):
        changing.without("x")


@pytest.mark.parametrize("message", [b"", b"x" * 10, b"\0" * 64, KeyCall(1, [b"k"]).pack() + b"x"])
def test_other_messages_are_refused(message: bytes) -> None:
    with pytest.raises(WireError, match="can't be read"):
        KeyCall.unpack(message)


def test_other_replies_and_commits_are_refused() -> None:
    for message in (b"", b"\xff" * 64):
        with pytest.raises(WireError, match="can't be read"):
            Reply.unpack(message)
    with pytest.raises(WireError, match="can't be read"):
        Commit.unpack(b"12345")
