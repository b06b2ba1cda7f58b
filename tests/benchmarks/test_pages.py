"""What `python -m benchmarks.pages` makes of the files in `benchmarks/results`: the tables of the pages."""

import pytest
import yaml
from scipy import stats

from bapo_trl.compare.results import Row
from bapo_trl.script.memory import GIB
from benchmarks import pages
from benchmarks.gpu_first_run.shapes import QWEN_15B


def row(arm: str, seed: int, final: float | None = 0.5, start: float = 0.25, **settings) -> Row:
    settings = {"learning_rate": 0.1, **settings}
    curve = [] if final is None else [(0, start), (8, final)]
    return Row(
        arm, {"max_steps": 8}, seed, {**settings, "seed": seed}, final, curve=curve, error=None if final else "killed"
    )


def test_a_table_of_finals_pairs_the_seeds_and_leaves_out_runs_that_failed():
    runs = [row("x", 0, 0.5), row("x", 1, 0.9), row("x", 2, None), row("y", 0, 0.25), row("y", 1, 0.45)]
    runs += [row("z", 0, 0.3), row("z", 1, 0.4), row("y", 2, 0.25)]
    # x - y: 0.25, 0.45 (p = 0.18), z - y: 0.05, -0.05 (p = 1). Corrected for both, x has the level 0.05 / 2
    by_arm, width = pages.finals(runs), stats.t.ppf(1 - 0.05 / 2 / 2, 1) * 0.1
    for table in (
        pages.final_table({"final": by_arm}, "y"),
        pages.long_table("a", [("16", by_arm, {})], "y"),
        pages.differences_table("y", {"final": by_arm}, {"x": "x", "z": "z"}),
    ):
        assert f"+0.350 ± {width:.3f}" in table


def test_a_row_of_fewer_seeds_shows_the_accuracy_of_the_baseline_on_them():
    by_arm = {"y": {0: 0.2, 1: 0.4, 2: 0.9}, "x": {0: 0.5, 1: 0.5}}
    assert "| x      | 2     | 0.500 (y: 0.300) | +0.200 ± " in pages.final_table({"final": by_arm}, "y")
    table = pages.long_table("a b", [("16", by_arm, {})], "y")
    assert "| 16  | x      | 2     | 0.500         | 0.300         | +0.200 ± " in table
    with pytest.raises(ValueError, match=r"y has the seeds \[2\], which x lacks"):
        pages.final_table({"final": by_arm}, "x")


def test_each_group_of_variants_stands_under_bapo_on_its_seeds():
    lines = [line.split("|") for line in pages.variants_table().splitlines()[2:]]
    bapo: list[float] = []
    for _, name, _, *cells, _ in lines:
        accuracies = [float(cell) for cell in cells[::2]]
        if name.strip() == "**BAPO**":
            bapo = accuracies
        else:
            for accuracy, base, cell in zip(accuracies, bapo, cells[1::2], strict=True):
                assert float(cell.split()[0]) == pytest.approx(accuracy - base, abs=0.0011)


def test_the_recipe_in_4_bits_fits_the_gpu_that_the_page_names():
    recipe = yaml.safe_load((pages.ROOT / "recipes/qlora_small.yaml").read_text())
    assert recipe["model_name_or_path"] == "Qwen/Qwen2.5-1.5B-Instruct"
    memory, engine = pages.qlora_memory(QWEN_15B)
    (row,) = (line for line in pages.qlora_memory_table().splitlines() if "1.5B" in line)
    gpu = int(row.split()[-3])
    of_vllm = recipe["vllm_gpu_memory_utilization"] * gpu * GIB
    a_sample = 2 * 2 * 28 * 2 * 128 * recipe["vllm_max_model_length"]  # keys and values of its layers in bfloat16
    assert engine + recipe["per_device_train_batch_size"] * a_sample < of_vllm
    assert memory.update + of_vllm < 0.9 * gpu * GIB
