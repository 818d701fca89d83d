"""Programs of any mesh in float64, without devices: their results are those of one device and the dense reference."""

import functools

import jax

from shardformer import exact
from shardformer.analysis import dense_reference, traced, verify_exact
from shardformer.analysis.verify import Difference
from shardformer.analysis.verify_exact import Result
from shardformer.config import Config
from shardformer.training.trainer import Trainer
from tests import shared

EXACT = 1e-12  # relative; right programs differ by less than 1e-14


def assert_equals_one_device(with_steps: bool = True, **keys) -> None:
    """Fails unless losses, gradients and three steps of `tiny` with these keys are those of one device.

    with_steps: features of the model have no other update than the same mesh without them.
    """
    assert_exact(find_differences(shared.tiny(**keys), with_steps))


def assert_exact(rows: list[Difference], bound: float = EXACT) -> None:
    wrong = [
        f"{row.name} differs from {row.expected} by {row.relative:.1e}" for row in rows if not row.relative <= bound
    ]
    assert not wrong, "; ".join(wrong)


def find_differences(config: Config, with_steps: bool = True) -> list[Difference]:
    """Returns the differences from one device and from the dense reference, where there is one."""
    trainer = verify_exact.make_trainer(config)
    got = compute_gradients(config, trainer=trainer)
    rows = verify_exact.compare(got, compute_on_one_device(simplify(config)), "one device")
    if verify_exact.has_dense_reference(config):
        in_float32 = config.replace(dtype="float32", param_dtype="float32", grad_dtype="float32")
        got = got if in_float32 == config else compute_gradients(in_float32)
        rows += verify_exact.compare(got, compute_dense(simplify(in_float32)), "dense")
    if with_steps:
        after = run_steps(config, trainer)
        rows += verify_exact.compare_states(after, run_steps_on_one_device(simplify(config)))
    return rows


def simplify(config: Config) -> Config:
    """Returns the configuration on one device, without what only takes another time or memory there."""
    return verify_exact.on_one_device(config).replace(scan=True, remat="none", loss_chunk=None, context_parallel="auto")


def compute_gradients(
    config: Config, batch: dict | None = None, params: dict | None = None, trainer: Trainer | None = None
) -> Result:
    """Returns the loss and the gradients on the config's mesh, of a drawn batch unless another is given."""
    trainer = trainer or traced.make_trainer(config)
    params = verify_exact.draw_parameters(config) if params is None else params  # floats, which are stored as codes
    batch = verify_exact.draw_batch(trainer) if batch is None else batch
    return verify_exact.compute_gradients(trainer, params, batch, verify_exact.draw_key(config))


@functools.cache
def compute_on_one_device(config: Config) -> Result:
    return compute_gradients(config, trainer=make_single_trainer(config))


make_single_trainer = functools.lru_cache(maxsize=1)(verify_exact.make_trainer)  # of gradients, then of steps


def compute_logits(config: Config, params: dict, tokens):
    """Returns the logits [B, T, vocab] of the dense reference in float64; nothing is compiled."""
    return exact.run(functools.partial(dense_reference.logits, config), params, tokens).outputs


@functools.cache
def compute_dense(config: Config) -> Result:
    batch = verify_exact.draw_batch(traced.make_trainer(config))
    return verify_exact.compute_dense(
        config, verify_exact.draw_parameters(config), batch, verify_exact.draw_key(config)
    )


def run_steps(config: Config, trainer: Trainer | None = None):
    trainer = trainer or traced.make_trainer(config)
    batches = [verify_exact.draw_batch(trainer)] * verify_exact.STEPS
    return verify_exact.run_steps(trainer, verify_exact.draw_parameters(config), batches)


@functools.cache
def run_steps_on_one_device(config: Config):
    return run_steps(config, make_single_trainer(config))


def measure_sums(config: Config, *batches: dict) -> list:
    """Returns the sums of an evaluation of each of some batches of the same shapes; without any, of a drawn batch."""
    trainer = traced.make_trainer(config)
    batches = batches or (verify_exact.draw_batch(trainer),)
    params = verify_exact.store(trainer, verify_exact.draw_parameters(config))
    shapes = trainer.model.shapes, verify_exact.describe(batches[0])
    sums = jax.jit(trainer.model.sums, inline=True)  # is traced for the first batch only
    return [exact.run(sums, params, batch, shapes=shapes).outputs for batch in batches]


def assert_equal_sums(config: Config) -> None:
    """Fails unless an evaluation on the mesh has the sums of one device."""
    got, expected = (jax.tree.leaves(measure_sums(c)) for c in (config, verify_exact.on_one_device(config)))
    for x, y in zip(got, expected, strict=True):
        assert abs(x - y) <= EXACT * abs(y)


def forget_results() -> None:
    """Frees the results of other configurations."""
    for function in (compute_on_one_device, compute_dense, run_steps_on_one_device):
        function.cache_clear()
