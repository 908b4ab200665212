"""One name for an option: each is taken under its full name and its short one, everywhere with the same result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hicache_ray.cli import COMMANDS, app, run
from hicache_ray.config import ConfigError, HiCacheConfig
from hicache_ray.config.names import (
    COPIES,
    IO_BACKENDS,
    MEM_LAYOUTS,
    REPLACED_LAYOUTS,
    STORAGE_BACKENDS,
    layouts_of,
)
from hicache_ray.config.option import Option, options_of, parse_bool, parse_size
from hicache_ray.pools.layouts import ORDERS
from hicache_ray.replay.settings import REPLAY_OPTIONS, ReplaySettings
from hicache_ray.replay.sweep import parse_sweeps
from hicache_ray.storage import registry

OPTIONS = options_of(HiCacheConfig)
WITH_ALIAS = [option for option in OPTIONS.values() if option.alias]


def another_value(option: Option) -> str:
    """A value, as text, that is not the default."""
    if option.choices:
        return next(choice for choice in option.known if choice != option.default)
    return "true" if bool in option.types else "2"


def commands(group: click.Group, *names: str) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)
        else:
            yield " ".join((*names, name)), command


ALL_COMMANDS = dict(commands(app))


def test_names_are_of_one_option_each() -> None:
    names = [name for option in REPLAY_OPTIONS.values() for name in (option.name, option.alias) if name]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("command", ALL_COMMANDS.values(), ids=ALL_COMMANDS)
def test_a_command_takes_an_option_under_both_names(command: click.Command) -> None:
    for parameter in command.params:
        for option in OPTIONS.values():
            if isinstance(parameter, click.Option) and set(parameter.opts) & set(option.flags):
                assert parameter.opts == option.flags
                assert parameter.name == option.name
                help_text = CliRunner().invoke(command, ["--help"], terminal_width=200).output
                assert ", ".join(option.flags) in help_text


def test_every_option_can_be_explained_and_most_replayed_and_swept() -> None:
    explained = {parameter.name for parameter in ALL_COMMANDS["config explain"].params}
    replayed = {parameter.name for parameter in ALL_COMMANDS["replay"].params}
    assert set(OPTIONS) <= explained and set(REPLAY_OPTIONS) <= replayed
    assert set(COMMANDS) == {name.split()[0] for name in ALL_COMMANDS}


@pytest.mark.parametrize("option", WITH_ALIAS, ids=lambda option: option.alias)
def test_an_alias_gives_what_the_full_name_gives(option: Option) -> None:
    value = another_value(option)
    by_name, by_alias = (HiCacheConfig.from_mapping({name: value}) for name in (option.name, option.alias))
    assert by_name == by_alias != HiCacheConfig()
    assert HiCacheConfig.from_mapping({option.alias.replace("_", "-"): value}) == by_name
    with pytest.raises(ConfigError, match=f"{option.name} is given twice"):
        HiCacheConfig.from_mapping({option.name: value, option.alias: value})


@pytest.mark.parametrize(
    "option", [found for found in WITH_ALIAS if found.name in REPLAY_OPTIONS], ids=lambda o: o.alias
)
def test_an_alias_is_the_same_to_a_replay_and_its_sweeps(option: Option) -> None:
    value = another_value(option)
    assert ReplaySettings.of(**{option.name: value}) == ReplaySettings.of(**{option.alias: value}) != ReplaySettings()
    swept = [list(parse_sweeps([f"{name}={value}"]).values()) for name in (option.name, option.alias)]
    assert swept[0] == swept[1]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 0
    return capsys.readouterr().out


def test_commands_print_the_same_under_both_names(capsys: pytest.CaptureFixture[str]) -> None:
    explained = [
        printed(capsys, "config", "explain", flag, "page_first") for flag in ("--layout", "--hicache-mem-layout")
    ]
    assert explained[0] == explained[1] and "hicache_mem_layout = page_first  # given" in explained[0]
    reports: list[Any] = []
    for tp, policy in (("--tp", "--policy"), ("--tp-size", "--radix-eviction-policy")):
        arguments = ("replay", "chat:sessions=3", "--index-only", tp, "2", policy, "lfu", "--json", "-")
        reports.append(json.loads(printed(capsys, *arguments)))
    assert {**reports[0], "seconds": 0} == {**reports[1], "seconds": 0}
    sweep = ("replay", "chat:sessions=3", "--index-only", "--sweep", "radix_eviction_policy=lru,lfu", "--json", "-")
    assert json.loads(printed(capsys, *sweep))["sweep"] == ["radix_eviction_policy"]


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["config", "explain", "--hicache-mem-layot", "page_first"], "--hicache-mem-layout"),
        (["config", "explain", "--layot", "page_first"], "--layout"),
        (["replay", "chat:", "--radix-eviction-polcy", "lru"], "--radix-eviction-policy"),
        (["replay", "chat:", "--sweep", "hicache_mem_layot=page_first"], "did you mean hicache_mem_layout?"),
        (["chaos", "--storage-replica", "2"], "--storage-replicas"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str], arguments: list[str], near: str
) -> None:
    assert run(arguments) == 2
    assert near in capsys.readouterr().err


def test_an_option_is_swept_once_whatever_its_name() -> None:
    with pytest.raises(ValueError, match="policy is swept twice"):
        parse_sweeps(["policy=lru", "radix-eviction-policy=lfu"])


def test_names_are_those_of_their_owners() -> None:
    assert set(MEM_LAYOUTS) == set(ORDERS)
    assert set(STORAGE_BACKENDS) <= set(registry.backend_names())
    assert {layout for layouts in COPIES.values() for layout in layouts} == set(MEM_LAYOUTS)
    for io_backend in IO_BACKENDS:
        replaced = {layout for backend, layout in REPLACED_LAYOUTS if backend == io_backend}
        assert set(layouts_of(io_backend)) == set(COPIES[io_backend]) - replaced


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4096, 4096), ("4096", 4096), ("1.5k", 1500), ("1kb", 1000), ("2 GB", 2 * 10**9), ("1T", 10**12), ("1b", 1),
        ("1Ki", 1024), ("64MiB", 64 << 20), ("1gib", 1 << 30), ("1.5 TiB", 3 << 39), ("0", 0),
    ],
)  # fmt: skip
def test_a_unit_with_an_i_is_binary_and_one_without_decimal(text: str | int, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("value", ["", "gb", "1 i", "1ib", "1.2.3", "-1", -1, None, True, "1 parsec"])
def test_what_is_no_size(value: Any) -> None:
    with pytest.raises(ValueError, match="is no size; give bytes as 1048576, 64MiB or 2GB"):
        parse_size(value)


def test_booleans_as_text() -> None:
    assert all(parse_bool(value) for value in (True, 1, "true", "YES", " on ", "1"))
    assert not any(parse_bool(value) for value in (False, 0, "false", "No", "off", "0"))
    for value in ("", "maybe", None, 2):
        with pytest.raises(ValueError, match="give true or false"):
            parse_bool(value)
