"""Every case of CASES.md and every defect of FAILURES.md A has a test that names it (issue: the option matrix)."""

from __future__ import annotations

from tests.case_table import CASES, DEFECTS, mentioned, table


def test_every_case_and_defect_has_a_test_that_names_it() -> None:
    holders = table()
    assert [case for case in (*CASES, *DEFECTS) if not holders.get(case)] == []


def test_mentions_are_read_as_they_are_written() -> None:
    assert mentioned("Case 22. and cases 39, 40 and 51; CASES 24 to 26, D1 to D3, D8.") == {
        *("22", "39", "40", "51", "24", "25", "26"),
        *("D1", "D2", "D3", "D8"),
    }
    assert mentioned("test_case_60_mha ") == {"60"}
