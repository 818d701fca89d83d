"""What a person looks at while a run trains and after: progress, metrics.csv, TensorBoard events, curves."""
