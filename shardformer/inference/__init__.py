"""Text from a trained model: generation, scores, stop conditions and lm-evaluation-harness."""

from shardformer.inference.generator import Continuation, Generator
from shardformer.inference.sampling import Sampling, Stops
from shardformer.inference.scoring import Scorer, score_documents

__all__ = ["Continuation", "Generator", "Sampling", "Scorer", "Stops", "score_documents"]
