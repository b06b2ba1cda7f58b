"""README and docs: links, and what a command writes into the pages. `tests/docs` runs the blocks."""

import re
import runpy
from pathlib import Path

import pytest

from bapo_trl.clip_bounds.update_log import UPDATE_METRICS
from bapo_trl.replay.mixer import REPLAY_METRICS
from bapo_trl.vllm_server.mismatch import MISMATCH_METRICS
from bapo_trl.vllm_server.weight_check import SERVER_METRICS
from benchmarks import pages
from compat import results
from tests.docs.blocks import PAGES
from tests.helpers.commands import ROOT


REFERENCE = runpy.run_path(str(ROOT / "docs" / "tools" / "render_reference.py"))
GENERATED = {  # by page: its text as the command makes it
    **{ROOT / "docs" / name: (REFERENCE["rendered"], name) for name in REFERENCE["PAGES"]},
    results.VERSIONS_PAGE: (results.versions_page,),
    results.CORNERS_PAGE: (results.corners_page,),
}
COMMANDS = "run `python docs/tools/render_reference.py`, `python -m compat page` and `python -m benchmarks.pages`"


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


def test_generated_pages_are_up_to_date():
    for page, (make, *arguments) in GENERATED.items():
        assert page.read_text() == make(*arguments), (page, COMMANDS)
    for page in pages.PAGES:
        assert page.read_text() == pages.filled(page.read_text()), (page, COMMANDS)


def test_the_site_names_the_column_of_a_cell_and_keeps_flags_whole():
    hook = runpy.run_path(str(ROOT / "docs" / "tools" / "narrow_pages.py"))["on_page_content"]
    head = "<thead><tr><th>flag</th><th>default</th><th>a <code>b</code></th></tr></thead>"
    cells = "<td><code>--seed 3</code></td><td></td><td>text -- more</td>"
    page = hook(f"<table>{head}<tbody><tr>{cells}</tr></tbody></table>")
    assert '<td data-column="flag"><code><span class="flag">--seed</span> 3</code></td>' in page
    assert '<td data-column="default"></td><td data-column="a b">text -- more</td>' in page
    assert page.startswith("<table data-wide>")
    assert hook('<img alt="A" src="a.png">') == '<a href="a.png"><img alt="A" src="a.png"></a>'


def test_metrics_of_ours_are_on_their_page():
    on_page = set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert {*UPDATE_METRICS, *REPLAY_METRICS, *MISMATCH_METRICS, *SERVER_METRICS} <= on_page
