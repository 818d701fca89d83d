"""The train step, the loop, saving, evaluation, and the folder of a run."""
