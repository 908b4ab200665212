"""The data half of a rank: carries out the transfers the index decided on, and tells how far they are.

It owns the pools' bytes and the lanes and threads that move them. It knows pages, neither the tree nor requests. Of a
node it reads no more than the tenant that a backup is for (`l3`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hicache_ray.index import Load, Write
from hicache_ray.kernels.base import PoolCopies
from hicache_ray.pools.layer_done import NO_LOAD
from hicache_ray.rank.l3 import StorageIO
from hicache_ray.rank.lanes import CopyError, CopyLane, copy_lane
from hicache_ray.storage.base import Storage
from hicache_ray.threads import Worker


class Mover:
    """Copies between L1 and L2 and, while a store is attached, between L2 and L3.

    Args:
        copies: those between L1 and L2.
        copy_timeout: seconds a blocking write may take before it counts as a failed copy.
        lanes, workers, storage_io: make the lanes, threads and L3 calls; tests give ones that they advance themselves.
    """

    def __init__(
        self,
        copies: PoolCopies,
        copy_timeout: float,
        *,
        lanes: Callable[[torch.device, str], CopyLane] = copy_lane,
        workers: Callable[[str], Worker] = Worker,
        storage_io: Callable[..., StorageIO] = StorageIO,
    ) -> None:
        self.copies = copies
        self.device_pool, self.host_pool = copies.device_pool, copies.host_pool
        self.copy_timeout = copy_timeout
        self.storage_io: StorageIO | None = None
        self.layer_done = self.device_pool.layer_done
        self.bytes: Counter[str] = Counter()
        self.retired: Counter[str] = Counter()
        self._retired_backups = 0
        self._workers, self._storage_io = workers, storage_io
        self._write_lane = lanes(self.device_pool.device, "l1-write")
        self._load_lane = lanes(self.device_pool.device, "l1-load")

    @property
    def writes_done(self) -> int:
        """L1 -> L2 copies that have ended, cumulative, in issue order. Raises CopyError when one failed."""
        return self._write_lane.done

    @property
    def loads_done(self) -> int:
        """L2 -> L1 loads that have ended, cumulative, in issue order. Raises CopyError when one failed."""
        return self._load_lane.done

    @property
    def backups_done(self) -> int:
        """L2 -> L3 backups that have ended, cumulative over all stores attached so far, in issue order."""
        return self._retired_backups + (self.storage_io.backups_done if self.storage_io else 0)

    def begin(self, transfers: Sequence[Write | Load]) -> int:
        """Begins the transfers. Returns the consumer index a forward pass waits with, -1 when nothing is loaded.

        Writes come first: a blocking one (write_back eviction) reads L1 pages that the loads may reuse, so it has
        ended when this returns.
        """
        for write in transfers:
            if isinstance(write, Write):
                self._write(write)
        loads = [load for load in transfers if isinstance(load, Load)]
        return self._load(loads) if loads else NO_LOAD

    def attach(self, storage: Storage, *, pass_prefix_hashes: bool = False) -> None:
        """Begin to use a store; RuntimeError while one is attached."""
        if self.storage_io is not None:
            raise RuntimeError("a storage backend is attached: detach it first")
        self.storage_io = self._storage_io(
            storage, self.host_pool, pass_prefix_hashes=pass_prefix_hashes, workers=self._workers
        )

    def detach(self, timeout: float) -> bool:
        """Stop using the store; the caller has waited for its operations. Returns whether its threads ended in time;
        True when none was attached."""
        io, self.storage_io = self.storage_io, None
        if io is None:
            return True
        self._retired_backups += io.backups_done
        self.retired.update(io.bytes)
        return io.close(timeout)

    def bytes_moved(self) -> dict[str, int]:
        """Bytes moved since start, by path: l1_to_l2, l2_to_l1, l2_to_l3, l3_to_l2."""
        paths = Counter({path: 0 for path in ("l1_to_l2", "l2_to_l1", "l2_to_l3", "l3_to_l2")})
        for counts in (self.bytes, self.retired, self.storage_io.bytes if self.storage_io else Counter()):
            paths.update({path: count for path, count in counts.items() if path in paths})
        return dict(paths)

    def settle(self, timeout: float) -> bool:
        """Waits until no copy between L1 and L2 is under way. Returns False when `timeout` seconds were not enough."""
        return self._write_lane.wait(timeout) and self._load_lane.wait(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Ends the lanes and threads; the pools stay readable. May be called twice."""
        self.detach(timeout)
        self._write_lane.close()
        self._load_lane.close()

    def _write(self, write: Write) -> None:
        device_pages, host_pages = write.device_pages, write.host_pages
        copies = self.copies
        self._write_lane.submit(lambda: copies.backup(copies.plan(device_pages, host_pages)))
        self.bytes["l1_to_l2"] += len(device_pages) * self.host_pool.page_bytes
        if write.blocking and not self._write_lane.wait(self.copy_timeout):
            raise CopyError(f"a write of {len(device_pages)} pages to L2 did not end within {self.copy_timeout:g} s")

    def _load(self, loads: Sequence[Load]) -> int:
        device_pages = np.concatenate([load.device_pages for load in loads])
        host_pages = np.concatenate([load.host_pages for load in loads])
        producer = self.layer_done.update_producer()
        arrivals = self.layer_done.events(producer)
        layers = range(self.device_pool.spec.layers)

        def copy() -> None:
            try:
                plan = self.copies.plan(device_pages, host_pages)
                for layer in layers:
                    self.copies.load_layer(plan, layer)
                    arrivals.complete(layer)
            except Exception as error:
                arrivals.fail(error)
                raise

        self._load_lane.submit(copy)
        for _ in loads[1:]:  # one lane entry a load, so that each is counted when all have ended
            self._load_lane.submit(_nothing)
        self.bytes["l2_to_l1"] += len(device_pages) * self.host_pool.page_bytes
        return producer


def _nothing() -> None:
    return None
