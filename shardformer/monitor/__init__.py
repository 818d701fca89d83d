"""Scores and samples of a model while it trains, on the training mesh."""

from shardformer.monitor.monitor import Monitor

__all__ = ["Monitor"]
