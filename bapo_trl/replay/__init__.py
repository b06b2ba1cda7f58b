"""The replay buffer: training on samples of past generation steps again."""
