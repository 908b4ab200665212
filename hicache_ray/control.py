"""Runtime control of a rank, carried out by all ranks in the same step: flush, attach, detach, policies (case 61).

A command that has to wait for transfers answers "draining" and is sent again in the next step; the group does that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hicache_ray.config_names import PREFETCH_POLICIES, WRITE_POLICIES

if TYPE_CHECKING:
    from hicache_ray.cache import HiRadixCache
    from hicache_ray.protocol import Control

DONE, DRAINING, REFUSED = "done", "draining", "refused"

Answer = list[str]
"""[state, text]: state is one of DONE, DRAINING, REFUSED; the text says why, or is empty."""


def carry_out(cache: HiRadixCache, control: Control) -> Answer:
    """Carries one command out. Never raises for a bad command: it is refused, with the reason, and nothing changes."""
    command = _COMMANDS.get(control.name)
    if command is None:
        return [REFUSED, f"unknown command {control.name!r}; known are {', '.join(sorted(_COMMANDS))}"]
    try:
        return command(cache, control.arguments)
    except (TypeError, ValueError) as error:
        return [REFUSED, f"{control.name}: {error}"]


def _flush(cache: HiRadixCache, arguments: dict[str, Any]) -> Answer:
    """Drops all of L1 and L2. In-flight reads are cancelled and awaited (D3); running requests refuse it."""
    running = [request.rid for request in cache.requests.values() if request.running]
    if running:
        return [REFUSED, f"{len(running)} requests are running, {running[0]!r} among them: finish or abort them first"]
    cache.prefetcher.cancel_all()
    if not cache.is_idle():
        return [DRAINING, ""]
    cache.index.flush()
    return [DONE, ""]


def _detach(cache: HiRadixCache, arguments: dict[str, Any]) -> Answer:
    """Stops using L3; what is in flight ends first (D7). Done when none is attached."""
    if cache.controller.storage_io is None:
        return [DONE, "no storage backend was attached"]
    cache.prefetcher.enabled = False
    cache.prefetcher.cancel_all()
    if cache.prefetcher.closing or cache.index.backups:
        return [DRAINING, ""]
    return [DONE, "" if cache.detach_storage() else "a call to the old backend did not end in time and was left behind"]


def _attach(cache: HiRadixCache, arguments: dict[str, Any]) -> Answer:
    """Begins to use an L3 backend by name and options; policies may come along. Refused: nothing changes."""
    policies = {name: value for name, value in arguments.items() if name not in ("backend", "options")}
    _check_policies(policies)
    backend, attached = arguments.get("backend"), cache.backend_name
    if not isinstance(backend, str):
        raise ValueError(f"backend is {backend!r}; give the name of a storage backend")
    if cache.controller.storage_io is None:
        cache.attach_backend(backend, arguments.get("options") or {})
    elif attached != backend:
        return [REFUSED, f"storage backend {attached!r} is attached: detach it before {backend!r} is"]
    cache.prefetcher.enabled = True
    _set_policies(cache, policies)
    return [DONE, ""]


def _policies(cache: HiRadixCache, arguments: dict[str, Any]) -> Answer:
    """Changes write_policy, prefetch_policy, prefetch_threshold; what is in flight ends under the new ones."""
    _check_policies(arguments)
    _set_policies(cache, arguments)
    return [DONE, ""]


def _clear_storage(cache: HiRadixCache, arguments: dict[str, Any]) -> Answer:
    """Drops this model's pages from L3; `everything` drops those of all models."""
    io = cache.controller.storage_io
    if io is None:
        return [REFUSED, "no storage backend is attached"]
    try:
        io.storage.clear(everything=bool(arguments.get("everything", False)))
    except Exception as error:  # a store raises what it likes here, and the service has to live on
        return [REFUSED, f"the storage backend did not clear: {error}"]
    return [DONE, ""]


def _check_policies(policies: dict[str, Any]) -> None:
    choices = {"write_policy": WRITE_POLICIES, "prefetch_policy": PREFETCH_POLICIES}
    for name, value in policies.items():
        if name == "prefetch_threshold":
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"prefetch_threshold is {value!r}; give a whole number of tokens, 0 or more")
        elif name not in choices:
            raise ValueError(f"unknown policy {name!r}; known are prefetch_threshold, {', '.join(choices)}")
        elif value not in choices[name]:
            raise ValueError(f"{name} is {value!r}; use one of {', '.join(choices[name])}")


def _set_policies(cache: HiRadixCache, policies: dict[str, Any]) -> None:
    if "write_policy" in policies:
        cache.index.write_policy = policies["write_policy"]
    cache.prefetcher.change_policy(name=policies.get("prefetch_policy"), threshold=policies.get("prefetch_threshold"))


_COMMANDS: dict[str, Callable[[HiRadixCache, dict[str, Any]], Answer]] = {
    "attach": _attach,
    "clear_storage": _clear_storage,
    "detach": _detach,
    "flush": _flush,
    "policies": _policies,
}
