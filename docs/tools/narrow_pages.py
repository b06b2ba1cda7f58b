"""A hook of mkdocs: tables, commands and pictures that can be read on a phone."""

import re


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
