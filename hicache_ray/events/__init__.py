"""KV events: which pages came to or left L1 and L2, published over ZMQ in the format of vLLM's KV events."""

from __future__ import annotations

from hicache_ray.events.index import EventIndex, ReplayError
from hicache_ray.events.recorder import EventRecorder, RecordedBatch
from hicache_ray.events.wire import (
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

__all__ = [
    "CPU",
    "GPU",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventFormatError",
    "EventIndex",
    "EventRecorder",
    "RecordedBatch",
    "ReplayError",
    "decode_batch",
    "encode_batch",
]
