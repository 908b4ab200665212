"""Reading request traces: the real one, and every kind of malformed line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hicache_ray.replay.traces import TraceError, load_workload, mooncake_lines, read_records

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [0, 1]}


def write(folder: Path, *lines: object, name: str = "trace.jsonl") -> Path:
    """A trace file with one line for each of `lines`: text as it is, all else as JSON."""
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_the_real_trace_has_its_known_size(shared: Path) -> None:
    trace = mooncake_lines(read_records(shared / "traces" / "conversation_trace.jsonl.gz"))
    assert len(trace) == 12_031
    assert sum(len(request.hash_ids) for request in trace) == 288_500
    assert len({block for request in trace for block in request.hash_ids}) == 182_790


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, GOOD, "not JSON")
    assert load_workload(str(path), limit=2).total == 2


def test_plain_and_gzipped_files_read_alike(tmp_path: Path) -> None:
    plain = write(tmp_path, GOOD, "", GOOD)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert mooncake_lines(read_records(plain)) == mooncake_lines(read_records(packed))
    assert load_workload(str(plain)).total == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no valid JSON"),
        ("[1]", "expected a JSON object, got [1]"),
        ({}, "'timestamp' is missing"),
        ({**GOOD, "timestamp": "now"}, 'timestamp is "now"; expected a number'),
        ({**GOOD, "hash_ids": 5}, "hash_ids is 5; expected a list"),
        ({**GOOD, "hash_ids": [0, -1]}, "hash_ids[1] is -1"),
        ({**GOOD, "hash_ids": [0, True]}, "hash_ids[1] is true"),
        ({**GOOD, "hash_ids": [0, 1.5]}, "hash_ids[1] is 1.5"),
        ({**GOOD, "hash_ids": [0]}, "1 hash_ids for an input_length of 600; blocks of 512 tokens make it 2"),
        ({**GOOD, "input_length": 0, "hash_ids": []}, "input_length is 0"),
        ({**GOOD, "input_length": True}, "input_length is true"),
        ({**GOOD, "input_length": 600.5}, "input_length is 600.5"),
        ({**GOOD, "input_length": 1 << 40}, "input_length is 1099511627776"),
        ({**GOOD, "output_length": -3}, "output_length is -3"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object, reason: str) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(TraceError) as caught:
        load_workload(str(path))
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_readable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        load_workload(str(tmp_path / "absent.jsonl"))
    with pytest.raises(TraceError, match="directory"):
        load_workload(str(tmp_path))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="can't be read as text"):
        load_workload(str(tmp_path / "binary.jsonl"))
    with pytest.raises(TraceError, match="holds no requests"):
        load_workload(str(write(tmp_path, "", name="empty.jsonl")))


def test_a_broken_gzip_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps({**GOOD, "timestamp": t}).encode() + b"\n" for t in range(1000)))
    for name, data in (("cut", whole[:-20]), ("plain", b"{}\n"), ("garbled", whole[:30] + b"\xff" * 40 + whole[70:])):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(TraceError, match="can't be read as text"):
            load_workload(str(path))
