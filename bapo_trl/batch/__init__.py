"""Everything that depends on the layout of TRL's batch: keys, padding, masks, policy versions and filler samples."""
