#!/usr/bin/env python
"""
Submit a training on several nodes to SLURM: ZeRO-3 on all nodes but one, and a vLLM server on the last node.

    python scripts/submit_slurm.py --recipe recipes/math_7b.yaml --model deepseek-ai/DeepSeek-R1-Distill-Qwen-7B \\
        --output_dir /shared/runs/math --trainer_nodes 4

The script checks before queueing that the server can split the model's attention heads, and that the output folder is
writable. Set the time limit, account and environment at the top of scripts/train_4_plus_1_nodes.slurm, or pass flags
of sbatch after `--`:

    python scripts/submit_slurm.py ... -- --time=12:00:00 --account=mine
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path


JOB = Path(__file__).resolve().parent / "train_4_plus_1_nodes.slurm"


def choose_size(model: str, asked: int | None, gpus: int, trust_remote_code: bool) -> int:
    """
    Return the number of GPUs for the server: the requested number, or the most GPUs of a node that the model allows.

    Raises:
        SystemExit: With one line, if the model cannot be split like this, or its configuration cannot be loaded.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).get_text_config()
    except (OSError, ValueError) as error:
        sys.exit(f"--model is '{model}', but its configuration cannot be loaded: {str(error).splitlines()[0]}")
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    possible = [
        size
        for size in range(1, gpus + 1)  # sizes over which vLLM can split the attention
        if heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)
    ]
    if asked is not None and asked not in possible:
        sys.exit(
            f"--tensor_parallel_size is {asked}, but {model} has {heads} attention heads ({key_value_heads} key-value "
            f"heads), and a node has {gpus} GPUs: choose one of {', '.join(map(str, possible))}."
        )
    return asked or possible[-1]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, help="YAML file, or the name of a recipe of the package")
    parser.add_argument("--model", required=True, help="folder that all nodes see, or id on the Hub")
    parser.add_argument("--output_dir", required=True, help="folder of the run, on a disk that all nodes share")
    parser.add_argument("--trainer_nodes", type=int, default=4, help="nodes that train (default: 4); one more samples")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="default: 8")
    parser.add_argument("--tensor_parallel_size", type=int, help="GPUs of the server (default: as many as go)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with the model")
    parser.add_argument("sbatch", nargs="*", help="behind `--`: flags of sbatch")
    args = parser.parse_args(arguments)
    size = choose_size(args.model, args.tensor_parallel_size, args.gpus_per_node, args.trust_remote_code)
    output_dir = Path(args.output_dir).absolute()
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output_dir).close()
    except OSError as error:
        sys.exit(f"--output_dir is '{args.output_dir}', which is not writable: {error}")
    print(
        f"{args.trainer_nodes} nodes train. One node generates, on {size} of its {args.gpus_per_node} GPUs. The job "
        f"checks that all nodes share {output_dir}, and stops at once if they do not.",
        flush=True,
    )
    environment = {
        "TRAINER_NODES": str(args.trainer_nodes),
        "GPUS_PER_NODE": str(args.gpus_per_node),
        "TENSOR_PARALLEL_SIZE": str(size),
        "TRUST_REMOTE_CODE": str(args.trust_remote_code).lower(),
    }
    command = ["sbatch", f"--nodes={args.trainer_nodes + 1}", f"--gpus-per-node={args.gpus_per_node}", *args.sbatch]
    # Absolute paths, as the job runs in another folder
    recipe, model = (str(Path(name).absolute()) if Path(name).exists() else name for name in (args.recipe, args.model))
    command += [str(JOB), recipe, model, str(output_dir)]
    os.chdir(JOB.parents[1])  # the job's folder
    os.execvpe(command[0], command, {**os.environ, **environment})


if __name__ == "__main__":
    main(sys.argv[1:])
