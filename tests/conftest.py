"""
What is slow, and settings of all tests.

With `TEST_ORDER` set to a number, files come in a random order of that seed, and so do the tests of each.
"""

import os
from random import Random
from tempfile import mkdtemp

import pytest
from hypothesis import settings


REASONS = ("processes", "kills", "fuzz", "sharding", "trainings", "figures")
settings.register_profile("bapo_trl", deadline=None)  # how long an example takes is the machine's
settings.load_profile("bapo_trl")
os.environ["COLUMNS"] = "120"  # tables do not depend on the terminal of the tests
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
