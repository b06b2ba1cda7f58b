"""Generation by a vLLM server: its client and failures, and whether it samples from the trainer's weights."""
