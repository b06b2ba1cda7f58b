"""Small changes that the tests of their part must notice: forty were chosen before the tests were made faster."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A change of one place: the symbol, wherever in the package it lives, and the text in it, which is there once."""

    symbol: str
    before: str
    after: str


METHOD = (
    Mutant("search_bounds", "ends = share >= goal", "ends = share > target"),
    Mutant("search_bounds", "ends[-1:].fill_(True)", "ends[:0].fill_(True)"),
    Mutant("search_bounds", "positive * (1 - target) / (target * negative)", "positive / (target * negative)"),
    Mutant("_slots", "num_upper, or_equal=False)", "num_upper, or_equal=True)"),
    Mutant("_slots", "torch.finfo(ratio.dtype).tiny", "0.0"),
    Mutant("_passed_table", ".triu_()", ".triu_(1)"),
    Mutant("_sum_block", "ratio > delta", "ratio < 0"),
    Mutant(
        "BAPOTrainer._compute_loss",
        "self._inputs_in_loss = without_masked_values(inputs)",
        "self._inputs_in_loss = inputs",
    ),
    Mutant("CarriedCurves.learn", "curves.positive / masses.positive", "curves.positive"),
    Mutant("UpdateBounds._add", "self._curves + curves", "curves"),
    Mutant("policy_tokens", "(log_ratio * mask).sum(dim=1, keepdim=True)", "log_ratio.sum(dim=1, keepdim=True)"),
)
REPLAY = (
    Mutant("ReplayQueue.expire", "<= self.max_staleness", "< self.max_staleness"),
    Mutant("ReplayQueue.draw", ">= self.min_staleness", "> self.min_staleness"),
    Mutant("ReplayQueue.draw", "ledger.uses[drawn] += 1", "ledger.uses[drawn] += 0"),
    Mutant("ReplayQueue.draw_first_pass", "[0] * len(displaced)", "[1] * len(displaced)"),
    Mutant(
        "ReplayQueue.draw_first_pass",
        "len(fresh)), policy_version, last_version)",
        "len(fresh)), policy_version, policy_version)",
    ),
    Mutant("ReplayQueue._overflow", "np.arange(len(self)) >= excess", "np.arange(len(self)) < self.capacity"),
    Mutant("ReplayQueue.restore", 'self._next_touch = state["next_turn"]', "pass"),
    Mutant("ReplayMixer._finish", 'torch.as_tensor(tally.sums["tokens"])', "torch.as_tensor(len(drawn.rows))"),
    Mutant(
        "rows_to_batch", 'pad_token_id if key in ("prompt_ids", "completion_ids") else field.padding', "field.padding"
    ),
    Mutant("Rows.masked", "torch.zeros_like(mask.values)", "mask.values"),
)
ROLLOUTS = (
    Mutant("RolloutPool.take", "append([policy_version, len(new)])", "append([policy_version + 1, len(new)])"),
    Mutant("RolloutPool.take", "len(new) < cap", "len(new) <= cap"),
    Mutant(
        "RolloutPool.emit",
        "(group.id not in overdue, group.completed_as)",
        "(group.id in overdue, group.completed_as)",
    ),
    Mutant("RolloutPool._num_left", "self.window - len(group.prompt_ids)", "self.window"),
    Mutant("RolloutPool.overdue", "g.first_version < oldest_version", "g.first_version <= oldest_version"),
    Mutant("RolloutPool.admit", "self._next_id += self.num_ranks", "self._next_id += 1"),
    Mutant(
        "RolloutRounds._score",
        "values[len(completion.logps) : len(completion.tokens)]",
        "values[: len(completion.tokens) - len(completion.logps)]",
    ),
    Mutant("RolloutRounds.save", "is_boundary and not self._is_generating", "is_boundary"),
    Mutant("RolloutRounds._decode_round", "missing = most - len(continuations)", "missing = 0"),
    Mutant("pad_with_masked_rows", '["completion_mask"][present:] = 0', '["completion_mask"][present:] = 1'),
)
CHECKPOINTS = (
    Mutant("find_defect", "elif found != size:", "elif found > size:"),
    Mutant(
        "RankFiles.read",
        "if checksum(path.name, text, tensors) !=",
        "if False and checksum(path.name, text, tensors) !=",
    ),
    Mutant("WholeCheckpoints._save_checkpoint", "write_manifest(unfinished)", "pass"),
    Mutant("WholeCheckpoints._save_checkpoint", "self._last_checkpoint = folder", "pass"),
    Mutant("WholeCheckpoints.checkpoint_to_resume", "key=step_of, reverse=True", "key=step_of"),
    Mutant("WholeCheckpoints.save_for_resume", "torch.set_rng_state(self._random_state)", "pass"),
    Mutant("_rotate", "for path in (newest, best) if", "for path in (newest,) if"),
    Mutant("_finish_replacement", "os.rename(new, folder)", "pass"),
    Mutant("flush_tree", "pool.map(flush, (*Path(folder)", "pool.map(str, (*Path(folder)"),
    Mutant(
        "StopSignals._stop_if_signalled",
        "control.should_save = control.should_training_stop = True",
        "control.should_training_stop = True",
    ),
)
COLOCATE = (
    Mutant(
        "stamp",
        '(len(batch["prompt_ids"]),), trainer.state.global_step)',
        '(len(batch["prompt_ids"]),), trainer.state.global_step + 1)',
    ),
    Mutant("RolloutPool.take", "append([policy_version, len(new)])", "append([policy_version + 1, len(new)])"),
    Mutant(
        "BAPOTrainer._generate_single_turn",
        "generate = super()._generate_single_turn",
        "self._last_loaded_step = self.state.global_step; generate = super()._generate_single_turn",
    ),
)
PARTS = {
    "method": METHOD, "replay": REPLAY, "rollouts": ROLLOUTS, "checkpoints": CHECKPOINTS, "colocate": COLOCATE,
}  # fmt: skip
TESTS = {
    "method": ["tests/test_clip_bounds.py", "tests/test_policy_tokens.py", "tests/test_look_ahead.py",
               "tests/test_balance.py", "tests/test_bapo_trainer.py", "tests/test_equivalence.py"],
    "replay": ["tests/replay", "tests/test_state_files.py"],
    "rollouts": ["tests/rollouts", "tests/test_state_files.py", "tests/vllm_server/test_partial_server.py"],
    "checkpoints": ["tests/test_state_files.py", "tests/test_whole_checkpoint.py", "tests/replay/test_mixer.py",
                    "tests/faults/test_signals.py", "tests/faults/test_fuzz_checkpoint.py",
                    "tests/faults/test_server.py"],
    "colocate": ["tests/vllm_server/test_colocate.py"],
}  # fmt: skip
