"""vLLM plugin with the weight-transfer backend `gloo` for CPUs. vLLM finds it through the package's entry point."""


def register() -> None:
    """
    Register the backend of `--weight-transfer-config '{"backend": "gloo"}'`, if vLLM runs on a CPU. vLLM calls this in
    all of its processes.
    """
    from vllm.platforms import current_platform  # vLLM has already imported it

    if not current_platform.is_cpu():
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", "bapo_trl_gloo.server_engine", "GlooWeightTransferEngine")
