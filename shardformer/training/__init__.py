"""The train step, the training loop, saving, evaluation, and the run folder."""
