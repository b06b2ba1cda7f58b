"""Flags and recipes: what can be set, how it is read, and the methods by name."""
