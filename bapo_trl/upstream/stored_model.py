"""What the files of a model say, before it is loaded."""

from transformers import PreTrainedConfig


def stored_quantization(model: str, revision: str | None = None) -> str | None:
    """Return the method by which a model is quantized in its folder or on the Hub."""
    config, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
    return config.get("quantization_config", {}).get("quant_method")
