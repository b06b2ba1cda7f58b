"""The only subpackage that knows TRL's batch: its keys, padding and masks, policy versions, and filler samples."""
