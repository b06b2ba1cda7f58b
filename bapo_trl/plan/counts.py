"""How many prompts, samples and updates a run makes."""

from dataclasses import dataclass

from ..bapo_config import BAPOConfig


@dataclass(frozen=True)
class Counts:
    """
    Numbers of a run on so many processes. Each process has the same `steps_per_generation`; with a given
    `generation_batch_size`, all of them have that.
    """

    processes: int
    prompts: float  # of a generation
    samples: int  # of a generation
    samples_per_update: int
    updates_per_generation: float  # not rounded
    generations_per_epoch: int | None  # `None` for prompts that are not counted
    updates_per_epoch: float | None
    refusal: str | None  # why no run with that many processes is possible


def count(args: BAPOConfig, processes: int, num_prompts: int | None) -> Counts:
    """Return the numbers of a run on so many processes and prompts; `None` for prompts that are not counted."""
    micro_batch = args.per_device_train_batch_size * processes
    samples = args.generation_batch_size if args.has_fixed_samples else args.steps_per_generation * micro_batch
    updates = samples / micro_batch * args.num_iterations / args.gradient_accumulation_steps
    prompts = samples / args.num_generations
    generations = None if num_prompts is None else int(num_prompts // prompts)
    refusal = None
    if samples % micro_batch:
        refusal = f"generation_batch_size {samples} is no multiple of {micro_batch}, a micro-batch on each process"
    elif samples % args.num_generations:
        refusal = f"{samples} samples are no multiple of num_generations {args.num_generations}"
    elif generations == 0:
        refusal = f"a generation takes {prompts:g} prompts, there are {num_prompts}"
    return Counts(
        processes=processes,
        prompts=prompts,
        samples=samples,
        samples_per_update=micro_batch * args.gradient_accumulation_steps,
        updates_per_generation=updates,
        generations_per_epoch=generations,
        updates_per_epoch=None if generations is None else generations * updates,
        refusal=refusal,
    )
