"""What may be changed on a running rank: its store, its policies, what it holds (case 61).

Commands travel in a step, so that all ranks carry them out at the same point. One that has to wait for transfers
answers "draining" and is sent again in the next step; the group does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hicache_ray.config import ConfigError, HiCacheConfig, prefetch_timeout_per_page
from hicache_ray.config.extra import PREFETCH_KEYS
from hicache_ray.config.option import options_of
from hicache_ray.index import TieredIndex
from hicache_ray.rank.prefetch import Prefetcher
from hicache_ray.rank.request import Request
from hicache_ray.rank.step import Control
from hicache_ray.storage.base import Storage
from hicache_ray.storage.prepared import PreparedStores
from hicache_ray.storage.registry import BackendError

DONE, DRAINING, REFUSED = "done", "draining", "refused"

_ABSENT = object()
_TOKENS_PER_KI = 1024

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


class RankControl:
    """The commands that change a rank while it runs, and the store and policies that they set.

    Args:
        prefetcher: of the rank, with its index and mover.
        requests: what the rank serves, by request id.
        stores: makes storage backends, or has them prepared.
    """

    def __init__(self, prefetcher: Prefetcher, requests: Mapping[str, Request], stores: PreparedStores) -> None:
        self.prefetcher = prefetcher
        self.mover = prefetcher.mover
        self.requests = requests
        self.stores = stores
        self.backend_name: str | None = None
        self.backend_options: dict[str, Any] = {}
        """What the attached backend was made from; empty where none is attached."""
        self._pass_prefix_hashes = False
        self._commands: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "attach": self._attach,
            "clear_storage": self._clear_storage,
            "detach": self._detach,
            "flush": self._flush,
            "policies": self._policies,
            "resume": self._resume,
        }

    @property
    def index(self) -> TieredIndex:
        """The rank's control half; a recovery replaces it."""
        return self.prefetcher.index

    def carry_out(self, control: Control) -> Answer:
        """Carries one command out. Never raises for a bad one: it is refused, with the reason, and nothing changes."""
        command = self._commands.get(control.name)
        if command is None:
            return [REFUSED, f"unknown command {control.name!r}; known are {', '.join(sorted(self._commands))}"]
        try:
            return command(control.arguments)
        except (TypeError, ValueError) as error:
            return [REFUSED, f"{control.name}: {error}"]

    def prepare_storage(self, ticket: str, backend: str, options: Mapping[str, Any]) -> str:
        """Makes a storage backend for an attach to come. Returns "" or why it can't be had. May run beside the steps.

        Nothing is made while a backend is attached: the attach itself says what follows from that.
        """
        if self.backend_name is None:
            try:
                self.stores.prepare(ticket, backend, options)
            except BackendError as error:
                return str(error)
        return ""

    # -- the store ---------------------------------------------------------------------------------------------------

    def attach_storage(self, storage: Storage, name: str = "", *, options: Mapping[str, Any] | None = None) -> None:
        """Begins to use an L3; what the tree holds gets its page hashes (D5). RuntimeError when one is in use.

        `name` and `options` are what a rank that joins later makes its own from.
        """
        self.mover.attach(storage, pass_prefix_hashes=self._pass_prefix_hashes)
        self.backend_name = name or type(storage).__name__
        self.backend_options = dict(options or {})
        self.index.enable_hashes()

    def attach_backend(self, name: str, options: Mapping[str, Any], *, ticket: str | None = None) -> None:
        """Begins to use a backend of that name, the prepared one of `ticket` or a new one.

        Raises:
            BackendError: it can't be had; nothing changed.
        """
        self.attach_storage(self.stores.take(name, options, ticket), name, options=options)

    def detach_storage(self) -> bool:
        """Stops using the L3; its operations must have ended. Returns False when a call to it was left behind."""
        self.backend_name, self.backend_options = None, {}
        return self.mover.detach(self.prefetcher.policy.hard_limit)

    # -- settings ----------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """What may have been changed at run time, for a rank that joins: policies, the attached store and its use."""
        policy = self.prefetcher.policy
        return {
            "backend": self.backend_name,
            "options": self.backend_options,
            "in_use": self.prefetcher.enabled,
            "policies": {
                "write_policy": self.index.options.write_policy,
                "prefetch_policy": policy.name,
                "prefetch_threshold": policy.threshold,
                "prefetch_timeout_base": policy.timeout_base,
                "prefetch_timeout_per_ki_token": policy.timeout_per_page * _TOKENS_PER_KI / self.index.page_size,
                "pass_prefix_keys": self._pass_prefix_hashes,
            },
        }

    def set_policies(self, policies: Mapping[str, Any]) -> None:
        """Changes policies from now on, by the names of `POLICIES`; the values must have been checked."""
        index, policy = self.index, self.prefetcher.policy
        index.options = replace(index.options, write_policy=policies.get("write_policy", index.options.write_policy))
        per_token = policies.get("prefetch_timeout_per_ki_token")
        self.prefetcher.policy = replace(
            policy,
            name=policies.get("prefetch_policy", policy.name),
            threshold=max(policies.get("prefetch_threshold", policy.threshold), index.page_size),
            timeout_base=policies.get("prefetch_timeout_base", policy.timeout_base),
            timeout_per_page=policy.timeout_per_page
            if per_token is None
            else prefetch_timeout_per_page(index.page_size, per_token),
        )
        self._pass_prefix_hashes = policies.get("pass_prefix_keys", self._pass_prefix_hashes)
        if self.mover.storage_io is not None:
            self.mover.storage_io.pass_prefix_hashes = self._pass_prefix_hashes

    def adopt(self, settings: Mapping[str, Any]) -> None:
        """Takes over another rank's `settings`. ValueError when its store can't be had."""
        wanted = (settings["backend"], settings["options"])
        if wanted != (self.backend_name, self.backend_options):
            self.detach_storage()
            if settings["backend"] is not None:
                self.attach_backend(*wanted)
        self.prefetcher.enabled = settings["in_use"]
        self.set_policies(settings["policies"])

    # -- the commands ------------------------------------------------------------------------------------------------

    def _flush(self, arguments: dict[str, Any]) -> Answer:
        """Drops all of L1 and L2. In-flight reads are cancelled and awaited (D3); running requests refuse it."""
        running = [request.rid for request in self.requests.values() if request.running]
        if running:
            return [
                REFUSED,
                f"{len(running)} requests are running, {running[0]!r} among them: finish or abort them first",
            ]
        self.prefetcher.cancel_all()
        if not (self.index.transfers.is_idle() and self.prefetcher.is_idle()):
            return [DRAINING, ""]
        self.index.flush()
        return [DONE, ""]

    def _detach(self, arguments: dict[str, Any]) -> Answer:
        """Stops using L3; what is in flight ends first (D7). Done when none is attached."""
        if self.mover.storage_io is None:
            return [DONE, "no storage backend was attached"]
        self.prefetcher.enabled = False
        self.prefetcher.cancel_all()
        if self.prefetcher.closing or self.index.transfers.backups:
            return [DRAINING, ""]
        return [
            DONE,
            "" if self.detach_storage() else "a call to the old backend did not end in time and was left behind",
        ]

    def _attach(self, arguments: dict[str, Any]) -> Answer:
        """Begins to use an L3 backend by name and options; policies may come along. Refused: nothing changes.

        Naming the attached backend again, with the same options or none, changes only the policies.

        `ticket` names a backend that `prepare_storage` has made. With `hold` the backend is attached but not used, and
        the policies stay, until `resume`: so that an attach that fails on one rank can be undone on the others.
        """
        fixed = ("backend", "options", "ticket", "hold")
        policies = checked_policies({name: value for name, value in arguments.items() if name not in fixed})
        backend, attached = arguments.get("backend"), self.backend_name
        if not isinstance(backend, str):
            raise ValueError(f"backend is {backend!r}; give the name of a storage backend")
        hold = bool(arguments.get("hold", False))
        if self.mover.storage_io is None:
            self.attach_backend(backend, arguments.get("options") or {}, ticket=arguments.get("ticket"))
            self.prefetcher.enabled = not hold
        elif attached != backend:
            return [REFUSED, f"storage backend {attached!r} is attached: detach it before {backend!r} is"]
        elif differences := _differences(self.backend_options, arguments.get("options") or {}):
            return [
                REFUSED,
                f"storage backend {backend!r} is attached with other options ({differences}): detach it first",
            ]
        return [DONE, ""] if hold else self._resume(policies)

    def _resume(self, arguments: dict[str, Any]) -> Answer:
        """Uses the attached backend, which was held back or is being detached, with these policies."""
        policies = checked_policies(arguments)
        if self.mover.storage_io is None:
            return [REFUSED, "no storage backend is attached any more"]
        self.prefetcher.enabled = True
        self.set_policies(policies)
        return [DONE, ""]

    def _policies(self, arguments: dict[str, Any]) -> Answer:
        """Changes policies; what is in flight ends under the new ones."""
        self.set_policies(checked_policies(arguments))
        return [DONE, ""]

    def _clear_storage(self, arguments: dict[str, Any]) -> Answer:
        """Drops this model's pages from L3; `everything` drops those of all models."""
        io = self.mover.storage_io
        if io is None:
            return [REFUSED, "no storage backend is attached"]
        try:
            io.storage.clear(everything=bool(arguments.get("everything", False)))
        except Exception as error:  # a store raises what it likes here, and the service has to live on
            return [REFUSED, f"the storage backend did not clear: {error}"]
        return [DONE, ""]


def _differences(attached: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Which options are not as wanted, as text; "" where none is wanted, or none differs."""
    if not wanted:
        return ""
    names = [name for name in {**attached, **wanted} if attached.get(name, _ABSENT) != wanted.get(name, _ABSENT)]
    return ", ".join(f"{name}: has {_shown(attached, name)}, given {_shown(wanted, name)}" for name in names)


def _shown(options: Mapping[str, Any], name: str) -> str:
    return repr(options[name]) if name in options else "none"
