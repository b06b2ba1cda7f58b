"""Plugin of a vLLM server on CPUs: the weight-transfer backend `gloo`. vLLM finds it by the package's entry point."""


def register() -> None:
    """
    Make `--weight-transfer-config '{"backend": "gloo"}'` known to vLLM. Called in each of its processes, every user's:
    where vLLM does not run on a CPU, nothing is done.
    """
    from vllm.platforms import current_platform  # which vLLM has imported, to load its plugins

    if not current_platform.is_cpu():
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", "bapo_trl_gloo.server_engine", "GlooWeightTransferEngine")
