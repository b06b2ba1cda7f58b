"""What `train_bapo.py` uses besides the trainer."""
