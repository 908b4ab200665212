"""The storage suite's table, backend x test, with what was skipped and why; printed at the end of a pytest run."""

from __future__ import annotations

from collections import defaultdict

import pytest

SIGNS = {"passed": "ok", "failed": "FAIL", "skipped": "-"}
_PLUGIN = "hicache-storage-suite-table"


class SuiteTable:
    """A pytest plugin that registers itself with the first suite of a run.

    `columns` names the backend of each suite by the node id of its class.
    """

    def __init__(self) -> None:
        self.columns: dict[str, str] = {}
        self._results: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._reasons: dict[tuple[str, str, str], None] = {}

    @classmethod
    def of(cls, config: pytest.Config) -> SuiteTable:
        """The table of this run."""
        table = config.pluginmanager.get_plugin(_PLUGIN)
        if table is None:
            table = cls()
            config.pluginmanager.register(table, _PLUGIN)
        assert isinstance(table, cls)
        return table

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test of a suite ended."""
        suite, _, test = report.nodeid.rpartition("::")
        if suite not in self.columns or not (report.when == "call" or report.outcome != "passed"):
            return
        name = test.partition("[")[0].removeprefix("test_").replace("_", " ")
        self._results[name][suite].append(report.outcome)
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            reason = " ".join(str(report.longrepr[2]).removeprefix("Skipped: ").split())
            self._reasons[suite, name, reason] = None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """The table as text: rows are tests, columns backends, then the reasons for what was skipped."""
        if not self._results:
            return []
        suites = list(self.columns)
        heads = [self.columns[suite] for suite in suites]
        width = max(len(name) for name in self._results)
        lines = ["", "storage suite", f"{'':{width}}  " + "  ".join(heads)]
        for name, results in self._results.items():
            cells = [f"{_cell(results[suite]):^{len(head)}}" for suite, head in zip(suites, heads, strict=True)]
            lines.append(f"{name:{width}}  " + "  ".join(cells).rstrip())
        lines += [f"- {self.columns[suite]}, {name}: {reason}" for suite, name, reason in self._reasons]
        return lines


def _cell(outcomes: list[str]) -> str:
    for outcome in ("failed", "skipped", "passed"):
        count = outcomes.count(outcome)
        if count == len(outcomes) and count:
            return SIGNS[outcome] + (f" {count}" if count > 1 else "")
        if count:
            return f"{SIGNS[outcome]} {count}/{len(outcomes)}"
    return ""
