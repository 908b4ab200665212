"""Page hashes: the chained SHA-256 names of KV pages, seeded by a namespace.

The hash of a page is `SHA256(hash of the page before || the page's tokens as little-endian uint32)`, so it stands for
the whole token path from the root. Without a namespace the hashes equal SGLang's (cases 1 to 8); a namespace seeds the
chain, so nothing stored under one adapter, salt or tenant is ever found under another.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.identity import (
    ModelIdentity,
    sglang_file_key,
    sglang_file_suffix,
    sglang_mooncake_keys,
    storage_key,
)

__all__ = [
    "EMPTY_NAMESPACE",
    "HASH_BYTES",
    "ModelIdentity",
    "Namespace",
    "TokenRangeError",
    "Tokens",
    "bigram_units",
    "event_id",
    "page_hash",
    "page_hashes",
    "sglang_file_key",
    "sglang_file_suffix",
    "sglang_mooncake_keys",
    "storage_key",
    "token_bytes",
]

HASH_BYTES = 32
"""Length of a page hash and of a namespace seed."""

TOKEN_BYTES = 4
MAX_TOKEN = 2**32 - 1

_SEED_TAG = b"sglang-cache-namespace-v1"
_ABSENT, _PRESENT, _TENANT = b"\x00", b"\x01", b"\x02"

Tokens: TypeAlias = "npt.NDArray[np.integer] | Sequence[int]"


class TokenRangeError(OverflowError, ValueError):
    """A token id that is no unsigned 32-bit integer (case 4)."""


class Namespace(NamedTuple):
    """What must never share KV. `None` and `""` are different values (case 8).

    Attributes:
        adapter: LoRA or other adapter id (SGLang's `extra_key`).
        salt: cache salt of the request.
        tenant: owner of the request.
    """

    adapter: str | None = None
    salt: str | None = None
    tenant: str | None = None

    @property
    def seed(self) -> bytes:
        """Start of the hash chain: `b""` for the empty namespace, else 32 bytes."""
        return b"" if self == EMPTY_NAMESPACE else _seed(self.adapter, self.salt, self.tenant)


EMPTY_NAMESPACE = Namespace()


@lru_cache(maxsize=4096)
def _seed(adapter: str | None, salt: str | None, tenant: str | None) -> bytes:
    # Adapter and salt are encoded as SGLang 0.5.23 does, so that their seeds agree; SGLang knows no tenant, so that
    # field only exists, under its own tag, where there is one.
    fields = [_ABSENT if part is None else _tagged(_PRESENT, part) for part in (adapter, salt)]
    if tenant is not None:
        fields.append(_tagged(_TENANT, tenant))
    return hashlib.sha256(_SEED_TAG + b"".join(fields)).digest()


def _tagged(tag: bytes, text: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"namespace field {text!r} is no string")
    # surrogatepass: a lone surrogate in a request's salt is a name like any other, not an error.
    encoded = text.encode("utf-8", "surrogatepass")
    return tag + len(encoded).to_bytes(8, "little") + encoded


def page_hashes(
    units: Tokens | bytes,
    page_size: int,
    *,
    prior: bytes = b"",
    namespace: Namespace = EMPTY_NAMESPACE,
    bigram: bool = False,
) -> list[bytes]:
    """Hashes of the whole pages of `units`, 32 bytes each; a tail that fills no page is ignored.

    Args:
        units: token ids of shape [tokens], or the units as bytes: 4 bytes a token (little-endian uint32), and with
            `bigram` 8 bytes a pair as `bigram_units` makes them. Token ids under `bigram` are paired here.
        page_size: units a page.
        prior: hash of the page before the first one, or empty at the root.
        namespace: seeds the chain at the root; ignored after a prior hash, which already stands for it.
        bigram: the units are pairs of tokens (EAGLE).

    Raises:
        TokenRangeError: a token is outside 0..4294967295 (case 4).
        ValueError: page_size below 1, a prior that is no hash, or bytes that hold no whole number of units.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1 token")
    unit_bytes = 2 * TOKEN_BYTES if bigram else TOKEN_BYTES
    data = _unit_bytes(units, bigram)
    if len(data) % unit_bytes:
        raise ValueError(f"{len(data)} bytes hold no whole number of {unit_bytes}-byte units")
    page_bytes = page_size * unit_bytes
    # One call a page over prior + page: a hasher fed twice, a copied hasher and a reused buffer are all slower.
    sha256, link = hashlib.sha256, _chain_start(prior, namespace)
    whole = memoryview(data)[: len(data) // page_bytes * page_bytes]
    return [link := sha256(link + page).digest() for (page,) in struct.iter_unpack(f"{page_bytes}s", whole)]


def page_hash(
    page: Tokens | bytes, *, prior: bytes = b"", namespace: Namespace = EMPTY_NAMESPACE, bigram: bool = False
) -> bytes:
    """Hash of one page of any length, the empty page included (case 4). Arguments as in `page_hashes`."""
    return hashlib.sha256(_chain_start(prior, namespace) + _unit_bytes(page, bigram)).digest()


def _chain_start(prior: bytes, namespace: Namespace) -> bytes:
    if not prior:
        return namespace.seed
    if len(prior) != HASH_BYTES:
        raise ValueError(f"prior hash has {len(prior)} bytes; give the {HASH_BYTES} raw bytes of a page hash, or none")
    return prior


def _unit_bytes(units: Tokens | bytes, bigram: bool) -> bytes:
    if isinstance(units, bytes):
        return units
    return bigram_units(units) if bigram else token_bytes(units)


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids of shape [tokens] as little-endian uint32, 4 bytes each.

    Raises:
        TokenRangeError: a token is outside 0..4294967295; the text names it and its position (case 4).
        TypeError: the tokens are not integers.
        ValueError: the tokens are not one-dimensional.
    """
    if isinstance(tokens, (list, tuple)):
        return _token_bytes_of_list(tokens)
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise ValueError(f"tokens have shape {ids.shape}; one dimension is wanted")
    if ids.dtype.kind not in "iu":
        return _token_bytes_of_list(ids.tolist())
    if ids.size and (ids.min() < 0 or ids.max() > MAX_TOKEN):
        position = int(np.flatnonzero((ids < 0) | (ids > MAX_TOKEN))[0])
        raise _out_of_range(int(ids[position]), position)
    return ids.astype("<u4", copy=False).tobytes()


def _token_bytes_of_list(tokens: Sequence[Any]) -> bytes:
    try:
        # A third of the time that numpy takes over a list, and the range is checked on the way.
        return np.asarray(array("I", tokens)).astype("<u4", copy=False).tobytes()
    except (OverflowError, TypeError):
        position, token = next((i, token) for i, token in enumerate(tokens) if not _is_token(token))
        if isinstance(token, (int, np.integer)):
            raise _out_of_range(int(token), position) from None
        raise TypeError(f"token {token!r} at position {position} is no integer") from None


def _is_token(token: object) -> bool:
    return isinstance(token, (int, np.integer)) and bool(0 <= token <= MAX_TOKEN)


def _out_of_range(token: int, position: int) -> TokenRangeError:
    return TokenRangeError(f"token {token} at position {position} does not fit 32 unsigned bits (0 to {MAX_TOKEN})")


def bigram_units(tokens: Tokens) -> bytes:
    """The EAGLE units of N tokens: N-1 overlapping pairs, 8 bytes each (case 5). Raises as `token_bytes` does."""
    singles = np.frombuffer(token_bytes(tokens), dtype="<u4")
    pairs = np.empty((max(len(singles) - 1, 0), 2), dtype="<u4")
    pairs[:, 0], pairs[:, 1] = singles[:-1], singles[1:]
    return pairs.tobytes()


def event_id(page_hash: bytes) -> int:
    """The signed 64-bit integer that names a page in KV events: its first 8 bytes, big endian (case 7)."""
    return int.from_bytes(page_hash[:8], "big", signed=True)
