"""Accuracy of a model on a dataset: completions, their rewards and answers, and avg@k, pass@k and maj@k of them."""
