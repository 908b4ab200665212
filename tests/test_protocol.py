"""Step messages: what is encoded comes back, and bytes from outside are refused with the field's name."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ray.hashing import Namespace
from hicache_ray.rank.step import (
    PROTOCOL_VERSION,
    Admit,
    Chunk,
    Control,
    Finish,
    Peek,
    ProtocolError,
    Scheduled,
    StepAnswer,
    StepRequest,
)

rids = st.text(min_size=1, max_size=8)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(lambda ids: b"".join(i.to_bytes(4, "little") for i in ids))
namespaces = st.builds(Namespace, *([st.none() | st.text(max_size=4)] * 3))
admits = st.builds(Admit, rids, tokens, namespaces, st.integers(-5, 5), st.integers(0, 9))
requests = st.builds(
    StepRequest,
    generation=st.integers(0, 2**40),
    step=st.integers(0, 2**40),
    aborts=st.lists(rids, max_size=3).map(tuple),
    finishes=st.lists(st.builds(Finish, rids, tokens, st.booleans()), max_size=3).map(tuple),
    admits=st.lists(admits, max_size=3).map(tuple),
    polls=st.lists(rids, max_size=3).map(tuple),
    schedules=st.lists(rids, max_size=3).map(tuple),
    chunks=st.lists(st.builds(Chunk, rids, st.integers(0, 99)), max_size=2).map(tuple),
    peeks=st.lists(st.builds(Peek, tokens, namespaces), max_size=2).map(tuple),
    controls=st.just(()) | st.just((Control("flush", {"tier": "host"}),)),
)


@given(requests)
def test_a_request_comes_back_as_it_was(request: StepRequest) -> None:
    assert StepRequest.decode(request.encode()) == request


def test_an_answer_comes_back_as_it_was() -> None:
    answer = StepAnswer(
        7, 2**64 - 1, rank=1, scheduled=(Scheduled("r", True, "", 4, 2, 0, 6),), timings_us={"work": 1.5}
    )
    assert StepAnswer.decode(answer.encode()) == answer


def test_what_numpy_counts_and_names_is_sent_as_what_it_is() -> None:
    request = StepRequest(0, np.int64(1), polls=(np.str_("r"),))  # type: ignore[arg-type]
    assert StepRequest.decode(request.encode()) == StepRequest(0, 1, polls=("r",))
    answer = StepAnswer(7, 1, engine={"seconds": np.float64(1.5), "pages": np.int64(3)})
    assert StepAnswer.decode(answer.encode()).engine == {"seconds": 1.5, "pages": 3}


@given(st.binary(max_size=60))
def test_random_bytes_are_refused_and_nothing_else_is_raised(message: bytes) -> None:
    for kind in (StepRequest, StepAnswer):
        with pytest.raises(ProtocolError):
            kind.decode(message)


@given(st.recursive(st.none() | st.integers() | st.binary(max_size=3) | st.text(max_size=3), st.lists, max_leaves=12))
def test_well_formed_msgpack_of_another_shape_is_refused(value: object) -> None:
    try:
        message = msgpack.packb([PROTOCOL_VERSION, 0, 0, [], [], [value], [], [], [], [], []])
    except OverflowError:
        return
    if isinstance(value, list) and value[1:] and isinstance(value[0], str) and isinstance(value[1], bytes):
        return  # the beginning of an Admit, whose other fields have defaults
    with pytest.raises(ProtocolError):
        StepRequest.decode(message)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ([99, 0, 0, [], [], [], [], [], [], [], []], "version 99"),
        ([PROTOCOL_VERSION, 0, 0, []], "expected 11 fields"),
        ([PROTOCOL_VERSION, 0, 0, [], [["r", b"abc", True]], [], [], [], [], [], []], "4-byte tokens"),
        ([PROTOCOL_VERSION, True, 0, [], [], [], [], [], [], [], []], "generation"),
        ([PROTOCOL_VERSION, 0, 0, [], [], [["r", b"", [None, 3, None], 0, 0]], [], [], [], [], []], "namespace"),
        (
            [PROTOCOL_VERSION, 0, 0, [], [], [["r", b"", [None, None, None], 0, -1]], [], [], [], [], []],
            r"admits.max_new_tokens: expected int >= 0, got -1",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: list[object], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        StepRequest.decode(msgpack.packb(fields))
