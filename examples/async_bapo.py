"""
Train with asynchronous BAPO on sums of two numbers for a chat model: rollouts continue while the policy is trained.

The requirements are those of TRL's asynchronous trainer: one GPU for the server and one for the trainer,
`pip install kernels vllm`, and a vLLM server in development mode:

    CUDA_VISIBLE_DEVICES=0 VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B \\
        --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs
    CUDA_VISIBLE_DEVICES=1 accelerate launch examples/async_bapo.py
"""

from bapo_trl.experimental import AsyncBAPOConfig, AsyncBAPOTrainer
from bapo_trl.tasks import last_number_reward, load_chat_sums


def main() -> None:
    args = AsyncBAPOConfig(
        "outputs/async_bapo",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=64,
        max_staleness=4,
        max_steps=200,
        learning_rate=1e-6,
    )
    trainer = AsyncBAPOTrainer(
        "Qwen/Qwen3-0.6B", last_number_reward, args, train_dataset=load_chat_sums(seed=0).train_dataset
    )
    trainer.train()


if __name__ == "__main__":
    main()
