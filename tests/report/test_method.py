"""How a run is called by its settings, what is searched, and that it is advised nothing else."""

import re

import pytest

from bapo_trl import BAPOConfig
from bapo_trl.report.command import main
from bapo_trl.report.health import examine
from bapo_trl.report.logs import Logs
from bapo_trl.report.method import method_by_settings
from bapo_trl.report.page import render_page
from bapo_trl.report.runs import group_runs, read_runs
from tests.report.made_logs import made_logs, save_run


FIXED = {"ratio_lower_max": 0.6, "ratio_upper_max": 1.2}
GRPO = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2}
WEIGHT = {"negative_weight_min": 0.5}
CONSTANT = {**WEIGHT, "positive_contribution_target": 1.0}
SEQUENCES = {"importance_sampling_level": "sequence"}
STALE = {"steps_per_generation": 4, "gradient_accumulation_steps": 1}

METHODS = [
    # settings, name, names of what the advice on a missed target holds (none: no such check)
    ({}, "BAPO", {"ratio_upper_max", "negative_weight_min"}),
    ({**WEIGHT}, "BAPO, weight from 0.5", {"ratio_upper_max", "negative_weight_min"}),
    ({"ratio_upper_max": 1.2}, "BAPO", {"ratio_lower_max", "negative_weight_min"}),
    ({"ratio_upper_max": 1.22, "ratio_lower_max": 0.6}, "Fixed bounds 0.6 to 1.2", None),  # less than a step apart
    ({**SEQUENCES}, "BAPO, ratios of sequences", {"ratio_upper_max", "negative_weight_min"}),
    (FIXED, "Fixed bounds 0.6 to 1.2", None),
    (GRPO, "GRPO bounds", None),
    ({**GRPO, **WEIGHT}, "GRPO bounds, weight from 0.5", {"negative_weight_min"}),
    ({**GRPO, **CONSTANT}, "GRPO bounds, constant weight 0.5", None),
    ({**FIXED, **SEQUENCES}, "GSPO, bounds 0.6 to 1.2", None),
    ({"loss_type": "vespo"}, "VESPO", None),
    ({"loss_type": "vespo", **WEIGHT}, "VESPO, weight from 0.5", {"negative_weight_min"}),
    ({"loss_type": "vespo", **CONSTANT}, "VESPO, constant weight 0.5", None),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "CISPO", None),
    ({"gradient_accumulation_steps": 4}, "BAPO", None),  # ratios are always 1: no bound has an effect
    ({"gradient_accumulation_steps": 4, "replay_fraction": 0.5}, "BAPO", {"ratio_upper_max", "negative_weight_min"}),
]  # fmt: skip


def config(folder, settings) -> BAPOConfig:
    return BAPOConfig(
        output_dir=str(folder), per_device_train_batch_size=2, num_generations=2, use_cpu=True, bf16=False,
        **{**STALE, **settings},
    )  # fmt: skip


@pytest.mark.parametrize(("settings", "name", "advised"), METHODS)
def test_a_run_is_titled_by_its_method_and_advised_what_it_leaves_open(tmp_path, settings, name, advised):
    args = config(tmp_path, settings)
    method = method_by_settings(args.to_dict())
    assert method.name == name
    has_effect = args.has_clip_bounds and not args.is_always_on_policy
    has_bounds = method.searches_lower or method.searches_upper
    assert has_bounds == (has_effect and not args.bound_grid.is_fixed)
    assert method.searches_weight == (args.negative_weight_min < 1 and not args.has_constant_weight)
    findings = examine(Logs(made_logs(entropy=[1.0, 0.1], **{"bapo/target_met": 0.0})), method)
    of_target = [finding for finding in findings if finding.name == "Target share missed"]
    assert [set(re.findall(r"`(\w+)`", finding.remedy)) for finding in of_target] == (
        [] if advised is None else [{"positive_contribution_target", *advised}]
    )
    (of_entropy,) = (finding for finding in findings if finding.name == "Entropy halved")
    assert ("ratio_upper_max" in of_entropy.remedy) == ("ratio_upper_max" in (advised or ()))


@pytest.mark.parametrize(
    ("settings", "low", "high", "advised"),
    [
        ({}, 0.9, 3.0, {"ratio_upper_max", "ratio_lower_max"}),
        ({"ratio_upper_max": 2.98}, 0.9, 2.95, {"ratio_upper_max", "ratio_lower_max"}),  # the last candidate
        ({"ratio_upper_max": 1.2}, 0.9, 1.2, {"ratio_lower_max"}),
        ({"ratio_lower_max": 0.6}, 0.6, 3.0, {"ratio_upper_max"}),
        ({}, 0.9, 2.95, None),
        (FIXED, 0.6, 1.2, None),
        ({"loss_type": "vespo"}, 0.9, 3.0, None),
        ({"gradient_accumulation_steps": 4}, 0.9, 3.0, None),  # no bound has an effect
    ],
)
def test_bounds_at_their_limits_are_found_where_they_are_searched(tmp_path, settings, low, high, advised):
    method = method_by_settings(config(tmp_path, settings).to_dict())
    findings = examine(Logs(made_logs(**{"bapo/clip_low": low, "bapo/clip_high": high})), method)
    found = [finding.remedy for finding in findings if finding.name == "Bounds at their limits"]
    assert [set(re.findall(r"`(\w+)`", remedy)) for remedy in found] == (
        [] if advised is None else [{"positive_contribution_target", *advised}]
    )


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"loss_type": "dapo", "epsilon": 0.2}, "GRPO"),
        ({"loss_type": "vespo"}, "VESPO"),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "GSPO"),
    ],
)
def test_settings_of_trls_trainer_are_told_nothing_of_ours(settings, name):
    method = method_by_settings(settings)
    assert method.name == name
    logs = made_logs(entropy=[1.0, 0.1], **{"bapo/target_met": 0.0, "ratio/ess": 0.1, "frac_reward_zero_std": 0.9})
    words = " ".join(finding.remedy for finding in examine(Logs(logs), method))
    ours = {word for word in re.findall(r"`(\w+)`", words) if not hasattr(BAPOConfig.__mro__[1], word)}
    assert ours == set()


@pytest.mark.figures
@pytest.mark.parametrize(
    ("logged", "advised"),
    [
        ({"bapo/search_steps": [0.0, 51.0]}, "ratio_upper_max"),
        ({"bapo/search_steps": 0.0}, None),
        ({"bapo/search_steps": 0.0, "bapo/negative_weight": [1.0, 0.4]}, "A smaller `negative_weight_min`"),
    ],
)
def test_without_settings_the_logs_tell_what_is_searched(tmp_path, capsys, logged, advised):
    run = save_run(tmp_path / "run", made_logs(**{"bapo/target_met": 0.0, **logged}))
    main([str(run), "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert (advised or "6 of 6 checks made") in printed
    assert ("Target share missed" in printed) == (advised is not None)
    assert ("ratio_upper_max" in printed) == (advised == "ratio_upper_max")


@pytest.mark.figures
def test_the_title_is_in_the_page_the_picture_and_the_terminal(tmp_path, capsys, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, text, **kwargs: drawn.append(text))
    args = config(tmp_path, {"loss_type": "vespo"})
    run = save_run(tmp_path / "mine", made_logs(**{"bapo/target_met": 0.0}), args.to_dict())
    main([str(run), "--output", str(tmp_path / "out")])
    assert "VESPO: mine:\n  [healthy]" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<h1>Training report: VESPO: mine</h1>" in page
    assert "<th>method</th><td>VESPO</td>" in page
    assert ">target<" not in page  # of the share: there is none
    assert "ratio_upper_max</code>" not in page
    assert drawn == ["VESPO: mine"]


RATIOS = {f"ratio_{side}_{part}" for side in ("lower", "upper") for part in ("start", "max")}
SEARCH = {"positive_contribution_target", "search_scope"}


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, RATIOS | SEARCH),
        ({"ratio_upper_max": 1.2}, (RATIOS | SEARCH) - {"ratio_upper_max"}),
        (GRPO, {"ratio_lower_start", "ratio_upper_start"}),
        ({**GRPO, **WEIGHT}, {"ratio_lower_start", "ratio_upper_start"} | SEARCH),
        ({"loss_type": "vespo", **WEIGHT}, SEARCH),
        *(({"loss_type": loss}, set()) for loss in ("sapo", "vespo")),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, set()),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_the_table_of_settings_has_bounds_and_search_where_there_are_some(tmp_path, settings, shown):
    run = save_run(tmp_path / "mine", made_logs(2), config(tmp_path, settings).to_dict())
    rows = set(re.findall(r"<tr><th>(\w+)</th>", render_page(group_runs(read_runs([run])), [], {})))
    assert rows & (RATIOS | SEARCH) == shown
    assert {"loss_type", "negative_weight_min", "learning_rate"} <= rows


def test_beside_a_run_that_uses_a_setting_others_say_that_they_do_not(tmp_path):
    runs = [
        save_run(tmp_path / name, made_logs(2), config(tmp_path, settings).to_dict())
        for name, settings in {"bapo": {}, "vespo": {"loss_type": "vespo"}}.items()
    ]
    page = render_page(group_runs(read_runs(runs)), [], {})
    assert "<tr><th>ratio_upper_max</th><td>3.0</td><td>not used</td></tr>" in page
    assert "search_order" not in page  # in which the runs that use it do not differ


@pytest.mark.figures
def test_a_finding_that_runs_share_is_said_once_by_their_names(tmp_path, capsys):
    bapo, vespo = (config(tmp_path, settings).to_dict() for settings in ({}, {"loss_type": "vespo"}))
    long, longer = {"completions/clipped_ratio": 0.8}, {"completions/clipped_ratio": 0.9}
    runs = [
        save_run(tmp_path / "a", made_logs(**long), {**bapo, "seed": 1}),
        save_run(tmp_path / "b", made_logs(**longer, **{"ratio/ess": 0.1}), {**bapo, "seed": 2}),
        save_run(tmp_path / "c", made_logs(**long), vespo),
    ]
    main([*map(str, runs), "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    cut = "of the completions ended for their length, in the latest 5 of 20 logs."
    assert f"BAPO: a, b; VESPO: c:\n  [warning] Completions cut off: a, c: 80% {cut} b: 90% {cut} Try:" in printed
    assert "BAPO: b:\n  [warning] Effective sample size: below" in printed
    assert printed.count("A larger `max_completion_length`") == page.count("A larger <code>max_completion_length") == 1
    assert "<h3>BAPO: a, b; VESPO: c</h3>" in page
