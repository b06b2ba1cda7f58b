"""The base of the trainer's mixins: to a type checker the trainer they become part of, to Python nothing."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

    from .bapo_config import BAPOConfig

    class TrainerMixin(GRPOTrainer):
        """A [`~trl.GRPOTrainer`] with the configuration of BAPO."""

        args: BAPOConfig
        model: PreTrainedModel
        _buffered_inputs: Any
        epsilon_low: Any  # a tensor here
        epsilon_high: Any

        def save_for_resume(self) -> str | None:  # of `WholeCheckpoints`
            ...

else:
    TrainerMixin = object
