"""Plugin of a vLLM server: the weight-transfer backend `gloo`. vLLM finds it by the package's entry point."""


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "gloo"}'` known to vLLM. Called in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "gloo", "bapo_trl.vllm_server.gloo.server_engine", "GlooWeightTransferEngine"
        )
