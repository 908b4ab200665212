"""Channels over Ray actor calls, and the directory of pools in Ray's internal key-value store.

Ray is imported when it is used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from hicache_ray.storage.pool.channel import ChannelLost, ChannelTimeout
from hicache_ray.storage.pool.membership import Membership

logger = logging.getLogger("hicache_ray.storage.pool.ray_channel")

_Result = TypeVar("_Result")

DIRECTORY_PREFIX = "hicache-ray/pool"
_KV_NAMESPACE = b"hicache-ray"


class RayChannel:
    """Calls to a named actor. The actor is looked up when it is first needed, and again after it died for good."""

    def __init__(self, actor_name: str, namespace: str, lookup_timeout: float) -> None:
        self._actor_name = actor_name
        self._namespace = namespace
        self._lookup_timeout = lookup_timeout
        self._methods: dict[str, Any] = {}
        self._handle: Any = None

    def call(self, method: str, *args: Any) -> RayPending:
        import ray

        try:
            return RayPending(self._remote(method)(*args), self)
        except ray.exceptions.RayError as error:
            raise ChannelLost(f"{self._actor_name}: {error}") from error

    def send(self, method: str, *args: Any) -> None:
        import ray

        try:
            self._remote(method)(*args)
        except (ChannelLost, ChannelTimeout, ray.exceptions.RayError) as error:
            logger.debug("%s: %s was not sent: %s", self._actor_name, method, error)

    def forget(self) -> None:
        """Look the actor up again before the next call."""
        self._handle = None
        self._methods = {}

    def _remote(self, method: str) -> Callable[..., Any]:
        remote = self._methods.get(method)
        if remote is None:
            if self._handle is None:
                self._handle = bounded(self._look_up, self._lookup_timeout)
            remote = self._methods[method] = getattr(self._handle, method).remote
        return remote

    def _look_up(self) -> Any:
        import ray

        try:
            return ray.get_actor(self._actor_name, namespace=self._namespace)
        except ValueError:
            raise ChannelLost(f"there is no actor {self._actor_name!r} in the namespace {self._namespace!r}") from None


class RayPending:
    """An actor call under way."""

    def __init__(self, reference: Any, channel: RayChannel) -> None:
        self._reference = reference
        self._channel = channel

    def result(self, timeout: float) -> Any:
        """See `Pending.result`."""
        import ray

        try:
            return ray.get(self._reference, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise ChannelTimeout(f"no answer within {timeout:.2f} s") from None
        except ray.exceptions.ActorDiedError as error:
            self._channel.forget()
            raise ChannelLost(_first_line(error)) from error
        except ray.exceptions.RayError as error:
            # ActorUnavailableError: away for now, and the call may have run.
            raise ChannelLost(_first_line(error)) from error


class DirectoryConflict(RuntimeError):
    """Two drivers changed a pool at the same time."""


class PoolDirectory:
    """Where a pool's membership is written down: one key per epoch in Ray's internal key-value store.

    An epoch can be written once, so of two drivers that change a pool at the same time one is told. The store lives as
    long as the cluster's head: the directory outlives drivers and actors.
    """

    def __init__(self, service: str, namespace: str) -> None:
        self._prefix = f"{DIRECTORY_PREFIX}/{namespace}/{service}/"

    def read(self) -> Membership | None:
        """The newest membership, None when there is no such pool."""
        from ray.experimental.internal_kv import _internal_kv_get

        for key in sorted(self._keys(), reverse=True):
            message = _internal_kv_get(key, namespace=_KV_NAMESPACE)
            if message is not None:
                return Membership.unpack(message)
        return None

    def publish(self, membership: Membership) -> None:
        """Write a new membership down and forget older ones.

        Raises:
            DirectoryConflict: somebody wrote this epoch already.
        """
        from ray.experimental.internal_kv import _internal_kv_put

        key = f"{self._prefix}{membership.epoch:020d}".encode()
        if _internal_kv_put(key, membership.pack(), overwrite=False, namespace=_KV_NAMESPACE):
            raise DirectoryConflict(
                f"epoch {membership.epoch} of {self._prefix} was written by somebody else; read it again"
            )
        self._forget(lambda other: other < key)

    def remove(self) -> None:
        """Forget the pool."""
        self._forget(lambda _: True)

    def _forget(self, which: Callable[[bytes], bool]) -> None:
        from ray.experimental.internal_kv import _internal_kv_del

        for key in filter(which, self._keys()):
            _internal_kv_del(key, namespace=_KV_NAMESPACE)

    def _keys(self) -> list[bytes]:
        from ray.experimental.internal_kv import _internal_kv_list

        return list(_internal_kv_list(self._prefix.encode(), namespace=_KV_NAMESPACE))


def bounded(function: Callable[[], _Result], timeout: float) -> _Result:
    """The result of a call into Ray that takes no timeout itself, in a thread that is left behind when it hangs.

    Raises:
        ChannelTimeout: it did not end in time. Else what it raises.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="l3-lookup", daemon=True).start()
    try:
        return future.result(timeout)
    except FutureTimeout:
        raise ChannelTimeout(f"Ray gave no answer within {timeout:.2f} s") from None


def _first_line(error: BaseException) -> str:
    """What went wrong, without the remote traceback that Ray adds."""
    error = getattr(error, "cause", None) or error
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
