"""The compiled functions of training on one mesh: a step, the sums of an evaluation, the norms of gradients."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer.config import Config
from shardformer.devices import programs
from shardformer.layout import Layout
from shardformer.model import Sums, with_shardings
from shardformer.model.task_on_mesh import choose_task
from shardformer.training.accumulation import make_accumulation
from shardformer.training.features import choose_parts, choose_update
from shardformer.training.step import StepMetrics, TrainState, Update

IN_FLIGHT = 4  # metrics are read this many steps late, so that the device never waits for the host
SLOW_STEP = 0.5  # seconds; one step ahead is enough to keep the device busy
VERY_SLOW_STEP = 2.0  # seconds; the host's milliseconds between two steps no longer matter


def choose_steps_ahead(seconds_per_step: float) -> int:
    """Returns how many steps to dispatch ahead of the one that is waited for. A run that stops waits for all."""
    if seconds_per_step > VERY_SLOW_STEP:
        return 0
    return 1 if seconds_per_step > SLOW_STEP else IN_FLIGHT


class Trainer:
    """The model, the optimizer and their compiled functions for one configuration and mesh."""

    def __init__(self, config: Config, mesh: Mesh, layout: Layout | None = None):
        """Resolves the layout from the mesh's devices, unless one is given."""
        self.config = config
        task = choose_task(config)
        # A TaskOnMesh; what belongs to an objective uses its class.
        self.model: Any = task(layout, mesh) if layout else task.on(config, mesh)  # type: ignore[call-arg]
        self.model.check_attention()
        self.constants: dict = {}  # arrays that each step needs besides its batch, such as a teacher
        self.update: Update = choose_update(config)(config, self.model, choose_parts(config, self.model))
        self.optimizer = self.update.optimizer
        self.shardings = self.update.make_shardings()
        self.accumulation = make_accumulation(config, self.update, self.shardings)
        self._start = programs.jit(self.update.start, donate_argnums=0, out_shardings=self.shardings)
        self._sums = programs.jit(self.model.sums, out_shardings=self.model.sharding(P()))

    @property
    def abstract(self) -> TrainState:
        """Shapes and shardings without arrays, onto which a checkpoint is restored."""
        shapes = jax.eval_shape(self.update.start, self.model.shapes)
        return with_shardings(shapes, self.shardings)

    def init(self) -> TrainState:
        """Returns the state before the first step, from the seed."""
        return self.start(self.model.init(self.config.training.seed))

    def start(self, params) -> TrainState:
        """Returns the state before the first step, from float32 parameters, which it consumes."""
        return self._start(params)

    def compile_step(self) -> None:
        """Compiles the step for batches of `batch_shapes`: the first call finds it compiled."""
        for lowered in self.lower(self.abstract, self.abstract_batch):
            lowered.compile()

    def step(self, state: TrainState, batch, step: int) -> tuple[TrainState, jax.Array]:
        """Dispatches one update with the batch made for `step`; consumes `state`. The metrics are one array."""
        return self.accumulation.step(state, self.to_devices(batch) | self.constants, np.int32(step))

    def lower(self, state: TrainState, batch) -> list[jax.stages.Lowered]:
        """Returns the programs that a step runs, for a caller to compile and inspect.

        Accepts a state and a batch of shapes as well: `abstract` and `abstract_batch`.
        """
        is_abstract = all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch))
        return self.accumulation.lower(state, batch if is_abstract else self.to_devices(batch))

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and shardings of a batch without arrays."""
        sharding = self.model.sharding(self.model.row_spec)
        shapes = self.model.batch_shapes()
        return with_shardings(shapes, dict.fromkeys(shapes, sharding)) | self.model.constant_shapes()

    @staticmethod
    def read_metrics(metrics: jax.Array) -> StepMetrics:
        """Waits for the step, and returns its metrics."""
        return StepMetrics(*np.asarray(metrics).tolist()[: len(StepMetrics._fields)])

    def read_details(self, metrics: jax.Array) -> dict[str, float | None]:
        """Returns the metrics that only this task has, and None for those that it has not."""
        names, values = self.model.details, np.asarray(metrics).tolist()
        further = dict(zip(names, values[len(values) - len(names) :], strict=True))
        return dict.fromkeys(self.model.unmeasured) | further

    def sums(self, params, batch) -> Sums:
        """Returns the weighted sums over one batch."""
        return self._sums(params, self.to_devices(batch))

    def place_batch(self, state: TrainState, batch, step: int) -> dict[str, jax.Array]:
        """Returns the arrays on the devices that `step` would learn from."""
        return self.to_devices(batch)

    @property
    def local_rows(self) -> np.ndarray:
        """The rows of a global batch that this process's devices hold. A pod's mesh may interleave its hosts."""
        every = np.arange(self.config.training.batch)
        indices = self.model.sharding(self.model.row_spec).addressable_devices_indices_map(every.shape)
        return np.unique(np.concatenate([every[index] for index in indices.values()]))

    def to_devices(self, batch) -> dict[str, jax.Array]:
        """Places this process's rows as its part of a global array."""
        sharding = self.model.sharding(self.model.row_spec)
        if jax.process_count() == 1:  # a quarter of the time of the general function
            place = jax.make_array_from_callback
            return {name: place(rows.shape, sharding, rows.__getitem__) for name, rows in batch.items()}
        return {
            name: jax.make_array_from_process_local_data(sharding, rows, (self.config.training.batch, *rows.shape[1:]))
            for name, rows in batch.items()
        }

    def dropout_key(self, step) -> jax.Array:
        """Returns the key data of a step's dropout masks."""
        return self.update.dropout_key(step)
