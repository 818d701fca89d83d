"""`verify exact=true`: right programs of any mesh pass with rounding errors, and wrong ones name their line."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardformer.__main__ import main
from shardformer.analysis import traced, verify_exact
from shardformer.analysis.verify import Difference
from shardformer.config import Config
from shardformer.errors import RunError
from shardformer.kernels.attention import Plain
from shardformer.model import Model
from shardformer.model import model as model_module
from shardformer.objectives import preference_model
from shardformer.parallel.replicas import Replicated, map_named
from shardformer.shards.dropout import Dropout
from shardformer.shards.layer import TransformerLayerShard
from shardformer.shards.projection import ProjectionShard
from tests import meshes, shared

EXPERTS = {
    "experts": 8, "bias": "none", "d_ff": 16, "balance_loss": 0.1, "balance_rate": 0.01, "router_z_loss": 0.01,
    "shared_width": 8,
}  # fmt: skip
# Most features have files of their own in tests/integration, with the same comparison: meshes without ZeRO, dropout,
# sequence_parallel and bfloat16 in test_parity.py, then blocks, stages, split contexts, windows and experts. Adapters
# are in test_lora.py.
ACCEPTED = (
    ("8x1", {"zero": 1}),
    ("4x2", {"accum": 2, "zero": 3}),
    ("2x2", {"accum": 2, "accum_mode": "manual", "dropout": 0.1}),
    ("4x2", {"dtype": "bfloat16", "param_dtype": "bfloat16", "grad_dtype": "bfloat16", "zero": 3}),
    ("64x8", {"zero": 3, "batch": 64}),
    # What a step does with its gradients; other optimizers and accum_mode=multisteps are in test_cookbook.py.
    ("4x2", {"zero": 1, "offload": "optimizer", "dtype": "bfloat16", "param_dtype": "bfloat16"}),
    ("4x2", {"zero": 3, "skip_steps": 5.0, "lr_rules": "*bias=10x,embed=frozen", "schedule": "wsd"}),
)


OF_THE_GRADIENT = (
    ("2x4", {"remat": "dots", "scan": False, "zero": 3}),
    # The head's bias is one of the logits, which logits_scale multiplies.
    ("2x4", {"logits_scale": 0.4, "loss_chunk": 5}),
)


@pytest.mark.parametrize(("mesh", "keys"), OF_THE_GRADIENT, ids=str)
def test_gradients_equal_one_device_and_the_dense_reference(mesh, keys):
    meshes.assert_equals_one_device(with_steps=False, mesh=mesh, **keys)


@pytest.mark.parametrize(("mesh", "keys"), ACCEPTED, ids=str)
def test_mesh_equals_one_device_and_the_dense_reference(mesh, keys):
    meshes.assert_equals_one_device(mesh=mesh, **keys)


OBJECTIVES = (
    {"objective": "dpo", "documents": "masked", "zero": 3},
    {"objective": "ipo", "sequence_parallel": True},
    {"objective": "kto", "accum": 2},
    {"objective": "orpo", "mesh": "2x2x2", "accum": 2},
    {"objective": "simpo", "mesh": "dp2.cp2.mp2", "zero": 1},
    {"objective": "grpo", "group_size": 2, "answer_tokens": 8, "rollout_steps": 2, "accum": 2},
    {"objective": "distill", "divergence": "reverse", "zero": 3, "loss_chunk": 5},
)
WITH_METRICS = ("dpo", "kto", "grpo", "distill")  # each kind of metrics, which steps have


@pytest.mark.parametrize("keys", OBJECTIVES, ids=str)
def test_every_objective_equals_one_device(keys, teacher):
    keys = keys | ({"teacher": str(teacher)} if keys["objective"] == "distill" else {})
    meshes.assert_equals_one_device(with_steps=keys["objective"] in WITH_METRICS, **{"mesh": "2x4"} | keys)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Returns the folder of a teacher's configuration; its weights are drawn."""
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "config.json").write_text(shared.tiny(layers=1, d_model=16, mesh="1x1").to_json())
    return folder


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_adapters_over_codes_equal_one_device(weights):
    """A CPU multiplies few rows by digits, which it rounds otherwise for each shard of mp."""
    meshes.assert_equals_one_device(mesh="2x4", lora_rank=2, weights=weights, zero=3)


def test_steps_learn_from_the_drawn_answers():
    """Without them in the state, a step of grpo has no gradient."""
    config = shared.tiny(mesh="2x2", objective="grpo", group_size=2, answer_tokens=8)
    _, metrics = meshes.run_steps(config)
    assert metrics[0][0] == pytest.approx(float(meshes.compute_gradients(config).loss), rel=1e-12)
    assert metrics[2][0] < metrics[0][0]


def test_drawn_pairs_have_a_divergence_above_zero():
    losses = meshes.compute_gradients(shared.tiny(mesh="2x2", objective="kto")).run.outputs[0]
    assert losses.kl > 1


def test_drawn_answers_are_clipped_or_not():
    config = shared.tiny(mesh="2x2", objective="grpo", group_size=2, answer_tokens=8)
    losses = meshes.compute_gradients(config).run.outputs[0]
    assert 0.1 < losses.clip_share < 0.9


# Wrong programs. The expected results are computed before the defect.


def find_failed(broken, *defect, with_steps=False, **keys) -> set[tuple[str, str]]:
    config = shared.tiny(**keys)
    assert [row for row in meshes.find_differences(config, with_steps) if not row.passes] == []
    broken(*defect)
    return {(row.name, row.expected) for row in meshes.find_differences(config, with_steps) if not row.passes}


def test_mean_of_the_means_of_shards_is_noticed(broken):
    loss = ProjectionShard.loss

    def mean_of_shard(self, x, targets, table=None, weights=None):
        return loss(self, x, targets, table, weights / weights.mean())

    failed = find_failed(broken, ProjectionShard, "loss", mean_of_shard, with_steps=True, mesh="2x4")
    assert {("gradient of transformer/head/w", "dense"), ("metrics of 3 steps", "one device")} <= failed


def test_scaled_gradient_is_noticed_in_the_steps(broken):
    """Adam hides the scale of a gradient; the parameters after steps with clipping do not."""
    mean = Replicated.mean

    def scale(self, grads):
        grads = mean(self, grads)
        return grads | {"transformer/head": {name: 2 * g for name, g in grads["transformer/head"].items()}}

    failed = find_failed(broken, Replicated, "mean", scale, with_steps=True, mesh="4x2")
    assert {("gradient of transformer/head/w", "one device"), ("gradient of transformer/head/w", "dense")} <= failed
    assert ("params transformer/head/w after 3 steps", "one device") in failed
    assert "transformer/layers/q" not in " ".join(name for name, _ in failed if name.startswith("gradient"))


def test_weights_that_do_not_count_are_noticed(broken):
    def weigh_equally(batch):
        return batch | {"weights": 0 * batch["weights"] + 1}

    assert ("loss", "dense") in find_failed(broken, model_module, "normalise_weights", weigh_equally, mesh="2x2")


def test_mean_of_microbatches_of_pairs_is_noticed(broken):
    normalise = preference_model.normalise_pairs

    def weigh_equally(batch):
        return normalise(batch) | {"pairs": batch["pairs"]}

    failed = find_failed(
        broken, preference_model, "normalise_pairs", weigh_equally, mesh="2x2", objective="dpo", accum=2
    )
    assert ("loss", "one device") in failed


DROPPED = shared.tiny(mesh="2x2", layers=1, dropout=0.2, documents="masked", accum=2)


def assert_gradients_are_noticed(broken, *defect) -> None:
    expected = meshes.compute_dense(DROPPED)
    assert all(row.passes for row in verify_exact.compare(meshes.compute_gradients(DROPPED), expected, "dense"))
    broken(*defect)
    assert not all(row.passes for row in verify_exact.compare(meshes.compute_gradients(DROPPED), expected, "dense"))


def test_masks_repeated_over_dp_are_noticed(broken):
    """Every shard numbers its own rows from 0."""

    def number_rows(self, batch):
        rows = batch["tokens"].shape[0]
        return batch | {"examples": lax.axis_index("dp") * 0 + jnp.arange(rows)}

    assert_gradients_are_noticed(broken, Model, "number_rows", number_rows)


def test_wrong_dropout_scale_is_noticed(broken):
    def forget_scale(self, x, keep):
        return jnp.where(keep, x, jnp.zeros_like(x))

    assert_gradients_are_noticed(broken, Dropout, "_apply", forget_scale)


def test_attention_between_documents_is_noticed(broken):
    attend = Plain.attend

    def without_documents(self, q, k, v, options):
        return attend(self, q, k, v, options._replace(documents_BT=None))

    assert_gradients_are_noticed(broken, Plain, "attend", without_documents)


SUMMED = shared.tiny(mesh="2x4", layers=1, bias="none")  # a branch is a sum and no more


def break_branch(broken, sum_branch) -> None:
    broken(TransformerLayerShard, "branch", lambda self, partial_BTD, *_, **__: sum_branch(partial_BTD))


def sum_never(x):
    return x


def sum_twice(x):
    return lax.psum(lax.psum(x, "mp"), "mp")


def sum_over_dp(x):
    return lax.psum(x, "dp")


def test_rejected_sum_names_its_line(broken):
    break_branch(broken, sum_over_dp)
    found = r"the psum is over dp, expected over mp, at .*\(sum_over_dp\)"
    with pytest.raises(RunError, match=f"the sharded model is wrong: {found}.* JAX rejects .*"):
        verify_exact.verify_exactly(SUMMED)


def test_doubled_sum_that_jax_accepts_names_its_line(broken):
    break_branch(broken, sum_twice)
    found = verify_exact.explain(SUMMED)
    assert re.match(r"the psum over mp is one too many at .*\(sum_twice\)", found)
    assert found.endswith("With this repaired, the loss is that of one device")


def test_right_program_has_no_repair():
    config = shared.tiny(mesh="2x4", layers=1)
    assert verify_exact.find_repair(config) is None
    assert verify_exact.explain(config) == ""


def test_program_without_a_trace_has_no_repair(broken):
    def fail(_):
        raise ValueError("no trace")

    Model.abstract_parameters(SUMMED)
    break_branch(broken, fail)
    with pytest.raises(RunError, match=r"JAX rejects tests/analysis/test_verify_exact.py:\d+ \(fail\): no trace"):
        verify_exact.verify_exactly(SUMMED)


# The batch and the state


def test_draws_are_the_same_on_every_mesh():
    batches = [verify_exact.draw_batch(traced.make_trainer(shared.tiny(mesh=mesh))) for mesh in ("1x1", "4x2")]
    jax.tree.map(np.testing.assert_array_equal, *batches)


def test_rows_have_different_numbers_of_targets():
    batch = verify_exact.draw_batch(traced.make_trainer(shared.tiny(mesh="1x1", documents="masked")))
    counts = batch["weights"].sum(1)
    assert counts.min() < counts.max() / 2
    assert (batch["weights"][-1] == 1).all()
    assert batch["documents"].max() == 3


def test_first_expert_of_drawn_parameters_has_no_tokens():
    gradients = meshes.compute_gradients(shared.tiny(mesh="2x2", **EXPERTS)).gradients["transformer/layers"]
    assert (gradients["expert_up"][0, 0] == 0).all()
    assert (gradients["expert_up"][0, 1:] != 0).any()


def test_parts_are_announced_in_their_order():
    begun: list[str] = []
    verify_exact.verify_exactly(shared.tiny(mesh="2x1", layers=1), begin=begun.append)
    assert tuple(begun) == verify_exact.PARTS


def test_memory_is_limited():
    with pytest.raises(RunError, match="raise the limit, or take a smaller model or mesh"):
        verify_exact.verify_exactly(shared.tiny(mesh="2x1", layers=1), memory=1e4)


# The command


def verify(*words) -> int:
    return main(["verify", "tiny", "vocab=61", "exact=true", *words])


def test_command_prints_a_table_and_returns_zero(capsys):
    assert verify("mesh=2x2x2", "accum=2") == 0
    out = capsys.readouterr().out
    assert "mesh 2x2x2 (dp x mp x pp), 8 devices, in float64, without any of them" in out
    assert out.endswith("sharded equals one device and dense\n")
    for row in ("loss", "metrics of 3 steps", "gradient of transformer/", "1e-10"):
        assert row in out


@pytest.mark.parametrize(
    ("words", "rows"), [(("mesh=16x2", "zero=3"), 16), (("mesh=4x2", "accum=3"), 12), (("mesh=4x1x2", "accum=2"), 16)]
)
def test_batch_grows_with_the_mesh(words, rows, capsys, monkeypatch):
    verified: list[Config] = []

    def record(config, memory, begin):
        verified.append(config)
        return [Difference("loss", 0.0, 1e-10, "one device")]

    monkeypatch.setattr(verify_exact, "verify_exactly", record)
    assert verify(*words) == 0
    assert [config.training.batch for config in verified] == [rows]
    assert f"batch=8 becomes batch={rows}" in capsys.readouterr().out


def test_given_batch_does_not_grow(capsys):
    assert verify("mesh=64x8", "batch=8") == 2
    assert "batch=8 does not divide over dp=64" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", ["1x1", "auto"])
def test_one_device_is_rejected(mesh, capsys):
    assert verify(f"mesh={mesh}") == 2
    assert f"exact=true compares a mesh of several devices with one device, got mesh={mesh}" in capsys.readouterr().err


def test_command_names_what_differs_and_its_line(broken, capsys):
    break_branch(broken, sum_twice)
    assert verify("mesh=2x2", "bias=none", "layers=1") == 1
    out = capsys.readouterr().out
    assert " NO" in out
    assert "sharded and dense differ; the worst is" in out
    assert "the psum over mp is one too many at" in out.splitlines()[-1]


def test_program_that_jax_rejects_returns_one(broken, capsys):
    break_branch(broken, sum_never)
    assert verify("mesh=2x2", "bias=none", "layers=1") == 1
    err = capsys.readouterr().err
    assert re.search(r"the sharded model is wrong: a psum over mp is missing after .*shards/.* JAX rejects ", err)
    assert "Traceback" not in err


def test_quantised_weights_have_no_dense_rows(capsys):
    assert verify("mesh=2x2", "weights=int8", "lora_rank=2") == 0
    assert capsys.readouterr().out.endswith("sharded equals one device\n")


# Errors of a millionth, far below a float32 tolerance

SMALL = shared.tiny(mesh="2x2", layers=1, d_model=16, heads=4, seq=4, batch=2)
FACTOR = 1 + 1e-6


def find_failed_names() -> set[str]:
    return {row.name for row in verify_exact.verify_exactly(SMALL) if not row.passes}


def test_gradient_that_is_a_millionth_too_large_is_noticed(broken):
    mean = Replicated.mean

    def scale(self, grads):
        return map_named(lambda name, g: g * FACTOR if name.endswith("/q") else g, mean(self, grads))

    broken(Replicated, "mean", scale)
    assert "gradient of transformer/layers/q" in find_failed_names()


def test_metric_that_is_a_millionth_too_large_is_noticed(broken):
    """Only on the mesh: one device has the right one."""
    norm = Model.norm

    def scale(self, grads):
        return norm(self, grads) * (FACTOR if self.config.parallel.devices > 1 else 1)

    broken(Model, "norm", scale)
    failed = find_failed_names()
    assert failed
    assert not any(name.startswith("gradient") for name in failed)
