"""A rollout function as public ones are."""


def multi_turn(prompts, trainer):
    """
    Sample a turn at a time, by the trainer's own sampler, while episodes are active: later samples last longer.

    So the ranks sample differently often. After each turn the environment says a digit.
    """
    first = trainer.accelerator.process_index * len(prompts)
    prompt_ids = trainer._tokenize_prompts(prompts)[0]
    completion_ids = [[] for _ in prompts]
    masks = [[] for _ in prompts]
    turns_left = [1 + (first + place) // 4 for place in range(len(prompts))]
    heard = trainer.processing_class("7")["input_ids"]
    while any(turns_left):
        active = [place for place, turns in enumerate(turns_left) if turns]
        said, _ = trainer._generate_single_turn([prompt_ids[p] + completion_ids[p] for p in active], None, {}, 1)
        for place, tokens in zip(active, said, strict=True):
            turns_left[place] -= 1
            completion_ids[place] += tokens + heard
            masks[place] += [1] * len(tokens) + [0] * len(heard)
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None, "env_mask": masks}
