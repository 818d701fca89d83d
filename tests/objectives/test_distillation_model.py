"""Distillation: divergences and gradients of a sharded vocabulary are those of full logits on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import dense_reference as reference
from shardformer.errors import UsageError
from shardformer.kernels import vocabulary_loss
from shardformer.layout import mesh
from shardformer.objectives.distillation_model import read_teacher
from shardformer.training.trainer import Trainer
from tests import asserts, meshes, shared

TEACHER = {"layers": 3, "d_model": 64, "seq": 16}
WEIGHTS = (np.random.RandomState(0).rand(8, 16) < 0.5).astype(np.float32)
CASES = (
    ({"divergence": "forward", "distill_temperature": 2.0, "distill_weight": 0.7}, {"mesh": "4x2"}),
    ({"divergence": "reverse"}, {"mesh": "2x4", "zero": 3, "accum": 2}),
    ({"divergence": "reverse"}, {"mesh": "dp2.cp2.mp2", "loss_chunk": 7}),
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Returns the folder of a teacher's configuration; a test gives its weights."""
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "config.json").write_text(shared.tiny(**TEACHER, mesh="1x1").to_json())
    return folder


def make_config(teacher, keys, **changes):
    return shared.tiny(objective="distill", teacher=str(teacher), seq=16, batch=8, **keys, **changes)


def batch() -> dict:
    return shared.batch() | {"weights": WEIGHTS}


@functools.cache
def weights(seed: int, **overrides) -> dict:
    """Returns random parameters, wide enough that every token has a divergence."""
    params = shared.drawn(shared.tiny(**overrides), seed)
    return jax.tree.map(lambda p: 2 * p if p.ndim > 1 else p, params)


def compute_sharded(config):
    """Returns (losses, gradient) of the model under test, in float64."""
    rows = batch() | {"teacher": weights(1, **TEACHER)}
    result = meshes.compute_gradients(config, rows, weights(0, seq=16))
    return result.run.outputs[0], result.gradients


def compile_sharded(config):
    """Returns (losses, gradient) of the compiled model, in float32."""
    trainer = Trainer(config, mesh.make(config))
    model = trainer.model
    params = jax.device_put(weights(0, seq=16), model.shardings)
    of_teacher = jax.device_put(weights(1, **TEACHER), model.teacher.shardings)
    rows = trainer.to_devices(batch()) | {"teacher": of_teacher}
    result = jax.jit(lambda *args: model.loss_and_grad(*args))(params, rows, trainer.dropout_key(0))
    return jax.tree.map(np.asarray, result)


def compute_dense(config):
    """Returns (divergence, loss, gradient) from full logits of both models, in float64."""
    keys, rows = config.preferences, batch()
    one, of_teacher = shared.tiny(seq=16, mesh="1x1"), shared.tiny(**TEACHER, mesh="1x1")

    def log_softmax(logits, temperature):
        return jax.nn.log_softmax(logits[..., : shared.VOCAB] / temperature, axis=-1)

    def objective(params, teacher, rows):
        target, logits = (reference.logits(c, p, rows["tokens"]) for c, p in ((of_teacher, teacher), (one, params)))
        p, q = (log_softmax(x, keys.distill_temperature) for x in (target, logits))
        first, second = (p, q) if keys.divergence == "forward" else (q, p)
        kl = ((jnp.exp(first) * (first - second)).sum(-1) * rows["weights"]).sum() / rows["weights"].sum()
        chosen = jnp.take_along_axis(log_softmax(logits, 1.0), rows["targets"][..., None], axis=-1)[..., 0]
        loss = -(chosen * rows["weights"]).sum() / rows["weights"].sum()
        scaled = keys.distill_temperature**2 * keys.distill_weight * kl
        return scaled + (1 - keys.distill_weight) * loss, (kl, loss)

    compute = jax.value_and_grad(objective, has_aux=True)
    (_, (kl, loss)), grads = exact.run(compute, weights(0, seq=16), weights(1, **TEACHER), rows).outputs
    return float(kl), float(loss), grads


def distance(config, compute=compute_sharded) -> tuple[float, float, float]:
    """Returns the differences of the divergence and the loss in nats, and the relative one of the worst gradient."""
    losses, grads = compute(config)
    kl, loss, expected = compute_dense(config)
    return abs(float(losses.kl) - kl), abs(float(losses.loss) - loss), asserts.worst_relative(grads, expected)


@pytest.mark.parametrize(("keys", "changes"), CASES, ids=str)
def test_divergence_is_exactly_that_of_full_logits(teacher, keys, changes):
    assert max(distance(make_config(teacher, keys, **changes))) <= 1e-8  # a temperature is a constant of float32
    meshes.assert_exact(meshes.find_differences(make_config(teacher, keys, **changes), with_steps=False))


@pytest.mark.slow
def test_compiled_divergence_is_that_of_full_logits(teacher):
    """A divergence is a small difference of log-probabilities of some nats, which float32 resolves to 5e-7."""
    keys, changes = CASES[0]
    kl, loss, gradient = distance(make_config(teacher, keys, **changes), compile_sharded)
    assert kl <= 1e-6
    assert loss <= 4e-6
    assert gradient <= 1e-5


def test_teacher_normalised_on_each_shard_is_noticed(teacher, broken):
    broken(vocabulary_loss, "_log_probabilities", lambda logits, axis: jax.nn.log_softmax(logits, axis=-1))
    assert distance(make_config(teacher, {"divergence": "forward"}, mesh="4x2"))[0] > 1e-3


def test_teacher_in_the_format_of_hugging_face_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = make_config(tmp_path, {}, mesh="4x2")
    with pytest.raises(UsageError, match="which only `train` converts; convert it first: convert"):
        Trainer(config, mesh.make(config))


def test_teacher_of_another_vocabulary_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text(shared.tiny(vocab=99, mesh="1x1").to_json())
    config = make_config(tmp_path, {}, mesh="4x2")
    with pytest.raises(UsageError, match=r"has vocab=99 vocab_multiple=8, and the student vocab=61"):
        Trainer(config, mesh.make(config))


@pytest.mark.parametrize("forms", [("float", "nf4"), ("nf4", "float")])
def test_teacher_and_student_store_their_own_weights(tmp_path, forms):
    (tmp_path / "config.json").write_text(shared.tiny(weights=forms[0], mesh="1x1").to_json())
    assert read_teacher(make_config(tmp_path, {}, weights=forms[1], lora_rank=2)).stored.weights == forms[0]


def test_teacher_with_codes_of_a_student_that_is_rounded(tmp_path):
    (tmp_path / "config.json").write_text(shared.tiny(weights="nf4", mesh="1x1").to_json())
    stored = read_teacher(make_config(tmp_path, {}, quantize_aware="int4")).stored
    assert (stored.weights, stored.quantize_aware) == ("nf4", "none")


def test_teacher_with_adapters_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text(shared.tiny(lora_rank=2, mesh="1x1").to_json())
    with pytest.raises(UsageError, match="has adapters, expected full weights; merge them first: convert"):
        read_teacher(make_config(tmp_path, {}))
