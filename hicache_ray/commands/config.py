"""`hicache-ray config explain`: what a set of options resolves to, and why."""

from __future__ import annotations

from typing import Any

import click

from hicache_ray.commands.failures import bad_input
from hicache_ray.commands.parameters import cache_options, given_options
from hicache_ray.config import HiCacheConfig, explain


@click.group("config")
def config_command() -> None:
    """Show what a set of options resolves to, and why."""


@config_command.command("explain")
@cache_options()
def explain_command(**options: Any) -> None:
    """Print every option as it holds, one `name = value` a line, each with the reason.

    Exits with 2 and the reason where the options can't work.
    """
    with bad_input():
        lines = explain(HiCacheConfig.from_mapping(given_options(options)))
    click.echo("\n".join(lines))
