"""README and docs: without dead links, with the texts of the code."""

import inspect
import re
import runpy
from pathlib import Path

import pytest

from bapo_trl import BAPOTrainer, dry_run
from bapo_trl.bapo_config import BAPOConfig, own_fields
from tests.docs.blocks import PAGES
from tests.helpers.commands import ROOT


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, flags=re.MULTILINE)
    for link in [link for link in links if "://" not in link]:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_the_table_of_knobs_and_the_docstring_of_the_config_are_made_of_the_help_texts():
    script = runpy.run_path(str(ROOT / "docs" / "tools" / "render_settings.py"))
    page, table = script["PAGE"].read_text(), script["settings_table"]()
    assert page == script["with_table"](page, table), "run `python docs/tools/render_settings.py`"
    docstring = " ".join(BAPOConfig.__doc__.split())
    for knob in own_fields():
        assert f"| `{knob.name}` |" in table
        assert f"{knob.name} (`" in docstring
        assert all(knob.metadata["help"] in text for text in (table, docstring)), knob.name


def test_sections_of_a_docstring_stand_where_readers_look_for_them():
    for each in (BAPOConfig, BAPOTrainer, dry_run):
        sections = re.findall(r"^( *)(Args|Attributes|Raises|Returns):$", inspect.cleandoc(each.__doc__), re.MULTILINE)
        assert {indent for indent, _ in sections} == {""}, each
