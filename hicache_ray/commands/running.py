"""Runs a replay for a command: checks, progress bar, groups, and the files it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicache_ray.commands.input import BadInput, bad_input
from hicache_ray.config import HiCacheConfig
from hicache_ray.replay.report import ReplayReport
from hicache_ray.replay.settings import ReplaySettings, check_unused, index_settings, replay_config
from hicache_ray.replay.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console

INDEX, LOCAL, RAY = "index", "local", "ray"
"""Modes of a replay: on the index alone, on groups in this process, on a Ray cluster."""

BAR_STEPS = 200
"""Times that a progress bar is brought up to date in the course of a run."""


class RunFailed(click.ClickException):
    """A run that could not go on to its end; exit code 1."""

    exit_code = 1


def checked_config(workload: Workload, settings: ReplaySettings, mode: str) -> HiCacheConfig | None:
    """The configuration of a run, None for one on the index alone; raises BadInput where it can't work."""
    with bad_input():
        if mode == INDEX:
            index_settings(settings, workload)
            check_unused(settings, workload)
            return None
        from hicache_ray.replay.run import BACKENDS, check_memory

        config = replay_config(settings, workload, storage_backend=BACKENDS[mode])
        check_memory(config, settings)
        return config


def run_replay(
    workload: Workload, settings: ReplaySettings, config: HiCacheConfig | None, mode: str, console: Console
) -> ReplayReport:
    """One replay with a progress bar on `console`; `config` is what `checked_config` gave.

    Raises:
        BadInput: a request can never run with these settings, or the groups can't be had.
        RunFailed: a group failed.
    """
    if config is None:
        from hicache_ray.replay.index_only import replay_index

        with bad_input(), _bar(console, workload.total) as progress:
            return replay_index(workload, index_settings(settings, workload), progress)
    from hicache_ray.replay.driver import DriveSettings
    from hicache_ray.replay.run import GROUPS, replay_workload

    with _failures(), ExitStack() as stack:
        with console.status(f"starting {settings.instances} x {settings.tp} ranks"), start_failures(mode):
            groups = stack.enter_context(GROUPS[mode](config, settings))
        drive = DriveSettings(page_size=config.page_size, concurrency=settings.concurrency)
        progress = stack.enter_context(_bar(console, workload.total))
        return replay_workload(
            workload, groups, drive, mode=mode, described=settings.described(config), progress=progress
        )


def write_json(path: Path | None, document: Any) -> None:
    """Writes a JSON file, or to standard output for "-"; nothing for None. BadInput when it can't be written."""
    if path is None:
        return
    text = json.dumps(document, indent=2) + "\n"
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise BadInput(f"{str(path)!r} can't be written: {error.strerror or error}") from error


@contextmanager
def _failures() -> Iterator[None]:
    """Says in one sentence why a run ended, where it is a reason that a user can do something about."""
    from hicache_ray.actors.errors import GroupError
    from hicache_ray.pools.memory import PoolMemoryError
    from hicache_ray.rank.request import RequestError
    from hicache_ray.replay.driver import Stalled
    from hicache_ray.storage.registry import BackendError

    try:
        yield
    except (RequestError, PoolMemoryError, BackendError) as error:
        raise BadInput(str(error)) from error
    except (GroupError, Stalled) as error:
        raise RunFailed(in_one_line(error)) from error


@contextmanager
def start_failures(mode: str = RAY) -> Iterator[None]:
    """Says in one sentence that Ray can't be started or reached, or the service not be started on it."""
    if mode != RAY:
        yield
        return
    from hicache_ray.actors.cluster import RayAddressError, RayStartError
    from hicache_ray.actors.storage_pool import StoragePoolError
    from hicache_ray.service import ServiceError

    try:
        yield
    except RayAddressError as error:
        raise BadInput(in_one_line(error)) from error
    except (RayStartError, ServiceError, StoragePoolError, OSError) as error:
        raise RunFailed(in_one_line(error)) from error


def in_one_line(error: Exception) -> str:
    """What an error says: of a remote traceback its first sentence, and the last line, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if len(lines) == 1:
        return lines[0]
    return f"{lines[0].partition(' The actor died')[0].rstrip(':')}: {lines[-1]}"


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar where the console is a terminal; gives what is told the number of requests done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    step = max(1, total // BAR_STEPS)
    shown = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=total)

        def update(done: int) -> None:
            nonlocal shown
            if done - shown >= step:
                shown = done
                bar.update(task, completed=done)

        yield update
