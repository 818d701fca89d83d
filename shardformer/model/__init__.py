"""The model in the global view: the only `shard_map`, LoRA adapters, master weights and FLOPs."""

from shardformer.model.model import ROWS, Loss, Model, Sums, with_shardings

__all__ = ["ROWS", "Loss", "Model", "Sums", "with_shardings"]
