"""What can be known of a run before it begins: its arithmetic, its prompts and its rewards."""
