"""The names of KV pages: page hashes, which name tokens, and storage keys, which name bytes.

The hash of a page is `SHA256(hash of the page before || the page's tokens as little-endian uint32)`, so it stands for
the whole token path from the root. Without a namespace the hashes equal SGLang's (cases 1 to 8); a namespace seeds the
chain, so nothing stored under one adapter, salt or tenant is ever found under another.

A storage key adds which model, shard and byte order a stored page belongs to: two things that differ in any field of
`ModelIdentity` never share one (cases 6, 8, 9, 10).
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

HASH_BYTES = 32
"""Length of a page hash and of a namespace seed."""

TOKEN_BYTES = 4
"""Bytes a token takes: a little-endian uint32."""
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


# -- page hashes -------------------------------------------------------------------------------------------------------


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
    if ids.dtype.kind not in "iu" or (ids.size and (ids.min() < 0 or ids.max() > MAX_TOKEN)):
        return _token_bytes_of_list(ids.tolist())  # which names the first that is no token
    return ids.astype("<u4", copy=False).tobytes()


def _token_bytes_of_list(tokens: Sequence[Any]) -> bytes:
    try:
        # A third of the time that numpy takes over a list, and the range is checked on the way.
        return np.asarray(array("I", tokens)).astype("<u4", copy=False).tobytes()
    except (OverflowError, TypeError):
        position, token = next((i, token) for i, token in enumerate(tokens) if not _is_token(token))
        if isinstance(token, (int, np.integer)):
            text = f"token {token} at position {position} does not fit 32 unsigned bits (0 to {MAX_TOKEN})"
            raise TokenRangeError(text) from None
        raise TypeError(f"token {token!r} at position {position} is no integer") from None


def _is_token(token: object) -> bool:
    return isinstance(token, (int, np.integer)) and bool(0 <= token <= MAX_TOKEN)


def bigram_units(tokens: Tokens) -> bytes:
    """The EAGLE units of N tokens: N-1 overlapping pairs, 8 bytes each (case 5). Raises as `token_bytes` does."""
    singles = np.frombuffer(token_bytes(tokens), dtype="<u4")
    pairs = np.empty((max(len(singles) - 1, 0), 2), dtype="<u4")
    pairs[:, 0], pairs[:, 1] = singles[:-1], singles[1:]
    return pairs.tobytes()


def event_id(page_hash: bytes) -> int:
    """The signed 64-bit integer that names a page in KV events: its first 8 bytes, big endian (case 7)."""
    return int.from_bytes(page_hash[:8], "big", signed=True)


# -- storage keys ------------------------------------------------------------------------------------------------------

DIGEST_CHARS = 32
"""Length of `ModelIdentity.digest` in hex characters (128 bits)."""

KEY_MODES = ("plain", "bigram")
ATTENTION_KINDS = ("mha", "mla")

_VERSION = b"hicache-ray-identity-v1"
_TENSOR_PARALLEL = ("tp_rank", "tp_size")


@dataclass(frozen=True)
class ModelIdentity:
    """Everything beside the tokens that decides the bytes of a stored page.

    Attributes:
        model, revision: name and revision of the weights.
        kv_dtype: logical dtype of the KV cache, e.g. `"bfloat16"`, `"float8_e4m3fn"`.
        page_size: tokens (or pairs) a page.
        layout: byte order of a page: the host memory layout it was copied from (case 56).
        key_mode: `"plain"` or `"bigram"` (case 6).
        attention: `"mha"` (each TP rank stores its heads) or `"mla"` (all TP ranks hold the same bytes, one writes).
        heads, head_dim: shape of a token's K in one layer on this rank; MLA: 1 and the latent's width. 0: not told.
        tp_rank ... dp_size: place in the attention's parallel grid.
        layer_start, layer_end: the layers held, half open. Both 0: not told.
    """

    model: str = ""
    revision: str = ""
    kv_dtype: str = ""
    page_size: int = 1
    layout: str = "layer_first"
    key_mode: str = "plain"
    attention: str = "mha"
    heads: int = 0
    head_dim: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    layer_start: int = 0
    layer_end: int = 0

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; it must be at least 1 token")
        if self.key_mode not in KEY_MODES:
            raise ValueError(f"key_mode is {self.key_mode!r}; use one of {', '.join(KEY_MODES)}")
        if self.attention not in ATTENTION_KINDS:
            raise ValueError(f"attention is {self.attention!r}; use one of {', '.join(ATTENTION_KINDS)}")
        for axis in ("tp", "pp", "dp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ValueError(f"{axis}_rank is {rank} of {axis}_size {size}; ranks run from 0 to size - 1")
        if not 0 <= self.layer_start <= self.layer_end:
            raise ValueError(f"layers {self.layer_start} to {self.layer_end} are no range")

    @cached_property
    def digest(self) -> str:
        """32 hex characters over all fields; for MLA without the tensor-parallel rank and size."""
        left_out = _TENSOR_PARALLEL if self.attention == "mla" else ()
        parts = [_VERSION]
        for field in fields(self):
            if field.name not in left_out:
                parts += [field.name.encode(), str(getattr(self, field.name)).encode("utf-8", "surrogatepass")]
        return hashlib.sha256(_length_prefixed(parts)).hexdigest()[:DIGEST_CHARS]


def _length_prefixed(parts: Iterable[bytes]) -> bytes:
    # Lengths keep neighbours apart: ("ab", "c") and ("a", "bc") differ.
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def storage_key(identity_digest: str, page_hash_hex: str) -> str:
    """Key of a page in any storage backend: 32 + 1 + 64 characters of `[0-9a-f-]`."""
    return f"{identity_digest}-{page_hash_hex}"


def sglang_file_key(page_hash_hex: str, identity: ModelIdentity) -> str:
    """The key under which SGLang's file backend stores the page (case 9); its file is that name plus `.bin`.

    It does not tell pipeline stages apart.
    """
    key = f"{page_hash_hex}_{identity.model.replace('/', '-')}"
    return key if identity.attention == "mla" else f"{key}_{identity.tp_rank}_{identity.tp_size}"


def sglang_mooncake_keys(page_hash_hexes: Sequence[str], identity: ModelIdentity, *, tag: str = "") -> list[str]:
    """SGLang's Mooncake keys (case 10): K then V of each page for MHA, one key a page for MLA.

    An MLA page without pipeline stages is `{hash}_k`; with stages `{hash}_{pp_rank}_k`.
    """
    staged = identity.pp_size > 1
    prefix = f"{tag}_" if tag else ""
    stage = f"_{identity.pp_rank}" if staged else ""
    if identity.attention == "mla":
        suffixes = [f"{stage}_k"]
    else:
        suffixes = [f"_{identity.tp_rank}{stage}_{component}" for component in "kv"]
    return [f"{prefix}{page}{suffix}" for page in page_hash_hexes for suffix in suffixes]
