"""Checks and counts before a run starts: samples and updates, prompts, and rewards (`dry_run`)."""
