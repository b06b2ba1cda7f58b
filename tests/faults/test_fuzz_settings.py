"""Settings at random: two updates are trained, a `ValueError` names a field, or a number stops the run that is none.

What TRL and transformers reject is their error: it need not name a field if one of theirs is out of range.

Fuzzed are the fields of `BAPOConfig` that GRPO does not have, and those of TRL that they depend on (`OF_TRL`). Values
are in and out of range, and of any type that YAML has.
"""

import contextlib
import dataclasses
import io
import logging
import math
import re
import warnings

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import given as given_examples
from hypothesis import strategies as st

from bapo_trl import BAPOConfig
from bapo_trl.bapo_config import own_fields
from bapo_trl.losses import LOSSES
from bapo_trl.tasks import character_tokenizer
from tests.helpers.fault_counts import cases
from tests.helpers.toy import toy_dataset, toy_model, toy_run


FUZZ = settings(
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
SMALL = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 1,
    "num_generations": 2, "max_completion_length": 3,
}  # fmt: skip


def floats(low: float, high: float) -> st.SearchStrategy:
    return st.floats(low, high, allow_nan=False) | st.sampled_from([low, high])


def in_range(field: dataclasses.Field) -> st.SearchStrategy:
    """Values of a field of ours, by its metadata; of an endless range the first of it."""
    if field.type is bool:
        return st.booleans()
    if "choices" in field.metadata:
        return st.sampled_from(field.metadata["choices"])
    interval = field.metadata["range"]
    low, high = (float(bound) for bound in interval[1:-1].split(", "))
    low, high = low + 0.01 * (interval[0] == "("), min(high, low + 10) - 0.01 * (interval[-1] == ")")
    values = st.integers(math.ceil(low), math.floor(high)) if "int" in str(field.type) else floats(low, high)
    return st.none() | values if "None" in str(field.type) else values


OF_BAPO = {f.name: in_range(f) for f in own_fields()}
# Few runs would have groups that are parked, or a queue that overflows
OF_BAPO |= {
    "partial_rollout_oversampling": st.just(1.5) | floats(1.0, 1.99),
    "replay_capacity": st.integers(1, 100),
}
OF_TRL = {
    "loss_type": st.sampled_from(list(LOSSES)),
    "importance_sampling_level": st.sampled_from(["token", "sequence"]),
    "epsilon": st.none() | floats(0.1, 1.0),
    "epsilon_high": st.none() | floats(0.1, 10.0),
    "delta": st.none() | floats(1.5, 10.0),
    "beta": st.just(0.0) | floats(0.0, 1.0),
    "num_generations": st.integers(2, 4),
    "per_device_train_batch_size": st.integers(1, 8),
    "gradient_accumulation_steps": st.integers(1, 3),
    "steps_per_generation": st.none() | st.integers(1, 4),
    "generation_batch_size": st.none() | st.integers(1, 16),
    "num_iterations": st.integers(1, 3),
    "max_completion_length": st.integers(1, 5),
    "scale_rewards": st.sampled_from(["group", "batch", "none", True, False]),
    "multi_objective_aggregation": st.sampled_from(["sum_then_normalize", "normalize_then_sum"]),
    "mask_truncated_completions": st.booleans(),
    "top_entropy_quantile": floats(0.0, 1.0),
    "off_policy_mask_threshold": st.none() | floats(0.01, 1.0),
    "reward_weights": st.none() | st.lists(floats(-2.0, 2.0), max_size=2),
    "max_grad_norm": floats(0.0, 2.0),
    "temperature": floats(0.1, 2.0),
    "top_p": floats(0.1, 1.0),
    "top_k": st.integers(0, 5),
    "min_p": st.none() | floats(0.0, 0.5),
    "repetition_penalty": floats(0.5, 2.0),
}
# Out of range, or of another type
WILD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, -0.5, 0.0, 1e-300, 1e308, 10**30, -(10**30)]),
    st.floats(),
    st.sampled_from(["", "0.5", "3", "true", "none", "null", "1e-3", "ünï-∞", "\u202e", "a b", "[1]", "{}", "-"]),
    st.lists(st.integers(0, 3) | st.text(max_size=2) | st.none(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(0, 3), max_size=2),
    st.just([[{"a": [None]}]]),
)
# Large values of these are no error, but take long
ARE_COSTS = {"per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "generation_batch_size"}
SMALL_WILD = WILD.filter(lambda value: not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 8)


@st.composite
def some_settings(draw, fields: dict[str, st.SearchStrategy]) -> tuple[dict, str | None]:
    names = draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=6, unique=True))
    wild = draw(st.sampled_from([None, None, *names]))
    values = {
        name: draw((SMALL_WILD if name in ARE_COSTS else WILD) if name == wild else fields[name]) for name in names
    }
    return values, wild


OF_OURS = (ValueError, RuntimeError)
OF_OTHERS = (*OF_OURS, ArithmeticError, AttributeError, TypeError)


def check_names_a_field(error: Exception) -> None:
    """A temperature of 1e-300 is a number, too; what comes of it is none."""
    if isinstance(error, RuntimeError) and str(error).startswith("NaN or infinity"):
        return
    known = {f.name for f in dataclasses.fields(BAPOConfig)}
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    named = set(re.findall(r"`(\w+)`", said)) | set(re.findall(r"\w+_\w+", said))  # TRL has no backticks
    in_words = {name for name in known if "_" in name and name.replace("_", " ") in said}  # so TRL on `reward_weights`
    assert known & named or in_words, said


@pytest.fixture(scope="module")
def quiet():
    """No warnings and no logs: thousands of trainers would fill the screen."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(before)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    toy_model().save_pretrained(folder / "model")
    return {
        "output_dir": folder,
        "trainer_args": {"train_dataset": toy_dataset(40), "processing_class": character_tokenizer()},
    }


def train_or_name_a_field(parts: dict, drawn: tuple[dict, str | None], errors: tuple) -> None:
    given, wild = drawn
    args = {**SMALL, "gradient_checkpointing": False, "logging_strategy": "no", "max_steps": 2, **given}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model = toy_model()
            model.config._name_or_path = str(parts["output_dir"] / "model")  # where TRL finds the reference
            trainer = toy_run(model=model, **parts, **args)
    except errors as error:
        if wild not in OF_TRL:
            check_names_a_field(error)
        return
    assert trainer.state.global_step == 2
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.fuzz
@settings(FUZZ, max_examples=cases(800))
@given_examples(given=some_settings(OF_BAPO))
def test_settings_of_ours_train_or_name_a_field(parts, quiet, given):
    train_or_name_a_field(parts, given, OF_OURS)


@pytest.mark.fuzz
@settings(FUZZ, max_examples=cases(800))
@given_examples(given=some_settings(OF_BAPO | OF_TRL))
def test_settings_of_ours_and_of_trl_train_or_name_a_field(parts, quiet, given):
    train_or_name_a_field(parts, given, OF_OTHERS)
