"""Bad input of every kind ends with one clear message on stderr and exit code 2; good input with what was asked for."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

import hicache_ray
from hicache_ray.cli import run
from hicache_ray.commands.parameters import ByteSize

GOOD = json.dumps({"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [0, 1]})

SCRIPT = (sys.executable, "-c", "from hicache_ray.cli import main; main()")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A small trace whose second request repeats the first."""
    path = tmp_path / "small.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}\n")
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command line is refused."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hicache-ray: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"hicache-ray {hicache_ray.__version__}\n"
    assert run(["--help"]) == 0
    assert all(name in capsys.readouterr().out for name in ("replay",))
    assert run(["replay", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--tp", "--page-size", "--attention", "--layers", "--heads", "--head-dim", "--l1-tokens"):
        assert option in text
    for option in ("--l2-tokens", "--l3-bytes", "--storage-actors", "--policy", "--write-policy", "--prefetch-policy"):
        assert option in text
    for option in ("--layout", "--io-backend", "--instances", "--limit", "--index-only", "--local", "--seed", "--json"):
        assert option in text
    assert "--sweep" in text and "--plot" in text and "--prefetch-threshold" in text


def test_starting_up_imports_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from hicache_ray.cli import run; run(['--version']); run(['replay', '--help']);"
        "sys.exit(', '.join({'ray', 'torch', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["replay"], "Missing argument 'TRACE'"),
        (["replay", "t", "--bogus"], "No such option '--bogus'"),
        (["replay", "t", "--tp", "0"], "0 is not in the range 1<=x<=1024"),
        (["replay", "t", "--tp", "two"], "'two' is not a valid integer"),
        (["replay", "t", "--attention", "gqa"], "'gqa' is not one of 'mha', 'mla'"),
        (["replay", "t", "--policy", "best"], "'best' is not one of 'lru'"),
        (["replay", "t", "--layout", "sideways"], "'sideways' is not one of"),
        (["replay", "t", "--l1-tokens", "0"], "0 is not in the range x>=1"),
        (["replay", "t", "--l3-bytes", "much"], "'much' is no size; give bytes as 1048576, 64MiB or 2GB"),
        (["replay", "t", "--l3-bytes", "-1"], "'-1' is no size"),
        (["replay", "t", "--limit", "0"], "0 is not in the range x>=1"),
        (["replay", "/absent/trace.jsonl"], "/absent/trace.jsonl: can't be read: No such file or directory"),
        (["replay", "chat:turns=x"], "chat:turns=x: 'x' is no whole number"),
        (["replay", "chat:", "--index-only", "--local"], "exclude each other"),
        (["replay", "chat:", "--sweep", "speed=1"], "'speed' is none of"),
        (["replay", "chat:", "--index-only", "--sweep", "policy=lru,best"], "'best' is not one of 'lru'"),
        (["replay", "chat:", "--sweep", "l3-bytes=1MiB,much"], "sweep 'l3-bytes=1MiB,much': 'much' is no size"),
        (["replay", "chat:", "--sweep", "instances=1025"], "1025 is not in the range 1<=x<=1024"),
        (["replay", "t", "--instances", "100000000"], "100000000 is not in the range 1<=x<=1024"),
        (["replay", "t", "--storage-actors", "1025"], "1025 is not in the range 1<=x<=1024"),
        (["replay", "t", "--l1-tokens", "9" * 400], f"a number of 400 digits is not in the range 1<=x<={2**62 - 1}"),
        (["replay", "t", "--l1-tokens", "9" * 5000], "a number of 5000 digits is not in the range"),
        (["replay", "t", "--l3-bytes", "9" * 5000], "(5000 characters) is more than the"),
        (["replay", "t", "--json", ""], "'' is no name of a file"),
        (["replay", "t", "--plot", ""], "'' is no name of a file"),
        (["demo", "--json", ""], "'' is no name of a file"),
        (["replay", ""], "'' names no trace: give a file, or chat:sessions=50,turns=6"),
        (["replay", "chat:", "--index-only", "--tp", "3"], "heads is 4 for 3 tensor-parallel ranks"),
        (["replay", "chat:", "--index-only", "--kv-cache-dtype", "int3"], "kv_cache_dtype is 'int3'"),
        (["replay", "chat:", "--index-only", "--prefetch-threshold", "many"], "prefetch_threshold is 'many'"),
        (["replay", "chat:sessions=" + "9" * 5000], "99999999999999999999... (5000 digits)"),
        (["config", "explain", "--l1-tokens", "9" * 5000], "l1_tokens is '99999999999999999999... (5000 digits)'"),
        (["chaos", "--minutes", "nan"], "'nan' is no finite number above 0"),
        (["chaos", "--minutes", "inf"], "'inf' is no finite number above 0"),
        (["chaos", "--minutes", "0"], "'0' is no finite number above 0"),
        (["chaos", "--period", "nan"], "'nan' is no finite number from 0.1"),
        (["chaos", "--heal-limit", "1e999"], "'1e999' is no finite number from 1"),
        (["chaos", "--kinds", "kill=nan"], "--kinds is 'kill=nan': give finite numbers as weights"),
        (["chaos", "--kinds", "kill=inf"], "--kinds is 'kill=inf': give finite numbers as weights"),
        (["chaos", "--write-plan", "/absent/plan"], "--write-plan '/absent/plan': there is no folder '/absent'"),
        (["chaos", "--json", "/proc/report"], "--json '/proc/report' can't be written: "),
        (["replay", "chat:", "--json", "/proc/report"], "--json '/proc/report' can't be written: "),
        (
            ["replay", "chat:sessions=1000000,turns=1000", "--index-only"],
            "1000000000 requests, and 10000000 is the most",
        ),
        (["replay", "chat:sessions=100000,turns=50"], "tokens, and 2000000000 is the most"),
        (["replay", "chat:", "--json", "/absent/report.json"], "there is no folder '/absent'"),
        (["replay", "chat:", "--plot", "/tmp/sweep.txt"], "the name must end in .png, .svg, .pdf"),
        (["replay", "chat:", "--l1-tokens", "64"], "l1_tokens is 64, and the longest request has"),
        (["replay", "chat:", "--l2-tokens", "3"], "l2_tokens is 3: no page of 16 tokens fits"),
        (["replay", "chat:", "--tp", "3"], "heads is 4 for 3 tensor-parallel ranks"),
        (["replay", "chat:", "--l2-tokens", "99999999999999"], "of memory are available"),
        (["replay", "chat:", "--kv-cache-dtype", "int3"], "kv_cache_dtype is 'int3'"),
        (["replay", "chat:", "--prefetch-threshold", "many"], "prefetch_threshold is 'many'; give a whole number"),
        (["replay", "chat:", "--io-backend", "kernel", "--layout", "page_head", "--attention", "mla"], "page_head"),
        (["demo", "--json", "/absent/report.json"], "there is no folder '/absent'"),
        (["config", "explain", "--page-size", "0"], "page_size is 0; it must be at least 1"),
        (["config", "explain", "--bogus", "1"], "No such option '--bogus'"),
        (["config", "explain", "--hicache-io-backend", "direct", "--hicache-mem-layout", "page_head"], "page_head"),
    ],
)
def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    assert reason in refused(capsys, *arguments)


@pytest.mark.parametrize("mode", ["--index-only", "--local"])
def test_a_malformed_line_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, mode: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n{GOOD.replace('600', '6000')}\n")
    message = refused(capsys, "replay", str(path), mode)
    assert message == f"hicache-ray: {path}, line 2: 2 hash_ids for an input_length of 6000; " + (
        "blocks of 512 tokens make it 12\n"
    )


def test_a_report_that_can_not_be_written_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "is a folder" in refused(capsys, "replay", "chat:", "--index-only", "--json", str(tmp_path))


def test_a_full_disk_is_said(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    assert run(["replay", trace, "--index-only", "--json", "/dev/full"]) == 2
    assert capsys.readouterr().err == "hicache-ray: '/dev/full' can't be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [["config", "explain"], ["replay", "chat:sessions=2", "--index-only"]])
def test_a_full_standard_output_is_said(arguments: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run([*SCRIPT, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "hicache-ray: the output can't be written: No space left on device\n")


def test_a_reader_that_leaves_ends_the_output_quietly() -> None:
    process = subprocess.Popen(
        [*SCRIPT, "config", "explain"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 1)


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_explain_prints_every_option_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hicache-mem-layout", "page_first", "--hicache-io-backend", "direct", "--page-size", "64"]
    assert run(["config", "explain", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(" = ")[0] for line in lines]
    assert len(names) == len(set(names)) and {"page_size", "hicache_ratio", "radix_eviction_policy"} <= set(names)
    assert "page_size = 64  # given" in lines
    assert any(line.startswith("hicache_mem_layout = page_first_direct  # adjusted from page_first") for line in lines)


def test_explain_keeps_each_option_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "explain", "--model-name", "a\nb = c  # given"]) == 0
    assert r"model_name = 'a\nb = c  # given'  # given" in capsys.readouterr().out.splitlines()


def test_json_of_the_demo_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--local", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["mode"] == "local"
    assert "Two model instances" in captured.err


def test_a_checked_report_leaves_no_file_and_no_change(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fresh, old, link = tmp_path / "fresh.json", tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("before")
    link.symlink_to(tmp_path / "absent" / "report.json")
    for path in (fresh, old):
        refused(capsys, "replay", "/absent/trace", "--index-only", "--json", str(path))
    assert not fresh.exists() and old.read_text() == "before"
    assert "there is no folder" in refused(capsys, "replay", "chat:", "--index-only", "--json", str(link))


def test_sweeps_read_values_as_the_options_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "chat:sessions=2", "--index-only", "--sweep", "l3-bytes=1MiB,2k", "--json", "-"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [entry["values"]["l3_bytes"] for entry in runs] == [1 << 20, 2000]


def test_a_huge_number_in_a_trace_is_named_with_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    path.write_text(f"{GOOD}\n{GOOD.replace('600', '6' * 5000)}\n")
    assert f"{path}, line 2: no valid JSON: Exceeds the limit" in refused(capsys, "replay", str(path), "--index-only")


def test_the_ending_of_a_packed_trace_may_be_in_capitals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "SMALL.JSONL.GZ"
    path.write_bytes(gzip.compress(f"{GOOD}\n".encode()))
    assert run(["replay", str(path), "--index-only"]) == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("4096", 4096), ("64MiB", 64 << 20), ("1.5k", 1500), ("2 GB", 2 * 10**9), ("1tib", 1 << 40)],
)
def test_sizes(text: str, count: int) -> None:
    assert ByteSize().convert(text, None, None) == count
    assert ByteSize().convert(count, None, None) == count


@pytest.mark.parametrize("text", ["", "MiB", "1.2.3", "1 parsec"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.UsageError):
        ByteSize().convert(text, None, None)


def test_a_remote_traceback_becomes_one_line() -> None:
    from hicache_ray.commands.failures import in_one_line

    remote = """group g: a rank died in join: The actor died because of an error raised in its creation task, ray::g
  File "rank.py", line 1, in __init__
hicache_ray.pools.memory.PoolMemoryError: the host pool needs 9 GB"""
    assert in_one_line(RuntimeError(remote)) == (
        "group g: a rank died in join: hicache_ray.pools.memory.PoolMemoryError: the host pool needs 9 GB"
    )
    assert in_one_line(RuntimeError("one line")) == "one line"
    assert in_one_line(RuntimeError()) == "RuntimeError"
