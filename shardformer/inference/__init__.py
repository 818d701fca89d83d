"""Text from a trained model: generation, scores, stop conditions and lm-evaluation-harness."""

from shardformer.inference.generator import Continuation, Generator
from shardformer.inference.sampling import Sampling, Stops

__all__ = ["Continuation", "Generator", "Sampling", "Stops"]
