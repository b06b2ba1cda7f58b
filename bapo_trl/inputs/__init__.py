"""Checks of user input: settings, datasets, prompts, tokenizers, optimizers and rewards."""
