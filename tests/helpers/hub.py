"""Stands in for the Hub, in the pushes of a training: nothing is uploaded, what an upload begins with is noted."""

from collections.abc import Callable
from typing import Any


class Hub:
    """Keeps in `uploads` what `note` says of each folder and its path in the repository, as its upload begins."""

    repo_id = "me/model"

    def __init__(self, note: Callable[[str, str | None], Any]):
        self.uploads: list[Any] = []
        self._note = note

    def create_repo(self, *args, **kwargs):
        return self

    def upload_folder(self, *, folder_path, path_in_repo=None, **kwargs):
        self.uploads.append(self._note(folder_path, path_in_repo))

    def is_done(self):
        return True

    def wait_until_done(self):
        pass


def push_to_stand_in(monkeypatch, note: Callable[[str, str | None], Any]) -> Hub:
    """Have transformers push to a stand-in from now on; return it."""
    hub = Hub(note)
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    monkeypatch.setattr("transformers.trainer.PushInProgress", lambda jobs: hub)
    return hub
