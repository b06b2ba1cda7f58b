"""Trains with a reference model that follows the policy: `-m tests.e2e.synced_worker OUT MODEL [CHECKPOINT]`."""

import sys

from tests.helpers.ranks import finish
from tests.helpers.toy import toy_run


def main(out: str, model: str, checkpoint: str | None = None) -> None:
    trainer = toy_run(
        out, model, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25,
        num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=1, steps_per_generation=2,
        num_iterations=1, logging_steps=3, max_steps=4, save_strategy="steps", save_steps=2, resume=checkpoint,
    )  # fmt: skip
    finish(trainer, out, loss=trainer.state.log_history[-1]["train_loss"])


if __name__ == "__main__":
    main(*sys.argv[1:])
