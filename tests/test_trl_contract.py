"""Every TRL name and signature the trainer relies on exists; a missing one is named at import, a new one passed on."""

import functools
import inspect

import pytest
import trl
from packaging.version import Version
from trl import GRPOTrainer

from bapo_trl import BAPOTrainer
from bapo_trl.evaluation.sampling import EvaluatedGRPOTrainer
from bapo_trl.upstream import trl_compat
from bapo_trl.vllm_server.client import ServerClient
from tests.helpers.toy import toy_dataset, toy_run
from tests.rollouts.test_rollout_rounds import PARTIAL


BASES = BAPOTrainer.__mro__[: BAPOTrainer.__mro__.index(GRPOTrainer)]
OVERRIDDEN = trl_compat.overridden_methods(BAPOTrainer, GRPOTrainer).keys() - {"__init__"}


def test_the_installed_version_is_one_that_is_claimed():
    installed = Version(trl.__version__)
    assert any(
        installed >= tested and installed.release[:2] == tested.release[:2]
        for tested in map(Version, trl_compat.TESTED_VERSIONS)
    )


def test_every_override_calls_its_parent():
    overrides = [(name, vars(base)[name]) for base in BASES for name in OVERRIDDEN & vars(base).keys()]
    assert len(overrides) > 20
    for name, override in overrides:
        assert {"super", name} <= {*inspect.unwrap(override).__code__.co_names}, name


def parameters_of(function) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(function).parameters.items())[1:])


@pytest.mark.parametrize(
    ("own", "parent"),
    [(BAPOTrainer, GRPOTrainer), (EvaluatedGRPOTrainer, GRPOTrainer), (ServerClient, trl_compat.VLLMClient)],
)
def test_every_override_takes_parameters_that_trl_adds(own, parent):
    for owner in own.__mro__[: own.__mro__.index(parent)]:
        for name in trl_compat.overridden_methods(own, parent).keys() & vars(owner).keys():
            takes = {each.kind for each in parameters_of(vars(owner)[name]).values()}
            assert {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= takes, (owner, name)


def test_what_the_trainer_lacks_is_named():
    class Changed(GRPOTrainer):
        get_off_policy_mask = None

        def _tokenize_prompts(self, tools, prompts):  # one comes before
            pass

        def _generate(self, prompts, images):  # one more is needed
            pass

        def _compute_loss(self, model, inputs, num_items_in_batch=None):  # one more may be given
            pass

    missing = [*trl_compat.missing_overrides(BAPOTrainer, GRPOTrainer, Changed), *trl_compat.missing_calls(Changed)]
    assert sorted(missing) == [
        "_generate, as it is called here (missing a required argument: 'images')",
        "_tokenize_prompts(self, prompts, ...)",
        "_tokenize_prompts, as it is called here (missing a required argument: 'prompts')",
        "get_off_policy_mask",
    ]
    message = r"trl 9\.9\.9 does not have: .*_tokenize_prompts\(self, prompts, \.\.\.\).*1\.16\.0.*~=1\.16"
    with pytest.raises(ImportError, match=message):
        trl_compat.check_trl(missing, "9.9.9")


def test_what_the_client_lacks_is_named():
    class Client(trl_compat.VLLMClient):
        reset_prefix_cache = None

        def update_named_params(self, named_params, metadata):
            pass

    assert sorted(trl_compat.missing_overrides(ServerClient, trl_compat.VLLMClient, Client)) == [
        "reset_prefix_cache",
        "update_named_params(self, metadata, named_params, ...)",
    ]


@pytest.mark.trainings
@pytest.mark.parametrize("settings", [{}, PARTIAL], ids=["", "partial rollouts"])
def test_a_keyword_that_trl_adds_reaches_it(tmp_path, monkeypatch, settings):
    """TRL's methods are called with one more, and by the names of their parameters, as the next release may do."""
    passed_on = set()

    def newer(name):
        original = getattr(GRPOTrainer, name)

        @functools.wraps(original)
        def method(self, *args, added=None, **kwargs):
            if added == name:
                passed_on.add(name)
            return original(self, *args, **kwargs)

        return method

    def caller(name):
        names = list(parameters_of(getattr(GRPOTrainer, name)))

        def method(self, *args, **kwargs):
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            return getattr(super(Called, self), name)(**given, added=name)

        return method

    callers = {name: caller(name) for name in OVERRIDDEN}
    for name in OVERRIDDEN:
        monkeypatch.setattr(GRPOTrainer, name, newer(name))
    Called = type("Called", (BAPOTrainer,), callers)
    run = {
        **settings, "beta": 0.0, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps",
        "eval_steps": 1, "per_device_eval_batch_size": 6, "trainer_args": {"eval_dataset": toy_dataset(2)},
        "trainer_class": Called,
    }  # fmt: skip
    toy_run(tmp_path, **run)
    toy_run(tmp_path, **{**run, "max_steps": 3}, resume=True)
    assert passed_on == OVERRIDDEN - {"_push_from_checkpoint"}


def test_forward_keys_are_those_of_trls_forward():
    """Of the batch's keys, the look-ahead passes on those that TRL's own loss passes on."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    call = source[source.index("_get_per_token_logps_and_entropies(") : source.index("if self.top_entropy_quantile")]
    assert {key for key in trl_compat.FORWARD_KEYS if f"{key}=inputs.get(" in call} == set(trl_compat.FORWARD_KEYS)
    assert call.count("inputs.get(") == len(trl_compat.FORWARD_KEYS)
