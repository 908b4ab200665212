"""docs/configuration.md says of every option what the code says of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hicache_ray.config import HiCacheConfig
from hicache_ray.config.names import STORAGE_BACKENDS
from hicache_ray.config.option import options_of
from hicache_ray.radix.eviction import eviction_policies

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
OPTIONS = options_of(HiCacheConfig)
NAMES_OF = {
    "radix_eviction_policy": "one of " + ", ".join(eviction_policies()) + ", or a registered one",
    "hicache_storage_backend": "one of " + ", ".join(STORAGE_BACKENDS) + ", or a registered one",
}
"""Values that are checked against a registry instead of the option's own choices."""


def row(field: dataclasses.Field[Any]) -> str:
    spec = OPTIONS[field.name]
    kind = next(name for wanted, name in KINDS if wanted in spec.types)
    values = NAMES_OF.get(field.name) or spec.values or kind
    if spec.values and not spec.choices:
        values = f"{kind}, {spec.values}"
    return f"| `{field.name}` | {default_text(field.default)} | {values} | {spec.help} |"


def default_text(value: Any) -> str:
    if value is None or value == "":
        return "unset" if value is None else "empty"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


KINDS = ((bool, "true or false"), (int, "whole number"), (float, "number"), (str, "text"))


@pytest.mark.parametrize("field", dataclasses.fields(HiCacheConfig), ids=lambda field: field.name)
def test_every_option_has_its_row(field):
    assert row(field) in PAGE.read_text().splitlines()


def test_no_row_is_left_of_an_option_that_is_gone():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and line.count(" | ") == 3]
    assert sorted(line.split("`")[1] for line in rows) == sorted(OPTIONS)


def test_every_short_name_is_told() -> None:
    section = PAGE.read_text().partition("## Short names")[2].partition("\n## ")[0]
    told: dict[str, str] = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, aliases = (cell.replace("`", "").split(", ") for cell in line.strip("| ").split(" | "))
            told.update(zip(names, aliases, strict=True))
    assert told == {name: option.alias for name, option in OPTIONS.items() if option.alias}
