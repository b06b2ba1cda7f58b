"""The verdict of the chat study and its figure, from result files made up for them."""

import json

import pytest
from PIL import Image

from benchmarks import chat_verdict, pages
from benchmarks.chat_rules import CAP, DELTA


NOISE = (-0.02, 0.02, -0.01, 0.01, -0.015, 0.015, -0.005, 0.005)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    pages.rows.cache_clear()
    yield tmp_path
    pages.rows.cache_clear()


def write(folder, study: str, settings: tuple[int, ...], **above: float) -> None:
    arms = {"VESPO": 0.0, DELTA: 0.0, CAP: 0.0, **above}
    rows = [
        {
            "arm": arm,
            "sweep": {"steps_per_generation": updates},
            "seed": seed,
            "final": 0.5 + mean + bool(mean) * noise,
        }
        for updates in settings
        for arm, mean in arms.items()
        for seed, noise in enumerate(NOISE[:2] if (arm, updates) == (CAP, 4) else NOISE)
    ]
    (folder / f"{study}.json").write_text(json.dumps({"rows": rows}))


def test_each_rule_has_its_line(results):
    write(results, "chat_chain_sum", (4, 16), good=0.04, bad=-0.04)
    write(results, "chat_leg_counting", (16,), good=0.03, bad=0.001)
    assert list(chat_verdict.verdict()) == [
        "chain sums at 4: differ from VESPO: good, bad",
        "at 4, above VESPO on both tasks: none",  # the legs are run at 16 alone
        "chain sums at 16: differ from VESPO: good, bad",
        "legs at 16: differ from VESPO: good",
        "at 16, above VESPO on both tasks: good",
        "negative_ratio_cap: goes",
    ]


def test_with_a_task_missing_there_is_a_figure_and_no_verdict(results, monkeypatch):
    write(results, "chat_chain_sum", (4, 16), good=0.04)
    monkeypatch.setattr(chat_verdict, "FIGURE", results / "figure.png")
    monkeypatch.setattr(chat_verdict, "ROOT", results)
    with pytest.raises(SystemExit, match="No verdict: 1 of 2 tasks have runs"):
        chat_verdict.main()
    with Image.open(results / "figure.png") as figure:
        assert figure.width > figure.height
