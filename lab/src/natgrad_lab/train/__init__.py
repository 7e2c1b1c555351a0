"""Training: configuration, the loop, run folders and checkpoints."""
