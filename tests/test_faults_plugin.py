"""The pytest plugin: its marker and fixtures, used as a user's own tests would use them."""

from __future__ import annotations

import pytest

from tests.conftest import REPOSITORY

pytest_plugins = ["pytester"]

PLUGIN = "hicache_ray.testing.plugin"

PLANS = """
    import pytest
    from hicache_ray.faults.plan import FaultPlanError

    def test_no_marker_no_faults(fault_plan):
        assert fault_plan.faults == ()

    @pytest.mark.hicache_faults({"kind": "kill", "who": "rank 1", "step": 5}, seed=3)
    def test_one(fault_plan):
        assert fault_plan.seed == 3 and str(fault_plan.faults[0].who) == "rank 1"

    @pytest.mark.hicache_faults({"kind": "kill", "who": "rank 1"})
    class TestTwice:
        @pytest.mark.hicache_faults({"kind": "hang", "who": "rank 0"})
        def test_outer_first(self, fault_plan):
            assert [fault.kind for fault in fault_plan.faults] == ["kill", "hang"]

    @pytest.mark.hicache_faults(file="plan.yaml")
    def test_file(fault_plan):
        assert fault_plan.seed == 8 and fault_plan.faults[0].kind == "corrupt"
"""


def run(pytester: pytest.Pytester, source: str, **outcomes: int) -> None:
    pytester.makepyfile(source)
    result = pytester.runpytest_subprocess(
        "-p", PLUGIN, "--strict-markers", "-q", "-p", "no:cacheprovider", timeout=600
    )
    result.assert_outcomes(**outcomes)


def test_the_marker_makes_the_plan(pytester: pytest.Pytester) -> None:
    pytester.makefile(".yaml", plan="seed: 8\nfaults:\n  - {kind: corrupt, who: storage 0}\n")
    run(pytester, PLANS, passed=4)


def test_a_bad_plan_is_an_error_of_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.hicache_faults({"kind": "explode"})
        def test_bad(fault_plan):
            pass
        """
    )
    result = pytester.runpytest_subprocess("-p", PLUGIN, "-q", timeout=300)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*FaultPlanError: fault 0: kind is 'explode'*"])


def test_the_plugin_is_loaded_by_a_conftest_as_the_page_says(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(f"pytest_plugins = [{PLUGIN!r}]")
    pytester.makefile(".yaml", plan="seed: 8\nfaults:\n  - {kind: corrupt, who: storage 0}\n")
    pytester.makepyfile(PLANS)
    pytester.runpytest_subprocess("--strict-markers", "-q", timeout=600).assert_outcomes(passed=4)


def test_a_misspelt_option_of_the_marker_is_an_error_of_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.hicache_faults({"kind": "kill", "who": "rank 1"}, sed=3)
        def test_bad(fault_plan):
            pass
        """
    )
    result = pytester.runpytest_subprocess("-p", PLUGIN, "-q", timeout=300)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*FaultPlanError: hicache_faults has sed; it takes faults, seed and file"])


@pytest.mark.ray
def test_faults_are_at_work_for_who_asks_for_the_service_only_and_timed_ones_are_told(
    pytester: pytest.Pytester,
) -> None:
    run(
        pytester,
        """
        import pytest
        from hicache_ray.testing.serving import wait_for

        @pytest.mark.hicache_faults({"kind": "kill", "who": "rank 1", "time": 0.2})
        def test_it_happens(hicache_service, request):
            faults = request.getfixturevalue("hicache_faults")
            wait_for(lambda: bool(faults.firings()), "the kill", 60.0)
            (firing,) = faults.firings()
            assert (firing.kind, firing.who, firing.point) == ("kill", "rank 1 of instance-0", "")
            wait_for(lambda: bool(hicache_service.supervisor.history()), "the heal", 60.0)

        @pytest.mark.hicache_faults({"kind": "kill", "who": "rank 1", "time": 0.2})
        def test_it_happens_unasked(hicache_service):
            wait_for(lambda: bool(hicache_service.supervisor.history()), "the heal", 60.0)
        """,
        passed=2,
    )


@pytest.mark.ray
def test_a_group_under_faults(pytester: pytest.Pytester) -> None:
    """The example of the documentation."""
    run(pytester, (REPOSITORY / "examples" / "faults_pytest.py").read_text(), passed=2)


def test_the_plugin_loads_neither_ray_nor_torch(pytester: pytest.Pytester) -> None:
    run(
        pytester,
        """
        import sys

        def test_light():
            assert not {"ray", "torch"} & set(sys.modules)
        """,
        passed=1,
    )
