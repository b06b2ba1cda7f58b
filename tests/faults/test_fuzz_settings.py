"""Settings of ours at random, in and out of range, of any type: two updates are trained, or an error names a field."""

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


FIELDS = {f.name: in_range(f) for f in own_fields()}
# Few runs would have groups that are parked, or a queue that overflows
FIELDS |= {
    "partial_rollout_oversampling": st.just(1.5) | floats(1.0, 1.99),
    "replay_capacity": st.integers(1, 100),
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


@st.composite
def some_settings(draw) -> dict:
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=6, unique=True))
    wild = draw(st.sampled_from([None, None, *names]))
    return {name: draw(WILD if name == wild else FIELDS[name]) for name in names}


def check_names_a_field(error: Exception) -> None:
    """A temperature of 1e-300 is a number, too; what comes of it is none."""
    if isinstance(error, RuntimeError) and str(error).startswith("NaN or infinity"):
        return
    known = {f.name for f in dataclasses.fields(BAPOConfig)}
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    named = set(re.findall(r"`(\w+)`", said)) | set(re.findall(r"\w+_\w+", said))  # TRL has no backticks
    assert known & named, said


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
    data = {"train_dataset": toy_dataset(40), "processing_class": character_tokenizer()}
    return {"output_dir": tmp_path_factory.mktemp("out"), "trainer_args": data}


@pytest.mark.fuzz
@settings(FUZZ, max_examples=cases(800))
@given_examples(given=some_settings())
def test_settings_train_or_an_error_names_a_field(parts, quiet, given):
    args = {**SMALL, "gradient_checkpointing": False, "logging_strategy": "no", "max_steps": 2, **given}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = toy_run(model=toy_model(), **parts, **args)
    except (ValueError, RuntimeError) as error:
        check_names_a_field(error)
        return
    assert trainer.state.global_step == 2
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
