"""What one token's KV looks like: attention type, local layers and heads, dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Attention = Literal["mha", "mla"]

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a KV cache; raises ValueError for one that no pool holds."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in set(DTYPES.values()):
        raise ValueError(f"KV dtype {dtype!r} is not supported; use one of {', '.join(sorted(DTYPES))}")
    assert found is not None
    return found


@dataclass(frozen=True)
class Part:
    """What a host layout keeps together of a token and layer: dims [start, stop) of plane 0 (K, latent) or 1 (V)."""

    name: str
    plane: int
    start: int
    stop: int

    @property
    def dims(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class KVSpec:
    """KV of one token on one rank. `heads` are the local heads (after the tensor-parallel split).

    MHA (with GQA and MQA) keeps K and V of `heads` x `head_dim`; MLA one latent of `latent_dim` (kv_lora_rank +
    qk_rope_head_dim), whose last `rope_dim` dims only page_first_kv_split keeps apart. `mha` and `mla` build one.
    """

    attention: Attention
    layers: int
    heads: int = 1
    head_dim: int = 0
    latent_dim: int = 0
    dtype: torch.dtype = torch.bfloat16
    rope_dim: int = 0

    def __post_init__(self) -> None:
        if self.attention not in ("mha", "mla"):
            raise ValueError(f"attention {self.attention!r} has no pool; use 'mha' or 'mla' (SWA and Mamba have none)")
        parse_dtype(self.dtype)
        if self.layers < 1 or self.heads < 1 or self.dim < 1:
            raise ValueError(f"layers {self.layers}, heads {self.heads} and dim {self.dim} must all be at least 1")
        if self.attention == "mla" and self.heads != 1:
            raise ValueError(f"MLA has one shared latent, so heads must be 1, not {self.heads}")
        if not 0 <= self.rope_dim < self.dim:
            raise ValueError(f"rope_dim {self.rope_dim} must lie within the {self.dim} dims of the latent")

    @classmethod
    def mha(cls, layers: int, heads: int, head_dim: int, dtype: str | torch.dtype = torch.bfloat16) -> KVSpec:
        """K and V of `heads` local heads."""
        return cls("mha", layers, heads=heads, head_dim=head_dim, dtype=parse_dtype(dtype))

    @classmethod
    def mla(
        cls, layers: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype: str | torch.dtype = torch.bfloat16
    ) -> KVSpec:
        """One latent per token and layer, the same on every rank."""
        latent = kv_lora_rank + qk_rope_head_dim
        return cls("mla", layers, latent_dim=latent, rope_dim=qk_rope_head_dim, dtype=parse_dtype(dtype))

    @property
    def dim(self) -> int:
        """Dims of one head (MHA) or of the latent (MLA)."""
        return self.head_dim if self.attention == "mha" else self.latent_dim

    @property
    def planes(self) -> int:
        """Tensors a layer has on the device: K and V, or the latent."""
        return 2 if self.attention == "mha" else 1

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one token, one layer, one plane."""
        return self.heads * self.dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers, K and V."""
        return self.planes * self.layers * self.row_bytes
