"""Folders that are built once: a folder under its final name is complete, and one that is there is used again."""

import re

import pytest

from bapo_trl.errors import InputError
from bapo_trl.tasks.cache import cached_folder, is_cached


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path))
    return tmp_path


def give(build, name="model-1"):
    return cached_folder(name, "the model", "a second", build)


def build(folder):
    (folder / "weights").write_text("of this build")


def never(folder):
    raise AssertionError("built")


def test_a_second_call_uses_the_folder_again(cache, capsys):
    assert not is_cached("model-1")
    path = give(build)
    assert re.fullmatch(
        rf"Building the model, once \(a second\) \.\.\.\nBuilt the model in {path} \(\d+ s, once\)\.\n",
        capsys.readouterr().out,
    )
    assert is_cached("model-1")
    assert give(never) == path
    assert capsys.readouterr().out == ""
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("cache", ["", "taken/cache"])
def test_a_user_without_a_home_is_told_of_the_variable(tmp_path, monkeypatch, cache):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path / "taken"))
    monkeypatch.setenv("BAPO_TRL_CACHE", cache and str(tmp_path / cache))
    with pytest.raises(InputError, match="Set the environment variable BAPO_TRL_CACHE to a folder"):
        give(build)


def test_a_cache_that_cannot_be_written_to_serves_what_is_there(cache, monkeypatch):
    def refuse(**kwargs):
        raise PermissionError("read-only")

    built = give(build)
    monkeypatch.setattr("bapo_trl.tasks.cache.tempfile.mkdtemp", refuse)
    assert give(never) == built
    with pytest.raises(InputError, match=r"read-only\. Set the environment variable BAPO_TRL_CACHE to a folder"):
        give(build, "model-2")


def test_an_interrupted_build_is_not_taken_as_complete(cache):
    path = give(build)
    left_over = path.rename(cache / f"{path.name}.unfinished-killed")
    (left_over / "weights").unlink()
    assert give(build) == path
    assert (path / "weights").is_file()


def test_a_failed_build_leaves_nothing_behind(cache):
    def save_half(folder):
        build(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        give(save_half)
    assert list(cache.iterdir()) == []


def test_a_build_that_finishes_second_takes_what_the_first_one_left(cache):
    def build_while_another_process_finishes(folder):
        (give(build) / "first").touch()
        build(folder)

    path = give(build_while_another_process_finishes)
    assert (path / "first").exists()
    assert list(cache.iterdir()) == [path]
