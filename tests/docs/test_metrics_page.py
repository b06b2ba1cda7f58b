"""docs/metrics.md and what real runs log: the same names."""

import inspect
import re

import pytest
from trl import GRPOTrainer

from bapo_trl.clip_bounds.update_log import UPDATE_METRICS
from bapo_trl.replay.mixer import REPLAY_METRICS
from bapo_trl.rollouts.rounds import PARTIAL_METRICS
from bapo_trl.tasks import character_tokenizer
from bapo_trl.vllm_server.mismatch import MISMATCH_METRICS
from bapo_trl.vllm_server.stale_server import SERVER_METRICS
from tests.helpers.commands import ROOT
from tests.helpers.fake_vllm import vllm_trainer
from tests.helpers.toy import toy_dataset, toy_model, toy_trainer


PAGE = (ROOT / "docs" / "metrics.md").read_text()
NOT_HERE = ("tools/call_frequency", "tools/failure_frequency", "aux_loss")  # take tools, and a mixture of experts


def names_on_page() -> set[str]:
    """Return the names in the first cells of the tables of metrics."""
    tables = re.findall(r"^\| metric .*\n\|---.*\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) == len(set(names))
    return set(names)


def test_each_table_has_the_same_columns():
    heads = re.findall(r"^\| metric .*$", PAGE, flags=re.MULTILINE)
    assert set(heads) == {"| metric | formula (unit) | healthy; what to do otherwise |"}


def as_on_page(name: str) -> str:
    """Return a logged name without what is of one run: the reward function, the number of rollouts."""
    return re.sub(r"^rewards/\w+/", "rewards/<function>/", name)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Names that trainings and an evaluation log, by the part of the page that they belong to."""
    folder = tmp_path_factory.mktemp("runs")
    toy_model().save_pretrained(folder / "model")
    character_tokenizer().save_pretrained(folder / "model")
    runs = [
        toy_trainer(
            folder / "all", model=str(folder / "model"), max_steps=6, beta=0.05, entropy_coef=0.01, do_eval=True,
            replay_fraction=0.5, partial_rollout_oversampling=1.5, partial_rollout_chunk_length=3,
            eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=6, num_generations_eval=2,
            trainer_args={"eval_dataset": toy_dataset(6)},
        ),
        *(toy_trainer(folder / loss, loss_type=loss, max_steps=2) for loss in ("cispo", "vespo")),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs.append(vllm_trainer(monkeypatch, folder / "vllm", max_steps=5))
        for trainer in runs:
            trainer.train()
    names = {name for trainer in runs for log in trainer.state.log_history for name in log if name != "step"}
    return {"training": {as_on_page(n) for n in names if not n.startswith("eval_")},
            "evaluation": {as_on_page(n.removeprefix("eval_")) for n in names if n.startswith("eval_")}}  # fmt: skip


def test_every_logged_metric_is_on_the_page(logged):
    assert sorted(logged["training"] - names_on_page()) == []
    of_evaluation = set(re.findall(r"`eval_([^`]+)`", PAGE.partition("## Evaluation")[2].partition("\n## ")[0]))
    of_evaluation = {name.replace("<k>", "2") for name in of_evaluation}
    assert sorted(logged["evaluation"] - of_evaluation - names_on_page()) == []
    assert of_evaluation <= logged["evaluation"]


def test_every_metric_on_the_page_is_logged(logged):
    source = inspect.getsource(GRPOTrainer)
    assert all(f'["{name}"]' in source for name in NOT_HERE)
    assert sorted(names_on_page() - logged["training"]) == sorted(NOT_HERE)
    own = {*UPDATE_METRICS, *REPLAY_METRICS, *PARTIAL_METRICS, *MISMATCH_METRICS, *SERVER_METRICS}
    assert own <= names_on_page()


def test_metrics_named_in_the_text_are_among_them():
    named = set(re.findall(r"`((?:bapo|ratio|staleness|replay|partial|sampling|completions|clip_ratio)/\w+)`", PAGE))
    assert named
    assert named <= names_on_page()
