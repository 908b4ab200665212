"""How `hicache-ray ctl` says what it found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

TIERS = {"device": "L1", "host": "L2"}
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
        lines += [f"            {TIERS[pool]}: {_pages_text(pages)}" for pool, pages in row["pages"].items()]
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
                f"  {TIERS[pool]}: {_pages_text(pages)}; {row['bytes'][pool]['used']} of "
                f"{row['bytes'][pool]['total']} bytes used"
                for pool, pages in row["pages"].items()
            ]
    lines += [
        f"storage actor {row['member']}: {row['pages']} pages, {row['used_bytes']} of {row['total_bytes']} bytes used, "
        f"{row['reserved']} reserved, {row['leased']} leased, arena {row['arena'] or 'unknown'}"
        for row in found["storage"]
    ]
    return lines if found["faults"] else [*lines, "everything adds up"]


def _pages_text(pages: dict[str, int]) -> str:
    return (
        f"{pages['total']} pages: {pages['free']} free, {pages['in_tree']} in the tree, {pages['in_flight']} in flight"
    )


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


def value_text(value: Any) -> str:
    """A policy's value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
