"""Settings and pages that the prose of the documentation names: they exist."""

import re
from dataclasses import fields

import pytest
import yaml
from transformers import GenerationConfig
from trl import DatasetMixtureConfig, ModelConfig

from bapo_trl import BAPOConfig
from bapo_trl.script.arguments import BAPOScriptArguments
from tests.docs.blocks import PAGES
from tests.helpers.commands import ROOT


SETTINGS = {f.name for config in (BAPOConfig, BAPOScriptArguments, ModelConfig, DatasetMixtureConfig)
            for f in fields(config)}  # fmt: skip
WRITTEN_FOR_USERS = ("index", "troubleshooting", "replay", "which_loss", "how_bapo_works", "staleness")


@pytest.mark.parametrize("name", WRITTEN_FOR_USERS)
def test_settings_with_a_value_are_settings(name):
    page = re.sub(r"\*\*`.+?`\*\*", "", (ROOT / "docs" / f"{name}.md").read_text())  # quoted messages
    named = re.findall(r"`(?:--)?(\w+)(?:=|: | )[^`]+`", page)
    named += re.findall(r"\b(\w+)=[\d.]+[,`]", page)
    beside_them = set(vars(GenerationConfig())) | {"python", "make", "config", "w_t"}
    assert sorted(set(named) - SETTINGS - beside_them) == []


def test_every_page_is_in_the_navigation_once():
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nvalidation:")[0]
    linked = re.findall(r": (\w+\.md)", text)
    assert sorted(linked) == sorted(page.name for page in PAGES if page.parent == ROOT / "docs")
    assert yaml.safe_load("nav:" + text)


def test_the_table_of_staleness_is_that_of_the_settings(tmp_path):
    page = (ROOT / "docs" / "staleness.md").read_text()
    rows = [[int(n) for n in re.findall(r"\d+", line)] for line in page.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 4
    for accumulation, steps, passes, updates, staleness in rows:
        args = BAPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, gradient_accumulation_steps=accumulation,
            steps_per_generation=steps, num_iterations=passes,
        )  # fmt: skip
        assert (args.updates_per_generation, args.largest_staleness) == (updates, staleness)
