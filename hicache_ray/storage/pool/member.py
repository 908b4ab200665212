"""One storage actor as a pool's client sees it: its channel, its breaker, and its arena where that can be mapped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hicache_ray import faultpoints
from hicache_ray.deadline import Deadline
from hicache_ray.pages import Bytes
from hicache_ray.storage.base import StorageCounters
from hicache_ray.storage.breaker import Breaker
from hicache_ray.storage.pool.channel import Channel, ChannelError, ChannelLost, ChannelTimeout, Pending
from hicache_ray.storage.pool.near import NearChannel, fits
from hicache_ray.storage.pool.wire import FAILED, Reply, WireError
from hicache_ray.storage.shard.arena import ArenaMapping
from hicache_ray.storage.shard.layout import ArenaError

logger = logging.getLogger("hicache_ray.storage.pool.member")


class ActorAnswer(NamedTuple):
    """A reply, and the pages that came with it, [granted, page_bytes]; none when they lie in the arena."""

    reply: Reply
    pages: Sequence[Bytes] = ()


class PoolMember:
    """Calls to one storage actor that never raise. A call that fails gives None, is counted, and opens the breaker.
    Thread-safe.

    Attributes:
        name: of the member.
        mapping: its arena, mapped, or None when it has to send pages (other node, or transport "object_store").
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        breaker: Breaker,
        counters: StorageCounters,
        *,
        call_timeout: float,
        use_shm: bool = True,
        prefault: bool = True,
    ) -> None:
        self.name = name
        self.mapping: ArenaMapping | None = None
        self._channel = channel
        self._near: NearChannel | None = None
        self.breaker = breaker
        self._counters = counters
        self._call_timeout = call_timeout
        self._use_shm = use_shm
        self._prefault = prefault
        self._arena_id = 0
        self._attach_again = False
        self._attaching = threading.Lock()
        self._local = threading.local()

    def start(self, method: str, *args: Any) -> Pending | None:
        """Start a call. Returns None when the breaker refuses it or the actor can't be found."""
        if not self.breaker.allows():
            self._counters.add(refused=1)
            return None
        if faultpoints.fails("channel.call", self.name):
            self._failed(ChannelLost("a fault plan cuts the connection"))
            return None
        try:
            if (near := self._near_for(method, args)) is not None:
                return near.call(method, *args)
        except ChannelError:
            # The actor may have come back under another address: Ray knows.
            self._near, self._attach_again = None, True
        try:
            return self._channel.call(method, *args)
        except ChannelError as error:
            self._failed(error)
            return None

    def finish(self, pending: Pending | None, deadline: Deadline) -> ActorAnswer | None:
        """Wait for a call's answer. Returns None when there is none, or when the actor says that it can't be done."""
        if pending is None:
            return None
        try:
            answer = pending.result(deadline.at_most(self._call_timeout))
            message, pages = answer if isinstance(answer, tuple) else (answer, ())
            reply = Reply.unpack(message)
        except (ChannelError, WireError) as error:
            self._failed(error)
            return None
        self._succeeded()
        if reply.status == FAILED:
            self._counters.add(errors=1)
            logger.warning("storage actor %s refused a call: %s", self.name, reply.payload.decode(errors="replace"))
            return None
        if reply.arena_id != self._arena_id or self._attach_again:
            self.attach(deadline, wait=False)
        return ActorAnswer(reply, pages)

    def send(self, method: str, *args: Any) -> None:
        """Start a call nobody waits for."""
        (self._near_for(method, args) or self._channel).send(method, *args)

    def attach(self, deadline: Deadline, *, wait: bool) -> bool:
        """Find out which arena the actor has now, and map it where that is possible. False when the actor is away.

        Args:
            wait: return when every page of the arena is mapped; else that goes on in a thread of its own, and the
                first copies are slower.
        """
        with self._attaching:
            try:
                description = self._channel.call("describe").result(deadline.at_most(self._call_timeout))
            except ChannelError as error:
                self._failed(error)
                return False
            path, arena_id, address = description
            if arena_id != self._arena_id:
                self.mapping = self._map(Path(path), arena_id, wait) if self._use_shm else None
                self._arena_id = arena_id
            self._attach_again = False
            # Only a client that sees the actor's memory is on its node for certain.
            self._near = self._connect(address) if self.mapping is not None and address else None
            self._succeeded()
            return True

    def read_method(self) -> str:
        """The call that reads pages here: it grants cells of the mapped arena, or sends the pages themselves."""
        return "acquire" if self.mapping is not None else "read"

    def close(self) -> None:
        """Close the connections to the actor. Idempotent."""
        if self._near is not None:
            self._near.close()

    def mapped(self, arena_id: int) -> ArenaMapping | None:
        """The mapping that grants of that arena refer to."""
        mapping = self.mapping
        return mapping if mapping is not None and mapping.arena_id == arena_id else None

    def scratch(self, count: int, length: int) -> Bytes:
        """Memory of the calling thread to gather pages in, [count, length]; good until its next call here."""
        memory = getattr(self._local, "memory", None)
        if memory is None or memory.size < count * length:
            memory = self._local.memory = np.empty(count * length, np.uint8)
        return memory[: count * length].reshape(count, length)

    def _near_for(self, method: str, args: tuple[Any, ...]) -> NearChannel | None:
        """The near channel, where there is one and the call can be made there."""
        near = self._near
        if near is not None and near.lost:
            self._near, self._attach_again = None, True
            return None
        return near if fits(method, args) else None

    def _connect(self, address: str) -> NearChannel | None:
        try:
            return NearChannel(address, self._call_timeout)
        except ChannelLost as error:
            logger.info("storage actor %s is called over Ray only: %s", self.name, error)
            return None

    def _map(self, path: Path, arena_id: int, wait: bool) -> ArenaMapping | None:
        try:
            mapping = ArenaMapping.attach(path, arena_id)
            if self._prefault and wait:
                mapping.prefault()
            elif self._prefault:
                threading.Thread(target=self._prefault_later, args=(mapping,), name="l3-prefault", daemon=True).start()
        except (OSError, ArenaError) as error:
            logger.info("the arena of storage actor %s can't be mapped, its pages are sent: %s", self.name, error)
            return None
        return mapping

    def _prefault_later(self, mapping: ArenaMapping) -> None:
        try:
            mapping.prefault()
        except ArenaError as error:
            logger.warning(
                "the arena of storage actor %s is used without being mapped as a whole: %s", self.name, error
            )

    def _succeeded(self) -> None:
        if self.breaker.is_open:
            logger.info("storage actor %s answers again", self.name)
        self.breaker.succeeded()

    def _failed(self, error: Exception) -> None:
        if not self.breaker.is_open:
            logger.warning("storage actor %s is away, its pages are misses: %s", self.name, error)
        self.breaker.failed()
        self._counters.add(**{"timeouts" if isinstance(error, ChannelTimeout) else "errors": 1})
