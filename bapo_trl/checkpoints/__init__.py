"""Atomic checkpoints, exact resume, and signals that stop a run."""
