"""What the study compares: the arms, and the variants of BAPO in its ablation."""

from benchmarks.training_run import fixed_clip


# Settings of each arm. Those of TRL's other losses are the ones that TRL's documentation gives for their papers.
ARMS = {
    "GRPO": fixed_clip(0.8, 1.2),
    "clip-higher": fixed_clip(0.8, 1.28),
    "BAPO": {},
    "BAPO, target 0.4": {"positive_contribution_target": 0.4},
    "BAPO, surrogate": {"contribution_measure": "surrogate"},
    "BAPO, sequence level": {"importance_sampling_level": "sequence"},
    "released recipe's bounds": {  # those of recipes/released_recipe.yaml
        "positive_contribution_target": 0.33333333,
        "ratio_lower_start": 0.8,
        "ratio_lower_max": 0.95,
        "ratio_lower_step": 0.05,
        "ratio_upper_start": 1.2,
        "ratio_upper_max": 2.0,
        "ratio_upper_step": 0.1,
        "contribution_measure": "surrogate",
        "search_order": "lower_first",
        "search_scope": "micro_batch",
        "delta": 3.0,
    },
    "GSPO": {**fixed_clip(1 - 3e-4, 1 + 4e-4), "importance_sampling_level": "sequence", "loss_type": "grpo"},
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0},
    "SAPO": {"loss_type": "sapo"},
    "VESPO": {"loss_type": "vespo"},
}
MAIN = ("GRPO", "clip-higher", "BAPO")
# One thing changed at a time, at BAPO's learning rate
ABLATION = {
    "target 0.6": {"positive_contribution_target": 0.6},
    "upper bound alone": {"ratio_lower_max": 0.6},
    "lower bound alone": {"ratio_upper_start": 3.0},
    "lower bound first": {"search_order": "lower_first"},
    "coarse grid": {"ratio_lower_step": 0.1, "ratio_upper_step": 0.3},
    "fixed at start": fixed_clip(0.6, 1.2),
    "fixed at end": fixed_clip(0.9, 3.0),
    "fixed at the widest": fixed_clip(0.6, 3.0),
    "delta 3": {"delta": 3.0},
    "upper bound alone, delta 3": {"ratio_lower_max": 0.6, "delta": 3.0},
    "GRPO's bounds, delta 3": {**fixed_clip(0.8, 1.2), "delta": 3.0},
    "fixed at the widest, delta 3": {**fixed_clip(0.6, 3.0), "delta": 3.0},
    "4 micro-batches, batch scope": {"gradient_accumulation_steps": 4},
    "4 micro-batches, micro-batch scope": {"gradient_accumulation_steps": 4, "search_scope": "micro_batch"},
}

# Variants that the ablation speaks for: compared with BAPO on seeds that had no part in their choice
CANDIDATES = ("upper bound alone", "delta 3")
# The part of the ablation that the easy task has as well
ON_BOTH_TASKS = (
    *CANDIDATES,
    "fixed at the widest",
    "upper bound alone, delta 3",
    "GRPO's bounds, delta 3",
    "fixed at the widest, delta 3",
)

# Trainers (`training_run.TRAINERS`) of the arms that do not run in `BAPOTrainer`
TRAINERS = {"CISPO": "GRPO", "SAPO": "GRPO", "VESPO": "GRPO"}
