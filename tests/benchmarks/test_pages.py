"""What `python -m benchmarks.pages` makes of the files in `benchmarks/results`: the pages and the README's table."""

import json
import re

import pytest

from benchmarks import pages
from benchmarks.common import RESULTS, describe_run, write_result


@pytest.fixture(scope="module")
def sections():
    return pages.render([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))])


def test_the_pages_in_docs_are_those_of_the_results(sections):
    texts = pages.texts(sections)
    assert {path.name for path in texts} == {"results.md", "results_tables.md", "README.md"}
    for path, text in texts.items():
        assert path.read_text() == text, "`python -m benchmarks.pages` has to be run"
    assert all((pages.DOCS / name).exists() for section in sections for name in section.figures)


def test_tables_have_seven_columns_at_most(sections):
    for text in pages.texts(sections).values():
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert lines
        assert max(line.count(" | ") + 1 for line in lines) <= 7


def test_links_to_the_tables_lead_to_headings(sections):
    page, tables = (pages.texts(sections)[pages.DOCS / name] for name in (pages.PAGE, pages.TABLES_PAGE))
    for heading in [line for line in tables.splitlines() if line.startswith("## ")]:
        anchor = re.sub(r"[^\w -]", "", heading.removeprefix("## ").lower()).replace(" ", "-")
        assert f"({pages.TABLES_PAGE}#{anchor})" in page


def test_a_readme_has_one_place_for_its_table():
    page = "Before\n\n<!-- final accuracy -->\n\n| old |\n\n<!-- end -->\n\nAfter <!-- end -->\n"
    assert pages.with_table(page, "| new |") == page.replace("old", "new")
    for wrong in ("Before\n", page + page):
        with pytest.raises(ValueError, match=r"`<!-- final accuracy -->`"):
            pages.with_table(wrong, "| new |")


def test_a_result_without_a_section_is_refused():
    with pytest.raises(ValueError, match="results of unknown"):
        pages.render([{"benchmark": "unknown"}])


def test_a_result_file_has_a_row_a_line(tmp_path):
    content = {"benchmark": "some", "settings": {"rows": [1, 2]}, "results": [{"a": [1, 2]}, {"a": None}]}
    write_result(content, tmp_path / "some.json")
    text = (tmp_path / "some.json").read_text()
    assert json.loads(text) == content
    assert '    {"a": [1, 2]},\n    {"a": null}\n' in text
    for path in RESULTS.glob("*.json"):
        assert len(path.read_text().splitlines()) < 12 + len(json.loads(path.read_text())["results"])


def test_commands_name_no_folder_of_one_machine(monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmark", "--jobs", "0", "--finished", "/scratch/rows.jsonl"])
    assert describe_run("balance", "cpu")["command"] == "python -m benchmarks.balance --jobs 0 --finished rows.jsonl"
    for path in RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        for run in (content, *content.get("earlier", [])):
            assert " /" not in run["command"], path
