"""Runtime control of a rank, carried out by all ranks in the same step: flush, attach, detach, policies (case 61).

A command that has to wait for transfers answers "draining" and is sent again in the next step; the group does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hicache_ray.config import ConfigError, HiCacheConfig
from hicache_ray.config.extra import PREFETCH_KEYS
from hicache_ray.config.option import options_of
from hicache_ray.storage.registry import BackendError

if TYPE_CHECKING:
    from hicache_ray.rank.cache import HiRadixCache
    from hicache_ray.rank.step import Control

DONE, DRAINING, REFUSED = "done", "draining", "refused"

_ABSENT = object()

Answer = list[str]
"""[state, text]: state is one of DONE, DRAINING, REFUSED; the text says why, or is empty."""

POLICIES: Mapping[str, str] = {
    options_of(HiCacheConfig)[option].alias or option: option
    for option in ("hicache_write_policy", "hicache_storage_prefetch_policy", *PREFETCH_KEYS)
}
"""What may be changed at run time, with the option of the configuration that each starts from. Both names are taken."""


class ControlRefused(ValueError):
    """A runtime command was refused: the text says why, and nothing changed.

    Attributes:
        partly: some ranks had carried it out; what can be undone was undone.
    """

    def __init__(self, text: str, *, partly: bool = False) -> None:
        super().__init__(text)
        self.partly = partly


class ControlTimeout(TimeoutError):
    """A runtime command still waited for transfers at its deadline. What it began holds: send it again."""


def carry_out(cache: HiRadixCache, control: Control) -> Answer:
    """Carries one command out. Never raises for a bad command: it is refused, with the reason, and nothing changes."""
    command = _COMMANDS.get(control.name)
    if command is None:
        return [REFUSED, f"unknown command {control.name!r}; known are {', '.join(sorted(_COMMANDS))}"]
    try:
        return command(cache, control.arguments)
    except (TypeError, ValueError) as error:
        return [REFUSED, f"{control.name}: {error}"]


def checked_policies(policies: Mapping[str, Any]) -> dict[str, Any]:
    """Policies under their short names, each of its option's type and range. ConfigError names the offending one."""
    short = {option: name for name, option in POLICIES.items()}
    options = options_of(HiCacheConfig)
    checked = {}
    for given, value in policies.items():
        name = short.get(given, given)
        if name not in POLICIES:
            raise ConfigError(f"unknown policy {given!r}; known are {', '.join(POLICIES)}")
        checked[name] = options[POLICIES[name]].check(value, given)
    return checked


def prepare_storage(cache: HiRadixCache, ticket: str, backend: str, options: Mapping[str, Any]) -> str:
    """Makes a storage backend for an attach to come; "" or why it can't be had. May run beside the steps.

    Nothing is made while a backend is attached: the attach itself says what follows from that.
    """
    if cache.backend_name is None:
        try:
            cache.stores.prepare(ticket, backend, options)
        except BackendError as error:
            return str(error)
    return ""


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
    if cache.mover.storage_io is None:
        return [DONE, "no storage backend was attached"]
    cache.prefetcher.enabled = False
    cache.prefetcher.cancel_all()
    if cache.prefetcher.closing or cache.index.transfers.backups:
        return [DRAINING, ""]
    return [DONE, "" if cache.detach_storage() else "a call to the old backend did not end in time and was left behind"]


def _attach(cache: HiRadixCache, arguments: dict[str, Any]) -> Answer:
    """Begins to use an L3 backend by name and options; policies may come along. Refused: nothing changes.

    The attached backend again, with the options it has or with none: only the policies change.

    `ticket` names a backend that `HiRadixCache.prepare_storage` has made. With `hold` the backend is attached but not
    used, and the policies stay, until `resume`: so that an attach that fails on one rank can be undone on the others.
    """
    fixed = ("backend", "options", "ticket", "hold")
    policies = checked_policies({name: value for name, value in arguments.items() if name not in fixed})
    backend, attached = arguments.get("backend"), cache.backend_name
    if not isinstance(backend, str):
        raise ValueError(f"backend is {backend!r}; give the name of a storage backend")
    hold = bool(arguments.get("hold", False))
    if cache.mover.storage_io is None:
        cache.attach_backend(backend, arguments.get("options") or {}, ticket=arguments.get("ticket"))
        cache.prefetcher.enabled = not hold
    elif attached != backend:
        return [REFUSED, f"storage backend {attached!r} is attached: detach it before {backend!r} is"]
    elif differences := _differences(cache.backend_options, arguments.get("options") or {}):
        return [REFUSED, f"storage backend {backend!r} is attached with other options ({differences}): detach it first"]
    return [DONE, ""] if hold else _resume(cache, policies)


def _differences(attached: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Which options are not as wanted, as text; "" where none is wanted, or none differs."""
    if not wanted:
        return ""
    names = [name for name in {**attached, **wanted} if attached.get(name, _ABSENT) != wanted.get(name, _ABSENT)]
    return ", ".join(f"{name}: has {_shown(attached, name)}, given {_shown(wanted, name)}" for name in names)


def _shown(options: Mapping[str, Any], name: str) -> str:
    return repr(options[name]) if name in options else "none"


def _resume(cache: HiRadixCache, arguments: dict[str, Any]) -> Answer:
    """Uses the attached backend, which was held back or is being detached, with these policies."""
    policies = checked_policies(arguments)
    if cache.mover.storage_io is None:
        return [REFUSED, "no storage backend is attached any more"]
    cache.prefetcher.enabled = True
    cache.set_policies(policies)
    return [DONE, ""]


def _policies(cache: HiRadixCache, arguments: dict[str, Any]) -> Answer:
    """Changes policies; what is in flight ends under the new ones."""
    cache.set_policies(checked_policies(arguments))
    return [DONE, ""]


def _clear_storage(cache: HiRadixCache, arguments: dict[str, Any]) -> Answer:
    """Drops this model's pages from L3; `everything` drops those of all models."""
    io = cache.mover.storage_io
    if io is None:
        return [REFUSED, "no storage backend is attached"]
    try:
        io.storage.clear(everything=bool(arguments.get("everything", False)))
    except Exception as error:  # a store raises what it likes here, and the service has to live on
        return [REFUSED, f"the storage backend did not clear: {error}"]
    return [DONE, ""]


_COMMANDS: dict[str, Callable[[HiRadixCache, dict[str, Any]], Answer]] = {
    "attach": _attach,
    "clear_storage": _clear_storage,
    "detach": _detach,
    "flush": _flush,
    "policies": _policies,
    "resume": _resume,
}
