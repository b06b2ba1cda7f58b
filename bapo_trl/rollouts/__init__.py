"""Partial rollouts: completions that are generated in rounds and go on under later policies."""
