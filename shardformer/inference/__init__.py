"""Text from a trained model: generation, scores, stop conditions and lm-evaluation-harness."""

from shardformer.config.sampling_keys import Sampling
from shardformer.inference.generator import Continuation, Generator
from shardformer.inference.sampling import Stops

__all__ = ["Continuation", "Generator", "Sampling", "Stops"]
