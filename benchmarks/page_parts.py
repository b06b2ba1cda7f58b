"""Parts of the results page that several sections share."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def with_quartiles(spread: dict, decimals: int, unit: str = "") -> str:
    """Return the median of a spread, and its quartiles in parentheses."""
    median, lower, upper = (
        f"{spread[key]:.{decimals}f}{unit}" for key in ("median", "lower_quartile", "upper_quartile")
    )
    return f"{median} ({lower} to {upper})"


def verdict(is_met: bool) -> str:
    """Return the word for a target that is met or missed."""
    return "yes" if is_met else "**no**"


def provenance(content: dict) -> str:
    """Return the sentences on how, when and where a result was made."""
    machine, threads = content["machine"], content["settings"].get("threads")
    place = f"{machine['device']} ({machine['cpu']}, {machine['cores']} cores, load average {machine['load_average']})"
    if threads is not None:
        place += f", {threads} CPU thread{'s' if threads > 1 else ''}"
    return (
        f"Command: `{content['command']}`. Measured on {content['date']} on {place}, with torch {machine['torch']}, "
        f"trl {machine['trl']}, transformers {machine['transformers']}, Python {machine['python']}."
    )
