"""TrainState and the compiled functions of training: a step, and the sums of an evaluation. Global view."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer import optim
from shardformer.config import Config
from shardformer.config.names import Stream
from shardformer.kernels.threefry import STANDARD
from shardformer.model import Loss, Model, Sums, lora, master_weights, with_shardings
from shardformer.shards import example_norms

IN_FLIGHT = 4  # metrics are read this many steps late, so that the device never waits for the host


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint keeps."""

    step: jax.Array  # steps done: the schedule, the batch, the dropout key and every name derive from it
    params: Any
    optimizer: Any
    average: Any  # of the weights; empty without ema
    masters: Any  # float32 copies of the parameters that are stored in bfloat16; empty where none is


class StepMetrics(NamedTuple):
    """Of one step: its losses before the update, and the update."""

    loss: float
    z_loss: float
    accuracy: float
    grad_norm: float
    update_norm: float
    lr: float


class Trainer:
    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.model = Model(config, mesh)
        self.model.check_attention()
        self.learning_rate = optim.learning_rate(config)
        self.optimizer = optim.make_optimizer(config)
        self._mode = "scan" if config.accum == 1 else config.accum_mode
        if config.accum_mode == "multisteps":  # with accum=1 too, which may change on resume
            self.optimizer = optim.accumulate_over_calls(self.optimizer, config.accum)
        learned = lora.select_learned(self.model.shapes, config)
        optim.rules.check_rules(learned, config)
        optim.average.check_names(self.model.shapes, config)
        optimizer_specs = optim.state_specs(self.optimizer, learned, self.model.grad_specs)
        average_specs = optim.average.select_averaged(self.model.specs, config)
        master_specs = master_weights.select_masters(self.model.grad_specs, config)
        specs = TrainState(P(), self.model.specs, optimizer_specs, average_specs, master_specs)
        self.shardings = jax.tree.map(self.model.sharding, specs)
        self._replicated = self.model.sharding(P())
        self.compiled_step = self._compiled(self.update)
        self._part = self._compiled(self.update_by_part)
        sum_shardings = Loss(*[self._replicated] * 3), jax.tree.map(self.model.sharding, self.model.grad_specs)
        self._start_sums = jax.jit(self.start_sums, out_shardings=sum_shardings)
        self._add_part = jax.jit(self.add_part, donate_argnums=0, out_shardings=sum_shardings)
        self._finish = self._compiled(self.finish)
        zeros = lambda: jnp.zeros(len(StepMetrics._fields))
        self._zero_metrics = jax.jit(zeros, out_shardings=self._replicated)  # placed as later metrics are
        self._start_compiled = jax.jit(self._start_state, donate_argnums=0, out_shardings=self.shardings)
        self._gradient_metrics = jax.jit(self.measure_examples, out_shardings=self._replicated)
        self._sums = jax.jit(self.model.sums, out_shardings=self._replicated)

    def _compiled(self, step):
        return jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, self._replicated))

    @property
    def abstract(self) -> TrainState:
        """Shapes and shardings without arrays: what a checkpoint restores onto."""
        shapes = jax.eval_shape(self._start_state, self.model.shapes)
        return with_shardings(shapes, self.shardings)

    def init(self) -> TrainState:
        return self.start(self.model.init(self.config.seed))

    def start(self, params) -> TrainState:
        """The state before the first step, of float32 parameters, which it consumes."""
        return self._start_compiled(params)

    def step(self, state: TrainState, batch, step: int) -> tuple[TrainState, jax.Array]:
        """One update with the batch made for `step`; consumes `state`. The metrics are one array."""
        batch, step = self.to_devices(batch), np.int32(step)
        if self._mode == "scan":
            return self.compiled_step(state, batch, step)
        if self._mode == "multisteps":
            metrics = self._zero_metrics()
            for part in range(self.config.accum):
                state, metrics = self._part(state, batch, step, np.int32(part), metrics)
            return state, metrics
        total = self._start_sums(state)
        for part in range(self.config.accum):
            total = self._add_part(total, state, batch, np.int32(part))
        return self._finish(state, total, step)

    def lower(self, state: TrainState, batch) -> list[jax.stages.Lowered]:
        """The programs that a step runs, for a caller to compile and inspect."""
        batch, step = self.to_devices(batch), np.int32(0)
        if self._mode == "scan":
            return [self.compiled_step.lower(state, batch, step)]
        if self._mode == "multisteps":
            return [self._part.lower(state, batch, step, step, self._zero_metrics())]
        total = self._start_sums(state)
        return [self._add_part.lower(total, state, batch, step), self._finish.lower(state, total, step)]

    @staticmethod
    def read_metrics(metrics: jax.Array) -> StepMetrics:
        """Waits for the step."""
        return StepMetrics(*np.asarray(metrics).tolist())

    def sums(self, params, batch) -> Sums:
        """Over one batch, each target weighted."""
        return self._sums(params, self.to_devices(batch))

    def gradient_metrics(self, state: TrainState, batch) -> dict[str, float]:
        """How the gradients of single examples spread, for the step that `state` is about to take; waits for it."""
        found = self._gradient_metrics(state, self.to_devices(batch))
        return {name: np.asarray(value).tolist() for name, value in found.items()}

    @property
    def local_rows(self) -> np.ndarray:
        """Which rows of a global batch this process's devices hold: a pod's mesh may interleave its hosts."""
        held = self.model.sharding(self.model.row_spec).addressable_devices_indices_map((self.config.batch,)).values()
        every = np.arange(self.config.batch)
        return np.unique(np.concatenate([every[index] for index in held]))

    def to_devices(self, batch):
        """This process's rows as its part of a global array."""
        sharding = self.model.sharding(self.model.row_spec)
        return {
            name: jax.make_array_from_process_local_data(sharding, rows, (self.config.batch, *rows.shape[1:]))
            for name, rows in batch.items()
        }

    def update(self, state: TrainState, batch, batch_step) -> tuple[TrainState, jax.Array]:
        """The step itself."""
        key = self.dropout_key(state.step)
        losses, grads = self.model.loss_and_grad(state.params, batch, key)
        objective = lambda learned: self.model.objective(learned, state.params, batch, key)
        return self.apply(state, losses, grads, batch_step, objective)

    def update_by_part(self, state: TrainState, batch, batch_step, part, before) -> tuple[TrainState, jax.Array]:
        """One microbatch of the step; the optimizer acts at the last one. `before` is the metrics so far."""
        losses, grads = self._loss_and_grad_of_part(state, batch, part)
        count = (part + 1).astype(jnp.float32)
        means = before[: len(losses)]
        losses = Loss(*[mean + (loss - mean) / count for mean, loss in zip(means, losses, strict=True)])
        return self.apply(state, losses, grads, batch_step, last=part == self.config.accum - 1, before=before)

    def start_sums(self, state: TrainState):
        """The sums of losses and gradients before the first part."""
        zero = jnp.zeros(())
        return Loss(zero, zero, zero), jax.tree.map(jnp.zeros_like, self._learned(state))

    def add_part(self, total, state: TrainState, batch, part):
        """The sums with one more part in them."""
        return jax.tree.map(jnp.add, total, self._loss_and_grad_of_part(state, batch, part))

    def finish(self, state: TrainState, total, batch_step) -> tuple[TrainState, jax.Array]:
        """The step, once all parts are in `total`."""
        return self.apply(state, *jax.tree.map(lambda x: x / self.config.accum, total), batch_step)

    def apply(
        self, state: TrainState, losses: Loss, grads, batch_step, objective=None, last=True, before=None
    ) -> tuple[TrainState, jax.Array]:
        """Applies the optimizer, unless the loss or the gradient is not finite: then the state does not change, nor in
        the steps that were dispatched after this one, as their `batch_step` is ahead of the state's.

        That is decided before the update: deciding by its norm would keep all updates and moments in memory twice.
        """
        counted = optim.rules.zero_frozen(optim.mean_gradient(state.optimizer, grads), self.config)  # as in the clip
        norm = optax.tree.norm(counted)
        measured = jnp.stack([*losses, norm])
        if before is not None:  # one microbatch that is not finite spoils the whole step
            measured = jnp.where(jnp.isfinite(before[: len(measured)]), measured, before[: len(measured)])
        finite = jnp.isfinite(measured).all() & (batch_step == state.step)
        minimised = losses.loss + self.config.z_loss * losses.z_loss
        known = {"norm": norm, "value": minimised, "grad": grads, "value_fn": objective}
        unchanged = state._replace(optimizer=optim.reset_accumulation(state.optimizer)), jnp.float32(0), jnp.float32(0)
        advance = lambda: self._advance(state, grads, last, known)
        after, update_norm, rate = lax.cond(finite, advance, lambda: unchanged)
        return after, jnp.stack([*measured, update_norm, rate])

    def _loss_and_grad_of_part(self, state: TrainState, batch, part):
        return self.model.loss_and_grad_of_part(state.params, batch, self.dropout_key(state.step), part)

    def _advance(self, state: TrainState, grads, last, known) -> tuple[TrainState, jax.Array, jax.Array]:
        """The state after an update, the norm of what moved, and the rate; the last microbatch ends the step."""
        before, moments = self._learned(state), optim.widen_moments(self.optimizer, state.optimizer, self.config)
        updates, moments = self.optimizer.update(grads, moments, before, step=state.step, **known)
        add = lambda p, u: jnp.where(jnp.isfinite(p + u), p + u, p)  # a weight that would overflow stays
        learned = jax.tree.map(add, before, updates)
        params = lora.replace_learned(state.params, master_weights.round_parameters(learned, self.config))
        average = optim.average.update_average(state.average, learned, state.step, self.config)
        average = jax.tree.map(lambda new, old: jnp.where(last, new, old), average, state.average)
        rate = optim.step_size(moments, self.learning_rate(state.step))
        optimizer = optim.round_moments(self.optimizer, moments, state.step, self.config)
        own = master_weights.select_masters(learned, self.config)
        moved = jax.tree.map(jnp.subtract, learned, before)
        after = TrainState(state.step + jnp.int32(last), params, optimizer, average, own)
        return after, optax.tree.norm(moved), rate

    def _learned(self, state: TrainState):
        return master_weights.learned_parameters(state.params, state.masters, self.config)

    def measure_examples(self, state: TrainState, batch) -> dict[str, jax.Array]:
        """Norms over all parameters and by layer, and the noise; its scale is the ratio of sums over many steps."""
        key = self.dropout_key(state.step)
        squares = optim.rules.zero_frozen(self.model.example_square_norms(state.params, batch, key), self.config)
        grads = optim.rules.zero_frozen(self.model.loss_and_grad(state.params, batch, key)[1], self.config)
        norm_B = jnp.sqrt(example_norms.sum_all(squares))
        noise = example_norms.estimate_noise(jnp.square(norm_B), jnp.square(optax.tree.norm(grads)))
        by_layer = jnp.sqrt(example_norms.sum_by_layer(squares)).mean(0)
        return {
            "example_norm_mean": norm_B.mean(),
            "example_norm_max": norm_B.max(),
            "noise_variance": noise.variance,
            "noise_signal": noise.signal,
        } | {f"example_norm_layer_{i}": by_layer[i] for i in range(self.config.layers)}

    def dropout_key(self, step):
        key = jax.random.fold_in(jax.random.key(self.config.seed, impl=STANDARD), Stream.DROPOUT)
        return jax.random.key_data(jax.random.fold_in(key, step))

    def _start_state(self, params) -> TrainState:
        step, learned = jnp.zeros((), jnp.int32), lora.select_learned(params, self.config)
        optimizer = optim.round_moments(self.optimizer, self.optimizer.init(learned), step, self.config)
        average, own = (
            optim.average.start_average(params, self.config),
            master_weights.select_masters(params, self.config),
        )
        return TrainState(step, master_weights.round_parameters(params, self.config), optimizer, average, own)
