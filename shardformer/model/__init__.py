"""The model in the global view: training, decoding and measuring; LoRA adapters, master weights and FLOPs."""

from shardformer.model.decoding import Chunk, Decoder
from shardformer.model.measuring import Measures, Sums
from shardformer.model.model import ROWS, Loss, Model, with_shardings

__all__ = ["ROWS", "Chunk", "Decoder", "Loss", "Measures", "Model", "Sums", "with_shardings"]
