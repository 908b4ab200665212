"""Which layers of a load have arrived: a reader of layer N waits for layer N only (docs/design.md 5)."""

from __future__ import annotations

import threading
import time

import torch

NO_LOAD = -1
"""Index of no load at all: a consumer set to it waits for nothing (case 40)."""

RING = 3
"""Loads that may be under way at once."""

DEFAULT_TIMEOUT = 30.0


class LayerTimeoutError(TimeoutError):
    """A layer of a load did not arrive before the deadline."""


class LayerLoadError(RuntimeError):
    """The load that a reader waits for failed."""


class LayerEvents:
    """The layers of one load, on the CPU: completed by the copying thread, awaited by readers."""

    def __init__(self, layers: int, producer: int) -> None:
        self.producer = producer
        self.error: BaseException | None = None
        self._arrived = [threading.Event() for _ in range(layers)]

    def complete(self, layer: int) -> None:
        """Layer `layer` is in the device pool."""
        self._arrived[layer].set()

    def fail(self, error: BaseException) -> None:
        """The load will not end: every waiter gets LayerLoadError."""
        self.error = error
        for event in self._arrived:
            event.set()

    def finished(self) -> bool:
        """True when no layer is under way any more."""
        return all(event.is_set() for event in self._arrived)

    def join(self, timeout: float) -> None:
        """Blocks until the load is over, failed or not; on CUDA, until its last copy is on the stream.

        Raises LayerTimeoutError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        for layer in range(len(self._arrived)):
            self._wait_flag(layer, max(0.0, deadline - time.monotonic()), timeout)

    def wait(self, layer: int, timeout: float) -> None:
        """Returns once the layer can be read. Raises LayerTimeoutError after `timeout` seconds, or LayerLoadError."""
        self._wait_flag(layer, timeout, timeout)
        if self.error is not None:
            raise LayerLoadError(f"layer {layer} of load {self.producer} can't be read: {self.error}") from self.error

    def _wait_flag(self, layer: int, left: float, timeout: float) -> None:
        if not self._arrived[layer].wait(left):
            raise LayerTimeoutError(f"layer {layer} of load {self.producer} did not arrive within {timeout:g} s")


class CudaLayerEvents(LayerEvents):
    """The layers of one load on a CUDA stream: readers wait on their stream, never on the host.

    The host flags of the base class say that an event was recorded: waiting for one that was not would return at once.
    """

    def __init__(self, layers: int, producer: int) -> None:
        super().__init__(layers, producer)
        self._copied = [torch.cuda.Event() for _ in range(layers)]

    def complete(self, layer: int) -> None:
        """Records the end of the layer on the current stream, which is the one that copies."""
        self._copied[layer].record()
        super().complete(layer)

    def finished(self) -> bool:
        """True when the stream has passed every layer."""
        if not super().finished():
            return False
        return self.error is not None or all(event.query() for event in self._copied)

    def wait(self, layer: int, timeout: float) -> None:
        """Makes the caller's current stream wait for the layer."""
        super().wait(layer, timeout)
        torch.cuda.current_stream().wait_event(self._copied[layer])


class LayerDoneCounter:
    """A ring of loads, so that the batches of an overlapped schedule each wait for their own.

    The side that loads calls `update_producer`, then completes the layers of its `events` or fails them; the side that
    computes calls `set_consumer` with the producer of its batch, and the device pool `wait_until` for each layer it
    hands out.

    Args:
        layers: local layers.
        device: where the pool is; on CUDA the waits are those of streams.
        timeout: seconds any wait may take.
    """

    def __init__(
        self,
        layers: int,
        device: torch.device | str = "cpu",
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.layers = layers
        self.timeout = timeout
        self._events_type = CudaLayerEvents if torch.device(device).type == "cuda" else LayerEvents
        self._ring: list[LayerEvents | None] = [None] * RING
        self._producer = NO_LOAD
        self._consumed: LayerEvents | None = None

    def update_producer(self) -> int:
        """Begins a load: its index in the ring, 0 for the first one (case 40).

        Waits while the load that had this place `RING` loads ago is under way; LayerTimeoutError after `timeout`.
        """
        producer = (self._producer + 1) % len(self._ring)
        before = self._ring[producer]
        if before is not None:
            before.join(self.timeout)
        self._ring[producer] = self._events_type(self.layers, producer)
        self._producer = producer
        return producer

    def events(self, producer: int) -> LayerEvents:
        """The layers of a load; ValueError for an index that no load has."""
        events = self._ring[producer] if 0 <= producer < len(self._ring) else None
        if events is None:
            raise ValueError(f"no load has producer index {producer}; update_producer() begins one")
        return events

    def set_consumer(self, producer: int) -> None:
        """From now on `wait_until` waits for the layers of this load; NO_LOAD (-1): for nothing."""
        self._consumed = None if producer == NO_LOAD else self.events(producer)

    def wait_until(self, layer: int) -> None:
        """Returns when the layer of the consumer's load has arrived. Raises LayerTimeoutError or LayerLoadError."""
        if self._consumed is not None:
            self._consumed.wait(layer, self.timeout)
