"""What stands between the sampler and the trainer."""
