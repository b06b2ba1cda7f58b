"""What an earlier run left in the output folder: kept, unless the flags let it go."""

import re
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ...bapo_config import BAPOConfig
from ...checkpoints.files import checkpoint_names, find_defect
from ...errors import InputError
from ...report.runs import SETTINGS_FILE
from ..models import Parts, merged_folder
from ..settings.parser import Settings


_MODEL = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|adapter_config\.json")
# Without the weights, these are no sign of a run that anybody trained
_RUN_FILES = (
    TRAINER_STATE_NAME, SETTINGS_FILE, "report.png", "all_results.json", "eval_results.json",
    "config.json", "generation_config.json", "chat_template.jinja",
    "completions/completions_*.parquet",  # TRL's, with `log_completions`
    "eval_completions*.jsonl",
)  # fmt: skip


def check_start(settings: Settings, parts: Parts) -> None:
    """
    Reject, before anything is loaded, a run that would ignore its checkpoint, would lose an earlier one's work, or has
    no adapter to merge (`InputError`).
    """
    script_args, training_args, model_args, _ = settings
    trains, resume, run_dir = training_args.do_train, training_args.resume_from_checkpoint, training_args.output_dir
    if not trains and resume is not None:
        raise InputError(
            f"`resume_from_checkpoint` is '{resume}', but `do_train` is false and evaluation is of "
            "`model_name_or_path`: set that to the checkpoint's folder."
        )
    if script_args.merge_adapter and len(parts) < 2 and not (trains and model_args.use_peft):
        raise InputError(
            "`merge_adapter` is set, but there is no adapter: set `use_peft` to train one, or `model_name_or_path` to "
            "the folder of a saved one."
        )
    merged = merged_folder(training_args)
    replaced = [merged] if script_args.merge_adapter and merged.exists() else []
    if trains and not continues(training_args):
        replaced += _find_trained(Path(run_dir))
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in replaced]
    for start, _ in parts:
        if Path(start).resolve() in folders:
            raise InputError(
                f"`output_dir` is {run_dir}, which holds the model that the run starts from ({start}), and would lose "
                "it: give another --output_dir."
            )
    if replaced and not script_args.overwrite_output_dir:
        raise InputError(
            f"`output_dir` is {run_dir}, which holds {', '.join(path.name for path in replaced)} of an earlier run: "
            "resume from its checkpoints with --resume_from_checkpoint true, give another --output_dir, or delete "
            "them with --overwrite_output_dir true."
        )


def continues(training_args: BAPOConfig) -> bool:
    """Whether the run resumes from a checkpoint of its own output folder."""
    resume: Any = training_args.resume_from_checkpoint  # `True` for the newest
    run_dir = Path(training_args.output_dir).resolve()
    return resume is True or (isinstance(resume, str) and Path(resume).resolve().parent == run_dir)


def check_resume(folder: str, training_args: BAPOConfig) -> None:
    """Reject a checkpoint beyond the last update (`InputError`)."""
    done = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME)).global_step
    if 0 < training_args.max_steps < done:
        raise InputError(
            f"`resume_from_checkpoint` is {folder}, at update {done}, and `max_steps` is {training_args.max_steps}: "
            f"raise `max_steps`, or evaluate it with --do_train false --model_name_or_path {folder}."
        )


def check_checkpoint(training_args: BAPOConfig) -> None:
    """Reject to resume where no checkpoint is complete, or the newest is beyond the last update (`InputError`)."""
    resume: Any = training_args.resume_from_checkpoint  # `True` for the newest
    run_dir = training_args.output_dir
    if resume is None:
        return
    folders = [str(resume)]
    if resume is True:
        folders = [f"{run_dir}/{name}" for name in reversed(checkpoint_names(run_dir))]
    defects = {folder: find_defect(folder) for folder in folders}
    complete = next((folder for folder, defect in defects.items() if defect is None), None)
    if complete is None:
        found = ", ".join(f"{folder}: {defect}" for folder, defect in defects.items()) or f"none in {run_dir}"
        raise InputError(
            f"`resume_from_checkpoint` is {training_args.resume_from_checkpoint}, but there is no complete checkpoint "
            f"({found}): name another one, or start without it."
        )
    check_resume(complete, training_args)


def remove_earlier_run(run_dir: Path) -> None:
    """Delete the checkpoints, the model and the evaluation of an earlier run, with its state, settings and report."""
    found = _find_trained(run_dir)
    beside = [path for pattern in _RUN_FILES for path in run_dir.glob(pattern)] if found else []
    for path in dict.fromkeys([*found, *beside]):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _find_trained(run_dir: Path) -> list[Path]:
    """Return the checkpoints, the files of the model, and the completions of an evaluation."""
    if not run_dir.is_dir():
        return []
    checkpoints = [run_dir / name for name in checkpoint_names(str(run_dir))]
    files = sorted(path for path in run_dir.iterdir() if _MODEL.fullmatch(path.name))
    return [*checkpoints, *files, *run_dir.glob("eval_completions.jsonl")]
