"""Finished samples of past updates."""
