"""`hicache-ray config explain`: what a set of options resolves to, and why."""

from __future__ import annotations

from typing import Any

import click

from hicache_ray.commands.input import bad_input, config_options, given_options


@click.group("config")
def command() -> None:
    """Show what a set of options resolves to, and why."""


@command.command("explain")
@config_options()
def explain(**options: Any) -> None:
    """Print every option as it holds, one `name = value` a line, each with the reason.

    Exits with 2 and the reason where the options can't work.
    """
    from hicache_ray.config import HiCacheConfig
    from hicache_ray.config import explain as explained

    with bad_input():
        lines = explained(HiCacheConfig.from_mapping(given_options(options)))
    click.echo("\n".join(lines))
