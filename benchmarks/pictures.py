"""The look that pictures of the documentation share."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def style_panel(axes: Axes, x: str, y: str, title: str, pad: float | None = None) -> None:
    """Label the axes, and leave out the frame on top and right."""
    axes.tick_params(labelsize=12)
    axes.set_xlabel(x, fontsize=13)
    axes.set_ylabel(y, fontsize=13)
    axes.set_title(title, fontsize=14, loc="left", pad=pad)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def save_panel(figure: Figure, axes: Axes, path: Path, x: str, y: str, title: str) -> None:
    """Style the only axes of a figure, and write the picture."""
    style_panel(axes, x, y, title)
    figure.savefig(path, dpi=150, facecolor="white")
