"""The train step, the training loop, its outputs, and evaluation."""
