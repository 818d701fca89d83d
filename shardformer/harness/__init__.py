"""Evaluation by the yardstick of others: lm-evaluation-harness asks, a model of ours answers."""
