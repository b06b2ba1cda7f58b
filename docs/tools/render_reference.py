"""
Write the table of knobs in docs/settings.md from the help texts of `BAPOConfig`.

    python docs/tools/render_settings.py
"""

import re
from pathlib import Path

from bapo_trl.bapo_config import own_fields


ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "settings.md"


def settings_table() -> str:
    """Return a Markdown table of all knobs: name, default and help text."""
    rows = [
        f"| `{knob.name}` | {'none' if knob.default is None else f'`{knob.default}`'} | {knob.metadata['help']} |"
        for knob in own_fields()
    ]
    return "\n".join(["| `BAPOConfig` | default | |", "|---|---|---|", *rows])


def with_table(page: str, table: str) -> str:
    """Return the page with the table between its two marks, of which the first names this script."""
    place = r"(<!-- [^\n]*render_settings[^\n]* -->\n).*?(<!-- end -->)"
    text, count = re.subn(place, lambda marks: f"{marks[1]}\n{table}\n\n{marks[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"A page has {count} places for the table of knobs: mark one, as docs/settings.md does.")
    return text


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), settings_table()))
    print(f"Written: {PAGE.relative_to(ROOT)}")
