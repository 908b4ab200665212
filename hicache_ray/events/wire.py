"""What a KV event says: which pages came to a tier, which left it, or that a tier was emptied (cases 62, 63).

Field names and media are vLLM's, so that routers made for vLLM or SGLang understand them. A block is one page.

Event batches as msgpack, in the format of vLLM's KV events.

A batch is the array [timestamp, events, data parallel rank]. An event is either an array that begins with its name
("array": vLLM up to 0.23 and SGLang) or a map with its name under "type" ("map": vLLM from 0.24 on); what is read may
be either. Fields that vLLM has no place for, as the reason of a removal, come after its own ones, where its decoders
pass over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgpack

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace

GPU, CPU = "GPU", "CPU"
MEDIA = {"device": GPU, "host": CPU}
"""Name of each tier in events."""

Token: TypeAlias = "int | tuple[int, int]"
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

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "reason")
_CLEARED_FIELDS = ("medium", "reason")
_ALWAYS: dict[type, int] = {BlockStored: 7, BlockRemoved: 2, AllBlocksCleared: 0}
"""Leading fields of an array that vLLM's decoders can't do without."""


class EventFormatError(ValueError):
    """A payload that is no event batch; the text says where it differs."""


def encode_batch(batch: EventBatch, encoding: str = "array") -> bytes:
    """A batch as a payload; `encoding` is one of `hicache_ray.config.names.KV_EVENT_ENCODINGS`."""
    events = [_packed(event, encoding) for event in batch.events]
    return msgpack.packb([batch.timestamp, events, batch.data_parallel_rank])


def decode_batch(payload: bytes) -> EventBatch:
    """Reads a payload of either encoding, also vLLM's own; fields it does not know are passed over.

    Raises:
        EventFormatError: anything else.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EventFormatError(f"an event batch of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} are read")
    try:
        fields = msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise EventFormatError(f"no msgpack: {error}") from None
    if isinstance(fields, dict):
        fields = [fields.get(name) for name in ("ts", "events", "data_parallel_rank")]
    if not isinstance(fields, list) or len(fields) < 2:
        raise EventFormatError(f"expected [timestamp, events, ...], got {fields!r:.80}")
    rank = fields[2] if len(fields) > 2 else None
    return EventBatch(
        _finite(fields[0]),
        tuple(_unpacked(event) for event in _list(fields[1], "events")),
        None if rank is None else _int(rank, "data_parallel_rank"),
    )


def _packed(event: Event, encoding: str) -> list[Any] | dict[str, Any]:
    name = type(event).__name__
    values = _PACK[type(event)](event)
    if encoding == "map":
        return {"type": name, **values, **({"reason": event.reason} if event.reason else {})}
    fields = list(values.values())
    if not isinstance(event, BlockStored):
        fields.append(event.reason or None)
    while len(fields) > _ALWAYS[type(event)] and fields[-1] is None:
        fields.pop()
    return [name, *fields]


def _pack_stored(event: BlockStored) -> dict[str, Any]:
    extra_keys = None if event.namespace == EMPTY_NAMESPACE else [list(event.namespace)] * len(event.block_hashes)
    values: tuple[Any, ...] = (
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.block_size,
        None,
        event.medium,
        event.namespace.adapter,
        extra_keys,
    )
    return dict(zip(_STORED_FIELDS, values, strict=True))


def _pack_removed(event: BlockRemoved) -> dict[str, Any]:
    return {"block_hashes": event.block_hashes, "medium": event.medium, "group_idx": None}


def _pack_cleared(event: AllBlocksCleared) -> dict[str, Any]:
    return {"medium": event.medium}


_PACK: dict[type, Callable[[Any], dict[str, Any]]] = {
    BlockStored: _pack_stored,
    BlockRemoved: _pack_removed,
    AllBlocksCleared: _pack_cleared,
}


def _unpacked(event: Any) -> Event:
    if isinstance(event, dict):
        name = event.get("type")
    elif isinstance(event, list) and event:
        name = event[0]
    else:
        raise EventFormatError(f"expected an event as an array or a map, got {event!r:.80}")
    reader = _READ.get(name) if isinstance(name, str) else None
    if reader is None:
        raise EventFormatError(f"unknown event {name!r:.80}; known are {', '.join(_READ)}")
    names, read = reader
    return read(event if isinstance(event, dict) else dict(zip(names, event[1:], strict=False)))


def _read_stored(fields: Mapping[str, Any]) -> BlockStored:
    parent = fields.get("parent_block_hash")
    hashes = _hashes(fields.get("block_hashes"))
    size = _int(fields.get("block_size"), "block_size")
    tokens = tuple(_token(token) for token in _list(fields.get("token_ids"), "token_ids"))
    if size < 1 or len(tokens) != size * len(hashes):
        raise EventFormatError(f"{len(tokens)} token_ids for {len(hashes)} blocks of {size}")
    return BlockStored(
        hashes,
        None if parent is None else _hash(parent),
        tokens,
        size,
        _text(fields.get("medium"), "medium"),
        _namespace(fields.get("extra_keys"), _text(fields.get("lora_name"), "lora_name")),
        _text(fields.get("reason"), "reason") or "",
    )


def _read_removed(fields: Mapping[str, Any]) -> BlockRemoved:
    return BlockRemoved(
        _hashes(fields.get("block_hashes")),
        _text(fields.get("medium"), "medium"),
        _text(fields.get("reason"), "reason") or "",
    )


def _read_cleared(fields: Mapping[str, Any]) -> AllBlocksCleared:
    return AllBlocksCleared(_text(fields.get("medium"), "medium"), _text(fields.get("reason"), "reason") or "")


_READ: dict[str, tuple[Sequence[str], Callable[[Mapping[str, Any]], Event]]] = {
    "BlockStored": (_STORED_FIELDS, _read_stored),
    "BlockRemoved": (_REMOVED_FIELDS, _read_removed),
    "AllBlocksCleared": (_CLEARED_FIELDS, _read_cleared),
}


def _namespace(extra_keys: Any, adapter: str | None) -> Namespace:
    """The namespace of this package's blocks. Others' extra keys mean something else: theirs is the adapter alone."""
    first = extra_keys[0] if isinstance(extra_keys, list) and extra_keys else None
    if isinstance(first, list) and len(first) == len(Namespace._fields):
        parts = [_text(part, "extra_keys") if part is None or isinstance(part, str) else str(part) for part in first]
        return Namespace(*parts)
    return Namespace(adapter=adapter)


def _hashes(value: Any) -> tuple[int, ...]:
    return tuple(_hash(entry) for entry in _list(value, "block_hashes"))


def _hash(value: Any) -> int:
    """A block hash; vLLM may send the whole digest instead of 64 bits of it."""
    if isinstance(value, bytes) and len(value) >= 8:
        return int.from_bytes(value[:8], "big", signed=True)
    return _int(value, "a block hash")


def _token(value: Any) -> Token:
    if isinstance(value, list) and len(value) == 2:
        return _int(value[0], "a token"), _int(value[1], "a token")
    return _int(value, "a token")


def _int(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise EventFormatError(f"{name}: expected a whole number, got {value!r:.80}")
    return value


def _text(value: Any, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise EventFormatError(f"{name}: expected text or nil, got {value!r:.80}")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise EventFormatError(f"{name}: expected an array, got {value!r:.80}")
    return value


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise EventFormatError(f"timestamp: expected seconds, got {value!r:.80}")
    return float(value)
