"""The bytes of event batches: what vLLM's own encoder writes is read, and what is written has vLLM's form."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ray.config.names import KV_EVENT_ENCODINGS
from hicache_ray.events import (
    CPU,
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventFormatError,
    decode_batch,
    encode_batch,
)
from hicache_ray.hashing import Namespace

VLLM = {
    "arrays, without medium": (
        "93cb3ff00000000000009396ab426c6f636b53746f726564920102c0940102030402c092ac426c6f636b52656d6f766564910191b0416c6c"
        "426c6f636b73436c656172656400"
    ),
    "arrays, with medium, a digest as hash": (
        "93cb3ff00000000000009397ab426c6f636b53746f726564920102c0940102030402c0a347505593ac426c6f636b52656d6f76656491c420"
        "0101010101010101010101010101010101010101010101010101010101010101a343505591b0416c6c426c6f636b73436c6561726564c0"
    ),
    "maps, with everything": (
        "93cb3ff0000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920102b1706172656e745f626c6f"
        "636b5f6861736807a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a9"
        "6c6f72615f6e616d65a26164aa65787472615f6b6579739291a26164c0a967726f75705f69647800b26b765f63616368655f737065635f6b"
        "696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d6564"
        "69756da3435055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656403"
    ),
}
"""One batch each as msgspec encodes vLLM's event classes (of 0.9, 0.11 and 0.26): stored 1 and 2, removed, cleared."""

STORED = BlockStored((1, -2), 7, (1, 2, 3, 4), 2, GPU, reason="computed")
LORA = BlockStored((3,), None, (5, 6), 2, CPU, Namespace("lora", "salt", "tenant"))
PAIRS = BlockStored((4,), None, ((1, 2), (2, 3)), 2, GPU)
REMOVED = BlockRemoved((1,), CPU, "evicted")
CLEARED = AllBlocksCleared(GPU, "flushed")


def test_what_vllm_writes_is_read() -> None:
    old = decode_batch(bytes.fromhex(VLLM["arrays, without medium"]))
    assert old == EventBatch(
        1.0, (BlockStored((1, 2), None, (1, 2, 3, 4), 2), BlockRemoved((1,)), AllBlocksCleared()), 0
    )
    medium = decode_batch(bytes.fromhex(VLLM["arrays, with medium, a digest as hash"]))
    assert medium.events[0] == BlockStored((1, 2), None, (1, 2, 3, 4), 2, GPU)
    assert medium.events[1] == BlockRemoved((0x0101010101010101,), CPU) and medium.data_parallel_rank is None


def test_newer_vllm_writes_maps_which_are_read_too() -> None:
    batch = decode_batch(bytes.fromhex(VLLM["maps, with everything"]))
    assert batch.events == (
        BlockStored((1, 2), 7, (1, 2, 3, 4), 2, GPU, Namespace(adapter="ad")),
        BlockRemoved((1,), CPU),
        AllBlocksCleared(),
    )
    assert batch.data_parallel_rank == 3


def test_arrays_have_vllms_fields_in_vllms_order() -> None:
    payload = msgpack.unpackb(encode_batch(EventBatch(2.5, (STORED, LORA, REMOVED, CLEARED))))
    namespace = ["lora", "salt", "tenant"]
    assert payload == [
        2.5,
        [
            ["BlockStored", [1, -2], 7, [1, 2, 3, 4], 2, None, "GPU", None],
            ["BlockStored", [3], None, [5, 6], 2, None, "CPU", "lora", [namespace]],
            ["BlockRemoved", [1], "CPU", None, "evicted"],
            ["AllBlocksCleared", "GPU", "flushed"],
        ],
        0,
    ]


def test_maps_have_vllms_field_names() -> None:
    _, (stored, removed, cleared), _ = msgpack.unpackb(encode_batch(EventBatch(2.5, (STORED, REMOVED, CLEARED)), "map"))
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [1, -2],
        "parent_block_hash": 7,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "reason": "computed",
    }
    assert (removed["type"], removed["medium"], removed["reason"]) == ("BlockRemoved", "CPU", "evicted")
    assert cleared == {"type": "AllBlocksCleared", "medium": "GPU", "reason": "flushed"}


@pytest.mark.parametrize("encoding", KV_EVENT_ENCODINGS)
def test_a_batch_comes_back_as_it_was(encoding: str) -> None:
    batch = EventBatch(3.5, (CLEARED, STORED, LORA, PAIRS, REMOVED), 1)
    expected = batch
    if encoding == "array":  # which have no place for why something was stored
        expected = batch._replace(events=(CLEARED, STORED._replace(reason=""), LORA, PAIRS, REMOVED))
    assert decode_batch(encode_batch(batch, encoding)) == expected


def test_a_batch_begins_anew_when_it_first_clears_every_tier() -> None:
    gpu, cpu = AllBlocksCleared(GPU), AllBlocksCleared(CPU)
    for events, anew in (
        ((gpu, cpu), True),
        ((AllBlocksCleared(), STORED), True),
        ((gpu, STORED, cpu), False),
        ((gpu,), False),
        ((STORED,), False),
    ):
        assert EventBatch(0.0, events).begins_anew is anew


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, r"expected \[timestamp, events, ...\], got 7"),
        ([1.0], r"expected \[timestamp, events"),
        (["now", []], r"event batch: Expected `float`, got `str` - at `\$.ts`"),
        ([float("nan"), []], "timestamp: expected seconds, got nan"),
        ([1.0, "x"], r"Expected `array`, got `str` - at `\$.events`"),
        ([1.0, [3]], "expected an event as an array or a map, got 3"),
        ([1.0, [[]]], "expected an event"),
        ([1.0, [["BlockMoved", [1]]]], "unknown event 'BlockMoved'; known are BlockStored"),
        ([1.0, [{"type": 4}]], "unknown event 4"),
        ([1.0, [["BlockStored", [1], None, [1], 2, None]]], "1 token_ids for 1 blocks of 2"),
        ([1.0, [["BlockStored", [1], None, [], 0, None]]], "0 token_ids for 1 blocks of 0"),
        ([1.0, [["BlockStored", ["h"], None, [1], 1]]], r"`int \| bytes`, got `str` - at `\$.block_hashes\[0\]`"),
        ([1.0, [["BlockStored", [b"7bytes."], None, [1], 1]]], r"of length >= 8 - at `\$.block_hashes\[0\]`"),
        ([1.0, [["BlockStored", [1], None, [True], 1]]], r"`int \| array`, got `bool` - at `\$.token_ids\[0\]`"),
        ([1.0, [["BlockRemoved", 1]]], r"BlockRemoved: Expected `array`, got `int` - at `\$.block_hashes`"),
        ([1.0, [{"type": "BlockRemoved"}]], "BlockRemoved: Object missing required field `block_hashes`"),
        ([1.0, [["BlockRemoved", [1], 5]]], r"Expected `str \| null`, got `int` - at `\$.medium`"),
        ([1.0, [], "zero"], r"Expected `int \| null`, got `str` - at `\$.data_parallel_rank`"),
    ],
)
def test_what_is_no_batch_is_refused_with_the_reason(value: object, text: str) -> None:
    with pytest.raises(EventFormatError, match=text):
        decode_batch(msgpack.packb(value))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except EventFormatError as error:
        assert str(error)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])


@given(st.lists(st.tuples(NAMES, st.lists(VALUES, max_size=9)), max_size=4))
def test_any_events_are_read_or_refused(events: list[tuple[str, list[object]]]) -> None:
    payload = msgpack.packb([1.0, [[name, *fields] for name, fields in events], 0])
    try:
        decode_batch(payload)
    except EventFormatError as error:
        assert str(error)
