"""Each test's CPU-seconds: their sum and the dearest tests are printed at the end."""

import os

import pytest

from tests.helpers import cpu_seconds


_START = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[_START] = cpu_seconds.used()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("cpu_seconds", cpu_seconds.used() - item.stash[_START]))
    return report


def pytest_terminal_summary(terminalreporter):
    reports = [report for group in terminalreporter.stats.values() for report in group]
    ends = [report for report in reports if getattr(report, "when", None) == "teardown"]
    costs = {report.nodeid: dict(report.user_properties)["cpu_seconds"] for report in ends}
    terminalreporter.section("CPU-seconds")
    terminalreporter.write_line(cpu_seconds.summary(costs))
    if file := os.environ.get("CPU_SECONDS"):
        cpu_seconds.add(file, costs)
