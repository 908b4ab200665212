"""Storage keys: which model, shard and byte order a stored page belongs to.

A page hash names tokens; a storage key names bytes. Two things that differ in any field of `ModelIdentity` never share
a storage key (case 6 and the ruling on 6, 8, 9, 10).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

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


def sglang_file_suffix(identity: ModelIdentity) -> str:
    """What SGLang's file backend appends to a page hash (case 9). It does not tell pipeline stages apart."""
    model = identity.model.replace("/", "-")
    if identity.attention == "mla":
        return f"_{model}"
    return f"_{model}_{identity.tp_rank}_{identity.tp_size}"


def sglang_file_key(page_hash_hex: str, identity: ModelIdentity) -> str:
    """The key under which SGLang's file backend stores the page (case 9); its file is that name plus `.bin`."""
    return page_hash_hex + sglang_file_suffix(identity)


def sglang_mooncake_keys(page_hash_hexes: Sequence[str], identity: ModelIdentity, *, tag: str = "") -> list[str]:
    """SGLang's Mooncake keys (case 10): K then V of each page for MHA, one key a page for MLA.

    An MLA page without pipeline stages is `{hash}_k`, by the ruling; with stages `{hash}_{pp_rank}_k`.
    """
    staged = identity.pp_size > 1
    prefix = f"{tag}_" if tag else ""
    stage = f"_{identity.pp_rank}" if staged else ""
    if identity.attention == "mla":
        suffixes = [f"{stage}_k"]
    else:
        suffixes = [f"_{identity.tp_rank}{stage}_{component}" for component in "kv"]
    return [f"{prefix}{page}{suffix}" for page in page_hash_hexes for suffix in suffixes]
