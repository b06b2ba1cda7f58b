"""What `bapo-trl train` and `bapo-trl evaluate` are made of, besides the trainer; `train_bapo.py` calls it."""
