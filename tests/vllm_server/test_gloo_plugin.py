"""The plugin of bapo-trl-gloo, which vLLM loads, with stand-ins for vLLM's modules; `tests/e2e` has the real ones."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from bapo_trl_gloo.server_plugin import register


@pytest.fixture
def registered(monkeypatch):
    """What is registered, with a vLLM of which only the platforms are there until something more is imported."""
    backends = {}
    factory = SimpleNamespace(
        _registry=backends, register_engine=lambda name, module, engine: backends.update({name: (module, engine)})
    )
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("vllm.distributed.weight_transfer.factory")
    module.WeightTransferEngineFactory = factory
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def on(is_cpu: bool) -> dict:
        platforms = ModuleType("vllm.platforms")
        platforms.current_platform = SimpleNamespace(is_cpu=lambda: is_cpu)
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
        if not is_cpu:
            monkeypatch.delitem(sys.modules, module.__name__)  # importing it would raise
        register()
        return backends

    return on


def test_on_a_gpu_nothing_is_imported_and_nothing_registered(registered):
    assert registered(is_cpu=False) == {}


def test_on_a_cpu_the_backend_is_known_once(registered):
    known = registered(is_cpu=True)
    assert known == {"gloo": ("bapo_trl_gloo.server_engine", "GlooWeightTransferEngine")}
    known["gloo"] = "as it was"
    register()
    assert known == {"gloo": "as it was"}
