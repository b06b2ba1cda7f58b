"""Weight transfer from the trainer to a vLLM server on CPUs. vLLM and TRL support only CUDA devices."""
