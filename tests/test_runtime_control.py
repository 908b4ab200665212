"""Runtime commands on a live group, every line of case 61; the ranks run in this process, with threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray.rank.control import ControlRefused, ControlTimeout
from hicache_ray.rank.local_group import LocalGroup
from hicache_ray.rank.step import Admit, Control, Finish
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.storage.base import StorageConfig
from hicache_ray.storage.memory import BACKEND, MemoryStorage, drop_store
from hicache_ray.storage.registry import register_backend
from tests.ray_service import config, prompts, serve

RANKS = 2


class OneRankFails(MemoryStorage):
    """A backend that rank 1 can't have."""

    def __init__(self, config: StorageConfig) -> None:
        if config.identity.tp_rank == 1:
            raise ConnectionError("no route to the store")
        super().__init__(config)


class OneRankFailsLater(MemoryStorage):
    """A backend that rank 1 gets when it is prepared, and not a second time."""

    made = 0

    def __init__(self, config: StorageConfig) -> None:
        if config.identity.tp_rank == 1:
            OneRankFailsLater.made += 1
            if OneRankFailsLater.made > 1:
                raise ConnectionError("the store is full")
        super().__init__(config)


for _name, _class in (("one_rank_fails", OneRankFails), ("one_rank_fails_later", OneRankFailsLater)):
    register_backend(_name, _class)


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    drop_store("default")
    started = LocalGroup.create(config(hicache_storage_backend=None).resolve().config, engine=ENGINE)
    yield started
    started.check_integrity()
    started.stop()


def state(group: LocalGroup) -> tuple[str, dict[str, Any]]:
    """Backend and policies of the group; all ranks must have the same."""
    rows = group.status()
    assert all((row["storage"], row["policies"]) == (rows[0]["storage"], rows[0]["policies"]) for row in rows)
    return rows[0]["storage"]["backend"], rows[0]["policies"]


def refused(group: LocalGroup, call: Callable[[], Any], text: str) -> None:
    """The call is refused with that text, nothing changed, and the group still serves."""
    before = state(group)
    with pytest.raises(ControlRefused, match=text):
        call()
    assert state(group) == before
    serve(group, prompts(1, seed=77)[0])


@pytest.mark.parametrize(
    ("policies", "text"),
    [
        ({"write_policy": "sometimes"}, "write_policy is 'sometimes'; use one of write_through"),
        ({"prefetch_policy": "never"}, "prefetch_policy is 'never'; use one of best_effort"),
        ({"prefetch_threshold": "256"}, "prefetch_threshold is '256'; give a whole number"),
        ({"prefetch_threshold": True}, "prefetch_threshold is True; give a whole number"),
        ({"prefetch_threshold": -1}, "prefetch_threshold is -1; it must be at least 0"),
        ({"prefetch_timeout_base": "1"}, "prefetch_timeout_base is '1'; give a number"),
        ({"prefetch_timeout_per_ki_token": -0.5}, "prefetch_timeout_per_ki_token is -0.5; it must be at least 0"),
        ({"pass_prefix_keys": 1}, "pass_prefix_keys is 1; give true or false"),
        ({"colour": "blue"}, "unknown policy 'colour'; known are write_policy"),
        ({"prefetch_policy": "timeout", "write_policy": "x"}, "write_policy is 'x'"),
    ],
)
def test_case_61_a_bad_policy_is_refused_and_nothing_changes(
    group: LocalGroup, policies: Mapping[str, Any], text: str
) -> None:
    refused(group, lambda: group.set_policies(**policies), text)
    refused(group, lambda: group.attach(BACKEND, **policies), text)
    group.attach(BACKEND)
    refused(group, lambda: group.attach(BACKEND, **policies), text)


def test_case_61_the_same_backend_again_succeeds_and_updates_the_policies(group: LocalGroup) -> None:
    group.attach(BACKEND, prefetch_policy="timeout")
    storage = group.caches[0].mover.storage_io
    group.attach(BACKEND, write_policy="write_back", prefetch_threshold=8)
    backend, policies = state(group)
    assert backend == BACKEND and group.caches[0].mover.storage_io is storage
    assert (policies["prefetch_policy"], policies["write_policy"], policies["prefetch_threshold"]) == (
        "timeout",
        "write_back",
        8,
    )


def test_case_61_another_backend_is_refused_and_the_policies_stay(group: LocalGroup, tmp_path: Path) -> None:
    group.attach(BACKEND)
    refused(
        group,
        lambda: group.attach("file", {"directory": str(tmp_path)}, prefetch_policy="timeout"),
        "'memory' is attached: detach it before 'file' is",
    )


def test_the_same_backend_with_other_options_is_refused_and_says_which_differ(
    group: LocalGroup, tmp_path: Path
) -> None:
    mine = {"directory": str(tmp_path / "mine"), "threads": 2}
    group.attach("file", mine)
    for changes, text in (
        ({"directory": str(tmp_path / "other")}, r"\(directory: has '.*mine', given '.*other'\): detach it first"),
        ({"threads": 3}, r"with other options \(threads: has 2, given 3\)"),
        ({"fsync": True}, r"\(fsync: has none, given True\)"),
    ):
        refused(group, lambda given={**mine, **changes}: group.attach("file", given, write_policy="write_back"), text)
    refused(group, lambda: group.attach("file", {"directory": mine["directory"]}), r"threads: has 2, given none")
    group.attach("file", dict(reversed(mine.items())), prefetch_threshold=16)
    group.attach("file", {"prefetch_threshold": 20}, prefetch_policy="timeout")
    _, policies = state(group)
    assert (policies["prefetch_policy"], policies["prefetch_threshold"]) == ("timeout", 20)
    assert group.caches[0].control.backend_options == mine


def test_case_61_detach_twice_succeeds_and_policies_survive_it(group: LocalGroup, tmp_path: Path) -> None:
    group.attach(BACKEND, prefetch_policy="timeout", prefetch_threshold=12, prefetch_timeout_base=0.5)
    assert group.detach() == ""
    assert group.detach() == "no storage backend was attached"
    assert state(group)[0] is None
    group.attach("file", {"directory": str(tmp_path)})
    backend, policies = state(group)
    assert backend == "file"
    assert (policies["prefetch_policy"], policies["prefetch_threshold"]) == ("timeout", 12)
    assert policies["prefetch_timeout_base"] == 0.5


BAD_OPTIONS: dict[str, tuple[Any, str]] = {
    "wrong-typed knob": ('{"prefetch_threshold": "many"}', "prefetch_threshold is 'many'; give a whole number"),
    "wrong-typed flag": (
        {"hicache_storage_pass_prefix_keys": "yes"},
        "hicache_storage_pass_prefix_keys is 'yes'; give true or false",
    ),
    "wrong-typed option of the backend": ('{"directory": "FOLDER", "threads": "four"}', "threads is 'four'"),
    "unknown option of the backend": ('{"directory": "FOLDER", "colour": 1}', "colour"),
    "bad JSON": ('{"directory": ', "no JSON"),
    "no mapping": ("[1, 2]", "holds a list"),
    "missing file": ("@FOLDER/none.json", "can't be read"),
    "unknown extension": ("@FOLDER/options.ini", r"must end in \.json"),
    "broken file": ("@FOLDER/broken.toml", "is no TOML"),
}
"""Options and what the refusal says; FOLDER stands for a folder with the two files."""


@pytest.mark.parametrize(("options", "text"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_case_61_bad_options_are_refused_with_the_reason(
    group: LocalGroup, tmp_path: Path, options: Any, text: str
) -> None:
    (tmp_path / "options.ini").write_text("a = 1")
    (tmp_path / "broken.toml").write_text("a = = 1")
    given = options.replace("FOLDER", str(tmp_path)) if isinstance(options, str) else options
    refused(group, lambda: group.attach("file", given), text)
    assert group.attach("file", {"directory": str(tmp_path / "good")}) == ""


def test_case_61_an_unknown_backend_is_refused(group: LocalGroup) -> None:
    refused(group, lambda: group.attach("floppy"), "unknown storage backend 'floppy'; known are")


def test_options_come_from_a_file_and_bring_policies_along(group: LocalGroup, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(f"directory: {tmp_path}\nprefetch_threshold: 16\nprefetch_timeout_base: 2\n")
    group.attach("file", f"@{file}", prefetch_threshold=20)
    backend, policies = state(group)
    assert (backend, policies["prefetch_threshold"], policies["prefetch_timeout_base"]) == ("file", 20, 2.0)


@pytest.mark.parametrize("backend", ["one_rank_fails", "one_rank_fails_later"])
def test_an_attach_that_fails_on_one_rank_is_undone_on_all(group: LocalGroup, backend: str) -> None:
    OneRankFailsLater.made = 0
    if backend == "one_rank_fails_later":
        for cache in group.caches:  # as if somebody detached between the preparation and the step
            cache.control.stores.prepare = lambda ticket, name, options, make=cache.control.stores.make: make(
                name, options
            )
    refused(group, lambda: group.attach(backend, prefetch_policy="timeout"), "(no route to|is full)")
    assert all(cache.mover.storage_io is None for cache in group.caches)
    assert not any(len(cache.control.stores) for cache in group.caches)
    group.attach(BACKEND)


def test_pages_written_before_a_detach_are_found_after_an_attach(group: LocalGroup) -> None:
    group.attach(BACKEND, prefetch_policy="wait_complete", prefetch_threshold=4)
    prompt = prompts(1, seed=3)[0]
    serve(group, prompt)
    settle(group)
    group.detach()
    group.flush()
    assert serve(group, prompt).computed_tokens == 24
    group.flush()
    group.attach(BACKEND)
    assert serve(group, prompt).storage_tokens == 20


def test_flush_waits_for_transfers_refuses_running_requests_and_empties_both_tiers(group: LocalGroup) -> None:
    group.attach(BACKEND)
    prompt = prompts(1, seed=4)[0]
    group.step(admits=[Admit("running", prompt.tobytes())])
    group.step(schedules=["running"])
    refused(group, group.flush, "1 requests are running, 'running' among them")
    group.step(finishes=[Finish("running")])
    assert group.flush() == ""
    for row in group.status():
        assert all(pool["free"] == pool["total"] for pool in row["pages"].values())


def test_clear_drops_what_is_in_l3(group: LocalGroup) -> None:
    refused(group, group.clear_storage, "no storage backend is attached")
    group.attach(BACKEND, prefetch_policy="wait_complete", prefetch_threshold=4)
    prompt = prompts(1, seed=5)[0]
    serve(group, prompt)
    settle(group)
    group.clear_storage()
    group.flush()
    assert serve(group, prompt).storage_tokens == 0


def test_a_command_that_waits_in_vain_says_so_at_its_deadline(group: LocalGroup) -> None:
    group.attach(BACKEND)
    for cache in group.caches:
        cache.prefetcher.is_idle = lambda: False
    with pytest.raises(ControlTimeout, match="flush still waits for transfers after 0.2 s"):
        group.flush(timeout=0.2)


def test_an_unknown_command_is_refused_by_every_rank(group: LocalGroup) -> None:
    (first, second) = group.step(controls=[Control("explode")]).controlled
    assert first == second and first[0][0] == "refused" and "known are attach" in first[0][1]


def test_an_audit_of_a_sound_group_finds_nothing_and_of_a_damaged_one_names_it(group: LocalGroup) -> None:
    group.attach(BACKEND)
    for prompt in prompts(6):
        serve(group, prompt)
    group.step(admits=[Admit("held", prompts(1)[0].tobytes())])
    group.step(schedules=["held"])
    for row in group.audit():
        assert row["faults"] == () and row["references"]["locks"] >= 1
        assert all(
            sum(pool[part] for part in ("free", "in_tree", "in_flight")) == pool["total"]
            for pool in row["pages"].values()
        )
        assert all(0 < size["used"] <= size["total"] for size in row["bytes"].values())
    cache = group.caches[0]
    lost = cache.index.device.alloc(2)
    node = next(iter(cache.index.tree.nodes()))
    cache.index.tree.lock(node)
    faults = " ".join(group.audit()[0]["faults"])
    assert "device: nobody owns 2 pages" in faults and "have a holder" in faults
    cache.index.tree.unlock(node)
    assert lost is not None
    cache.index.device.free(lost)
    group.step(aborts=["held"])
    assert np.all([row["faults"] == () for row in group.audit()])
