"""A hook of mkdocs: pages of the notebooks with their stored outputs, and links out of the site."""

import re
from pathlib import Path

import nbformat
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter


NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def on_files(files, config):
    """Add a page for each notebook, and its figures."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        text, resources = MarkdownExporter().from_notebook_node(notebook, {"unique_key": path.stem})
        for name, content in {f"{path.stem}.md": text, **resources["outputs"]}.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown, **kwargs):
    """Turn links to files of the repository into links between pages, or into paths if the site lacks the file."""
    markdown = re.sub(r"\]\(([\w./]+)\.ipynb\)", r"](\1.md)", markdown)
    markdown = markdown.replace("](../docs/", "](../").replace("](../notebooks/", "](notebooks/")
    outside = r"\[([^\]\n]+(?:\n[^\]\n]+)*)\]\(\.\./((?:benchmarks|compat)/[\w./]+|[A-Z]+\.md)(?:#[\w-]*)?\)"
    return re.sub(outside, r"\1 (`\2`)", markdown)
