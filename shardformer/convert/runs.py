"""Runs of ours as whole arrays: the one place where conversions meet run folders and checkpoints."""

from pathlib import Path

import jax
import numpy as np
import optax

from shardformer import checkpoint, mesh
from shardformer.checkpoint import folder as step_folder
from shardformer.config import Config
from shardformer.convert.gptj import Leaves
from shardformer.convert.state import Moments, State
from shardformer.errors import UsageError
from shardformer.run import Best, Run
from shardformer.train import Trainer, TrainState


def read(run: Run, step: int, with_moments: bool) -> State:
    """A checkpoint of a run: the best by validation unless `step` says otherwise."""
    trainer = _trainer(run.config)
    step, params = run.restore_params(trainer.model, step)
    if not with_moments:
        return State(step, flat(params))
    like = {"optimizer": trainer.abstract.optimizer}
    optimizer = checkpoint.restore(step_folder(run.out, step), like, without=("step", "params", "average"))["optimizer"]
    return State(step, flat(params), _moments(run.config, optimizer, params))


def write(folder: Path, run: Run, state: State, resumable: bool) -> None:
    """The run with one checkpoint, in `folder` for now, without its optimizer where it need not be resumable."""
    trainer = _trainer(run.config)
    params = nested(trainer.model.shapes, state.params)
    whole = {"step": np.int32(state.step), "params": params}
    if resumable:
        whole = TrainState(**whole, optimizer=_optimizer(trainer, params, state.moments), average={})
        if jax.tree.structure(whole) != jax.tree.structure(trainer.abstract):
            raise UsageError("these settings keep more in a run's state than SRC holds; give moments=false")
    texts = run.documents(state.step, Best())
    checkpoint.save(folder, state.step, jax.tree.map(jax.numpy.asarray, whole), texts)
    for name in ("config.json", "vocabulary.json"):
        (folder / name).write_text(texts[name])


def _optimizer(trainer: Trainer, params, moments: Moments | None):
    """The optimizer's state with these moments; without any, they begin anew."""
    optimizer = trainer.optimizer.init(params)
    if moments is None:
        return optimizer
    _moments(trainer.config, optimizer, params)
    mu, nu = (nested(trainer.model.shapes, moment) for moment in (moments.mu, moments.nu))
    return optax.tree.set(optimizer, count=np.int32(moments.count), mu=mu, nu=nu)


def _moments(config: Config, optimizer, params) -> Moments:
    try:
        count, mu, nu = (optax.tree.get(optimizer, name) for name in ("count", "mu", "nu"))
    except KeyError:  # there are several
        count = mu = nu = None
    if not jax.tree.structure(mu) == jax.tree.structure(nu) == jax.tree.structure(params):
        raise UsageError(
            f"optimizer={config.optimizer} does not keep Adam's two moments of every parameter, and GPT-J has no other "
            "state; give moments=false"
        )
    return Moments(int(count), flat(mu), flat(nu))


def _trainer(config: Config) -> Trainer:
    alone = config.replace(mesh="1x1", coordinator="", processes=0, process_id=0)
    return Trainer(alone, mesh.make(alone))


def flat(params) -> Leaves:
    return {f"{module}/{name}": np.asarray(leaf) for module, named in params.items() for name, leaf in named.items()}


def nested(like, flat: Leaves):
    return {module: {name: flat[f"{module}/{name}"] for name in named} for module, named in like.items()}
