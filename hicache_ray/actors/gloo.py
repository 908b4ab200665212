"""A torch store over Ray's internal KV: ranks find each other without a server and without depending on rank 0.

The Ray collective backend "hicache": one torch ProcessGroupGloo per group, with a deadline.

Against Ray's stock GLOO backend (one torch WORLD per process, 30-minute timeout, no second life after a death) each
group here stands alone: groups of any shape live side by side, and a new generation is a new name. The small MIN of a
step does not go through gloo's ring but from rank to rank over receives that were posted a step ahead, which takes one
network hop each way and no hand-shake.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
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

KV_NAMESPACE = "hicache"
"""Namespace of all our keys in Ray's internal KV."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02


class InternalKVStore(distributed.Store):
    """What one rank needs to meet its peers: keys under a prefix, waited for until a fixed deadline."""

    def __init__(self, prefix: str, deadline: float) -> None:
        """
        Args:
            prefix: put before every key; equal on all ranks that meet, and never used again.
            deadline: `time.monotonic()` after which waiting for a peer's key fails.
        """
        super().__init__()
        self.prefix = prefix
        self.deadline = deadline
        self._written: list[str] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Publishes a key."""
        self._written.append(key)
        internal_kv._internal_kv_put(self.prefix + key, value, namespace=KV_NAMESPACE)

    def get(self, key: str) -> bytes:
        """The value of a key, once a peer has published it."""
        pause = _FIRST_PAUSE
        while True:
            value: bytes | None = internal_kv._internal_kv_get(self.prefix + key, namespace=KV_NAMESPACE)
            if value is not None:
                return value
            if time.monotonic() >= self.deadline:
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
        return all(internal_kv._internal_kv_exists(self.prefix + key, namespace=KV_NAMESPACE) for key in keys)

    def delete_key(self, key: str) -> bool:
        """Deletes a key; False when it did not exist."""
        return bool(internal_kv._internal_kv_del(self.prefix + key, namespace=KV_NAMESPACE))

    def delete_written(self) -> None:
        """Deletes the keys that this rank published."""
        for key in self._written:
            self.delete_key(key)
        self._written.clear()


def delete_keys(prefix: str) -> int:
    """Deletes all our keys under a prefix; returns how many there were."""
    return int(internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=KV_NAMESPACE))


def list_keys(prefix: str) -> list[str]:
    """Our keys under a prefix."""
    return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=KV_NAMESPACE)]


BACKEND: Any = "HICACHE"  # Ray annotates backend names as a class that it never makes an object of.
DEFAULT_TIMEOUT_SECONDS = 5.0
DEFAULT_JOIN_TIMEOUT_SECONDS = 30.0

FRAME = 512
"""Numbers in one exchange of `HiCacheGroup.reduce_min`: up to a few thousand cost no more time than one."""

Vector = npt.NDArray[np.int64]
# torch's stubs know only a part of this class.
TorchGroup = Any

_FRAME_TAG = 1
_USER_TAG = 0
_SHORTEST_WAIT = 0.001
_TORCH_OPS = {
    ReduceOp.SUM: distributed.ReduceOp.SUM,
    ReduceOp.PRODUCT: distributed.ReduceOp.PRODUCT,
    ReduceOp.MIN: distributed.ReduceOp.MIN,
    ReduceOp.MAX: distributed.ReduceOp.MAX,
}


class Deadline:
    """A moment; what is left until then is the limit of the next wait."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def left(self) -> timedelta:
        """Time left, never less than a millisecond, so that what is already there can still be taken."""
        return timedelta(seconds=max(self.at - time.monotonic(), _SHORTEST_WAIT))


class Link:
    """Frames to and from one peer; the receive of the next one is always posted."""

    def __init__(self, group: TorchGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._inbox = torch.empty(FRAME, dtype=torch.int64)
        self._received: Vector = self._inbox.numpy()
        self.post()

    def post(self) -> None:
        """Lets the next frame in, over the one received before."""
        self._pending = self._group.recv([self._inbox], self._peer, _FRAME_TAG)

    def receive(self, deadline: Deadline) -> Vector:
        """The peer's frame: a view that holds until `post`. RuntimeError when it does not come in time."""
        self._pending.wait(deadline.left())
        return self._received

    def send(self, frame: torch.Tensor) -> Any:
        """Starts sending; `frame` must not change before the returned work is done."""
        return self._group.send([frame], self._peer, _FRAME_TAG)


class MinExchange:
    """MIN of one frame per rank. Two ranks swap frames; more send theirs to rank 0, which folds and sends back."""

    def __init__(self, group: TorchGroup, rank: int, size: int) -> None:
        everyone_else = [peer for peer in range(size) if peer != rank]
        self._links = [Link(group, peer) for peer in (everyone_else if rank == 0 else [0])]
        self._swaps = size == 2
        self._folds = self._swaps or rank == 0

    def reduce(self, frame: Vector, deadline: Deadline) -> None:
        """Replaces `frame` by the MIN over all ranks. RuntimeError as torch raises it when a peer fails."""
        outgoing = torch.from_numpy(frame)
        sends_first = self._swaps or not self._folds
        if sends_first:
            sends = [link.send(outgoing) for link in self._links]
        received = [link.receive(deadline) for link in self._links]
        if sends_first:
            _finish(sends, deadline)
        for other in received:
            np.minimum(frame, other, out=frame) if self._folds else np.copyto(frame, other)
        for link in self._links:
            link.post()
        if not sends_first:
            _finish([link.send(outgoing) for link in self._links], deadline)


def _finish(sends: Sequence[Any], deadline: Deadline) -> None:
    for send in sends:
        send.wait(deadline.left())


class HiCacheGroup(BaseGroup):
    """One rank's end of a group. `connect` meets the peers; any operation does so first where nobody has.

    All operations raise RuntimeError when a peer fails or the timeout passes; the group is unusable then, and `close`
    is what frees the peers that still wait.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.timeout = DEFAULT_TIMEOUT_SECONDS
        self.join_timeout = DEFAULT_JOIN_TIMEOUT_SECONDS
        self._torch_group: TorchGroup | None = None
        self._exchange: MinExchange | None = None
        self._connecting = threading.Lock()
        self._closed = False

    @classmethod
    def backend(cls) -> str:
        """The name under which the backend is registered."""
        return BACKEND

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
                self._torch_group, self._exchange = self._meet(Deadline(self.join_timeout))
            return self._torch_group

    def _meet(self, deadline: Deadline) -> tuple[TorchGroup, MinExchange]:
        store = InternalKVStore(store_prefix(self.group_name), deadline.at)
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        # The node's address as Ray knows it: gloo would take what the host name resolves to, often the loopback.
        options._devices = [gloo.create_device(hostname=ray.util.get_node_ip_address())]
        options._timeout = timedelta(seconds=self.timeout)
        try:
            group: TorchGroup = gloo(store, self.rank, self.world_size, options)
            exchange = MinExchange(group, self.rank, self.world_size)
            # Past this barrier every rank has read every address, so the keys have served.
            group.barrier(_with(distributed.BarrierOptions(), timeout=deadline.left())).wait()
        finally:
            store.delete_written()
        return group, exchange

    def reduce_min(self, frame: Vector, deadline: Deadline | None = None) -> None:
        """Replaces a frame, FRAME int64 numbers, by the MIN over the ranks."""
        if frame.shape != (FRAME,) or frame.dtype != np.int64:
            raise ValueError(f"a frame of {frame.shape} {frame.dtype}; it must be ({FRAME},) int64")
        self.connect()
        exchange = self._exchange
        if exchange is None:
            raise RuntimeError(f"group {self.group_name} is closed")
        exchange.reduce(frame, deadline or Deadline(self.timeout))

    def close(self) -> None:
        """Closes the connections, which ends the waits of the peers. May be called twice and from any thread.

        Connections close when nothing refers to the torch group any more (its `shutdown` and `abort` do not close
        them): an operation under way in another thread keeps them open until its own deadline.
        """
        self._closed = True
        self._exchange = None
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


def store_prefix(group_name: str) -> str:
    """Prefix of a group's keys in the internal KV."""
    return f"collective/{group_name}/"


def register() -> None:
    """Makes the backend known to `ray.util.collective` in this process. May be called twice."""
    if not is_backend_available(BACKEND):
        register_collective_backend(BACKEND, HiCacheGroup)


def _with(options: Any, **values: Any) -> Any:
    """The options with attributes set: always an object of our own, since Ray writes on the class."""
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _as_torch(tensors: Sequence[Any]) -> torch.Tensor:
    """The only tensor of a list as Ray passes them, sharing memory with it."""
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors for one rank; the {BACKEND} backend takes exactly one")
    tensor = tensors[0]
    return tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor)
