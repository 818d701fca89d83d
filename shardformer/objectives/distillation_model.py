"""The model that learns the distributions of a teacher: another model on the same mesh, whose weights are constant.

Both models' logits exist for at most `loss_chunk` tokens at a time, each shard with its part of the vocabulary.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import checkpoint, storage
from shardformer.config import ARCHITECTURE, Config, is_hugging_face
from shardformer.errors import UsageError
from shardformer.kernels import vocabulary_loss
from shardformer.kernels.vocabulary_loss import measure_divergence
from shardformer.layout.mesh import resolve_on
from shardformer.model.model import Model, average_tokens
from shardformer.shards.pair_transformer import PairTransformerShard


class DistillationLoss(NamedTuple):
    """Means over the tokens of a batch; the first three are those of `Loss`."""

    loss: jax.Array  # the student's cross-entropy in nats per token
    z_loss: jax.Array
    accuracy: jax.Array
    kl: jax.Array  # the divergence in nats per token, at the distillation's temperature


class DistillationModel(Model):
    """`Model` with a teacher. A batch has the teacher's parameters under `teacher`."""

    shard: PairTransformerShard
    shard_class = PairTransformerShard

    def __init__(self, layout, mesh):
        super().__init__(layout, mesh)
        config = read_teacher(self.config)
        self.teacher = Model(resolve_on(config, mesh), mesh)
        self._teacher_shard = PairTransformerShard(
            dataclasses.replace(self.teacher.layout, replicas=self.teacher.replicas.for_forward_pass())
        )

    losses = DistillationLoss

    def constant_shapes(self) -> dict:
        return {"teacher": self.teacher.abstract}

    def make_constants(self) -> dict:
        """Returns a teacher with the weights of a seed."""
        return {"teacher": self.teacher.init(0)}

    def loss_and_grad(self, params, batch, dropout_key):
        """Returns the batch's `DistillationLoss` and the gradient of its objective, which ZeRO splits over dp."""

        def body(params, teacher, batch, dropout_key):
            params, rows = self.replicas.make_local(params), self.number_rows(batch)
            counts = self.count_first(self, params, rows, dropout_key)

            def grad(batch):
                return self._unscaled_loss_and_grad(params, batch, dropout_key, (counts, teacher))

            return self._mean(*self.run_rows(grad, rows))

        rows = self.prepare({name: values for name, values in batch.items() if name != "teacher"})
        in_specs = self.specs, self.teacher.specs, self.row_spec, P()
        return self.shard_map(body, in_specs, (P(), self.grad_specs))(params, batch["teacher"], rows, dropout_key)

    # Shard view: the parts of the bodies above.

    def local_objective(self, params, batch, dropout_key=None, counts=None):
        """Returns (the minimised loss, `DistillationLoss`) of this shard's rows.

        `counts` has the result of `count_first`, and the teacher's parameters.
        """
        keys, tokens = self.config.preferences, batch["tokens"].shape[1]
        of_experts, of_teacher = counts
        batch = self.layout.attention.take_batch(batch)
        dropout = self.draw_masks(dropout_key, batch, tokens)
        inputs, documents = batch["tokens"], batch.get("documents")
        student, records = self.shard.factors(params, inputs, dropout, documents)
        teacher, _ = self._teacher_shard.factors(of_teacher, inputs, None, documents)
        token, kl_BT = self._compare(student, jax.tree.map(_stop, teacher), batch["targets"])
        weights_BT = batch.get("weights")

        def mean(x_BT):
            return average_tokens(x_BT if weights_BT is None else x_BT * weights_BT)

        loss, z_loss, kl = mean(token.nats_BT), mean(jnp.square(token.log_z_BT)), mean(kl_BT)
        objective = keys.distill_weight * keys.distill_temperature**2 * kl + (1 - keys.distill_weight) * loss
        objective = self.add_z_loss(objective, z_loss)
        objective = self.shard.records.complete(objective, records, of_experts)
        means = DistillationLoss(loss, z_loss, mean(token.correct_BT.astype(jnp.float32)), kl)
        return objective, lax.stop_gradient(means)

    def _compare(self, student: tuple, teacher: tuple, targets_BT):
        """Returns the student's losses of every token, and the divergence of every token, in chunks of tokens."""
        keys, chunk = self.config.preferences, self.layout.loss_chunk
        (h_BTD, *of_student), (teacher_BTD, *of_teacher) = student, teacher

        def measure(part):
            h_1cD, teacher_1cD, targets_1c = part
            logits_1cv = vocabulary_loss.project(h_1cD, *of_student)
            teacher_1cv = vocabulary_loss.project(teacher_1cD, *of_teacher)
            scale = 1 / keys.distill_temperature
            vocabulary = of_student[-1]
            kl_1c = measure_divergence(logits_1cv * scale, teacher_1cv * scale, vocabulary.axis, keys.divergence)
            return vocabulary_loss.measure_tokens(logits_1cv, targets_1c, vocabulary), kl_1c

        parts = h_BTD, teacher_BTD, targets_BT
        if not chunk or targets_BT.size <= chunk:
            return measure(parts)
        result = lax.map(jax.checkpoint(measure), vocabulary_loss.split_tokens(parts, chunk))
        return vocabulary_loss.join_tokens(result, targets_BT.shape)


def _stop(leaf):
    return lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf


def read_teacher(config: Config) -> Config:
    """Returns the teacher's configuration on the student's mesh; raises UsageError for another vocabulary."""
    name = config.preferences.teacher
    location = storage.location(name)
    if not (location / "config.json").exists():
        raise UsageError(f"teacher={checkpoint.describe_no_run(location)}")
    if is_hugging_face((location / "config.json").read_bytes()):
        raise UsageError(
            f"teacher={name} is in Hugging Face's format, which only `train` converts; convert it first: "
            f"convert {name} TEACHER"
        )
    teacher = checkpoint.read_config(storage.reading_folder(location))
    check_teacher(config, teacher, name)
    architecture = {key: teacher.get(key) for key in ARCHITECTURE}
    plain = {"lora_rank": 0, "dropout": 0.0, "param_dtype": "float32", "quantize_aware": "none",
             "weights": teacher.stored.weights}  # fmt: skip
    return config.objective.as_language_model().replace(**plain).replace(**architecture | {"seq": config.model.seq})


def check_teacher(config: Config, teacher: Config, name: str) -> None:
    """Raises UsageError unless a teacher has the tokens and the positions of the student, and full weights.

    A student whose vocabulary is not known yet (vocab=auto) has that of any teacher.
    """
    sizes = [(c.model.vocab, c.model.padded_vocab) for c in (config, teacher)]
    if teacher.lora.lora_rank:
        raise UsageError(
            f"teacher={name} has adapters, expected full weights; merge them first: convert {name} MERGED "
            "merge_lora=true"
        )
    if not teacher.objective.has_vocabulary:
        raise UsageError(
            f"teacher={name} trained {teacher.objective.trained}, which gives no distribution over tokens; give a run "
            "of a language model"
        )
    if config.model.vocab and sizes[0] != sizes[1]:
        mine, others = (f"vocab={c.model.vocab} vocab_multiple={c.model.vocab_multiple}" for c in (config, teacher))
        raise UsageError(
            f"teacher={name} has {others}, and the student {mine}: distributions over different tokens; a new student "
            f"takes {others}"
        )
    has_table = teacher.model.positions == "learned"
    if has_table and teacher.model.seq != config.model.seq:
        raise UsageError(
            f"teacher={name} has learned positions for seq={teacher.model.seq}, and the student "
            f"seq={config.model.seq}; give seq={teacher.model.seq}"
        )
