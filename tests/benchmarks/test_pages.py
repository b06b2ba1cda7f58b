"""What `python -m benchmarks.pages` makes of the files in `benchmarks/results`: the tables of the pages."""

import json

import pytest

from bapo_trl.compare.results import Row, write_row
from benchmarks import pages
from benchmarks.common import RESULTS, describe_run, write_result


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_the_tables_in_the_pages_are_those_of_the_results(page):
    assert page.read_text() == pages.filled(page.read_text()), "`python -m benchmarks.pages` has to be run"


def test_a_table_of_finals_pairs_the_seeds():
    runs = pages.rows("stability", **{pages.TASK: "running totals", pages.UPDATES: "64"})
    finals = pages.finals(runs)
    above = [finals["GRPO"][seed] - finals["BAPO"][seed] for seed in finals["GRPO"]]
    table = pages.final_table({"at 64": runs}, "BAPO", ["GRPO"])
    assert f"{sum(above) / len(above):+.3f} ± " in table
    assert "| BAPO" not in table


def test_every_study_can_be_printed_whole(capsys, monkeypatch):
    for path in RESULTS.glob("*.json"):
        if "rows" in json.loads(path.read_text()):
            monkeypatch.setattr("sys.argv", ["pages", path.stem])
            pages.main()
            assert capsys.readouterr().out.count("| arm") >= 2


def test_runs_that_are_kept_stay_when_another_machine_makes_more(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)

    def keep(part: str, *rows: Row) -> dict:
        for row in rows:
            write_row(row, tmp_path / part / "study" / "runs" / f"{row.arm}-{row.seed}.json")
        pages.keep(tmp_path / part / "study")
        return json.loads((tmp_path / "study.json").read_text())

    def row(arm: str, seed: int, final: float, **settings) -> Row:
        return Row(arm, {"max_steps": 8}, seed, {"learning_rate": 0.1, "seed": seed, **settings}, final)

    first = keep("a", row("x", 0, 0.5), row("y", 0, 0.25, delta=3.0))
    assert first["settings"] == {"learning_rate": "0.1"}
    kept = keep("b", row("x", 1, 0.75), row("y", 0, 0.125, delta=4.0))
    assert {(run["arm"], run["seed"]): run["final"] for run in kept["rows"]} == {
        ("x", 0): 0.5, ("x", 1): 0.75, ("y", 0): 0.125,
    }  # fmt: skip
    assert [run["settings"] for run in kept["rows"]] == [{}, {}, {"delta": 4.0}]
    assert kept["commit"] == f"{first['commit']} to {first['commit']}"
    other_rate = row("x", 2, 0.5)
    other_rate.settings["learning_rate"] = 0.2
    assert [run["settings"].get("learning_rate") for run in keep("c", other_rate)["rows"]] == ["0.1"] * 3 + [0.2]


def test_a_table_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="no table is called 'nothing'"):
        pages.filled("<!-- table nothing -->\n<!-- end -->")


def test_a_result_file_has_a_row_a_line(tmp_path):
    content = {"benchmark": "some", "settings": {"rows": [1, 2]}, "results": [{"a": [1, 2]}, {"a": None}]}
    write_result(content, tmp_path / "some.json")
    text = (tmp_path / "some.json").read_text()
    assert json.loads(text) == content
    assert '    {"a": [1, 2]},\n    {"a": null}\n' in text


def test_commands_name_no_folder_of_one_machine(monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmark", "--rounds", "0", "--finished", "/scratch/rows.jsonl"])
    command = describe_run("search_cost", "cpu")["command"]
    assert command == "python -m benchmarks.search_cost --rounds 0 --finished rows.jsonl"
    for path in RESULTS.glob("*.json"):
        assert " /" not in json.loads(path.read_text()).get("command", ""), path
