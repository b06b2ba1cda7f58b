"""Checkpoints that are complete or not there, and signals that stop a run. Knows transformers alone, not TRL."""
