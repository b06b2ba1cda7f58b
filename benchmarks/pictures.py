"""The look that single-panel pictures of the documentation share."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def save_panel(figure: Figure, axes: Axes, path: Path, x: str, y: str, title: str, pad: float | None = None) -> None:
    """Label the axes, leave out the frame on top and right, and write the picture."""
    axes.tick_params(labelsize=12)
    axes.set_xlabel(x, fontsize=13)
    axes.set_ylabel(y, fontsize=13)
    axes.set_title(title, fontsize=14, loc="left", pad=pad)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, facecolor="white")
