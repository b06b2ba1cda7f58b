"""What users bring: the checks of prompts, tokens and rewards, and the notes that they add to errors of TRL."""
