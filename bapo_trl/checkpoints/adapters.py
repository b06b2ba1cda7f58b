"""Compare the settings of the trained adapter with its settings in the checkpoint that a run resumes from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from transformers.utils import ADAPTER_CONFIG_NAME

from ..errors import InputError


# They change neither what an adapter computes nor, but for dropout, how it is trained
_MAY_DIFFER = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type",
)  # fmt: skip
_INITIALIZED_ALIKE = (None, True, False, "gaussian", "orthogonal")  # others also change the base model's weights


def check_adapters(trainer: Any, checkpoint: str | None) -> None:
    """
    Raise an `InputError` if an adapter would compute something else with the weights of the checkpoint.

    peft loads the weights into the adapter of this run, whose scaling, such as `lora_alpha`, is in no weight.
    """
    if checkpoint is None:
        return
    for path, config in _adapters(trainer.model, checkpoint):
        if path.is_file():
            _compare(config, path)
        elif not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            raise InputError(
                f"The model has an adapter, but there is no {path}: resume with the model of the run that saved the "
                "checkpoint, without `peft_config`, or start a new run."
            )


def save_adapter_configs(model: Any, checkpoint: str) -> None:
    """Write the settings of adapters that the checkpoint lacks: transformers writes none beside shards of FSDP."""
    for path, config in _adapters(model, checkpoint):
        if not path.is_file():
            config.save_pretrained(str(path.parent))


def _adapters(model: Any, checkpoint: str) -> Iterator[tuple[Path, Any]]:
    """Return the path in a checkpoint, and the configuration in the model, of each active adapter."""
    for name in model.active_adapters if is_peft_model(model) else ():
        folder = Path(checkpoint) if name == "default" else Path(checkpoint, name)
        yield folder / ADAPTER_CONFIG_NAME, model.peft_config[name]


def _compare(config: Any, path: Path) -> None:
    saved, here = (_settings(each) for each in (type(config).from_pretrained(str(path.parent)), config))
    different = [name for name in here | saved if here.get(name) != saved.get(name)]
    if different:
        values = (f"`{name}` is {here.get(name)!r}, but it was {saved.get(name)!r}" for name in different)
        raise InputError(
            f"The adapter differs from the one in {path}: {'; '.join(values)}. The resumed run would continue with "
            f"another policy than it had. Set {', '.join(f'`{name}`' for name in different)} of the adapter back, or "
            "start a new run."
        )


def _settings(config: Any) -> dict[str, Any]:
    """Return the settings that decide what an adapter computes, in a form that can be compared."""
    settings = {}
    for name, value in config.to_dict().items():
        if name in _MAY_DIFFER or name.endswith("dropout"):
            continue
        if name.startswith("init_") and value in _INITIALIZED_ALIKE:
            continue
        if isinstance(value, (list, set, tuple)):  # the order of names has no effect, that of layers has
            are_names = all(isinstance(each, str) for each in value)
            value = json.loads(json.dumps(sorted(value) if are_names else list(value)))  # a file has no tuples
        settings[name] = value
    return settings
