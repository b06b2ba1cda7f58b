"""A hook of mkdocs: pages of the notebooks, with the outputs that are stored in them."""

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
    """
    Turn links between notebooks and pages, which lead to files of the repository, into links between pages. The site
    leaves out the reports, and names their files.
    """
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./(benchmarks/reports/\w+\.md)[#\w-]*\)", r"\1 (`\2`)", markdown)
    markdown = re.sub(r"\]\(([\w./]+)\.ipynb\)", r"](\1.md)", markdown)
    return markdown.replace("](../docs/", "](../").replace("](../notebooks/", "](notebooks/")
