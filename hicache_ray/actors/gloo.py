"""The Ray collective backend "hicache": one torch ProcessGroupGloo per group, with a deadline.

Against Ray's stock GLOO backend (one torch WORLD per process, 30-minute timeout, no second life after a death) each
group here stands alone: groups of any shape live side by side, and a new generation is a new name. The small MIN of a
step goes from rank to rank over the torch group (`actors.collective`). Ranks find each other through Ray's internal KV,
without a server and without depending on rank 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
from ray.experimental import internal_kv
from ray.util.collective import is_backend_available, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)
from torch import distributed

from hicache_ray.deadline import Deadline

RAY_BACKEND: Any = "HICACHE"  # Ray annotates backend names as a class that it never makes an object of.
REDUCTION_SECONDS = 5.0
MEETING_SECONDS = 30.0
"""Limits of a reduction and of a group's ranks to meet, where none is given."""

# torch's stubs know only a part of this class.
TorchGroup = Any

_KV_NAMESPACE = "hicache"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
_USER_TAG = 0
FRAME_TAG = 1
"""Tag of what `actors.collective` sends through a group beside Ray's own operations."""
_SHORTEST_WAIT = 0.001
_TORCH_OPS = {
    ReduceOp.SUM: distributed.ReduceOp.SUM,
    ReduceOp.PRODUCT: distributed.ReduceOp.PRODUCT,
    ReduceOp.MIN: distributed.ReduceOp.MIN,
    ReduceOp.MAX: distributed.ReduceOp.MAX,
}


def time_left(deadline: Deadline) -> timedelta:
    """Limit of the next wait: never less than a millisecond, so that what is already there can still be taken."""
    return timedelta(seconds=max(deadline.remaining(), _SHORTEST_WAIT))


class HiCacheGroup(BaseGroup):
    """One rank's end of a group. `connect` meets the peers; any operation does so first where nobody has.

    All operations raise RuntimeError when a peer fails or the timeout passes; the group is unusable then, and `close`
    is what frees the peers that still wait.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.timeout = REDUCTION_SECONDS
        self.join_timeout = MEETING_SECONDS
        self._torch_group: TorchGroup | None = None
        self._connecting = threading.Lock()
        self._closed = False

    @classmethod
    def backend(cls) -> str:
        """The name under which the backend is registered."""
        return RAY_BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Whether this torch has gloo."""
        return bool(distributed.is_available() and distributed.is_gloo_available())

    def connect(self) -> TorchGroup:
        """Meets the peers within `join_timeout` seconds and returns the torch group.

        Ray makes groups under a process-wide lock. Meeting here, outside of it, lets another group of this process
        carry on while a peer of this one is late.

        Raises:
            TimeoutError, RuntimeError: a peer did not come or failed, or the group is closed.
        """
        with self._connecting:
            if self._closed:
                raise RuntimeError(f"group {self.group_name} is closed")
            if self._torch_group is None:
                self._torch_group = self._meet(Deadline(self.join_timeout))
            return self._torch_group

    def _meet(self, deadline: Deadline) -> TorchGroup:
        store = InternalKVStore(store_prefix(self.group_name), deadline)
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        # The node's address as Ray knows it: gloo would take what the host name resolves to, often the loopback.
        options._devices = [gloo.create_device(hostname=ray.util.get_node_ip_address())]
        options._timeout = timedelta(seconds=self.timeout)
        try:
            group: TorchGroup = gloo(store, self.rank, self.world_size, options)
            # Past this barrier every rank has read every address, so the keys have served.
            group.barrier(_with(distributed.BarrierOptions(), timeout=time_left(deadline))).wait()
        finally:
            store.delete_written()
        return group

    def close(self) -> None:
        """Closes the connections, which ends the waits of the peers. May be called twice and from any thread.

        Connections close when nothing refers to the torch group any more (its `shutdown` and `abort` do not close
        them): an operation under way in another thread keeps them open until its own deadline.
        """
        self._closed = True
        self._torch_group = None

    def destroy_group(self) -> None:
        """As `close`; Ray's name for it."""
        self.close()

    def allreduce(self, tensor: Sequence[Any], allreduce_options: AllReduceOptions | None = None) -> None:
        """Reduces the one tensor in place over all ranks."""
        ray_options = allreduce_options or AllReduceOptions()
        options = _with(distributed.AllreduceOptions(), reduceOp=_TORCH_OPS[ray_options.reduceOp])
        self._wait(self.connect().allreduce([_as_torch(tensor)], options))

    def barrier(self, barrier_options: BarrierOptions | None = None) -> None:
        """Returns when all ranks have come here."""
        self._wait(self.connect().barrier(distributed.BarrierOptions()))

    def reduce(self, tensor: Sequence[Any], reduce_options: ReduceOptions | None = None) -> None:
        """Reduces the one tensor over all ranks into the root's."""
        ray_options = reduce_options or ReduceOptions()
        options = _with(
            distributed.ReduceOptions(), reduceOp=_TORCH_OPS[ray_options.reduceOp], rootRank=ray_options.root_rank
        )
        self._wait(self.connect().reduce([_as_torch(tensor)], options))

    def allgather(
        self,
        tensor_list: Sequence[Sequence[Any]],
        tensor: Sequence[Any],
        allgather_options: AllGatherOptions | None = None,
    ) -> None:
        """Fills the one list of tensors with the tensors of all ranks."""
        outputs = [[_as_torch([entry]) for entry in tensor_list[0]]]
        self._wait(
            self.connect().allgather(outputs, [_as_torch(tensor)], distributed.distributed_c10d.AllgatherOptions())
        )

    def broadcast(self, tensor: Sequence[Any], broadcast_options: BroadcastOptions | None = None) -> None:
        """Copies the root's tensor to all ranks."""
        ray_options = broadcast_options or BroadcastOptions()
        options = _with(distributed.BroadcastOptions(), rootRank=ray_options.root_rank)
        self._wait(self.connect().broadcast([_as_torch(tensor)], options))

    def reducescatter(
        self,
        tensor: Sequence[Any],
        tensor_list: Sequence[Sequence[Any]],
        reducescatter_options: ReduceScatterOptions | None = None,
    ) -> None:
        """Reduces the one list of tensors over all ranks; this rank keeps the entry of its number."""
        ray_options = reducescatter_options or ReduceScatterOptions()
        options = _with(distributed.AllreduceOptions(), reduceOp=_TORCH_OPS[ray_options.reduceOp])
        whole = torch.stack([_as_torch([entry]) for entry in tensor_list[0]])
        self._wait(self.connect().allreduce([whole], options))
        _as_torch(tensor).copy_(whole[self.rank])

    def send(self, tensor: Sequence[Any], send_options: SendOptions) -> None:
        """Sends the one tensor to `send_options.dst_rank`."""
        self._wait(self.connect().send([_as_torch(tensor)], send_options.dst_rank, _USER_TAG))

    def recv(self, tensor: Sequence[Any], recv_options: RecvOptions) -> None:
        """Receives the one tensor from `recv_options.src_rank`."""
        self._wait(self.connect().recv([_as_torch(tensor)], recv_options.src_rank, _USER_TAG))

    def _wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=self.timeout))


class InternalKVStore(distributed.Store):
    """What one rank needs to meet its peers: keys under a prefix, waited for until a fixed deadline."""

    def __init__(self, prefix: str, deadline: Deadline) -> None:
        """
        Args:
            prefix: put before every key; equal on all ranks that meet, and never used again.
            deadline: after which waiting for a peer's key fails.
        """
        super().__init__()
        self.prefix = prefix
        self.deadline = deadline
        self._written: list[str] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Publishes a key."""
        self._written.append(key)
        internal_kv._internal_kv_put(self.prefix + key, value, namespace=_KV_NAMESPACE)

    def get(self, key: str) -> bytes:
        """The value of a key, once a peer has published it."""
        pause = _FIRST_PAUSE
        while True:
            value: bytes | None = internal_kv._internal_kv_get(self.prefix + key, namespace=_KV_NAMESPACE)
            if value is not None:
                return value
            if self.deadline.passed:
                raise TimeoutError(f"no rank published {self.prefix + key!r} in time: a peer did not join")
            # The internal KV has no way to wait for a key.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys exist. The store's own deadline holds, not torch's limit for each key."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now."""
        return all(internal_kv._internal_kv_exists(self.prefix + key, namespace=_KV_NAMESPACE) for key in keys)

    def delete_key(self, key: str) -> bool:
        """Deletes a key. Returns False when it did not exist."""
        return bool(internal_kv._internal_kv_del(self.prefix + key, namespace=_KV_NAMESPACE))

    def delete_written(self) -> None:
        """Deletes the keys that this rank published."""
        for key in self._written:
            self.delete_key(key)
        self._written.clear()


def delete_keys(prefix: str) -> None:
    """Deletes all our keys under a prefix."""
    internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=_KV_NAMESPACE)


def list_keys(prefix: str) -> list[str]:
    """Our keys under a prefix."""
    return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=_KV_NAMESPACE)]


def store_prefix(group_name: str) -> str:
    """Prefix of a group's keys in the internal KV."""
    return f"collective/{group_name}/"


def register() -> None:
    """Makes the backend known to `ray.util.collective` in this process. May be called twice."""
    if not is_backend_available(RAY_BACKEND):
        register_collective_backend(RAY_BACKEND, HiCacheGroup)


def _with(options: Any, **values: Any) -> Any:
    """The options with attributes set: always an object of our own, since Ray writes on the class."""
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _as_torch(tensors: Sequence[Any]) -> torch.Tensor:
    """The only tensor of a list as Ray passes them, sharing memory with it."""
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors for one rank; the {RAY_BACKEND} backend takes exactly one")
    tensor = tensors[0]
    return tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor)
