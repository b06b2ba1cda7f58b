"""The folder cache: a folder under its final name is complete, and an existing folder is reused."""

import pytest

from bapo_trl.tasks.cache import cached_folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path))
    return tmp_path


def give(build):
    return cached_folder("model-1", "the model", build)


def build(folder):
    (folder / "weights").write_text("of this build")


def test_a_second_call_uses_the_folder_again(cache, capsys):
    path = give(build)
    assert capsys.readouterr().out == "Building the model, once ...\n"
    assert give(lambda folder: pytest.fail("built again")) == path
    assert capsys.readouterr().out == ""
    assert list(cache.iterdir()) == [path]


def test_a_failed_build_leaves_nothing_behind(cache):
    def save_half(folder):
        build(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        give(save_half)
    assert list(cache.iterdir()) == []


def test_a_build_that_finishes_second_uses_the_first_folder(cache):
    def build_while_another_process_finishes(folder):
        (give(build) / "first").touch()
        build(folder)

    path = give(build_while_another_process_finishes)
    assert (path / "first").exists()
    assert list(cache.iterdir()) == [path]
