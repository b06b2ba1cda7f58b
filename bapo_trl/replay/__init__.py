"""Finished samples of past updates. The only door of this wing is `mixer`."""
