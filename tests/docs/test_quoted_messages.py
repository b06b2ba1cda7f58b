"""Messages that docs/troubleshooting.md quotes: the package, or TRL, still has them."""

import re
from functools import cache
from pathlib import Path

import pytest
import trl

from tests.docs.test_advice import messages
from tests.helpers.commands import ROOT


PAGE = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## By error message\n")[2]
QUOTED = re.findall(r"\*\*`(.+?)`\*\*( \(TRL\))?", PAGE)  # `...` stands for what a message fills in
TRL_FILES = ("trainer/grpo_config.py", "generation/vllm_client.py")


@cache
def messages_of(is_trl: bool) -> list[str]:
    """Return the messages of TRL or of the package."""
    return messages([Path(trl.__file__).parent / name for name in TRL_FILES] if is_trl else None)


def is_quoted_from(quoted: str, texts: list[str]) -> bool:
    """Return whether one of the texts holds all parts of a quotation, in their order."""
    pattern = re.compile(".*".join(map(re.escape, quoted.split("..."))), re.DOTALL)
    return any(pattern.search(text) for text in texts)


@pytest.mark.parametrize(("quoted", "mark"), QUOTED)
def test_quoted_messages_exist(quoted, mark):
    assert is_quoted_from(quoted, messages_of(bool(mark)))


def test_the_page_quotes_messages_in_the_form_that_is_checked():
    assert len(QUOTED) > 15
    assert not is_quoted_from("no message ... says this", messages_of(False))
    paragraphs = [line for line in PAGE.splitlines() if line.startswith("**")]
    assert sum(line.count("**`") for line in paragraphs) == len(QUOTED)
