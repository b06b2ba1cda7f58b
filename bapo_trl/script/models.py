"""
A model by name: a folder, an id on the Hub or one that needs no hub; whole, or a saved adapter on its base.

And the targets of a new adapter on it.
"""

import importlib.util
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel, Trainer
from transformers.integrations import get_reporting_integration_callbacks
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.training_args import OptimizerNames
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, cached_file, find_adapter_config_file
from trl import ModelConfig

from ..bapo_config import BAPOConfig
from ..errors import InputError
from ..plan.empty_model import empty_model
from ..report.runs import read_settings
from ..tasks import SMOLLM2, smollm2_path, sums_model_path
from ..upstream.trl_compat import create_model_from_path
from .arguments import EMBEDDED


PACKAGED_MODELS = {EMBEDDED: sums_model_path, SMOLLM2: smollm2_path}
"""What gives the folder of a model that no hub is needed for, by its name."""

_IF_ANY: Any = {
    f"_raise_exceptions_for_{each}": False for each in ("gated_repo", "missing_entries", "connection_errors")
}


def adapter_base(model: str | None, revision: str | None = None) -> str | None:
    """Return the base of a saved adapter, `None` if `model` is none; refuse one that does not say (`InputError`)."""
    path = None if model is None or model in PACKAGED_MODELS else _adapter_config(model, revision)
    if path is None:
        return None
    try:
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (AttributeError, OSError, ValueError) as error:
        raise InputError(
            f"`model_name_or_path` is '{model}', an adapter whose {path} is damaged: save it again, or take another. "
            f"What failed: {_first_line(error)}"
        ) from error
    if not base:
        raise InputError(
            f"`model_name_or_path` is '{model}', an adapter that does not name its base model: write it into "
            f"`base_model_name_or_path` of {path}."
        )
    return base


def base_revision(adapter: str, revision: str | None = None) -> str | None:
    """Return the revision of its base that a saved adapter was trained on, if it says one."""
    path = _adapter_config(adapter, revision)
    return None if path is None else json.loads(path.read_text(encoding="utf-8")).get("revision")


def load_adapter(
    adapter: str, base: str, is_trainable: bool = False, revision: str | None = None, **kwargs: Any
) -> Any:
    """Load a saved adapter on its base, which is loaded with `kwargs` as in `from_pretrained`."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise InputError(
            f"`model_name_or_path` is '{adapter}', an adapter, which needs the package peft: install it with "
            "`pip install 'bapo-trl[peft]'`."
        ) from error
    with _explaining_base(adapter, base):
        model = create_model_from_path(base, revision=base_revision(adapter, revision), **kwargs)
    return PeftModel.from_pretrained(model, adapter, is_trainable=is_trainable, revision=revision)


@contextmanager
def _explaining_base(adapter: str, base: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(
            f"`model_name_or_path` is '{adapter}', an adapter of '{base}', and that base cannot be loaded: put it "
            "there, or correct `base_model_name_or_path` in the adapter's adapter_config.json. What failed: "
            f"{_first_line(error)}"
        ) from error


def base_dtype(adapter: str, base: str, revision: str | None = None, trust_remote_code: bool = False) -> str:
    """Return the type in which the base of a saved adapter is stored; refuse one that is not there (`InputError`)."""
    with _explaining_base(adapter, base):
        of_adapter = base_revision(adapter, revision)
        config = AutoConfig.from_pretrained(base, revision=of_adapter, trust_remote_code=trust_remote_code)
    return _name_of_type(config.dtype)


def merged_dtype(adapter: str, asked: str | None) -> tuple[str, str]:
    """
    Return the type in which an adapter is merged, and why that one: the one asked for, else that of its training.

    If its run has not saved that, it is "auto", for the type in which the base is stored.
    """
    if asked not in (None, "auto"):
        return str(asked), "as `dtype` says"
    trained = read_settings(Path(adapter)).get("dtype") if Path(adapter).is_dir() else None
    return (str(trained), "as it was trained") if trained else ("auto", "as its base")


def _name_of_type(dtype: Any) -> str:
    return str(dtype or "float32").removeprefix("torch.")


def load_processing_class(
    model: str, base: str | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """
    Load the tokenizer, or the processor, as [`~trl.GRPOTrainer`] does; refuse a model without one (`InputError`).

    With a base, `model` is an adapter: its own, if it was saved with it, else that of the base.
    """
    settings: dict[str, Any] = {"padding_side": "left", "truncation_side": "left"}
    settings["trust_remote_code"] = trust_remote_code
    try:
        if base is not None and _has_file(model, TOKENIZER_CONFIG_FILE, revision):
            is_processor = any(_has_file(model, name, revision) for name in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME))
            own: Any = AutoProcessor if is_processor else AutoTokenizer  # which needs no configuration of a model
            return own.from_pretrained(model, revision=revision, **settings)
        of_base = base_revision(model, revision) if base else revision
        return AutoProcessor.from_pretrained(base or model, revision=of_base, **settings)
    except (OSError, ValueError) as error:
        raise InputError(
            f"`model_name_or_path` is '{model}', and the tokenizer of '{base or model}' cannot be loaded: give a "
            f"folder with a model and its tokenizer, or an id on the Hub. What failed: {_first_line(error)}"
        ) from error


def check_adapter(base: str | None, is_made: bool = False) -> None:
    """Refuse to merge (`InputError`) where the run neither starts from a saved adapter, with a base, nor makes one."""
    if base is None and not is_made:
        raise InputError(
            "`merge_adapter` is set, but there is no adapter: set `use_peft` to train one, or `model_name_or_path` to "
            "the folder of a saved one."
        )


def check_merged(folder: Path, overwrites: bool, starts: Iterable[str | None] = ()) -> None:
    """
    Refuse to merge into what is there already (`InputError`).

    An earlier folder may go, but no link and no file, and nothing that the run starts from: a model, or its base.
    """
    for start in starts:
        if start is not None and folder.exists() and Path(start).resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"`merge_adapter` is to save the folder {folder}, which holds the model that the run starts from "
                f"({start}), and would replace it: give another --output_dir."
            )
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"`merge_adapter` is to save the folder {folder}, which is a link or a file: remove it.")
    if folder.exists() and not overwrites:
        raise InputError(
            f"`merge_adapter` is to save the folder {folder}, which is there already: rename or remove it, or replace "
            "it with --overwrite_output_dir true."
        )


def save_merged(
    adapter: str,
    base: str,
    folder: Path,
    trust_remote_code: bool = False,
    revision: str | None = None,
    dtype: str = "auto",
) -> str:
    """
    Merge a saved adapter into its base, loaded in a type, and save the model with its tokenizer; return the type.

    It is loaded anew, on the CPU: a model that is being trained may be sharded or quantized. The folder is there when
    it is whole, and takes the place of an earlier one.
    """
    unset_hf_deepspeed_config()  # under ZeRO-3, the loading would be sharded over processes that do not take part
    settings: dict[str, Any] = {"dtype": dtype, "device_map": None, "trust_remote_code": trust_remote_code}
    model: PreTrainedModel = load_adapter(adapter, base, revision=revision, **settings).merge_and_unload()
    part = folder.with_name(folder.name + ".part")
    if part.exists():
        shutil.rmtree(part)
    model.save_pretrained(part)
    load_processing_class(adapter, base, revision, trust_remote_code).save_pretrained(part)
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)
    return _name_of_type(model.dtype)


def check_packages(model_args: ModelConfig) -> None:
    """Refuse flags of the model whose package is not installed (`InputError`)."""
    _check_package("use_peft", model_args.use_peft, "peft", "'bapo-trl[peft]'")
    _check_package("load_in_4bit", model_args.load_in_4bit, "bitsandbytes", "bitsandbytes")
    _check_package("load_in_8bit", model_args.load_in_8bit, "bitsandbytes", "bitsandbytes")


def check_vllm(training_args: BAPOConfig) -> None:
    """Refuse to sample with vLLM where it is not installed (`InputError`)."""
    _check_package("use_vllm", training_args.use_vllm, "vllm", "'bapo-trl[vllm]'")


def _check_package(flag: str, is_set: bool, module: str, requirement: str) -> None:
    if is_set and importlib.util.find_spec(module) is None:
        raise InputError(
            f"`{flag}` needs the package {module}, which is not installed: run `pip install {requirement}`, or "
            f"leave `{flag}` out."
        )


def check_trackers(report_to: Sequence[str]) -> None:
    """Refuse experiment trackers that are not known or not installed (`InputError`)."""
    for name in report_to:
        try:
            get_reporting_integration_callbacks([name])[0]()  # as the trainer does, once the model is loaded
        except (ImportError, RuntimeError, ValueError) as error:
            raise InputError(f"`report_to` is '{name}': {error} Or set `report_to` to none.") from error


def check_training_packages(training_args: BAPOConfig) -> None:
    """Refuse kernels and an optimizer whose package is not installed (`InputError`)."""
    _check_package("use_liger_kernel", training_args.use_liger_kernel, "liger_kernel", "liger-kernel")
    try:
        Trainer.get_optimizer_cls_and_kwargs(training_args)  # as the trainer does, once the model is loaded
    except (ImportError, ValueError) as error:
        if "pass a" not in str(error):  # model, which the trainer has
            reason = str(error).rstrip(".")
            name = OptimizerNames(training_args.optim).value
            raise InputError(f"`optim` is '{name}': {reason}. Or set it to adamw_torch.") from error


def settle_lora_targets(model: str, model_args: ModelConfig, trust_remote_code: bool = False) -> None:
    """
    Refuse LoRA targets that the model does not have (`InputError`): peft lets them pass where another one is there.

    A single name stays a name. TRL makes a pattern for whole module paths of it, which `q_proj` alone does not match.
    Nothing is done for a model whose structure cannot be built from its configuration alone.
    """
    if not model_args.use_peft or not model_args.lora_target_modules:
        return
    layers, targets = _layers(model, model_args.model_revision, trust_remote_code), model_args.lora_target_modules
    missing = missing_targets(targets, layers) if layers else []
    if missing and not missing_targets(missing, layers):  # a name that no path is
        model_args.lora_target_modules = missing
    elif missing:
        linear = sorted({name.rpartition(".")[2] for name, is_linear in layers.items() if is_linear})
        raise InputError(
            f"`lora_target_modules` has {', '.join(missing)}, which the model does not have: its linear layers are "
            f"{', '.join(linear)}; `all-linear` takes all but the head."
        )


def missing_targets(targets: str | Iterable[str], names: Iterable[str]) -> list[str]:
    """
    Return the targets that match none of the modules, as peft matches them.

    A text is a regular expression for whole names, or `all-linear`; others are the last parts of dotted names.
    """
    names = list(names)
    if isinstance(targets, str):
        found = targets == "all-linear" or any(re.fullmatch(targets, name) for name in names)
        return [] if found else [targets]
    return [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]


def _adapter_config(model: str, revision: str | None) -> Path | None:
    """Return the file that describes a saved adapter; `None` for what is none, or is not there."""
    if (Path(model) / "config.json").exists():
        return None
    try:
        path = find_adapter_config_file(model, revision=revision)
    except (OSError, ValueError):  # no such model: said when it is loaded
        return None
    return None if path is None else Path(path)


def _has_file(model: str, name: str, revision: str | None) -> bool:
    return cached_file(model, name, revision=revision, **_IF_ANY) is not None


def _layers(model: str, revision: str | None, trust_remote_code: bool) -> dict[str, bool]:
    """Return for each module of the model, by name, whether it is linear; nothing where that cannot be told."""
    try:
        built = empty_model(model, revision, trust_remote_code)
    except Exception:  # said where it is loaded
        return {}
    return {name: isinstance(module, nn.Linear) for name, module in built.named_modules()}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
