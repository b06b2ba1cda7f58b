"""Partial rollouts and overlapped generation: completions that are not all sampled by the latest policy."""
