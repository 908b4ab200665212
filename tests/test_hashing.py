"""Page hashes against the golden values of cases 1 to 8, their input checks, and their independence of the process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray.hashing import (
    EMPTY_NAMESPACE,
    Namespace,
    TokenRangeError,
    bigram_units,
    event_id,
    page_hash,
    page_hashes,
    token_bytes,
)

PAGE_0 = "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f"
PAGE_1 = "c57b445f90651b9a650e516ab2238c965b21af35608a31c303e6d9e407f2915c"
PAGE_2 = "4a8a26efbf98ddb0eca98c8913c209b45b7241fb0ccbdb559f74dafba44b7c60"


def hexes(tokens, page_size, **options) -> list[str]:
    return [digest.hex() for digest in page_hashes(tokens, page_size, **options)]


def test_case_1_golden_chain_of_page_2():
    assert hexes([1, 2, 3, 4], 2) == [PAGE_0, PAGE_1]
    assert hexes([5, 6], 2, prior=bytes.fromhex(PAGE_1)) == [PAGE_2]
    assert hexes([1, 2, 3, 4, 5, 6], 2) == [PAGE_0, PAGE_1, PAGE_2]


def test_case_2_position_matters():
    assert hexes([3, 4], 2) == ["8073c94ef47ecc86dcd78a8d9027a23484fadcd7cea37150319ba8cbf1c70b6b"]


GOLDEN = {
    "page_4": ([1, 2, 3, 4], 4, ["cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"]),
    "page_4_range_8": (
        range(8),
        4,
        [
            "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
            "01414b052706d93bd0f1f1646c0e8ca2fa8ef5efd7bcc99f7a1cee8eb11ad052",
        ],
    ),
    "page_64_range_128": (
        range(128),
        64,
        [
            "fea7b32778ecbdd7adee1941e98c89cf96bbc762f5f1beb0be24e36a456fbbc5",
            "1617a7384eff5e9135098c24794739af884859cdb17c1a61a834e8d6ac997351",
        ],
    ),
    "page_1": (
        [1, 2, 3, 4],
        1,
        [
            "67abdd721024f0ff4e0b3f4c2fc13bc5bad42d0b7851d456d88d203d15aaa450",
            "e95092c4b38d42d1363b9e9b06bc5d6377af1cd06651a9fedac8b36dc9e56114",
            "65a83b157c6cfe60e7f2b2dbc81912f32c87b62f180abb0b8b40bf4b5259ae86",
            "c6c57967c409c4a7922608584bb063c57e0785f766cb8dae3f2a77edb186150c",
        ],
    ),
    "page_2_chat_template": (
        [151643, 151644, 872, 198],
        2,
        [
            "328f40bd12b67254388b2555230d2a43982511e0233fb8da2140df1edbf327e2",
            "37db8f564870dc52880337129482555457e380c10ec7bf2db7ed7434bd0e30b1",
        ],
    ),
}


@pytest.mark.parametrize("tokens, page_size, expected", GOLDEN.values(), ids=[f"case_3_{name}" for name in GOLDEN])
def test_case_3_golden_vectors(tokens, page_size, expected):
    assert hexes(tokens, page_size) == expected


def test_case_4_smallest_and_largest_token():
    assert token_bytes([0, 4294967295]) == bytes(4) + b"\xff" * 4


OUT_OF_RANGE = [
    *[[7, 8, token, token] for token in (4294967296, -1, 2**63, 2**64, -(2**63), -(2**70))],
    np.array([7, 8, 4294967296, -1]),
    np.array([7, 8, -1, 4294967296]),
    np.array([7, 8, -1], dtype=np.int32),
    np.array([7, 8, -1], dtype=np.int8),
    np.array([7, 8, 2**63], dtype=np.uint64),
]


@pytest.mark.parametrize(
    "tokens", OUT_OF_RANGE, ids=[f"case_4_{getattr(t, 'dtype', 'list')}_{t[2]}" for t in OUT_OF_RANGE]
)
def test_a_token_out_of_range_is_named_with_its_position(tokens):
    with pytest.raises(OverflowError, match=f"token {tokens[2]} at position 2 ") as raised:
        page_hashes(tokens, 2)
    assert isinstance(raised.value, TokenRangeError) and isinstance(raised.value, ValueError)


def test_case_4_empty_prior_and_empty_page():
    assert hexes([1, 2], 2, prior=b"") == [PAGE_0]
    assert page_hash([]) == hashlib.sha256().digest()
    assert page_hashes([], 4) == []


def test_case_5_bigram_chain():
    expected = [
        "ede8ef26a097f0fd889f9f39f6f5af921370630b164c4a4fa28eb716b2df9269",
        "678c5307f2a02a2aaf8edbeb80ebac13663f70e14a4fc8d5d62b77e702841e4b",
    ]
    tokens = [1, 2, 3, 4, 5]
    assert hexes(tokens, 2, bigram=True) == expected
    assert hexes(bigram_units(tokens), 2, bigram=True) == expected
    assert len(bigram_units(tokens)) == 8 * 4
    assert bigram_units([9]) == bigram_units([]) == b""


def test_case_6_bigram_and_plain_pages_can_hash_the_same():
    """Why the key mode and the page size are part of the storage key."""
    assert hexes([1, 2, 3], 2, bigram=True) == hexes([1, 2, 2, 3], 4)


@pytest.mark.parametrize(
    "page, expected",
    [(PAGE_0, 3817746824117602890), (PAGE_1, -4216701448867210342), (PAGE_2, 5371148316746243504)],
    ids=["case_7_page_0", "case_7_page_1", "case_7_page_2"],
)
def test_case_7_event_integer(page, expected):
    assert event_id(bytes.fromhex(page)) == expected


def test_case_8_seeds_of_sglang():
    assert EMPTY_NAMESPACE.seed == b""
    lora = Namespace(adapter="loraA")
    assert lora.seed.hex() == "6cd7eb41f530691802505c73a271274a8c787625af639eed20c88e4b46d5f1c8"
    assert hexes([1, 2, 3, 4], 2, namespace=lora) == [
        "3a2e561b3ba4ea769b68438b4dde0c417758be53ea174bcab44f684c67b908a0",
        "3220dc30f56881ac317d6c2a5f20a33539e6f6ef09a7baf380ef06099d235297",
    ]
    salted = "780ab65d5251057628969d8ee6d9da652bf4095b320004669f83ff93cc879842"
    assert hexes([1, 2], 2, namespace=Namespace(salt="saltB")) == [salted]
    assert page_hash([1, 2], namespace=Namespace(salt="saltB")).hex() == salted


def test_case_8_fields_cannot_be_confused():
    values = [None, "", "a", "ab", "b", "bc", "c", "loraA", "saltB", "loraAsaltB", "\x02", "a\x01"]
    namespaces = {Namespace(adapter, salt, tenant) for adapter in values for salt in values for tenant in values}
    assert len({namespace.seed for namespace in namespaces}) == len(namespaces) == len(values) ** 3


def test_a_prior_hash_already_stands_for_its_namespace():
    lora = Namespace(adapter="loraA")
    first, second = page_hashes([1, 2, 3, 4], 2, namespace=lora)
    assert page_hashes([3, 4], 2, prior=first, namespace=lora) == page_hashes([3, 4], 2, prior=first) == [second]


def test_a_name_need_not_be_valid_unicode_but_must_be_text():
    assert Namespace(salt="\ud800").seed != Namespace(salt="\ud801").seed
    with pytest.raises(TypeError, match="namespace field 7 is no string"):
        page_hashes([1], 1, namespace=Namespace(adapter=7))  # type: ignore[arg-type]


def test_case_20_the_tail_that_fills_no_page_is_ignored():
    assert hexes([1, 2, 3], 2) == [PAGE_0]
    assert hexes(token_bytes([1, 2, 3]), 2) == [PAGE_0]


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i4", "<i8", ">i8", "<u8", "<u2", "<i2", "u1"])
def test_every_integer_dtype_and_stride_hashes_the_same(dtype):
    tokens = np.array([1, 99, 2, 99, 3, 99, 4, 99], dtype=dtype)[::2]
    assert hexes(tokens, 2) == [PAGE_0, PAGE_1]
    assert token_bytes(tokens) == token_bytes([1, 2, 3, 4])


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: page_hashes([1], 0), ValueError, "page_size is 0"),
        (lambda: page_hashes([1], 1, prior=b"short"), ValueError, "prior hash has 5 bytes"),
        (lambda: page_hashes(b"12345", 1), ValueError, "5 bytes hold no whole number of 4-byte units"),
        (lambda: page_hashes(b"1234", 1, bigram=True), ValueError, "4 bytes hold no whole number of 8-byte units"),
        (lambda: token_bytes([1.0]), TypeError, "token 1.0 at position 0 is no integer"),
        (lambda: token_bytes([1, None]), TypeError, "token None at position 1 is no integer"),
        (lambda: token_bytes(["1"]), TypeError, "token '1' at position 0 is no integer"),
        (lambda: token_bytes([[1, 2]]), TypeError, r"token \[1, 2\] at position 0 is no integer"),
        (lambda: token_bytes(np.array([1.5])), TypeError, "token 1.5 at position 0 is no integer"),
        (lambda: token_bytes(np.array([[1, 2]])), ValueError, r"shape \(1, 2\)"),
    ],
    ids=["page_size", "prior", "bytes", "pair_bytes", "float", "none", "text", "nested", "float_array", "matrix"],
)
def test_bad_input_is_refused_with_its_value(call, error, text):
    with pytest.raises(error, match=text):
        call()


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 9), st.integers(0, 70))
def test_the_chain_may_be_cut_anywhere(tokens, page_size, cut):
    """Hashing in two pieces at a page boundary equals hashing in one, and equals the definition."""
    whole = page_hashes(tokens, page_size)
    at = min(cut, len(whole))
    prior = whole[at - 1] if at else b""
    assert whole[:at] + page_hashes(tokens[at * page_size :], page_size, prior=prior) == whole
    link = b""
    for index, digest in enumerate(whole):
        page = tokens[index * page_size : (index + 1) * page_size]
        link = hashlib.sha256(link + b"".join(token.to_bytes(4, "little") for token in page)).digest()
        assert digest == link


PRINT_KEYS = """
import sys
from hicache_ray.hashing import ModelIdentity, Namespace, page_hashes, storage_key
assert "torch" not in sys.modules and "ray" not in sys.modules
identity = ModelIdentity(model="org/m", revision="main", kv_dtype="bfloat16", page_size=2, tp_rank=1, tp_size=2)
for page in page_hashes([1, 2, 3, 4], 2, namespace=Namespace("loraA", "saltB", "t")):
    print(storage_key(identity.digest, page.hex()))
"""


def test_three_interpreters_give_the_same_keys_and_import_neither_torch_nor_ray():
    """ "Keys differ between processes" in docs/reliability.md."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PRINT_KEYS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4242")
    ]
    assert len(outputs[0].split()) == 2
    assert outputs[0] == outputs[1] == outputs[2]
