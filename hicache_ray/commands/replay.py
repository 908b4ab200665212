"""`hicache-ray replay`: a workload through the cache, on Ray, in this process, or on the index alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hicache_ray.commands.failures import BadInput, RunFailed, bad_input, in_one_line, start_failures
from hicache_ray.commands.parameters import (
    COUNT,
    PROCESSES,
    ByteSize,
    F,
    OutputPath,
    Whole,
    cache_options,
    command_option,
    type_of,
    write_json,
)
from hicache_ray.config import HiCacheConfig
from hicache_ray.config.option import Option
from hicache_ray.replay.report import ReplayReport, report_tables, sweep_table
from hicache_ray.replay.requests import Workload
from hicache_ray.replay.settings import (
    OWN_OPTIONS,
    REPLAY_DEFAULTS,
    REPLAY_OPTIONS,
    ReplaySettings,
    check_unused,
    index_settings,
    replay_config,
)
from hicache_ray.replay.sweep import check_plot, combinations, parse_sweeps, plot_sweep, read_value
from hicache_ray.replay.traces import BLOCK_TOKENS, load_workload
from hicache_ray.storage.registry import parse_storage_url

INDEX, LOCAL, RAY = "index", "local", "ray"
"""Modes of a replay: on the index alone, on groups in this process, on a Ray cluster."""

BAR_STEPS = 200
"""Times that a progress bar is brought up to date in the course of a run."""

SweptRun = tuple[dict[str, Any], ReplayReport]
"""The swept values, and what came of them."""

_TYPES: Mapping[str, click.ParamType[Any]] = {
    "tp_size": PROCESSES,
    "storage_actors": PROCESSES,
    "instances": PROCESSES,
    "l3_bytes": ByteSize(),
}
_HELP = {
    "head_dim": "Elements of a head, or of the latent (MLA).",
    "l1_tokens": "Capacity of L1 per rank; with --index-only on a block trace: in blocks.",
    "hicache_io_backend": "How pages move between L1 and L2. Default: what the layout needs.",
}


def _replay_options(function: F) -> F:
    """The options that a replay has defaults of its own for, read by click."""
    defaults = {**REPLAY_DEFAULTS, **{name: option.default for name, option in OWN_OPTIONS.items()}}
    for name, default in reversed(defaults.items()):
        option = REPLAY_OPTIONS[name]
        read = _TYPES.get(name) or type_of(option)
        function = command_option(option, help=_HELP.get(name, ""), type=read, default=default)(function)
    return function


@click.command("replay")
@click.argument("source", metavar="TRACE")
@_replay_options
@click.option("--l3", metavar="URL", help="L3 instead: file:///DIR, mooncake://HOST:PORT?metadata=URL, ray://POOL.")
@click.option("--limit", type=COUNT, help="Only the first so many requests.")
@click.option("--block-tokens", type=Whole(1, BLOCK_TOKENS), default=BLOCK_TOKENS, help="Scale trace blocks.")
@click.option("--index-only", is_flag=True, help="The index alone: no Ray, no bytes, one trace block is one page.")
@click.option("--local", is_flag=True, help="All ranks in this process, without Ray.")
@click.option("--json", "json_path", type=OutputPath(), help="Write the report there (- is stdout).")
@click.option("--sweep", "sweeps", multiple=True, metavar="NAME=V1,V2", help="Run each value; may be given repeatedly.")
@click.option("--plot", "plot_path", type=OutputPath(), help="Draw the sweep there (.png, .svg, .pdf).")
@cache_options(name for name in REPLAY_OPTIONS if name not in OWN_OPTIONS and name not in REPLAY_DEFAULTS)
def replay_command(source: str, index_only: bool, local: bool, **options: Any) -> int:
    """Replay TRACE and report what each tier saved.

    TRACE is a Mooncake trace (one JSON object a line with input_length, output_length and hash_ids), a tau-bench
    result or an LMCache agent trace, plain, .gz or .xz; or a made-up chat:
    chat:sessions=50,turns=6,system=512,turn=64,answer=64

    Every cached page is compared with what it must hold before it is used. Exit code 1 when one was wrong or a pool did
    not balance, 2 for bad input.
    """
    if index_only and local:
        raise BadInput("--index-only and --local exclude each other: give one of them")
    console, out = Console(stderr=True), Console(stderr=str(options["json_path"]) == "-")
    runs, swept = _runs(source, INDEX if index_only else LOCAL if local else RAY, options, console)
    for table in [sweep_table(swept, runs)] if swept else report_tables(runs[0][1]):
        out.print(table)
    write_json(options["json_path"], _document(runs, swept))
    if options["plot_path"] is not None:
        with bad_input():
            plot_sweep(options["plot_path"], runs, Path(source).name)
    faults = [fault for _, report in runs for fault in report.faults]
    if faults:
        raise RunFailed("; ".join(faults))
    return 0


def checked_config(workload: Workload, settings: ReplaySettings, mode: str) -> HiCacheConfig | None:
    """The configuration of a run, None for one on the index alone; raises BadInput where it can't work."""
    with bad_input():
        if mode == INDEX:
            index_settings(settings, workload)
            check_unused(settings, workload)
            return None
        from hicache_ray.replay.run import MODES, check_memory

        config = replay_config(settings, workload, storage_backend=MODES[mode].backend)
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
    from hicache_ray.replay.run import MODES, replay_workload

    with _failures(), ExitStack() as stack:
        starting = console.status(f"starting {settings.instances} x {config.tp_size} ranks")
        with starting, start_failures() if mode == RAY else nullcontext():
            groups = stack.enter_context(MODES[mode].groups(config, settings))
        drive = DriveSettings(page_size=config.page_size, concurrency=settings.concurrency)
        progress = stack.enter_context(_bar(console, workload.total))
        return replay_workload(
            workload, groups, drive, mode=mode, described=settings.described(config), progress=progress
        )


def _runs(source: str, mode: str, options: Mapping[str, Any], console: Console) -> tuple[list[SweptRun], list[str]]:
    """All runs of the command, everything that can be checked being checked before the first begins."""
    workload, settings, sweeps = _prepare(source, options)
    combined = list(combinations(settings, sweeps))
    configs = [checked_config(workload, chosen, mode) for _, chosen in combined]
    runs = []
    for number, ((values, chosen), config) in enumerate(zip(combined, configs, strict=True), start=1):
        if sweeps and console.is_terminal:
            named = ", ".join(f"{name} {value}" for name, value in values.items())
            console.print(f"run {number} of {len(combined)}: {named}")
        runs.append((values, run_replay(workload, chosen, config, mode, console)))
    return runs, list(sweeps)


def _prepare(source: str, options: Mapping[str, Any]) -> tuple[Workload, ReplaySettings, dict[str, list[Any]]]:
    given = {name: options[name] for name in REPLAY_OPTIONS if options[name] is not None}
    with bad_input():
        if options["plot_path"] is not None:
            check_plot(options["plot_path"])
        sweeps = parse_sweeps(options["sweeps"], _swept_value)
        if options["l3"] is not None:
            store = parse_storage_url(options["l3"])
            given["hicache_storage_backend"] = store.backend
            given["hicache_storage_backend_extra_config"] = store.extra or None
        settings = ReplaySettings.of(**given)
        workload = load_workload(
            source, limit=options["limit"], seed=options["seed"], block_tokens=options["block_tokens"]
        )
    return workload, settings, sweeps


def _swept_value(option: Option, text: str) -> Any:
    """A swept value, read as the command line reads it; ValueError when it is none."""
    (parameter,) = (known for known in replay_command.params if known.name == option.name)
    if isinstance(parameter.type, click.types.StringParamType):
        return read_value(option, text)
    try:
        return parameter.type.convert(text, parameter, None)
    except click.BadParameter as error:
        raise ValueError(error.message) from None


def _document(runs: Sequence[SweptRun], swept: Sequence[str]) -> dict[str, Any]:
    if not swept:
        return runs[0][1].as_dict()
    return {"sweep": list(swept), "runs": [{"values": values, **report.as_dict()} for values, report in runs]}


@contextmanager
def _failures() -> Iterator[None]:
    """Says in one sentence why a run ended, where it is a reason that a user can do something about."""
    from hicache_ray.pools.memory import PoolMemoryError
    from hicache_ray.rank.group import GroupError
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
def _bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar where the console is a terminal; gives what is told the number of requests done."""
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
