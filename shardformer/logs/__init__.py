"""The records and displays of a run: progress, metrics.csv, TensorBoard events, curves."""
