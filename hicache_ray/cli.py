"""The command line: `hicache-ray COMMAND`. Each command is a module of `hicache_ray.commands`.

Exit codes: 0 done, 1 the run itself found a fault, 2 bad input (one message, no traceback), 130 interrupted,
143 terminated.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

import click

import hicache_ray

COMMANDS = {
    "replay": "Replay a request trace, or a made-up chat, through the cache and report what happened.",
    "demo": "See it work: two instances of two ranks and two storage actors on this machine.",
    "chaos": "Break a service of its own while it serves verified requests, and check that it holds what it promises.",
    "config": "Show what a set of options resolves to, and why.",
    "ctl": "Look at a running service and change it: status, flush, attach, policies, audit.",
}
"""Commands by name, each with its line in the help; a command's module is imported when it is used."""

BAD_INPUT = 2
INTERRUPTED = 130
TERMINATED = 143

COMMAND_STOP_SECONDS = 30.0
"""Most that a command may take to stop what it started, after a signal."""

OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC)
"""What writing to standard output raises when its reader left, or its disk is full."""

_LONG = re.compile(r"\d{80,}")
"""A number in a message that nobody could read."""


class LazyCommands(click.Group):
    """The commands, imported one by one: `--help` and `--version` load neither Ray nor torch."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"hicache_ray.commands.{name}"), f"{name}_command")
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hicache_ray.__version__, message="hicache-ray %(version)s")
def app() -> None:
    """A hierarchical KV cache for LLM inference on Ray: L1 device memory, L2 host memory, L3 storage actors."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    # The ranks on this machine copy small pages: torch's threads would only take the processor from one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    try:
        code = app.main(args=list(arguments), prog_name="hicache-ray", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return BAD_INPUT
    except click.ClickException as error:
        click.echo(f"hicache-ray: {_LONG.sub(_shortened, error.format_message())}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("hicache-ray: interrupted", err=True)
        return INTERRUPTED
    except SystemExit as error:
        # Ray's own handler, which holds while Ray starts, exits with the number of the signal.
        if error.code not in (signal.SIGTERM, TERMINATED):
            raise
        return TERMINATED
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        return _output_lost(error)
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the `hicache-ray` script."""
    ending = Ending()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ending)
    code = run(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):  # what is left to do is Python's own end
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


class Ending:
    """Handler of SIGINT and SIGTERM: the first becomes an exception, so that what the command started is stopped.

    Those after it are passed over: stopping is bounded by its own deadlines, and broken off it would leave processes.
    Where it can't end, for a signal to the whole process group has ended the Ray of this process too, the process does.
    """

    def __init__(self) -> None:
        self.began = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.began:
            return
        self.began = True
        code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        last = threading.Timer(COMMAND_STOP_SECONDS, os._exit, (code,))
        last.daemon = True
        last.start()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(code)


def _shortened(number: re.Match[str]) -> str:
    return f"{number[0][:20]}... ({len(number[0])} digits)"


def _output_lost(error: OSError) -> int:
    # What Python still has to print would fail again when it ends.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    if error.errno != errno.EPIPE:
        click.echo(f"hicache-ray: the output can't be written: {error.strerror}", err=True)
        return BAD_INPUT
    return 1
