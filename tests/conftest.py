"""
What is slow, and what each test cost in CPU-seconds: their sum and the dearest are printed at the end.

With `TEST_ORDER` set to a number, files come in a random order of that seed, and so do the tests of each.
"""

import os
from random import Random
from tempfile import mkdtemp

import pytest
from hypothesis import settings

from tests.helpers import cpu_seconds


REASONS = ("processes", "kills", "fuzz", "sharding", "trainings", "figures", "rehearsal")
settings.register_profile("bapo_trl", deadline=None)  # how long an example takes is the machine's
settings.load_profile("bapo_trl")
_START = pytest.StashKey[float]()
if os.environ.get("TEST_DEVICE") != "cuda":  # before anything asks CUDA: tests are about CPUs, but for `make test-gpu`
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_configure():
    if not os.access(os.path.expanduser("~"), os.W_OK):  # a user without a home has no room for caches
        os.environ["HOME"] = mkdtemp()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a model, a reward and problems."""
    from tests.helpers.script_runs import fill_folder  # and with it all libraries

    return fill_folder(tmp_path, monkeypatch)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    for item in items:
        if any(item.get_closest_marker(reason) for reason in REASONS):
            item.add_marker("slow")
    if seed := os.environ.get("TEST_ORDER"):
        random = Random(seed)
        place = {path: random.random() for path in dict.fromkeys(item.path for item in items)}
        random.shuffle(items)
        items.sort(key=lambda item: place[item.path])


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


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workerinput"):
        return  # of pytest-xdist: all tests are counted where they are reported
    reports = [report for group in terminalreporter.stats.values() for report in group]
    costs = {
        report.nodeid: seconds
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, seconds in report.user_properties
        if name == "cpu_seconds"  # doctests of the package have none: they are not below this file
    }
    terminalreporter.section("CPU-seconds")
    terminalreporter.write_line(cpu_seconds.summary(costs))
    if file := os.environ.get("CPU_SECONDS"):
        cpu_seconds.add(file, costs)
