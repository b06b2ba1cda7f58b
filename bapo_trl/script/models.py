"""A model by name: a folder, an id on the Hub or one that needs no hub; whole, or a saved adapter on its base."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import find_adapter_config_file

from ..errors import InputError
from ..tasks import SMOLLM2, smollm2_path, warm_start_path
from ..upstream.trl_compat import create_model_from_path
from .arguments import EMBEDDED


PACKAGED_MODELS = {EMBEDDED: warm_start_path, SMOLLM2: smollm2_path}
"""What gives the folder of a model that no hub is needed for, by its name."""


def adapter_base(model: str, revision: str | None = None) -> str | None:
    """
    Return the base model of a saved adapter, or `None` if `model` is no adapter.

    Args:
        model (`str`): A folder or an id on the Hub.
        revision (`str`, *optional*): Revision of an id.

    Raises:
        ValueError: If the adapter does not say what its base is.
    """
    folder = Path(model)
    if (folder / "config.json").exists():
        return None
    try:
        path = find_adapter_config_file(model, revision=revision)
    except (OSError, ValueError):  # no such model: said when it is loaded
        return None
    if path is None:
        return None
    try:
        base = json.loads(Path(path).read_text(encoding="utf-8")).get("base_model_name_or_path")
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


def load_adapter(
    adapter: str, base: str, is_trainable: bool = False, revision: str | None = None, **kwargs: Any
) -> Any:
    """
    Load a saved adapter on its base.

    Args:
        adapter (`str`): A folder or an id on the Hub.
        base (`str`): Its base, as [`adapter_base`] returns it.
        is_trainable (`bool`, *optional*, defaults to `False`): Whether the adapter's weights are to be trained.
        revision (`str`, *optional*): Revision of the adapter.
        **kwargs:
            How to load the base, as in `from_pretrained`.

    Returns:
        [`~peft.PeftModel`]: The base with the adapter.

    Raises:
        ValueError: If peft is not installed, or the base cannot be had.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise InputError(
            f"`model_name_or_path` is '{adapter}', an adapter, which needs the package peft: install it with "
            "`pip install 'bapo-trl[peft]'`."
        ) from error
    try:
        model = create_model_from_path(base, **kwargs)
    except (OSError, ValueError) as error:
        raise InputError(
            f"`model_name_or_path` is '{adapter}', an adapter of '{base}', and that base cannot be loaded: put it "
            "there, or correct `base_model_name_or_path` in the adapter's adapter_config.json. What failed: "
            f"{_first_line(error)}"
        ) from error
    return PeftModel.from_pretrained(model, adapter, is_trainable=is_trainable, revision=revision)


def load_processing_class(
    model: str, base: str | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """
    Load the tokenizer, or the processor, as [`~trl.GRPOTrainer`] does: that of an adapter if it was saved with it,
    else that of its base.

    Args:
        model (`str`): A folder or an id on the Hub.
        base (`str`, *optional*): The base, if `model` is an adapter.
        revision (`str`, *optional*): Revision of `model`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code in the model's folder may run.

    Raises:
        ValueError: If there is none.
    """
    settings: dict[str, Any] = {"padding_side": "left", "truncation_side": "left"}
    settings["trust_remote_code"] = trust_remote_code
    if base is not None and (Path(model) / "tokenizer_config.json").exists():
        return AutoTokenizer.from_pretrained(model, **settings)
    try:
        return AutoProcessor.from_pretrained(base or model, revision=None if base else revision, **settings)
    except (OSError, ValueError) as error:
        raise InputError(
            f"`model_name_or_path` is '{model}', and the tokenizer of '{base or model}' cannot be loaded: give a "
            f"folder with a model and its tokenizer, or an id on the Hub. What failed: {_first_line(error)}"
        ) from error


def check_adapter(base: str | None, is_made: bool = False) -> None:
    """
    Refuse to merge where there is no adapter.

    Args:
        base (`str`, *optional*): Base of the saved adapter, if the run starts from one.
        is_made (`bool`, *optional*, defaults to `False`): Whether the run makes one.
    """
    if base is None and not is_made:
        raise InputError(
            "`merge_adapter` is set, but there is no adapter: set `use_peft` to train one, or `model_name_or_path` to "
            "the folder of a saved one."
        )


def check_merged(folder: Path, overwrites: bool) -> None:
    """
    Refuse to merge into what is there already.

    Args:
        folder (`Path`): Where the merged model is to be saved.
        overwrites (`bool`): Whether an earlier folder may go. A link or a file is refused all the same.

    Raises:
        InputError: With the fix.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"`merge_adapter` is to save the folder {folder}, which is a link or a file: remove it.")
    if folder.exists() and not overwrites:
        raise InputError(
            f"`merge_adapter` is to save the folder {folder}, which is there already: rename or remove it, or replace "
            "it with --overwrite_output_dir true."
        )


def save_merged(adapter: str, base: str, folder: Path, trust_remote_code: bool = False) -> None:
    """
    Merge a saved adapter into its base, in the base's precision, and save the model with its tokenizer.

    It is loaded anew, on the CPU: a model that is being trained may be sharded or quantized.

    Args:
        adapter (`str`): A folder or an id on the Hub.
        base (`str`): Its base.
        folder (`Path`): Where to save. It is there when it is whole, and takes the place of an earlier one.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code in the model's folder may run.
    """
    unset_hf_deepspeed_config()  # under ZeRO-3, the loading would be sharded over processes that do not take part
    settings: dict[str, Any] = {"dtype": "auto", "device_map": None, "trust_remote_code": trust_remote_code}
    model: PreTrainedModel = load_adapter(adapter, base, **settings).merge_and_unload()
    part = folder.with_name(folder.name + ".part")
    if part.exists():
        shutil.rmtree(part)
    model.save_pretrained(part)
    load_processing_class(adapter, base, trust_remote_code=trust_remote_code).save_pretrained(part)
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
