"""A hook of mkdocs: pages of the notebooks with their stored outputs, links out of the site, and tables for phones."""

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


def on_page_content(html, **kwargs):
    """Name the column of each cell, let flags break at underscores only, and link each picture to its file."""
    html = re.sub(r"<table>.*?</table>", _with_columns, html, flags=re.DOTALL)
    html = re.sub(r"<code[^>]*>.*?</code>", _with_flags, html, flags=re.DOTALL)
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)


def _with_columns(table):
    rows = re.split(r"(?=<tr)", table[0])
    names = [re.sub(r"<.*?>", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", rows[1], flags=re.DOTALL)]
    for number, row in enumerate(rows[2:], 2):
        cells = re.split(r"(?=<td)", row)
        labelled = [
            f'<td data-column="{name}"{cell.removeprefix("<td")}' for name, cell in zip(names, cells[1:], strict=True)
        ]
        rows[number] = cells[0] + "".join(labelled)
    is_wide = len(names) > 2
    text = re.sub(r"(?<=<code>)[^<]*", lambda code: code[0].replace("_", "_<wbr>"), "".join(rows))
    return text.replace("<table>", "<table data-wide>" if is_wide else "<table>", 1)


def _with_flags(code):
    return re.sub(r"(?<=[>\s])--\w[\w-]*", r'<span class="flag">\g<0></span>', code[0])
