"""The one reduction of a step: MIN of an int64 vector over the ranks of a group, with a deadline (docs/design.md 4).

A group is a Ray collective group named `{group}:{generation}`. A generation never comes back: after a failure the
survivors and the new rank join the next one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import ray.util.collective as ray_collective
import torch
from ray.util.collective.types import AllReduceOptions, ReduceOp
from torch import distributed

from hicache_ray.actors.gloo import (
    BACKEND,
    DEFAULT_JOIN_TIMEOUT_SECONDS,
    DEFAULT_TIMEOUT_SECONDS,
    FRAME,
    Deadline,
    HiCacheGroup,
    Vector,
    delete_keys,
    list_keys,
    register,
    store_prefix,
)

_STOCK_BACKENDS = ("gloo", "nccl")
_LENGTH_FIELDS = 2


class CollectiveError(RuntimeError):
    """A reduction or a join that failed; the text names the group, the generation, the rank and the cause.

    The group is already closed on this rank when this is raised: closing is what frees the other survivors.
    """


class Member(Protocol):
    """This process's end of a Ray collective group, of our own backend or a stock one."""

    def join(self, rank: int, world_size: int, timeout: float, join_timeout: float) -> None:
        """Meets the peers within `join_timeout` seconds; `timeout` is the limit of a reduction."""

    def reduce(self, frame: Vector, deadline: Deadline) -> None:
        """Replaces a frame of FRAME numbers by the MIN over the ranks; raises when a peer fails."""

    def close(self) -> None:
        """Closes the connections and drops the group's name."""


class ReductionGroup:
    """One rank's place in one generation of a group. One thread reduces; `close` may be called from any."""

    def __init__(self, name: str, rank: int, world_size: int, timeout: float, member: Member | None) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._member = member
        self._frame: Vector = np.zeros(FRAME, dtype=np.int64)

    @classmethod
    def join(
        cls,
        group: str,
        generation: int,
        *,
        rank: int,
        world_size: int,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        backend: str = "hicache",
        join_timeout: float = DEFAULT_JOIN_TIMEOUT_SECONDS,
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
        if backend != "hicache" and backend not in _STOCK_BACKENDS:
            raise ValueError(f"collective backend is {backend!r}; use one of hicache, {', '.join(_STOCK_BACKENDS)}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} of world size {world_size}; ranks run from 0 to size - 1")
        name = group_name(group, generation)
        if world_size == 1:
            return cls(name, rank, world_size, timeout, None)
        if ray_collective.is_group_initialized(name):
            raise CollectiveError(f"rank {rank} is already in group {name}; close it, or join the next generation")
        member: Member = OwnMember(name, rank, world_size) if backend == "hicache" else StockMember(name, backend)
        try:
            member.join(rank, world_size, timeout, join_timeout)
        except Exception as error:
            cause = error.with_traceback(None)
        else:
            if rank == 0:
                _forget_generations_before(group, generation)
            return cls(name, rank, world_size, timeout, member)
        member.close()
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
        member = self._member
        if member is None:
            raise CollectiveError(f"rank {self.rank} has left group {self.name}; join its next generation")
        try:
            return self._agree(member, np.ascontiguousarray(vector, dtype=np.int64), Deadline(self.timeout))
        except Exception as error:
            # The frames of a traceback refer to the torch group and would keep its connections open.
            cause = error.with_traceback(None)
        self.close()
        raise CollectiveError(f"reduction failed on rank {self.rank} of group {self.name}: {cause}") from cause

    def close(self) -> None:
        """Leaves the group; the other ranks' waits end. May be called twice."""
        member, self._member = self._member, None
        if member is not None:
            member.close()

    def _agree(self, member: Member, vector: Vector, deadline: Deadline) -> Vector:
        """Exchanges the length with the first frame: as x and -x, so that MIN shows any difference."""
        frame, length = self._frame, len(vector)
        frame[0], frame[1] = length, -length
        agreed = np.empty(length, dtype=np.int64)
        start, at = 0, _LENGTH_FIELDS
        while True:
            taken = min(length - start, FRAME - at)
            frame[at : at + taken] = vector[start : start + taken]
            member.reduce(frame, deadline)
            if at and frame[0] != -frame[1]:
                raise ValueError(f"the ranks' vectors have different lengths, {frame[0]} to {-frame[1]}")
            agreed[start : start + taken] = frame[at : at + taken]
            start, at = start + taken, 0
            if start == length:
                return agreed


class OwnMember:
    """A member of a group of our own backend."""

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        register()
        self._name = name
        ray_collective.init_collective_group(world_size, rank, BACKEND, name)
        self._handle: HiCacheGroup = ray_collective.get_group_handle(name)

    def join(self, rank: int, world_size: int, timeout: float, join_timeout: float) -> None:
        """Meets the peers."""
        self._handle.timeout, self._handle.join_timeout = timeout, join_timeout
        self._handle.connect()

    def reduce(self, frame: Vector, deadline: Deadline) -> None:
        """As `Member` says."""
        self._handle.reduce_min(frame, deadline)

    def close(self) -> None:
        """Closes first: Ray's lock may be held by another group's rendezvous, and the survivors wait."""
        self._handle.close()
        ray_collective.destroy_collective_group(self._name)


class StockMember:
    """A member of a group of Ray's GLOO or NCCL backend.

    All GLOO groups of a process share one torch WORLD, so a process can be in one such group at a time.
    """

    def __init__(self, name: str, backend: str) -> None:
        self._name, self._backend = name, backend
        self._handle: Any = None
        self._options = AllReduceOptions()
        self._options.reduceOp = ReduceOp.MIN

    def join(self, rank: int, world_size: int, timeout: float, join_timeout: float) -> None:
        """Meets the peers; gives the group the real timeout that Ray leaves at torch's 30 minutes."""
        backend: Any = self._backend.upper()
        milliseconds = int(join_timeout * 1000)
        ray_collective.init_collective_group(world_size, rank, backend, self._name, gloo_timeout=milliseconds)
        self._handle = ray_collective.get_group_handle(self._name)
        if self._backend == "gloo":
            distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), self._handle._pg)

    def reduce(self, frame: Vector, deadline: Deadline) -> None:
        """As `Member` says; for NCCL by way of the current CUDA device."""
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


def group_name(group: str, generation: int) -> str:
    """Name of a generation in `ray.util.collective`."""
    return f"{_quoted(group)}:{generation}"


def forget_group(group: str) -> int:
    """Deletes what dead ranks of any generation left in Ray's internal KV; returns the number of keys."""
    return delete_keys(_prefix_of_generations(group))


def _forget_generations_before(group: str, generation: int) -> None:
    prefix = _prefix_of_generations(group)
    for key in list_keys(prefix):
        old = key[len(prefix) :].partition("/")[0]
        if int(old) < generation:
            delete_keys(store_prefix(group_name(group, int(old))))


def _prefix_of_generations(group: str) -> str:
    return store_prefix(_quoted(group)).rstrip("/") + ":"


def _quoted(group: str) -> str:
    # Without ":" or "/" in it, no group's keys begin with those of another.
    return quote(group, safe="")
