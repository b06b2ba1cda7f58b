"""The training report: one figure of how reward, entropy, bounds and positive share went over the updates."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path


def report_line(log_history: Sequence[Mapping[str, float]], path: str | Path) -> str:
    """Draw the report if there is something to draw, and something to draw it with; return a line that says so."""
    if not importlib.util.find_spec("matplotlib"):
        return "Report: not drawn, matplotlib is not installed (pip install '.[plots]')"
    if not any(_is_update(log) for log in log_history if "train_runtime" not in log):  # TRL's summary at the end
        return "Report: not drawn, no update was logged (`logging_steps` and `logging_strategy` say which are)"
    return f"Report: {save_report(log_history, path)}"


def save_report(log_history: Sequence[Mapping[str, float]], path: str | Path) -> Path:
    """
    Draw the training report and save it as an image.

    Args:
        log_history (sequence of mappings):
            Logs of the run, as in `trainer.state.log_history`. Those of an evaluation are left out; missing values
            leave a gap.
        path (`str` or `Path`):
            Image file to write.

    Returns:
        `Path` of the image.

    Raises:
        ImportError: If matplotlib is not installed (extra `plots`).
        ValueError: If no log is that of an update.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    logs = [log for log in log_history if _is_update(log)]
    if not logs:
        raise ValueError("`log_history` has no update with `bapo/positive_share`: nothing to draw.")

    def series(name: str) -> tuple[list[float], list[float]]:
        points = [(log["step"], log[name]) for log in logs if log.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    figure, ((reward, entropy), (bounds, share)) = plt.subplots(
        2, 2, figsize=(10, 6), sharex=True, layout="constrained"
    )
    reward.plot(*series("reward"), color="tab:blue")
    reward.set_title("Mean reward of the generated samples")
    entropy.plot(*series("entropy"), color="tab:purple")
    entropy.set_title("Entropy of the policy (nats per token)")
    has_bounds, has_weight = "bapo/clip_low" in logs[0], any(log.get("bapo/negative_weight", 1) < 1 for log in logs)
    if has_bounds:
        bounds.plot(*series("bapo/clip_high"), color="tab:red", label="upper bound")
        bounds.plot(*series("bapo/clip_low"), color="tab:green", label="lower bound")
        bounds.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    if has_weight or not has_bounds:
        bounds.plot(*series("bapo/negative_weight"), color="tab:brown", label="weight of negatives")
    names = ["Clip bounds (importance ratio)"] * has_bounds + ["weight of negatives"] * (has_weight or not has_bounds)
    bounds.set_title(", ".join(names).capitalize())
    share.plot(*series("bapo/positive_share"), color="tab:orange", label="as trained")
    share.plot(*series("bapo/positive_share_initial"), color="grey", linewidth=0.8, label="without search and weight")
    share.set_ylim(0, 1)
    share.set_title("Share of positive-advantage tokens in the loss")
    for axes in (bounds, share):
        axes.set_xlabel("optimizer update")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best", fontsize="small")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _is_update(log: Mapping[str, float]) -> bool:
    return "bapo/positive_share" in log
