"""
Write the tables of knobs in docs/knobs.md and README.md from the help texts of `BAPOConfig`.

    python docs/tools/render_knobs.py
"""

import re
from collections.abc import Iterable
from pathlib import Path

from bapo_trl.bapo_config import own_fields


ROOT = Path(__file__).resolve().parents[2]
FIRST_KNOBS = (
    "positive_contribution_target",
    "ratio_lower_max",
    "ratio_upper_max",
    "search_scope",
    "replay_zero_advantage",
)
PAGES = {"docs/knobs.md": None, "README.md": FIRST_KNOBS}  # `None`: all of them


def knob_table(names: Iterable[str] | None) -> str:
    """Return a Markdown table of the named knobs, or of all: name, default and help text."""
    knobs = {f.name: f for f in own_fields()}
    rows = [
        f"| `{name}` | {'none' if knobs[name].default is None else f'`{knobs[name].default}`'} | "
        f"{knobs[name].metadata['help']} |"
        for name in (knobs if names is None else names)
    ]
    return "\n".join(["| `BAPOConfig` | default | |", "|---|---|---|", *rows])


def with_table(page: str, table: str, script: str = "render_knobs") -> str:
    """Return the page with the table between its two marks, of which the first names the script."""
    place = rf"(<!-- [^\n]*{script}[^\n]* -->\n).*?(<!-- end -->)"
    text, count = re.subn(place, lambda marks: f"{marks[1]}\n{table}\n\n{marks[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"A page has {count} places for the table of {script}: mark one, as docs/knobs.md does.")
    return text


def main():
    for name, knobs in PAGES.items():
        page = ROOT / name
        page.write_text(with_table(page.read_text(), knob_table(knobs)))
        print(f"Written: {name}")


if __name__ == "__main__":
    main()
