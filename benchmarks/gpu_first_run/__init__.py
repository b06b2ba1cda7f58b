"""First run on a GPU: checks that all variants train, and measures updates, host waits and partial rollouts."""
