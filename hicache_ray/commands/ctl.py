"""`hicache-ray ctl`: look at a running service, and change it, as one more driver beside those that use it."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hicache_ray.commands.failures import BadInput, RunFailed, bad_input
from hicache_ray.commands.parameters import CACHE_OPTIONS, cache_options, given_options
from hicache_ray.config.extra import PREFETCH_KEYS, parse_extra_config
from hicache_ray.config.option import read_options, value_text
from hicache_ray.rank.control import POLICIES, ControlRefused, ControlTimeout, checked_policies
from hicache_ray.replay.report import POOL_NAMES

if TYPE_CHECKING:
    from hicache_ray.actors.group import TPGroup
    from hicache_ray.service import Service


@click.group("ctl")
@click.option("--address", help="Of the Ray cluster. Default: RAY_ADDRESS, else the one on this machine.")
@click.option("--name", default="hicache", show_default=True, help="Of the service.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def ctl_command(context: click.Context, **settings: Any) -> None:
    """Look at a running service and change it, while others go on using it.

    Without --group a command is for every group of the service. Exit code 1 where a command was refused or an audit
    found something, 2 for bad input.
    """
    context.obj = settings


@dataclass(frozen=True)
class Connection:
    """What a command is for: a service in a Ray cluster, and one of its groups or, without a name, each of them."""

    address: str | None
    name: str
    as_json: bool
    group: str | None

    @contextmanager
    def service(self) -> Iterator[Service]:
        """The service, connected to; what goes wrong with it becomes one sentence."""
        from hicache_ray.actors.cluster import RayStartError
        from hicache_ray.rank.group import GroupError
        from hicache_ray.service import ServiceError, connect

        if (self.address or os.environ.get("RAY_ADDRESS")) == "local":
            raise BadInput(
                "the address 'local' would start a Ray cluster of its own, in which no service runs: "
                "give HOST:PORT or auto, or leave it out for the Ray of this machine"
            )
        try:
            service = connect(self.name, address=self.address)
        except (ServiceError, ConnectionError, ValueError) as error:
            raise BadInput(" ".join(str(error).split())) from error
        except RayStartError as error:
            raise RunFailed(str(error)) from error
        try:
            yield service
        except (ControlRefused, ControlTimeout, GroupError) as error:
            raise RunFailed(str(error)) from error

    def groups(self, service: Service) -> tuple[str, ...]:
        """Names of the groups that are meant."""
        if self.group is None:
            return service.groups
        if self.group not in service.groups:
            known = ", ".join(service.groups) or "none"
            raise BadInput(f"service {service.name} has no group {self.group!r}; it has {known}")
        return (self.group,)

    def answers(self, ask: Callable[[TPGroup], Any]) -> dict[str, Any]:
        """What each group answers, by its name."""
        with self.service() as service:
            return {name: ask(service.group(name)) for name in self.groups(service)}

    def show(self, document: Any, lines: Iterable[str]) -> None:
        """Prints what was found: as JSON, or as lines of text."""
        for line in [json.dumps(document, indent=2)] if self.as_json else lines:
            click.echo(line)

    def change(self, done: str, act: Callable[[TPGroup], str]) -> None:
        """Does something to each group and prints the outcome; goes on after a refusal, and fails at the end."""
        refusals, rows = [], {}
        with self.service() as service:
            for name in self.groups(service):
                try:
                    note = act(service.group(name))
                except (ControlRefused, ControlTimeout) as error:
                    refusals.append(f"{name}: {error}")
                    rows[name] = {"done": False, "note": str(error)}
                    continue
                rows[name] = {"done": True, "note": note}
                if not self.as_json:
                    click.echo(f"{name}: {done}" + (f" ({note})" if note else ""))
        if self.as_json:
            click.echo(json.dumps(rows, indent=2))
        if refusals:
            raise RunFailed("; ".join(refusals))


def _command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a function that takes a `Connection` a command of that name, with --group."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def command(group: str | None, **options: Any) -> None:
            function(Connection(**click.get_current_context().obj, group=group), **options)

        made = ctl_command.command(name)(command)
        made.params.append(click.Option(["--group"], metavar="GROUP", help="Only this group."))
        return made

    return decorate


@_command("status")
def status_command(target: Connection) -> None:
    """Print what each rank holds and does, its policies, and the state of L3."""
    rows = target.answers(lambda group: group.status())
    lines = [line for name, ranks in rows.items() for line in status_lines(name, ranks)]
    target.show({"service": target.name, "groups": rows}, lines or [f"service {target.name} has no group yet"])


@_command("flush")
def flush_command(target: Connection) -> None:
    """Drop everything in L1 and L2; L3 stays. Refused while requests run."""
    target.change("flushed", lambda group: group.flush())


@_command("abort")
@click.argument("rids", nargs=-1, metavar="[REQUEST]...")
@click.option("--all", "everything", is_flag=True, help="All that are admitted: nothing may be serving.")
def abort_command(target: Connection, rids: tuple[str, ...], everything: bool) -> None:
    """End REQUESTs that nobody else will end, as those of a driver that died; `ctl status` names them."""
    if bool(rids) == everything:
        raise BadInput("name requests, or give --all")
    target.change("aborted", lambda group: group.abort(None if everything else rids))


@_command("attach")
@click.argument("backend")
@click.option("--options", metavar="JSON", help="Of the backend: JSON text, or @ and a JSON, TOML or YAML file.")
@cache_options(POLICIES.values())
def attach_command(target: Connection, backend: str, options: str | None, **policies: Any) -> None:
    """Begin to use an L3 BACKEND, on all ranks of a group or on none."""
    given, chosen = _given(policies), _backend_options(options)
    target.change(f"uses {backend}", lambda group: group.attach(backend, chosen, **given))


@_command("detach")
def detach_command(target: Connection) -> None:
    """Stop using L3; what is in flight to it ends first."""
    target.change("detached", lambda group: group.detach())


@_command("policies")
@cache_options(POLICIES.values())
def policies_command(target: Connection, **policies: Any) -> None:
    """Change policies; without any, print those that hold."""
    if given := _given(policies):
        target.change("policies changed", lambda group: group.set_policies(**given))
        return
    held = target.answers(lambda group: group.status()[0]["policies"])
    rows = ((name, policy, value) for name, values in held.items() for policy, value in values.items())
    target.show(held, (f"{name}: {policy} = {value_text(value)}" for name, policy, value in rows))


@_command("clear-l3")
@click.option("--everything", is_flag=True, help="The pages of all models in that store, not only of this one.")
def clear_l3_command(target: Connection, everything: bool) -> None:
    """Drop this model's pages from L3."""
    target.change("L3 cleared", lambda group: group.clear_storage(everything=everything))


@_command("audit")
@click.option("--read-pages", is_flag=True, help="Also compare every page in L3 with its checksum.")
def audit_command(target: Connection, read_pages: bool) -> None:
    """Count slots, bytes, references, leases and arenas anew, and say what does not add up."""
    from hicache_ray.service_audit import audit_service

    with target.service() as service:
        found = audit_service(service, target.groups(service), read_pages=read_pages).as_dict()
    target.show(found, audit_lines(found))
    if found["faults"]:
        raise RunFailed("; ".join(found["faults"]))


@_command("metrics")
def metrics_command(target: Connection) -> None:
    """Print the metrics of every rank, as Prometheus text; Ray exports the same."""
    from hicache_ray.metrics import exposition

    rows = target.answers(lambda group: group.metrics())
    target.show(rows, exposition(snapshot for ranks in rows.values() for snapshot in ranks).splitlines())


@_command("heals")
def heals_command(target: Connection) -> None:
    """Print each rebuild of a group, and each storage actor that hung and was ended, since the supervisor started."""
    with target.service() as service:
        wanted = target.groups(service)
        rows = [heal._asdict() for heal in service.supervisor.history() if heal.group in wanted]
        ended = [heal._asdict() for heal in service.supervisor.storage_history()] if target.group is None else []
    none = [] if rows else ["no group was rebuilt"]
    target.show([*rows, *ended], [*map(heal_line, rows), *map(storage_heal_line, ended), *none])


def _given(policies: dict[str, Any]) -> dict[str, Any]:
    with bad_input():
        return checked_policies(read_options(CACHE_OPTIONS, given_options(policies)))


def _backend_options(text: str | None) -> dict[str, Any]:
    """The options of a backend, with the policies among them checked: what is wrong with them needs no service."""
    try:
        options = parse_extra_config(text)
        checked_policies({name: value for name, value in options.items() if name in PREFETCH_KEYS})
    except ValueError as error:
        raise BadInput(f"--options: {' '.join(str(error).split())}") from error
    return options


NAMED_REQUESTS = 8
"""Most requests that a status names."""


def status_lines(name: str, ranks: Sequence[dict[str, Any]]) -> list[str]:
    """A group's status in lines of text."""
    first = ranks[0]
    storage, policies = first["storage"], first["policies"]
    lines = [
        f"group {name}: generation {first['generation']}, {len(ranks)} ranks",
        f"  L3        {storage['backend'] or 'none'}, {storage['state']}",
        f"  policies  {', '.join(f'{policy} = {value_text(value)}' for policy, value in policies.items())}",
    ]
    events = first.get("events")
    if events is not None:
        replays = f", replays at {events['replay_endpoint']}" if events["replay_endpoint"] else ""
        lines.append(f"  events    {events['endpoint']}{replays}; {events['lost']} batches lost")
    if ids := first["requests"]["ids"]:
        more = f" and {len(ids) - NAMED_REQUESTS} more" if len(ids) > NAMED_REQUESTS else ""
        lines.append(f"  requests  {', '.join(ids[:NAMED_REQUESTS])}{more}")
    for row in ranks:
        requests = row["requests"]
        flying = ", ".join(f"{count} {kind}" for kind, count in row["in_flight"].items() if count) or "nothing"
        lines.append(
            f"  rank {row['rank']}    pid {row['pid']}, step {row['next_step']}, {requests['running']} running, "
            f"{requests['waiting']} waiting, in flight: {flying}"
        )
        lines += [f"            {_pages_text(pool, pages)}" for pool, pages in row["pages"].items()]
    return lines


def audit_lines(found: dict[str, Any]) -> list[str]:
    """A service's audit in lines of text; the faults are left to the caller."""
    lines = []
    for name, ranks in found["groups"].items():
        for row in ranks:
            references = row["references"]
            lines.append(
                f"group {name}, rank {row['rank']}: {references['locks']} locks, "
                f"{references['protections']} protections, digest {row['digest']:016x} at step {row['next_step']}"
            )
            lines += [
                f"  {_pages_text(pool, pages)}; {row['bytes'][pool]['used']} of "
                f"{row['bytes'][pool]['total']} bytes used"
                for pool, pages in row["pages"].items()
            ]
    lines += [
        f"storage actor {row['member']}: {row['pages']} pages, {row['used_bytes']} of {row['total_bytes']} bytes used, "
        f"{row['reserved']} reserved, {row['leased']} leased, arena {row['arena'] or 'unknown'}"
        for row in found["storage"]
    ]
    return lines if found["faults"] else [*lines, "everything adds up"]


def _pages_text(pool: str, pages: dict[str, int]) -> str:
    counts = f"{pages['free']} free, {pages['in_tree']} in the tree, {pages['in_flight']} in flight"
    return f"{POOL_NAMES[pool].upper()}: {pages['total']} pages: {counts}"


def heal_line(row: dict[str, Any]) -> str:
    """One rebuild of a group as a line of text."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["noticed_at"]))
    took = row["healed_at"] - row["noticed_at"]
    if row["error"]:
        return f"{when} {row['group']}: not rebuilt after {took:.1f} s: {row['error']}"
    lost = ", ".join(map(str, row["fresh"])) or "none"
    return (
        f"{when} {row['group']}: generation {row['generation']} after {took:.1f} s; "
        f"ranks that came back empty: {lost}; {row['retained']} of {row['pages']} pages kept"
    )


def storage_heal_line(row: dict[str, Any]) -> str:
    """The end of a storage actor that hung as a line of text."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["ended_at"]))
    silence = row["ended_at"] - row["silent_at"]
    return f"{when} storage actor {row['member']}: silent for {silence:.1f} s; process {row['pid']} was ended"
