"""DeepSpeed's own parser reads every file that the launch configs point to, filled in as the trainer fills it."""

import pytest
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.config import DeepSpeedConfig

from tests.helpers.commands import ROOT


OWNED_BY_THE_TRAINER = {
    "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4, "bf16.enabled": True, "fp16.enabled": False,
    "zero_optimization.reduce_bucket_size": 64**2, "zero_optimization.stage3_prefetch_bucket_size": 64,
    "zero_optimization.stage3_param_persistence_threshold": 640,
}  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "deepspeed_configs").iterdir()), ids=lambda path: path.stem)
def test_deepspeed_reads_every_config(path):
    plugin = DeepSpeedPlugin(hf_ds_config=str(path))
    plugin.deepspeed_config_process(must_match=True, **OWNED_BY_THE_TRAINER)  # all that is `auto`
    config = DeepSpeedConfig(plugin.deepspeed_config)
    assert config.zero_config.stage == (2 if path.stem == "zero2" else 3)
    assert config.bfloat16_config.enabled
    assert config.gradient_accumulation_steps == 2
    is_offloaded = config.zero_config.offload_param is not None
    assert is_offloaded == (path.stem == "zero3_offload")
    if path.stem != "zero2":
        assert config.zero_config.gather_16bit_weights_on_model_save  # else checkpoints hold no weights
