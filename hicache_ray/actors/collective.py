"""The one reduction of a step: MIN of an int64 vector over the ranks of a group, with a deadline (docs/design.md 4).

A group is a Ray collective group named `{group}:{generation}`. A generation never comes back: after a failure the
survivors and the new rank join the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import ray.util.collective as ray_collective
import torch
from ray.util.collective.types import AllReduceOptions, ReduceOp
from torch import distributed

from hicache_ray.actors.gloo import (
    FRAME_TAG,
    MEETING_SECONDS,
    RAY_BACKEND,
    REDUCTION_SECONDS,
    HiCacheGroup,
    TorchGroup,
    delete_keys,
    list_keys,
    register,
    store_prefix,
    time_left,
)
from hicache_ray.config.names import COLLECTIVE_BACKENDS
from hicache_ray.deadline import Deadline

FRAME = 512
"""Numbers in one exchange between ranks: up to a few thousand cost no more time than one."""

Vector = npt.NDArray[np.int64]

_LENGTH_FIELDS = 2


class CollectiveError(RuntimeError):
    """A reduction or a join that failed; the text names the group, the generation, the rank and the cause.

    The group is already closed on this rank when this is raised: closing is what frees the other survivors.
    """


class ReductionGroup:
    """One rank's place in one generation of a group. One thread reduces; `close` may be called from any.

    Args:
        name: of the generation in `ray.util.collective`.
        rank, world_size: this rank of how many.
        timeout: limit of one reduction, seconds.
        exchange: connected to the peers; None where this rank is alone.
    """

    def __init__(self, name: str, rank: int, world_size: int, timeout: float, exchange: FrameExchange | None) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._exchange = exchange
        self._frame: Vector = np.zeros(FRAME, dtype=np.int64)

    @classmethod
    def join(
        cls,
        group: str,
        generation: int,
        *,
        rank: int,
        world_size: int,
        timeout: float = REDUCTION_SECONDS,
        backend: str = "hicache",
        join_timeout: float = MEETING_SECONDS,
    ) -> ReductionGroup:
        """Meets the other ranks; all of them have to call it within `join_timeout` seconds. Only inside a Ray actor.

        Args:
            group: name of the group, unique in the cluster.
            generation: grows with each rebuild of the group.
            rank, world_size: this rank of how many. With one rank nothing is joined.
            timeout: limit of one reduction, seconds.
            backend: "hicache", or Ray's stock "gloo" or "nccl".

        Raises:
            CollectiveError: a rank did not come in time, or this process is already in that generation.
            ValueError: an unknown backend, or a rank that is not within the world size.
        """
        if backend not in COLLECTIVE_BACKENDS:
            raise ValueError(f"collective backend is {backend!r}; use one of {', '.join(COLLECTIVE_BACKENDS)}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} of world size {world_size}; ranks run from 0 to size - 1")
        name = generation_name(group, generation)
        if world_size == 1:
            return cls(name, rank, world_size, timeout, None)
        if ray_collective.is_group_initialized(name):
            raise CollectiveError(f"rank {rank} is already in group {name}; close it, or join the next generation")
        exchange: FrameExchange = MinExchange(name) if backend == "hicache" else StockExchange(name, backend)
        try:
            exchange.connect(rank, world_size, timeout, join_timeout)
        except Exception as error:
            cause = error.with_traceback(None)
        else:
            if rank == 0:
                _forget_generations_before(group, generation)
            return cls(name, rank, world_size, timeout, exchange)
        exchange.close()
        raise CollectiveError(f"rank {rank} of {world_size} could not join group {name}: {cause}") from cause

    def allreduce_min(self, vector: Vector) -> Vector:
        """The elementwise MIN of the ranks' int64 vectors; MAX is the MIN of the negatives.

        Vectors of up to FRAME - 2 numbers take one exchange.

        Raises:
            CollectiveError: a rank died or did not come within the timeout, the ranks gave vectors of different
                lengths, or the group is closed. The group is closed by then.
        """
        if self.world_size == 1:
            return np.array(vector, dtype=np.int64)
        exchange = self._exchange
        if exchange is None:
            raise CollectiveError(f"rank {self.rank} has left group {self.name}; join its next generation")
        try:
            return self._agree(exchange, np.ascontiguousarray(vector, dtype=np.int64))
        except Exception as error:
            # The frames of a traceback refer to the torch group and would keep its connections open.
            cause = error.with_traceback(None)
        self.close()
        raise CollectiveError(f"reduction failed on rank {self.rank} of group {self.name}: {cause}") from cause

    def close(self) -> None:
        """Leaves the group; the other ranks' waits end. May be called twice."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _agree(self, exchange: FrameExchange, vector: Vector) -> Vector:
        """Exchanges the length with the first frame: as x and -x, so that MIN shows any difference."""
        deadline = Deadline(self.timeout)
        frame, length = self._frame, len(vector)
        frame[0], frame[1] = length, -length
        agreed = np.empty(length, dtype=np.int64)
        start, at = 0, _LENGTH_FIELDS
        while True:
            taken = min(length - start, FRAME - at)
            frame[at : at + taken] = vector[start : start + taken]
            exchange.reduce(frame, deadline)
            if at and frame[0] != -frame[1]:
                raise ValueError(f"the ranks' vectors have different lengths, {frame[0]} to {-frame[1]}")
            agreed[start : start + taken] = frame[at : at + taken]
            start, at = start + taken, 0
            if start == length:
                return agreed


class FrameExchange(Protocol):
    """This process's end of a Ray collective group, of our own backend or a stock one."""

    def connect(self, rank: int, world_size: int, timeout: float, join_timeout: float) -> None:
        """Meets the peers within `join_timeout` seconds; `timeout` is the limit of a reduction. Called once."""

    def reduce(self, frame: Vector, deadline: Deadline) -> None:
        """Replaces a frame of FRAME int64 numbers by the MIN over the ranks; raises when a peer fails or is late."""

    def close(self) -> None:
        """Closes the connections and drops the group's name. May be called from any thread."""


class Link:
    """Frames to and from one peer; the receive of the next one is always posted."""

    def __init__(self, group: TorchGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._inbox = torch.empty(FRAME, dtype=torch.int64)
        self._received: Vector = self._inbox.numpy()
        self.post()

    def post(self) -> None:
        """Lets the next frame in, over the one received before."""
        self._pending = self._group.recv([self._inbox], self._peer, FRAME_TAG)

    def receive(self, deadline: Deadline) -> Vector:
        """The peer's frame: a view that holds until `post`. RuntimeError when it does not come in time."""
        self._pending.wait(time_left(deadline))
        return self._received

    def send(self, frame: torch.Tensor) -> Any:
        """Starts sending; `frame` must not change before the returned work is done."""
        return self._group.send([frame], self._peer, FRAME_TAG)


class MinExchange:
    """The exchange over our own backend: two ranks swap frames, more send theirs to rank 0, which folds and sends back.

    Frames do not go through gloo's ring but over receives that were posted a step ahead: one network hop each way, and
    no hand-shake.
    """

    def __init__(self, name: str) -> None:
        register()
        self._name = name
        self._handle: HiCacheGroup | None = None
        self._links: Sequence[Link] = ()
        self._swaps = self._folds = False

    def connect(self, rank: int, world_size: int, timeout: float, join_timeout: float) -> None:
        """As `FrameExchange` says."""
        ray_collective.init_collective_group(world_size, rank, RAY_BACKEND, self._name)
        handle: HiCacheGroup = ray_collective.get_group_handle(self._name)
        self._handle = handle
        handle.timeout, handle.join_timeout = timeout, join_timeout
        group = handle.connect()
        self._swaps = world_size == 2
        self._folds = self._swaps or rank == 0
        peers = [peer for peer in range(world_size) if peer != rank] if rank == 0 else [0]
        self._links = [Link(group, peer) for peer in peers]

    def reduce(self, frame: Vector, deadline: Deadline) -> None:
        """As `FrameExchange` says: RuntimeError as torch raises it when a peer fails."""
        links = self._links
        if not links:
            raise RuntimeError(f"group {self._name} is closed")
        outgoing = torch.from_numpy(frame)
        sends_first = self._swaps or not self._folds
        if sends_first:
            sends = [link.send(outgoing) for link in links]
        received = [link.receive(deadline) for link in links]
        if sends_first:
            _finish(sends, deadline)
        for other in received:
            np.minimum(frame, other, out=frame) if self._folds else np.copyto(frame, other)
        for link in links:
            link.post()
        if not sends_first:
            _finish([link.send(outgoing) for link in links], deadline)

    def close(self) -> None:
        """Closes first: Ray's lock may be held by another group's rendezvous, and the survivors wait."""
        self._links = ()
        if self._handle is not None:
            self._handle.close()
        ray_collective.destroy_collective_group(self._name)


def _finish(sends: Sequence[Any], deadline: Deadline) -> None:
    for send in sends:
        send.wait(time_left(deadline))


class StockExchange:
    """The exchange over Ray's GLOO or NCCL backend.

    All GLOO groups of a process share one torch WORLD, so a process can be in one such group at a time.
    """

    def __init__(self, name: str, backend: str) -> None:
        self._name, self._backend = name, backend
        self._handle: Any = None
        self._options = AllReduceOptions()
        self._options.reduceOp = ReduceOp.MIN

    def connect(self, rank: int, world_size: int, timeout: float, join_timeout: float) -> None:
        """As `FrameExchange` says; gives the group the real timeout that Ray leaves at torch's 30 minutes."""
        backend: Any = self._backend.upper()
        milliseconds = int(join_timeout * 1000)
        ray_collective.init_collective_group(world_size, rank, backend, self._name, gloo_timeout=milliseconds)
        self._handle = ray_collective.get_group_handle(self._name)
        if self._backend == "gloo":
            distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), self._handle._pg)

    def reduce(self, frame: Vector, deadline: Deadline) -> None:
        """As `FrameExchange` says; for NCCL by way of the current CUDA device."""
        tensor = torch.from_numpy(frame)
        if self._backend == "gloo":
            self._handle.allreduce([tensor], self._options)
            return
        on_device = tensor.to(f"cuda:{torch.cuda.current_device()}")
        self._handle.allreduce([on_device], self._options)
        tensor.copy_(on_device)

    def close(self) -> None:
        """Destroys the group and, for GLOO, the torch WORLD under it: a later generation needs a new one."""
        self._handle = None
        if ray_collective.is_group_initialized(self._name):
            ray_collective.destroy_collective_group(self._name)
        if self._backend == "gloo" and distributed.is_initialized():
            distributed.destroy_process_group()


def generation_name(group: str, generation: int) -> str:
    """Name of a generation in `ray.util.collective`."""
    return f"{_quoted(group)}:{generation}"


def _forget_generations_before(group: str, generation: int) -> None:
    prefix = _prefix_of_generations(group)
    for key in list_keys(prefix):
        old = key[len(prefix) :].partition("/")[0]
        if int(old) < generation:
            delete_keys(store_prefix(generation_name(group, int(old))))


def _prefix_of_generations(group: str) -> str:
    return store_prefix(_quoted(group)).rstrip("/") + ":"


def _quoted(group: str) -> str:
    # Without ":" or "/" in it, no group's keys begin with those of another.
    return quote(group, safe="")
