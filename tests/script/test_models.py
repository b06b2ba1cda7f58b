"""Saved adapters: evaluated, trained on, merged; and models that cannot be had."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from bapo_trl import BAPOTrainer
from bapo_trl.errors import InputError
from bapo_trl.script.plan import print_plan
from tests.helpers.script_runs import completions, fill_folder, flags, results, run, train_bapo


pytestmark = pytest.mark.trainings


LORA = {"use_peft": "true", "lora_r": 4, "lora_target_modules": "q_proj|v_proj", "max_steps": 4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        out = fill_folder(tmp_path_factory.mktemp("trained"), patch) / "out"
        run(dataset_name="train.jsonl", learning_rate="0.3", **LORA)
    assert not (out / "config.json").exists()
    return out


@pytest.fixture
def adapter(trained, folder):
    shutil.copytree(trained, "adapter")


def assert_alike(path, other):
    torch.testing.assert_close(logits(path), logits(other), rtol=1e-4, atol=1e-4)


def logits(path, **kwargs):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, **kwargs)(torch.arange(2, 40)[None]).logits


def test_an_adapter_is_evaluated_and_merged_and_the_merged_model_evaluated(adapter, capsys):
    alone = {"do_train": "false", "eval_dataset": "test.jsonl"}
    run(**alone, **LORA, model_name_or_path="adapter", merge_adapter="true")  # with the settings that trained it
    of_adapter = [line["completion"] for line in completions()]
    out = capsys.readouterr().out
    assert out.startswith("Evaluation of adapter on test.jsonl; results in out\n")
    assert "Evaluation of adapter on test.jsonl" in out
    assert_alike("out/merged", "adapter")
    assert (logits("out/merged") - logits("model")).abs().max() > 0.01
    assert not list(Path("out").glob("*.part"))
    run(**alone, model_name_or_path="out/merged", output_dir="merged")
    assert [line["completion"] for line in completions("merged/eval_completions.jsonl")] == of_adapter
    assert not Path("out/model.safetensors").exists()


MERGE = {"do_train": "false", "model_name_or_path": "adapter", "merge_adapter": "true", "output_dir": "new"}


@pytest.mark.parametrize(
    ("dtype", "run_settings", "merged", "said"),
    [
        (None, {"dtype": "float32"}, torch.float32, "float32, as it was trained"),
        ("bfloat16", {"dtype": "float32"}, torch.bfloat16, "bfloat16, set by `dtype`"),
        (None, {}, torch.bfloat16, "bfloat16, as its base"),
    ],
)
def test_a_merged_model_is_of_the_type_that_was_trained_and_needs_no_gpu(
    adapter, capsys, monkeypatch, dtype, run_settings, merged, said
):
    """A base that is stored in bfloat16 is trained in float32, as TRL has it: rounded, small changes are lost."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    AutoModelForCausalLM.from_pretrained("model").to(torch.bfloat16).save_pretrained("model")
    Path("adapter/run_settings.json").write_text(json.dumps(run_settings))
    Path("merge.yaml").write_text(yaml.safe_dump(MERGE if dtype is None else {**MERGE, "dtype": dtype}))
    train_bapo.main(["--config", "merge.yaml"])
    assert capsys.readouterr().out == f"Merged model: new/merged ({said})\n"
    assert AutoModelForCausalLM.from_pretrained("new/merged").dtype == merged
    assert (logits("new/merged") - logits("model")).abs().max() > 0.01


def test_a_run_killed_before_its_model_is_saved_is_finished_with_the_weights_of_its_last_update(
    folder, monkeypatch, capsys
):
    settings = {
        **LORA, "dataset_name": "train.jsonl", "eval_dataset": "test.jsonl", "save_strategy": "steps",
        "save_steps": "1", "max_steps": "3", "do_eval": "true", "per_device_eval_batch_size": "4",
        "merge_adapter": "true",
    }  # fmt: skip
    save_model = BAPOTrainer.save_model

    def killed(self, output_dir=None, _internal_call=False):
        if not _internal_call:
            raise KeyboardInterrupt
        save_model(self, output_dir, _internal_call)

    with monkeypatch.context() as patch:
        patch.setattr(BAPOTrainer, "save_model", killed)
        with pytest.raises(KeyboardInterrupt):
            run(**settings)
    assert not list(Path("out").glob("*model*.safetensors"))
    capsys.readouterr()
    run(**settings, resume_from_checkpoint="true")
    assert "\nResumes from out/checkpoint-3.\n" in capsys.readouterr().out
    (saved,) = Path("out").glob("*model.safetensors")
    assert saved.read_bytes() == Path("out/checkpoint-3", saved.name).read_bytes()
    assert saved.read_bytes() != Path("out/checkpoint-2", saved.name).read_bytes()
    assert results()["eval_reward"] is not None
    assert Path("out/merged").is_dir()
    with pytest.raises(ValueError, match="at update 3, and `max_steps` is 2: raise `max_steps`"):
        run(**{**settings, "max_steps": "2", "merge_adapter": None}, resume_from_checkpoint="true")


def test_an_adapter_is_trained_on(adapter):
    run(dataset_name="train.jsonl", model_name_or_path="adapter", merge_adapter="true")
    assert Path("out/adapter_model.safetensors").exists()
    assert (logits("out") - logits("adapter")).abs().max() > 1e-4
    assert_alike("out/merged", "out")


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        ("peft", {"use_peft": "true"}, r"`use_peft` needs the package peft, .* `pip install 'bapo-trl\[peft\]'`"),
        ("peft", {"model_name_or_path": "adapter"}, "`model_name_or_path` needs the package peft"),
        ("math_verify", {"reward_funcs": "accuracy_reward"}, r"`reward_funcs` needs .*'bapo-trl\[math\]'"),
        ("bitsandbytes", {"load_in_4bit": "true"}, "`load_in_4bit` needs the package bitsandbytes"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_command(adapter, monkeypatch, module, settings, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == module else True)
    with pytest.raises(InputError, match=message):
        run(dataset_name="train.jsonl", **settings)
    with pytest.raises(InputError, match=message):
        print_plan(flags(dataset_name="train.jsonl", **settings))
