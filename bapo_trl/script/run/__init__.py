"""A run: training, evaluation, and what may be replaced in the output folder."""
