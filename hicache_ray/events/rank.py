"""The KV events of one rank, from its index to its sockets."""

from __future__ import annotations

from typing import Any

from hicache_ray.config import HiCacheConfig
from hicache_ray.events.publisher import KVEventPublisher, PublisherOptions
from hicache_ray.events.recorder import EventRecorder
from hicache_ray.rank.cache import HiRadixCache


class KVEvents:
    """Publishes what becomes of a cache's pages: `flush` after every step, `begin` after the tree was replaced.

    One rank of a group does this; the others hold the same tree.
    """

    def __init__(self, cache: HiRadixCache, options: PublisherOptions) -> None:
        """Opens the sockets and begins the log. EventPublisherError when an endpoint can't be used."""
        self._cache = cache
        self.publisher = KVEventPublisher(options)
        self.recorder = EventRecorder(cache.index)
        self.flush()

    @classmethod
    def of(cls, cache: HiRadixCache, config: HiCacheConfig) -> KVEvents | None:
        """The events of a rank as configured: None where they are off, and on every rank but 0."""
        if not config.enable_kv_events or cache.rank != 0:
            return None
        return cls(
            cache,
            PublisherOptions(
                endpoint=config.kv_events_endpoint,
                replay_endpoint=config.kv_events_replay_endpoint or "",
                topic=config.kv_events_topic,
                encoding=config.kv_events_encoding,
            ),
        )

    def flush(self) -> None:
        """Publishes what was noted since the last call, as one batch; never waits."""
        recorded = self.recorder.take()
        if recorded is not None:
            self.publisher.publish(recorded)

    def begin(self) -> None:
        """Begins the log anew with the tree that the cache has now."""
        self.recorder.begin(self._cache.index)
        self.flush()

    def status(self) -> dict[str, Any]:
        """Where the events are published and how far they are; plain values."""
        publisher = self.publisher
        return {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "topic": publisher.options.topic,
            "next_sequence": publisher.next_sequence,
            "published": publisher.published,
            "lost": publisher.lost,
        }

    def close(self) -> None:
        """Sends what is queued and closes the sockets. May be called twice."""
        self.recorder.close()
        self.publisher.close()
