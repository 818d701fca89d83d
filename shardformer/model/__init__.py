"""The model in the global view: training, decoding and measuring; LoRA adapters, master weights and FLOPs."""

from shardformer.model.decoding import Chunk, Decoder
from shardformer.model.model import Model
from shardformer.model.task_on_mesh import ROWS, Loss, Sums, TaskOnMesh, with_shardings

__all__ = ["ROWS", "Chunk", "Decoder", "Loss", "Model", "Sums", "TaskOnMesh", "with_shardings"]
