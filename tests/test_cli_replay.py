"""`hicache-ray replay` and `demo` on the index and on in-process groups: tables, JSON, sweeps, faults, interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hicache_ray.cli import run

CHAT = "chat:sessions=6,turns=3,system=64,turn=16,answer=16"
LONGER = "chat:sessions=12,turns=5,system=64,turn=32,answer=32"
"""Its conversations come back after they have left small tiers."""

SMALL = ["--layers", "1", "--heads", "2", "--head-dim", "4", "--prefetch-policy", "wait_complete"]


def test_index_only_prints_a_table_and_writes_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert run(["replay", CHAT, "--index-only", "--json", str(path)]) == 0
    captured = capsys.readouterr()
    assert "18 requests" in captured.out and "token hit rate" in captured.out
    assert captured.err == ""
    report = json.loads(path.read_text())
    assert (report["mode"], report["requests"]) == ("index", 18)
    assert report["tokens"] == report["tokens_l1"] + report["tokens_computed"]


def test_json_may_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", CHAT, "--index-only", "--limit", "4", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["requests"] == 4
    assert "4 requests" in captured.err


@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_a_local_replay_checks_every_page(capsys: pytest.CaptureFixture[str], tmp_path: Path, attention: str) -> None:
    path = tmp_path / "report.json"
    sizes = [
        "--l1-tokens",
        "512",
        "--l2-tokens",
        "800",
        "--instances",
        "2",
        "--tp",
        "2",
        "--concurrency",
        "1",
        "--attention",
        attention,
    ]
    assert run(["replay", LONGER, "--local", *SMALL, *sizes, "--kv-cache-dtype", "float16", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["mode"], report["requests"], report["pages_mismatched"]) == ("local", 60, 0)
    assert report["pages_verified"] == 2 * report["hit_blocks"] > 0
    assert report["tokens_l3"] > 0 and report["ledger_balanced"] and report["digest_checks"] > 0
    assert report["settings"]["others"] == {"kv_cache_dtype": "float16"}
    assert "wrong: 0" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for seed in ("1", "1", "2"):
        assert run(["replay", "chat:sessions=5,turns=2", "--index-only", "--seed", seed, "--json", "-"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["tokens"] == reports[1]["tokens"] != reports[2]["tokens"]


def test_a_sweep_runs_every_combination(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, path = tmp_path / "sweep.png", tmp_path / "sweep.json"
    sweeps = ["--sweep", "policy=lru,lfu", "--sweep", "l1-tokens=176,320,640"]
    assert run(["replay", CHAT, "--index-only", *sweeps, "--plot", str(plot), "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["sweep"] == ["policy", "l1_tokens"]
    assert [entry["values"]["l1_tokens"] for entry in document["runs"]] == [176, 320, 640] * 2
    rates = [entry["token_hit_rate"] for entry in document["runs"]]
    assert rates[0] < rates[2] and rates[3] < rates[5]
    assert plot.stat().st_size > 10_000
    assert capsys.readouterr().out.count("lfu") == 3


def test_a_sweep_of_groups_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["replay", CHAT, "--local", *SMALL, "--sweep", "write-policy=write_through,write_back", "--json", "-"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert [entry["pages_mismatched"] for entry in document["runs"]] == [0, 0]


def test_a_wrong_page_ends_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hicache_ray.storage.memory import MemoryStorage

    get = MemoryStorage.get

    def flipped(self: MemoryStorage, key: str, out: object) -> bool:
        found = get(self, key, out)  # type: ignore[arg-type]
        out[0] ^= 1  # type: ignore[index]
        return found

    monkeypatch.setattr(MemoryStorage, "get", flipped)
    arguments = [*SMALL, "--l1-tokens", "512", "--l2-tokens", "512", "--concurrency", "1"]
    assert run(["replay", LONGER, "--local", *arguments]) == 1
    assert "cached pages held other bytes than they must" in capsys.readouterr().err
    assert "hold wrong bytes" in caplog.text


def test_the_demo_shows_what_each_tier_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    assert run(["demo", "--local", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    for part in (
        "Two model instances",
        "L1, device memory, had",
        "L2, host memory, saved",
        "L3, the storage actors, saved",
    ):
        assert part in " ".join(out.split())
    report = json.loads(path.read_text())
    assert min(report["tokens_l1"], report["tokens_l2"], report["tokens_l3"]) > 0.03 * report["tokens"]
    assert report["pages_mismatched"] == 0 and report["ledger_balanced"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_without_a_traceback(number: int, code: int) -> None:
    script = (
        "import sys, hicache_ray.replay.driver as driver\n"
        "from hicache_ray import cli\n"
        "step = driver.Driver.advance\n"
        "def advance(self, *given):\n"
        "    print('running', flush=True)\n"
        "    return step(self, *given)\n"
        "driver.Driver.advance = advance\n"
        "sys.argv = ['hicache-ray', 'replay', 'chat:sessions=3000', '--local', '--layers', '1']\n"
        "cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = threading.Timer(120, process.kill)
    deadline.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(number)
    _, errors = process.communicate()
    deadline.cancel()
    assert process.returncode == code
    assert "Traceback" not in errors
