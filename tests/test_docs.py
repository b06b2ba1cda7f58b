"""README and docs: without dead links, with the texts of the code."""

import importlib
import inspect
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
from trl import ScriptArguments

from bapo_trl import BAPOTrainer, dry_run
from bapo_trl.bapo_config import BAPOConfig, own_fields
from bapo_trl.script.arguments import BAPOScriptArguments
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


REFERENCE = runpy.run_path(str(ROOT / "docs" / "tools" / "render_reference.py"))


@pytest.mark.parametrize("name", REFERENCE["PAGES"])
def test_reference_pages_are_up_to_date(name):
    page = (ROOT / "docs" / name).read_text()
    assert page == REFERENCE["rendered"](name), "run `python docs/tools/render_reference.py`"


def test_help_texts_are_on_the_settings_page_once_and_in_the_docstring():
    page = (ROOT / "docs" / "settings.md").read_text()
    docstring = " ".join(BAPOConfig.__doc__.split())
    for f in own_fields():
        assert page.count(f"\n| `{f.name}` | ") == 1
        assert f"{f.name} (`" in docstring
        assert all(f.metadata["help"] in text for text in (page, docstring)), f.name
        assert f.metadata.get("range", "") in docstring


def test_every_flag_of_the_script_is_on_the_command_line_page_once():
    section = (ROOT / "docs" / "command_line.md").read_text().partition("\n## train\n")[2].partition("\n## ")[0]
    inherited = {f.name for f in fields(ScriptArguments)}
    for f in fields(BAPOScriptArguments):
        assert section.count(f"\n| `--{f.name}` | ") == (f.name not in inherited or f.name == "dataset_name"), f.name


PUBLIC = ("bapo_trl", "bapo_trl.evaluation", "bapo_trl.report", "bapo_trl.clip_bounds", "bapo_trl.tasks")


def test_every_public_name_is_on_the_api_page_once():
    """What is imported from each package, in the section that names it."""
    sections = re.split(r"^## ", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)[1:]
    on_page = {
        re.search(r"`([\w.]+)`", section)[1]: re.findall(r"^::: (\S+)$", section, re.MULTILINE) for section in sections
    }
    assert list(on_page) == [*PUBLIC, "bapo_trl.experimental"]
    for package in PUBLIC:
        module = importlib.import_module(package)
        assert sorted(path.rpartition(".")[2] for path in on_page[package]) == sorted(module.__all__), package
        for path in on_page[package]:
            home, _, name = path.rpartition(".")
            assert getattr(importlib.import_module(home), name) is getattr(module, name), path


def test_sections_of_a_docstring_stand_where_readers_look_for_them():
    for each in (BAPOConfig, BAPOTrainer, dry_run):
        sections = re.findall(r"^( *)(Args|Attributes|Raises|Returns):$", inspect.cleandoc(each.__doc__), re.MULTILINE)
        assert {indent for indent, _ in sections} == {""}, each
