"""How a command says that its input can't be used, or that its run failed: one sentence and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click


class BadInput(click.ClickException):
    """Something the user gave can't be used: one message, exit code 2."""

    exit_code = 2


class RunFailed(click.ClickException):
    """A run that could not go on to its end; exit code 1."""

    exit_code = 1


@contextmanager
def bad_input() -> Iterator[None]:
    """Says what is wrong with the input where the code within finds it wrong (ValueError, OSError)."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or in_one_line(error)
        raise BadInput(f"{error.filename}: {reason}" if error.filename is not None else reason) from error
    except (ValueError, OverflowError) as error:
        raise BadInput(" ".join(str(error).split()) or type(error).__name__) from error


@contextmanager
def start_failures() -> Iterator[None]:
    """Says in one sentence that Ray can't be started or reached, or the service not be started on it."""
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
