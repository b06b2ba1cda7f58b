"""Every TRL name the trainer relies on exists, and a missing one is named at import."""

import inspect

import pytest
import trl
from packaging.version import Version
from trl import GRPOTrainer

from bapo_trl import BAPOTrainer
from bapo_trl.upstream import trl_compat


BASES = BAPOTrainer.__mro__[: BAPOTrainer.__mro__.index(GRPOTrainer)]


def test_the_installed_version_is_one_that_is_claimed():
    installed = Version(trl.__version__)
    assert any(
        installed >= tested and installed.release[:2] == tested.release[:2]
        for tested in map(Version, trl_compat.TESTED_VERSIONS)
    )


def test_the_list_is_that_of_the_methods_overridden():
    own = {name for base in BASES for name, member in vars(base).items() if inspect.isfunction(member)}
    assert {name for name in own if hasattr(GRPOTrainer, name)} - {"__init__"} == set(trl_compat.OVERRIDDEN_METHODS)


@pytest.mark.parametrize("method", trl_compat.OVERRIDDEN_METHODS)
def test_every_override_calls_its_parent(method):
    overrides = [vars(base)[method] for base in BASES if method in vars(base)]
    assert all("super" in inspect.unwrap(override).__code__.co_names for override in overrides)


def test_a_missing_method_is_named():
    class Renamed(GRPOTrainer):
        _compute_loss = None
        get_off_policy_mask = None

    with pytest.raises(
        ImportError, match=r"trl 9\.9\.9 does not have: _compute_loss, get_off_policy_mask\. .*1\.14\.2, .*~=1\.16"
    ):
        trl_compat.check_trl(Renamed, "9.9.9")


def test_a_missing_attribute_is_named():
    class Renamed(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return self.epsilon_low

    assert "_compute_loss: self.epsilon_high" in trl_compat.missing_names(Renamed)
    assert "_compute_loss: self.epsilon_low" not in trl_compat.missing_names(Renamed)


def test_a_missing_name_of_the_client_is_named(monkeypatch):
    class Renamed:
        def generate(self):
            return self._post(self.url)

    monkeypatch.setattr(trl_compat, "VLLMClient", Renamed)
    monkeypatch.setattr(trl_compat, "HAS_OPENAI_CLIENT", True)
    assert trl_compat.missing_names() == ["VLLMClient.base_url", "VLLMClient.model"]


def test_a_missing_name_of_the_weight_transfer_is_named(monkeypatch):
    class Renamed:
        def sync_weights(self):
            with self.model.merged_adapter():
                return list(self.model.named_parameters())

        def generate(self):
            self.sync_weights()

    monkeypatch.setattr(trl_compat, "VLLMGeneration", Renamed)
    missing = trl_compat.missing_names()
    assert missing == ["VLLMGeneration: merge_adapter", "VLLMGeneration: unmerge_adapter"]


def test_forward_keys_are_those_of_trls_forward():
    """Of the batch's keys, the look-ahead passes on those that TRL's own loss passes on."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    call = source[source.index("_get_per_token_logps_and_entropies(") : source.index("if self.top_entropy_quantile")]
    assert {key for key in trl_compat.FORWARD_KEYS if f"{key}=inputs.get(" in call} == set(trl_compat.FORWARD_KEYS)
    assert call.count("inputs.get(") == len(trl_compat.FORWARD_KEYS)
