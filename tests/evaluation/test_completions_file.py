"""Completions on disk: what a kill leaves of them, and what is not theirs."""

import json

import pytest

from bapo_trl.evaluation.completions_file import CompletionsFile


def completion(prompt, number):
    return {"prompt_index": prompt, "number": number, "completion": f"{prompt}.{number} ü"}


@pytest.fixture
def path(tmp_path):
    file = CompletionsFile(tmp_path / "new" / "completions.jsonl", "a", num_completions=2)
    assert file.missing(2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    file.append([completion(1, 0), completion(0, 1)])
    file.append([completion(0, 0), completion(0, 1)])
    assert file.path.read_bytes().count(b"\n") == 3  # none twice
    return file.path


def test_what_was_written_is_there_again_once(path):
    again = CompletionsFile(path, "a", num_completions=2)
    assert again.missing(2) == [(1, 1)]
    assert again.records() == [{**completion(*key), "evaluation": "a"} for key in ((0, 0), (0, 1), (1, 0))]
    assert path.read_text().count("\n") == 3


def test_a_kill_at_any_byte_loses_the_line_it_cut_and_no_other(path):
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        file = CompletionsFile(path, "a", num_completions=2)
        assert len(file.records()) == whole[:size].count(b"\n")
        file.append([completion(7, 0)])
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[-1]["completion"] == "7.0 ü"
        assert len(lines) == whole[:size].count(b"\n") + 1


def test_more_completions_of_each_prompt_are_added_to_those_there(path):
    assert CompletionsFile(path, "a", num_completions=3).missing(2) == [(0, 2), (1, 1), (1, 2)]
