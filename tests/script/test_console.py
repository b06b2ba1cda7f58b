"""What the terminal shows."""

import io

from datasets import Dataset
from transformers import TrainerControl, TrainerState

from bapo_trl import BAPOConfig
from bapo_trl.script.console import UpdateLines
from tests.helpers.toy import CPU, OFF_POLICY, toy_trainer


def off_policy(**args):
    """Return settings of 6 rows x 4 steps = 24 rows a generation; an update has 2 micro-batches of 6."""
    return BAPOConfig("unused", **{**CPU, **OFF_POLICY, **args})


LOG = {
    "reward": 0.25, "frac_reward_zero_std": 0.5, "entropy": 0.777, "bapo/clip_low": 0.6, "bapo/clip_high": 1.849,
    "bapo/positive_share": 0.7, "ratio/ess": 0.9, "grad_norm": 12.34,
}  # fmt: skip


def printed(args, logs, capsys, state=None, **steps) -> list[str]:
    """Return the lines that a training prints for logs, one update for each."""
    callback, control = UpdateLines(), TrainerControl(**steps)
    state = state or TrainerState(max_steps=20000, is_world_process_zero=True)
    callback.on_log(args, state, control, {"eval_reward": 1.0})  # before the training
    callback.on_train_begin(args, state, control)
    for log in logs:
        state.global_step += 1
        callback.on_log(args, state, control, logs=log)
    return capsys.readouterr().out.splitlines()


def test_a_row_has_the_columns_that_apply_and_fits_into_100_characters(capsys, monkeypatch):
    monkeypatch.setattr("bapo_trl.script.console.monotonic", iter([0.0, 0.5, 0.5, 0.5, 0.5]).__next__)
    above, names, row, undefined = printed(off_policy(), [LOG, {"loss": 0.1, "entropy": None}], capsys)
    for line, words in (
        (above, "mean zero entropy clip positive grad s per time"),
        (names, "update reward advantage (nats) bounds contrib. ESS norm update left"),
        (row, "1/20000 0% 0.250 50% 0.78 0.60-1.85 0.70 0.90 12.3 0.50 2:46:40"),
    ):
        assert " ".join(line.split()) == words
    assert undefined.split()[2:9] == ["-"] * 7
    assert len({len(line) for line in (above, names, row, undefined)}) == 1
    assert len(row) <= 100
    assert "bounds" not in "".join(printed(off_policy(loss_type="vespo"), [LOG], capsys))


def test_saves_and_evaluations_are_announced(capsys):
    lines = printed(
        off_policy(), [LOG, {"eval_reward_best_of_4": 0.75, "eval_reward": 0.5}], capsys, should_evaluate=True
    )
    assert lines[3:] == [
        "Evaluating after update 1 ...",
        "Evaluation after update 2: mean reward 0.500, best of 4 0.750",
    ]
    assert printed(off_policy(), [{"eval_loss": 0.1}], capsys) == ["Evaluation after update 1: no reward"]
    assert printed(off_policy(), [{"train_runtime": 3.0}], capsys) == []
    callback, state = UpdateLines(), TrainerState(global_step=3, is_world_process_zero=True)
    callback.on_train_begin(None, state, None)
    callback.on_save(off_policy(), state, None)
    assert capsys.readouterr().out == "Saved unused/checkpoint-3\n"


def test_completions_that_the_terminal_cannot_encode_end_no_training(tmp_path, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    dataset = Dataset.from_dict({"prompt": ["1+\u00e9="] * 24})
    trainer = toy_trainer(tmp_path, max_steps=1, log_completions=True, trainer_args={"train_dataset": dataset})
    trainer.train()
    terminal.flush()
    assert b" 1+?= " in terminal.buffer.getvalue()
