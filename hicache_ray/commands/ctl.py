"""`hicache-ray ctl`: look at a running service, and change it, as one more driver beside those that use it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from hicache_ray.commands.failures import BadInput, RunFailed, bad_input
from hicache_ray.commands.parameters import CACHE_OPTIONS, command_option
from hicache_ray.config.extra import PREFETCH_KEYS, parse_extra_config
from hicache_ray.config.option import value_text
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
def ctl_command(context: click.Context, address: str | None, name: str, as_json: bool) -> None:
    """Look at a running service and change it, while others go on using it.

    Without --group a command is for every group of the service. Exit code 1 where a command was refused or an audit
    found something, 2 for bad input.
    """
    context.obj = {"address": address, "name": name, "as_json": as_json}


def _group_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--group", "group", metavar="GROUP", help="Only this group.")(function)


def _policy_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for name in reversed(list(POLICIES.values())):
        function = command_option(CACHE_OPTIONS[name])(function)
    return function


@ctl_command.command("status")
@_group_option
@click.pass_obj
def status_command(settings: dict[str, Any], group: str | None) -> None:
    """Print what each rank holds and does, its policies, and the state of L3."""
    rows = _answers(settings, group, lambda asked: asked.status())
    lines = [line for name, ranks in rows.items() for line in status_lines(name, ranks)]
    none = f"service {settings['name']} has no group yet"
    _show(settings, {"service": settings["name"], "groups": rows}, lines or [none])


@ctl_command.command("flush")
@_group_option
@click.pass_obj
def flush_command(settings: dict[str, Any], group: str | None) -> None:
    """Drop everything in L1 and L2; L3 stays. Refused while requests run."""
    _each(settings, group, "flushed", lambda target: target.flush())


@ctl_command.command("abort")
@click.argument("rids", nargs=-1, metavar="[REQUEST]...")
@click.option("--all", "everything", is_flag=True, help="All that are admitted: nothing may be serving.")
@_group_option
@click.pass_obj
def abort_command(settings: dict[str, Any], rids: tuple[str, ...], everything: bool, group: str | None) -> None:
    """End REQUESTs that nobody else will end, as those of a driver that died; `ctl status` names them."""
    if bool(rids) == everything:
        raise BadInput("name requests, or give --all")
    _each(settings, group, "aborted", lambda target: target.abort(None if everything else rids))


@ctl_command.command("attach")
@click.argument("backend")
@click.option("--options", metavar="JSON", help="Of the backend: JSON text, or @ and a JSON, TOML or YAML file.")
@_policy_options
@_group_option
@click.pass_obj
def attach_command(
    settings: dict[str, Any], backend: str, options: str | None, group: str | None, **policies: Any
) -> None:
    """Begin to use an L3 BACKEND, on all ranks of a group or on none."""
    given, chosen = _given(policies), _backend_options(options)
    _each(settings, group, f"uses {backend}", lambda target: target.attach(backend, chosen, **given))


@ctl_command.command("detach")
@_group_option
@click.pass_obj
def detach_command(settings: dict[str, Any], group: str | None) -> None:
    """Stop using L3; what is in flight to it ends first."""
    _each(settings, group, "detached", lambda target: target.detach())


@ctl_command.command("policies")
@_policy_options
@_group_option
@click.pass_obj
def policies_command(settings: dict[str, Any], group: str | None, **policies: Any) -> None:
    """Change policies; without any, print those that hold."""
    given = _given(policies)
    if given:
        _each(settings, group, "policies changed", lambda target: target.set_policies(**given))
        return
    held = _answers(settings, group, lambda asked: asked.status()[0]["policies"])
    rows = ((name, policy, value) for name, values in held.items() for policy, value in values.items())
    _show(settings, held, [f"{name}: {policy} = {value_text(value)}" for name, policy, value in rows])


@ctl_command.command("clear-l3")
@click.option("--everything", is_flag=True, help="The pages of all models in that store, not only of this one.")
@_group_option
@click.pass_obj
def clear_l3_command(settings: dict[str, Any], everything: bool, group: str | None) -> None:
    """Drop this model's pages from L3."""
    _each(settings, group, "L3 cleared", lambda target: target.clear_storage(everything=everything))


@ctl_command.command("audit")
@click.option("--read-pages", is_flag=True, help="Also compare every page in L3 with its checksum.")
@_group_option
@click.pass_obj
def audit_command(settings: dict[str, Any], read_pages: bool, group: str | None) -> None:
    """Count slots, bytes, references, leases and arenas anew, and say what does not add up."""
    from hicache_ray.service_audit import audit_service

    with _service(settings) as service:
        found = audit_service(service, _groups(service, group), read_pages=read_pages).as_dict()
    _show(settings, found, audit_lines(found))
    if found["faults"]:
        raise RunFailed("; ".join(found["faults"]))


@ctl_command.command("metrics")
@_group_option
@click.pass_obj
def metrics_command(settings: dict[str, Any], group: str | None) -> None:
    """Print the metrics of every rank, as Prometheus text; Ray exports the same."""
    from hicache_ray.metrics import exposition

    rows = _answers(settings, group, lambda asked: asked.metrics())
    _show(settings, rows, exposition(snapshot for ranks in rows.values() for snapshot in ranks).splitlines())


@ctl_command.command("heals")
@_group_option
@click.pass_obj
def heals_command(settings: dict[str, Any], group: str | None) -> None:
    """Print each rebuild of a group, and each storage actor that hung and was ended, since the supervisor started."""
    with _service(settings) as service:
        wanted = _groups(service, group)
        rows = [heal._asdict() for heal in service.supervisor.history() if heal.group in wanted]
        ended = [heal._asdict() for heal in service.supervisor.storage_history()] if group is None else []
    none = [] if rows else ["no group was rebuilt"]
    _show(settings, [*rows, *ended], [*map(heal_line, rows), *map(storage_heal_line, ended), *none])


@contextmanager
def _service(settings: dict[str, Any]) -> Iterator[Service]:
    """The service, connected to; what goes wrong with it becomes one sentence."""
    from hicache_ray.actors.cluster import RayStartError
    from hicache_ray.rank.group import GroupError
    from hicache_ray.service import ServiceError, connect

    address = settings["address"]
    if (address or os.environ.get("RAY_ADDRESS")) == "local":
        raise BadInput(
            "the address 'local' would start a Ray cluster of its own, in which no service runs: "
            "give HOST:PORT or auto, or leave it out for the Ray of this machine"
        )
    try:
        service = connect(settings["name"], address=address)
    except (ServiceError, ConnectionError, ValueError) as error:
        raise BadInput(" ".join(str(error).split())) from error
    except RayStartError as error:
        raise RunFailed(str(error)) from error
    try:
        yield service
    except (ControlRefused, ControlTimeout, GroupError) as error:
        raise RunFailed(str(error)) from error


def _groups(service: Service, group: str | None) -> tuple[str, ...]:
    if group is None:
        return service.groups
    if group not in service.groups:
        known = ", ".join(service.groups) or "none"
        raise BadInput(f"service {service.name} has no group {group!r}; it has {known}")
    return (group,)


def _answers(settings: dict[str, Any], group: str | None, ask: Callable[[TPGroup], Any]) -> dict[str, Any]:
    """What each group answers, by its name."""
    with _service(settings) as service:
        return {name: ask(service.group(name)) for name in _groups(service, group)}


def _show(settings: dict[str, Any], document: Any, lines: Sequence[str]) -> None:
    """Prints what was found: as JSON, or as lines of text."""
    for line in [json.dumps(document, indent=2)] if settings["as_json"] else lines:
        click.echo(line)


def _each(settings: dict[str, Any], group: str | None, done: str, act: Callable[[TPGroup], str]) -> None:
    """Does something to each group and prints the outcome; goes on after a refusal, and fails at the end."""
    refusals, rows = [], {}
    with _service(settings) as service:
        for name in _groups(service, group):
            try:
                note = act(service.group(name))
            except (ControlRefused, ControlTimeout) as error:
                refusals.append(f"{name}: {error}")
                rows[name] = {"done": False, "note": str(error)}
                continue
            rows[name] = {"done": True, "note": note}
            if not settings["as_json"]:
                click.echo(f"{name}: {done}" + (f" ({note})" if note else ""))
    if settings["as_json"]:
        click.echo(json.dumps(rows, indent=2))
    if refusals:
        raise RunFailed("; ".join(refusals))


def _given(policies: dict[str, Any]) -> dict[str, Any]:
    with bad_input():
        return checked_policies(
            {name: CACHE_OPTIONS[name].read(text) for name, text in policies.items() if text is not None}
        )


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
