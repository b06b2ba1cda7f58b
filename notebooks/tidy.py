"""
Leave the notebooks as they are committed: without outputs and counts, with a badge that opens them in Colab.

    python notebooks/tidy.py

A badge leads to GitHub. `REPOSITORY` is the one place that says where there: set it before a release, and run this.
"""

import json
import re
from pathlib import Path


FOLDER = Path(__file__).resolve().parent
REPOSITORY = "OWNER/bapo_trl"  # no public one yet
COLAB = "https://colab.research.google.com"
BADGE = re.compile(r"\[!\[Open In Colab\].*\n?")


def badge(name: str) -> str:
    """Return the badge of a notebook, a line of Markdown."""
    address = f"{COLAB}/github/{REPOSITORY}/blob/main/notebooks/{name}"
    return f"[![Open In Colab]({COLAB}/assets/colab-badge.svg)]({address})\n"


def tidy(text: str, name: str) -> str:
    """Return the text of a notebook file as it is to be committed."""
    notebook = json.loads(text)
    first = notebook["cells"][0]
    lines = "".join(first["source"])
    first["source"] = (badge(name) + BADGE.sub("", lines, count=1)).splitlines(keepends=True)
    for number, cell in enumerate(notebook["cells"], start=1):
        cell["id"] = f"cell-{number:02d}"
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key == "tags"}
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main():
    for path in sorted(FOLDER.glob("*.ipynb")):
        text = path.read_text()
        tidied = tidy(text, path.name)
        if tidied != text:
            path.write_text(tidied)
            print(f"Tidied {path.relative_to(FOLDER.parent)}")


if __name__ == "__main__":
    main()
