"""What an earlier run left in the output folder: kept, unless the flags let it go."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from accelerate.utils import gather_object
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..bapo_config import BAPOConfig
from ..checkpoints.files import checkpoint_names, find_defect, goes_on_from
from ..errors import InputError
from ..report.runs import SETTINGS_FILE
from .arguments import EMBEDDED, BAPOScriptArguments
from .models import check_merged
from .recipes import DEMO_FOLDER


_MODEL = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?|adapter_config\.json"
)
# Without the weights, these are no sign of a run that anybody trained
_BESIDE = (
    TRAINER_STATE_NAME, SETTINGS_FILE, "report.png", "all_results.json", "eval_results.json",
    "config.json", "generation_config.json", "chat_template.jinja",
)  # fmt: skip


def check_start(
    script_args: BAPOScriptArguments, training_args: BAPOConfig, model: str | None, base: str | None
) -> None:
    """Refuse, before anything is loaded, a run that cannot use its checkpoint, or would lose an earlier one's work."""
    resume, run_dir = training_args.resume_from_checkpoint, Path(training_args.output_dir).absolute()
    above = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise InputError(
            f"`output_dir` is {training_args.output_dir}, but {above} is no folder that can be written to: give "
            "another --output_dir."
        )
    if not training_args.do_train and resume_argument(resume) is not None:
        raise InputError(
            f"`resume_from_checkpoint` is '{resume}', but `do_train` is false and evaluation is of "
            "`model_name_or_path`: set that to the checkpoint's folder."
        )
    if goes_on(training_args):
        return
    if script_args.merge_adapter:
        check_merged(merged_folder(training_args), script_args.overwrite_output_dir, [model, base])
    if training_args.do_train:
        # The demo's own folder is nobody's work
        is_demo = script_args.dataset_name == EMBEDDED and training_args.output_dir == DEMO_FOLDER
        check_output_dir(training_args.output_dir, script_args.overwrite_output_dir or is_demo, model)


def goes_on(training_args: BAPOConfig) -> bool:
    """Whether the run goes on from a checkpoint of its own output folder."""
    resume, run_dir = resume_argument(training_args.resume_from_checkpoint), Path(training_args.output_dir).resolve()
    return resume is True or (isinstance(resume, str) and Path(resume).resolve().parent == run_dir)


def resume_argument(value: str | None) -> str | bool | None:
    """Return what to resume from: the newest whole checkpoint for "true", none for "false", else a folder."""
    return {"true": True, "false": None}.get(value.lower(), value) if value is not None else None


def check_resume(folder: str, training_args: BAPOConfig) -> bool:
    """Return whether a checkpoint leaves updates to make; refuse that of a run that is over, with its model saved."""
    state = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME))
    done, last = state.global_step, training_args.max_steps
    if not 0 < last <= done:
        return True
    if done > last or any(gather_object([_is_saved(folder, done, training_args.output_dir)])):
        raise InputError(
            f"`resume_from_checkpoint` is {folder}, at update {done}, and `max_steps` is {last}: nothing is left to "
            f"train. Raise `max_steps`, or evaluate it with --do_train false --model_name_or_path {folder}."
        )
    return False


def _is_saved(folder: str, update: int, output_dir: str) -> bool:
    """Whether the model that a run had at its end is saved: its state, which is saved after it, goes on from there."""
    if find_defect(output_dir) is not None:
        return False
    saved = TrainerState.load_from_json(str(Path(output_dir) / TRAINER_STATE_NAME))
    return saved.global_step == update and goes_on_from(output_dir, folder)


def merged_folder(training_args: BAPOConfig) -> Path:
    """Return where a merged model goes."""
    return Path(training_args.output_dir) / "merged"


def check_output_dir(output_dir: str | Path, overwrites: bool, model: str | None = None) -> None:
    """
    Refuse an output folder with checkpoints or a model, which a run from the start would delete (`InputError`).

    They may go if `overwrites` is set, but for the model that the run starts from.
    """
    run_dir = Path(output_dir)
    found = _find_trained(run_dir)
    if not found:
        return
    names = ", ".join(path.name for path in found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    start = None if model is None else Path(model).resolve()
    going = [path.resolve() for path in found]
    if start is not None and (start == run_dir.resolve() or any(start.is_relative_to(path) for path in going)):
        raise InputError(
            f"`output_dir` is {run_dir}, which holds the model that the run starts from ({model}), and would lose it: "
            "give another --output_dir."
        )
    if not overwrites:
        raise InputError(
            f"`output_dir` is {run_dir}, which holds {names} of an earlier run: go on from its checkpoints with "
            "--resume_from_checkpoint true, give another --output_dir, or delete them with --overwrite_output_dir "
            "true."
        )


def remove_earlier_run(output_dir: str | Path) -> None:
    """Delete the checkpoints and the model of an earlier run, with its state, settings, report and evaluation."""
    run_dir = Path(output_dir)
    found = _find_trained(run_dir)
    for path in [*found, *(run_dir / name for name in _BESIDE), *_completions(run_dir)] if found else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _find_trained(run_dir: Path) -> list[Path]:
    """Return the checkpoints and the files of the model."""
    if not run_dir.is_dir():
        return []
    checkpoints = [run_dir / name for name in checkpoint_names(str(run_dir))]
    return [*checkpoints, *sorted(path for path in run_dir.iterdir() if _MODEL.fullmatch(path.name))]


def _completions(run_dir: Path) -> Iterator[Path]:
    yield from run_dir.glob("completions/completions_*.parquet")  # TRL's, with `log_completions`
    yield from run_dir.glob("eval_completions*.jsonl")
