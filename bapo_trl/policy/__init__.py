"""What a policy says of TRL's batches: log-probabilities, tokens as the loss weighs them, how stale they are."""
