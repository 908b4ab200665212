"""KV events: which pages came to a tier, which left it, or that a tier was emptied; and their form on the wire, vLLM's.

A block is one page; field names and media are vLLM's, so that routers made for vLLM or SGLang understand them (cases 62
and 63). A batch is the msgpack array [timestamp, events, data parallel rank]. An event is either an array that begins
with its name ("array": vLLM up to 0.23 and SGLang) or a map with its name under "type" ("map": vLLM from 0.24 on); what
is read may be either. Fields that vLLM has no place for, as the reason of a removal, come after its own ones, where its
decoders pass over them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace

GPU, CPU = "GPU", "CPU"
MEDIA = {"device": GPU, "host": CPU}
"""Name of each tier in events."""

Token: TypeAlias = int | tuple[int, int]
"""A token id, or a pair of them where the cache is keyed by pairs (EAGLE)."""


class BlockStored(NamedTuple):
    """Blocks that follow one another came to a tier.

    Attributes:
        block_hashes: `hashing.event_id` of each page, in order; signed 64 bit.
        parent_block_hash: of the page before the first one; None at the root.
        token_ids: of all blocks, `block_size` a block.
        block_size: tokens a block.
        medium: tier, "GPU" or "CPU".
        namespace: of the path; adapter, cache salt and tenant.
        reason: "computed", "loaded" (from the host), "written" (to the host), "fetched" (from L3), or "present" (was
            there when the log began anew).
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[Token, ...]
    block_size: int
    medium: str | None = None
    namespace: Namespace = EMPTY_NAMESPACE
    reason: str = ""


class BlockRemoved(NamedTuple):
    """Blocks left a tier.

    Attributes:
        block_hashes: as in `BlockStored`.
        medium: tier, "GPU" or "CPU".
        reason: "evicted", or "dropped" (without the host copy that `write_back` owed them).
    """

    block_hashes: tuple[int, ...]
    medium: str | None = None
    reason: str = ""


class AllBlocksCleared(NamedTuple):
    """A tier was emptied; without a medium, every tier.

    Attributes:
        medium: tier, "GPU" or "CPU", or None.
        reason: "flushed", or "restarted" where a log begins anew.
    """

    medium: str | None = None
    reason: str = ""


Event: TypeAlias = "BlockStored | BlockRemoved | AllBlocksCleared"


class EventBatch(NamedTuple):
    """Events of one step, in the order in which they took effect.

    Attributes:
        timestamp: seconds since the epoch.
        events: at least one.
        data_parallel_rank: of the publisher; 0 where there is only one.
    """

    timestamp: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = 0

    @property
    def begins_anew(self) -> bool:
        """Whether it first clears every tier: nothing that came before matters then."""
        cleared: set[str] = set()
        for event in self.events:
            if not isinstance(event, AllBlocksCleared):
                break
            cleared.update(MEDIA.values() if event.medium is None else (event.medium,))
        return cleared.issuperset(MEDIA.values())


MAX_PAYLOAD_BYTES = 256 << 20


class EventFormatError(ValueError):
    """A payload that is no event batch; the text says where it differs."""


def encode_batch(batch: EventBatch, encoding: str = "array") -> bytes:
    """A batch as a payload; `encoding` is one of `config.KV_EVENT_ENCODINGS`."""
    forms = [_form(event) for event in batch.events]
    events = forms if encoding == "map" else [_as_array(form) for form in forms]
    return msgspec.msgpack.encode([batch.timestamp, events, batch.data_parallel_rank])


def decode_batch(payload: bytes) -> EventBatch:
    """Reads a payload of either encoding, also vLLM's own; fields it does not know are passed over.

    Raises:
        EventFormatError: anything else.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EventFormatError(f"an event batch of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} are read")
    try:
        fields = msgspec.msgpack.decode(payload)
    except (ValueError, TypeError, RecursionError) as error:
        raise EventFormatError(f"no msgpack: {error}") from None
    if isinstance(fields, list) and len(fields) > 1:
        fields = dict(zip(_Batch.__struct_fields__, fields, strict=False))
    if not isinstance(fields, dict):
        raise EventFormatError(f"expected [timestamp, events, ...], got {fields!r:.80}")
    batch = _read(fields, _Batch, "event batch")
    if not math.isfinite(batch.ts):
        raise EventFormatError(f"timestamp: expected seconds, got {batch.ts}")
    return EventBatch(batch.ts, tuple(_event(event) for event in batch.events), batch.data_parallel_rank)


def _read(fields: dict[str, Any], into: Any, name: str) -> Any:
    try:
        # Bytes are known as they are: else text would be read as their base64.
        return msgspec.convert(fields, into, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise EventFormatError(f"{name}: {error}") from None


_Hash: TypeAlias = int | Annotated[bytes, msgspec.Meta(min_length=8)]
"""vLLM may send the whole digest instead of 64 bits of it."""


class _Batch(msgspec.Struct):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class _Stored(msgspec.Struct, tag="BlockStored"):
    """vLLM's fields in vLLM's order, then ours, which are left out of a map where they are unset."""

    block_hashes: tuple[_Hash, ...]
    parent_block_hash: _Hash | None
    token_ids: tuple[Token, ...]
    block_size: int
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    reason: str | None | msgspec.UnsetType = msgspec.UNSET


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: tuple[_Hash, ...]
    medium: str | None = None
    group_idx: Any = None
    reason: str | None | msgspec.UnsetType = msgspec.UNSET


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    medium: str | None = None
    reason: str | None | msgspec.UnsetType = msgspec.UNSET


_Form: TypeAlias = "_Stored | _Removed | _Cleared"


class _Array(NamedTuple):
    """The array of an event: its fields in order, and how many vLLM's decoders can't do without."""

    fields: tuple[str, ...]
    required: int


_ARRAYS = {
    "BlockStored": _Array(_Stored.__struct_fields__[:-1], 7),  # in vLLM another field follows
    "BlockRemoved": _Array(_Removed.__struct_fields__, 2),
    "AllBlocksCleared": _Array(_Cleared.__struct_fields__, 0),
}


def _form(event: Event) -> _Form:
    reason = event.reason or msgspec.UNSET
    if isinstance(event, BlockRemoved):
        return _Removed(event.block_hashes, event.medium, reason=reason)
    if isinstance(event, AllBlocksCleared):
        return _Cleared(event.medium, reason)
    return _Stored(
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.block_size,
        medium=event.medium,
        lora_name=event.namespace.adapter,
        extra_keys=None if event.namespace == EMPTY_NAMESPACE else [list(event.namespace)] * len(event.block_hashes),
        reason=reason,
    )


def _as_array(form: _Form) -> list[Any]:
    name = str(form.__struct_config__.tag)
    fields, required = _ARRAYS[name]
    values = [getattr(form, field) for field in fields]
    while len(values) > required and values[-1] in (None, msgspec.UNSET):
        values.pop()
    return [name, *values]


def _event(event: Any) -> Event:
    if not isinstance(event, dict | list) or not event:
        raise EventFormatError(f"expected an event as an array or a map, got {event!r:.80}")
    name = event.get("type") if isinstance(event, dict) else event[0]
    if not isinstance(name, str) or name not in _ARRAYS:
        raise EventFormatError(f"unknown event {name!r:.80}; known are {', '.join(_ARRAYS)}")
    fields = event if isinstance(event, dict) else dict(zip(("type", *_ARRAYS[name].fields), event, strict=False))
    form: _Form = _read(fields, _Stored | _Removed | _Cleared, name)
    reason = form.reason or ""
    if isinstance(form, _Removed):
        return BlockRemoved(tuple(map(_number, form.block_hashes)), form.medium, reason)
    if isinstance(form, _Cleared):
        return AllBlocksCleared(form.medium, reason)
    return _stored(form, reason)


def _stored(form: _Stored, reason: str) -> BlockStored:
    blocks, tokens = len(form.block_hashes), len(form.token_ids)
    if form.block_size < 1 or tokens != form.block_size * blocks:
        raise EventFormatError(f"{tokens} token_ids for {blocks} blocks of {form.block_size}")
    return BlockStored(
        tuple(map(_number, form.block_hashes)),
        None if form.parent_block_hash is None else _number(form.parent_block_hash),
        form.token_ids,
        form.block_size,
        form.medium,
        _namespace(form.extra_keys, form.lora_name),
        reason,
    )


def _namespace(extra_keys: list[Any] | None, adapter: str | None) -> Namespace:
    """The namespace of this package's blocks. Others' extra keys mean something else: theirs is the adapter alone."""
    first = extra_keys[0] if extra_keys else None
    if isinstance(first, list) and len(first) == len(Namespace._fields):
        return Namespace(*(part if part is None else str(part) for part in first))
    return Namespace(adapter=adapter)


def _number(block_hash: int | bytes) -> int:
    return int.from_bytes(block_hash[:8], "big", signed=True) if isinstance(block_hash, bytes) else block_hash
