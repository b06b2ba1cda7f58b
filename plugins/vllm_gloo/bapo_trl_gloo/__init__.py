"""Weight transfer from the trainer to a vLLM server on CPUs, where vLLM and TRL have it for CUDA devices only."""
