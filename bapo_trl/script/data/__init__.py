"""Datasets by name: loaded, brought into columns that trainer and rewards read, and checked."""
