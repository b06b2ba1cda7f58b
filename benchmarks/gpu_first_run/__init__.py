"""Runs on a GPU: time to an accuracy, micro-batches without padding, sharded resuming, and QLoRA."""
