"""What train.py is made of, apart from its loop: options, the model, signals, checkpoints, log, report."""
