"""Sums over tokens, microbatches and devices in bfloat16 runs: gradients against float64, and the types of the sums."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import dense_reference as reference
from shardformer.exact import jaxprs
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.shards import parameters
from tests import asserts, shared

ROWS, SEQ = 1024, 64  # 65,536 tokens
SMALL = {"d_model": 16, "heads": 2, "layers": 1, "seq": SEQ, "batch": ROWS, "dtype": "bfloat16"}
CASES = {
    "all biases, learned": {"bias": "all", "embed": "bias", "positions": "learned", "block": "sequential"},
    "T5, tied, blocks, chunks": {"positions": "t5", "tied": True, "attention": "blocks", "loss_chunk": 8192},
    "grouped": {"bias": "all", "kv_heads": 1, "positions": "learned"},
}


def new_model(**overrides) -> Model:
    config = shared.tiny(**{"mesh": "1x1"} | overrides)
    return Model.on(config, mesh.make(config))


def draw_parameters(shapes):
    """Draws parameters of ordinary size that bfloat16 holds exactly, so that only the computation rounds."""
    random = np.random.RandomState(0)

    def draw(path, leaf):
        center = 1 if path[-1].key == "scale" else 0
        return np.asarray(jnp.asarray(center + random.normal(size=leaf.shape) / 4, jnp.bfloat16), np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def draw_batch():
    """Draws tokens that repeat after four places, and of which a few are frequent: gradients that do not cancel."""
    random, frequency = np.random.RandomState(1), 1 / np.arange(1, shared.VOCAB + 1)
    ids = random.choice(shared.VOCAB, (ROWS, SEQ + 1), p=frequency / frequency.sum())
    repeats = random.uniform(size=ids.shape) < 0.8
    for place in range(4, SEQ + 1):
        ids[:, place] = np.where(repeats[:, place], ids[:, place - 4], ids[:, place])
    return {"tokens": ids[:, :-1].astype(np.int32), "targets": ids[:, 1:].astype(np.int32)}


@functools.cache
def our_gradients(**overrides):
    model = new_model(**SMALL | overrides)
    params = jax.device_put(draw_parameters(model.shapes), model.shardings)
    key = jax.random.key_data(jax.random.key(0))
    return shared.on_host(jax.jit(lambda *args: model.loss_and_grad(*args)[1])(params, draw_batch(), key))


@functools.cache
def exact_gradients(case):
    """Differentiates the plain dense model in float64."""
    config, batch = shared.tiny(**{"mesh": "1x1"} | SMALL | CASES[case]), draw_batch()
    parameters = draw_parameters(Model.abstract_parameters(config))

    def loss(params):
        return reference.loss(config, params, batch["tokens"], batch["targets"])[1]

    return exact.run(jax.grad(loss), parameters).outputs


def without_k_bias(gradients):
    """Drops k_bias, which shifts a query's logits all alike: its gradient is zero but for rounding."""
    layers = {name: leaf for name, leaf in gradients["transformer/layers"].items() if name != "k_bias"}
    return gradients | {"transformer/layers": layers}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_gradients_are_those_of_float64(case):
    asserts.assert_trees_close(
        without_k_bias(our_gradients(**CASES[case])), without_k_bias(exact_gradients(case)), 1e-2
    )


def add_biases_in_bfloat16(broken) -> None:
    """Adds as shardformer once did: the transpose of the broadcast is a sum over tokens in bfloat16."""
    broken(parameters, "add_broadcast", lambda x, y: x + y.astype(x.dtype))


@pytest.mark.slow
def test_biases_added_in_bfloat16_lose_their_gradients(broken):
    add_biases_in_bfloat16(broken)
    got, expected = our_gradients.__wrapped__(**CASES["all biases, learned"]), exact_gradients("all biases, learned")
    errors = jax.tree.map(asserts.relative, got, expected)["transformer/layers"]
    assert min(errors[name] for name in ("v_bias", "o_bias", "up_bias", "down_bias")) > 2e-2
    assert errors["v"] < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{"mesh": "8x1"}, {"accum": 8}], ids=str)
def test_bfloat16_gradients_do_not_depend_on_the_split(overrides):
    case = CASES["all biases, learned"]
    once, split = our_gradients(**case), our_gradients(**case | overrides)
    asserts.assert_trees_close(without_k_bias(split), without_k_bias(once), 3e-3)


# The types of the sums, from the traced gradient: a small run shows no error.

TRACED_SEQ = 24  # no dimension of a parameter is as large, or half as large
FEATURES = {
    "biases": {"mesh": "2x2", "bias": "all", "embed": "bias", "positions": "learned", "block": "sequential"},
    "learned": {"mesh": "2x2", "positions": "learned"},
    "blocks": {"mesh": "2x2", "kv_heads": 2, "positions": "t5", "attention": "blocks", "loss_chunk": 16},
    "tokens split": {"mesh": "2x2", "sequence_parallel": True, "bias": "all", "positions": "learned"},
    "adapters": {"mesh": "2x2", "zero": 3, "activation": "swiglu", "lora_rank": 2, "lora_targets": "q,o"},
    "accumulated": {"mesh": "2x2", "zero": 1, "accum": 2, "dropout": 0.1},
    "stages": {"mesh": "1x2x2", "param_dtype": "bfloat16", "accum": 2},
    "rounds": {"mesh": "2x1x2", "zero": 1, "accum": 2, "layers": 4, "pipeline_rounds": 2},
}  # fmt: skip


def trace_gradient(**overrides):
    model = new_model(dtype="bfloat16", seq=TRACED_SEQ, **overrides)
    batch = {name: jax.ShapeDtypeStruct((8, TRACED_SEQ), jnp.int32) for name in ("tokens", "targets")}
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return jax.jit(lambda *args: model.loss_and_grad(*args)).trace(model.abstract, batch, key)


def is_narrow(variable) -> bool:
    return getattr(variable.aval, "dtype", None) == jnp.bfloat16


def is_activation(x) -> bool:
    """Recognises [..., T, D], also with T split over mp: the residual stream and its gradient."""
    return x.ndim >= 3 and x.shape[-2] in (TRACED_SEQ, TRACED_SEQ // 2)


def describe_narrow_sum(equation) -> str:
    """Names a sum with a bfloat16 accumulator; '' if the equation is none.

    Matrix products accumulate in float32 on every device. Activations are summed over mp in their own type.
    """
    if not any(map(is_narrow, equation.invars)):
        return ""
    name, x = equation.primitive.name, equation.invars[0]
    if name in ("reduce_sum", "cumsum"):
        axes_of_sum = equation.params.get("axes", ())
        return f"{name} of {x.aval}" if any(x.aval.shape[axis] > 1 for axis in axes_of_sum) or name == "cumsum" else ""
    if jaxprs.COLLECTIVES.get(name) in ("all-reduce", "reduce-scatter") and not name.startswith(("pmax", "pmin")):
        over = jaxprs.find_axes(equation)
        return "" if over == ("mp",) and is_activation(x.aval) else f"{name} of {x.aval} over {over}"
    return f"{name} of {x.aval}" if name == "scatter-add" else ""


def describe_narrow_carries(equation) -> list[str]:
    """Names what a scan adds up in bfloat16, step by step."""
    if equation.primitive.name != "scan":
        return []
    loop = jaxprs.read_loop(equation)
    before_and_after = zip(loop.body.invars[loop.constants :], loop.body.outvars[: loop.carried], strict=False)
    return [
        f"scan adds up {after.aval}"
        for before, after in before_and_after
        if is_narrow(after) and not is_activation(after.aval)
        for inner in loop.body.eqns
        if inner.primitive.name in ("add", "add_any") and before in inner.invars and after in inner.outvars
    ]


def narrow_sums(traced) -> list[str]:
    found = []
    for jaxpr in jaxprs.walk(traced.jaxpr.jaxpr):
        for equation in jaxpr.eqns:
            found += [describe_narrow_sum(equation), *describe_narrow_carries(equation)]
    return [text for text in found if text]


@pytest.mark.parametrize("feature", FEATURES)
def test_no_sum_accumulates_in_bfloat16(feature):
    assert narrow_sums(trace_gradient(**FEATURES[feature])) == []


def test_narrow_sums_are_detected(broken):
    assert narrow_sums(trace_gradient(mesh="2x2")) == []
    add_biases_in_bfloat16(broken)
    assert any(text.startswith("reduce_sum") for text in narrow_sums(trace_gradient(mesh="2x2")))


def test_narrow_carries_are_detected():
    def total(w, xs):
        return jax.lax.scan(lambda carry, x: (carry, (x * w).sum()), 0.0, xs)[1].sum()

    w, xs = jnp.ones(4, jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    assert "scan adds up bfloat16[4]" in narrow_sums(jax.jit(jax.grad(total)).trace(w, xs))


def count_narrow_reductions(traced, platform: str) -> int:
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.reduce(" in text
    return len(re.findall(r"stablehlo.reduce\([^\n]*applies stablehlo.add[^\n]*: \(tensor<[^>]*bf16>", text))


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_devices_add_in_float32(platform, broken):
    settings = {"mesh": "2x2", "bias": "all", "attention": "plain"}
    assert count_narrow_reductions(trace_gradient(**settings), platform) == 0
    add_biases_in_bfloat16(broken)
    assert count_narrow_reductions(trace_gradient(**settings), platform) == 6  # one for each bias of a layer
