"""The model card of a run: model, data, loss, settings, and how to load the result."""

import re
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from huggingface_hub import ModelCard

from .trl_compat import get_config_model_id


PAPER = {
    "title": "BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy Optimization with "
    "Adaptive Clipping",
    "id": "2510.18927",
    # docstyle-ignore
    "citation": textwrap.dedent("""\
        @article{xi2025bapo,
            title        = {{BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy
                            Optimization with Adaptive Clipping}},
            author       = {Zhiheng Xi and Xin Guo and Yang Nan and Enyu Zhou and Junrui Shen and Wenxiang Chen and
                            Jiaqi Liu and Jixuan Huang and Zhihao Zhang and Honglin Guo and Xun Deng and Zhikai Lei
                            and Miao Zheng and Guoteng Wang and Shuo Zhang and Peng Sun and Rui Zheng and Hang Yan
                            and Tao Gui and Qi Zhang and Xuanjing Huang},
            year         = 2025,
            eprint       = {arXiv:2510.18927},
        }"""),
}
"""The paper, as TRL's model cards cite it."""

_SETTINGS = (
    "learning_rate", "beta", "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps",
    "steps_per_generation", "num_iterations", "temperature", "max_completion_length", "seed",
)  # fmt: skip
_OF_BOUNDS = (
    "importance_sampling_level", "ratio_lower_start", "ratio_lower_max", "ratio_upper_start", "ratio_upper_max",
)  # fmt: skip
_OF_SEARCH = ("positive_contribution_target", "contribution_measure", "search_order", "search_scope")


def rewrite_card(trainer: Any, model_name: str | None, dataset_name: str | None) -> None:
    """
    Replace the model card that TRL has just written into `output_dir`.

    TRL's card does not name a local model or its data, and gives every loss the name of the trainer. Its example
    cannot load a local model, nor an adapter with its own tokenizer.

    Args:
        trainer ([`BAPOTrainer`]): Trainer, on its main process.
        model_name (`str`, *optional*): Title; by default the name of `output_dir`.
        dataset_name (`str`, *optional*): Name of the data; by default `trainer.dataset_title` or the dataset's name.
    """
    args, path = trainer.args, Path(trainer.args.output_dir, "README.md")
    card = ModelCard.load(path)
    links = [line for line in card.text.splitlines() if line.startswith("[<img")]  # of experiment trackers
    vars(card.data).pop("licence", None)  # a placeholder of TRL's
    model, data = get_config_model_id(trainer.model.config), dataset_name or _data_of(trainer)
    start = "A LoRA adapter of" if is_peft_model(trainer.model) else "Trained from"
    if is_peft_model(trainer.model):
        card.data.library_name = "peft"
    if data is not None and _is_on_hub(data):
        card.data.datasets = [data]
    count = f"{len(trainer.train_dataset)} prompts" if isinstance(trainer.train_dataset, Dataset) else "prompts"
    described = count if data is None else f"{_link(data, 'datasets/')} ({count})"
    parts = [
        f"# {model_name or path.parent.name}",
        f"{start} {_link(model, '') or 'a model without a name'}, with {_method(args)}, on {described}. Made with "
        f"[TRL](https://github.com/huggingface/trl) {version('trl')} and `bapo_trl`.",
        "## How to use it",
        _example(trainer),
        "## Training",
        *links,
        _settings(trainer),
    ]
    if args.has_clip_bounds and not args.bound_grid.is_fixed:
        parts += ["## Citation", f"```bibtex\n{PAPER['citation'].strip()}\n```"]
    ModelCard(f"---\n{card.data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n").save(path)


def _data_of(trainer: Any) -> str | None:
    """Return the name of the data, if it has one. For a local file, the dataset's name is only its format."""
    info = getattr(trainer.train_dataset, "info", None)
    named = getattr(info, "dataset_name", None)
    return trainer.dataset_title or (None if named == getattr(info, "builder_name", None) else named)


def _is_on_hub(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def _link(name: str, kind: str) -> str:
    """Return a name in Markdown, linked if it is on the Hub; for a path, only its last part."""
    if _is_on_hub(name):
        return f"[{name}](https://huggingface.co/{kind}{name})"
    return f"`{Path(name).name}`" if Path(name).exists() else name


def _method(args: Any) -> str:
    if not args.has_clip_bounds:
        method = f"the loss {args.loss_type.upper()}"
    elif args.bound_grid.is_fixed:
        method = f"the loss `{args.loss_type}` and fixed clip bounds"
    else:
        method = "BAPO, which searches the clip bounds of each update"
    return method + (", and a weight on tokens with a negative advantage" if args.negative_weight_min < 1 else "")


def _settings(trainer: Any) -> str:
    """Return a table of the loss with the settings that it uses, and of the settings of generation and training."""
    args = trainer.args
    names = ["loss_type", *(name for name in vars(args) if name.startswith(f"{args.loss_type}_"))]
    names += ["epsilon_high"] if args.has_ratio_cap else []
    names += _OF_BOUNDS if args.has_clip_bounds else ()
    names += ["delta"] if args.has_clip_bounds and args.delta is not None else []
    names += ["negative_weight_min"] if args.negative_weight_min < 1 else []
    names += _OF_SEARCH if args.is_adaptive else ()
    rows = [f"| `{name}` | {getattr(args, name)} |" for name in (*names, *_SETTINGS)]
    return "\n".join(["| setting | value |", "|---|---|", f"| updates | {trainer.state.global_step} |", *rows])


def _example(trainer: Any) -> str:
    """Return a Python code block that loads the model and samples a completion."""
    where = repr(trainer.hub_model_id or trainer.args.output_dir)
    # The base model of an adapter may be stored in another dtype
    dtype = f', dtype="{trainer.model.config.dtype or "float32"}"'.replace("torch.", "")
    question = "What is 3 + 4?"
    is_chat = getattr(trainer.processing_class, "chat_template", None) is not None
    prompt = [{"role": "user", "content": question}] if is_chat else question
    limit = trainer.args.max_completion_length or 256
    needs = "The adapter needs `pip install peft`, and its base.\n\n" if is_peft_model(trainer.model) else ""
    return (
        f"{needs}```python\nfrom transformers import pipeline\n\n"
        f'generate = pipeline("text-generation", model={where}, tokenizer={where}{dtype if needs else ""})\n'
        f"(output,) = generate({prompt!r}, max_new_tokens={limit}, return_full_text=False)\n"
        'print(output["generated_text"])\n```'
    )
