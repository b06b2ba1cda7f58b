"""The fenced blocks of README, CONTRIBUTING, docs/ and the reports, and the commands in them.

A block that cannot run here says why, in an HTML comment right above it: `<!-- not run: needs vLLM -->`. No reader of
the page sees it.
"""

import re
import shlex
from dataclasses import dataclass

from tests.helpers.commands import ROOT


PAGES = sorted(path for folder in (".", "docs", "benchmarks/reports") for path in (ROOT / folder).glob("*.md"))
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n\n?)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
VARIABLE = re.compile(r"\w+=")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str  # its path from the repository's root
    line: int  # of the opening fence, from 1
    language: str
    text: str
    reason: str | None  # why it is not run

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def all_blocks() -> list[Block]:
    """Return the fenced blocks of all pages."""
    blocks = []
    for path in PAGES:
        page, name = path.read_text(), str(path.relative_to(ROOT))
        for match in FENCE.finditer(page):
            line = page[: match.start("language")].count("\n") + 1
            blocks.append(Block(name, line, match["language"], match["text"], match["reason"]))
    return blocks


def commands_of(text: str) -> list[list[str]]:
    """
    Return the words of each command of a bash block, without comments, variables before a command and a final `&`.

    >>> commands_of("# Both\\nA=1 make demo &  # now\\npython x.py \\\\\\n    --flag 'a b'\\n")
    [['make', 'demo'], ['python', 'x.py', '--flag', 'a b']]
    """
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and VARIABLE.match(words[0]):
            del words[0]
        if words:
            commands.append(words[:-1] if words[-1] == "&" else words)
    return commands
