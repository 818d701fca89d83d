"""Runs of ours as whole arrays: the one place where conversions meet run folders and checkpoints."""

from pathlib import Path

import jax
import numpy as np
import optax

from shardformer import checkpoint, mesh
from shardformer.checkpoint import step_folder
from shardformer.config import Config
from shardformer.convert.gptj import Leaves
from shardformer.convert.gptj_state import Moments, State
from shardformer.errors import UsageError
from shardformer.training.run_folder import Best, Run
from shardformer.training.step import Trainer, TrainState


def read(run: Run, step: int, with_moments: bool, averaged: bool = False) -> State:
    """A checkpoint of a run: the best by validation unless `step` says otherwise. averaged: see Run.restore_params."""
    trainer = _trainer(run.config)
    step, params = run.restore_params(trainer.model, step, averaged)
    if not with_moments:
        return State(step, flat(params))
    like = {"optimizer": trainer.abstract.optimizer}
    optimizer = checkpoint.restore(step_folder(run.out, step), like, ignored=("step", "params", "average"))["optimizer"]
    moments = _moments(optimizer, params)
    if moments is None:
        raise UsageError(
            f"{_settings(run.config)} does not keep Adam's two moments of every parameter, and GPT-J has no other "
            "state; give moments=false"
        )
    return State(step, flat(params), Moments(int(moments[0]), *map(flat, moments[1:])))


def write(folder: Path, run: Run, state: State, resumable: bool) -> None:
    """The run with one checkpoint, in `folder` for now, without its optimizer where it need not be resumable."""
    trainer = _trainer(run.config)
    params = nested(trainer.model.shapes, state.params)
    whole = {"step": np.int32(state.step), "params": params}
    if resumable:
        whole = TrainState(**whole, optimizer=_optimizer(trainer, params, state.moments), average={})
    texts = run.documents(state.step, Best())
    checkpoint.save(folder, state.step, jax.tree.map(jax.numpy.asarray, whole), texts)
    for name in ("config.json", "vocabulary.json"):
        (folder / name).write_text(texts[name])


def _optimizer(trainer: Trainer, params, moments: Moments | None):
    """The optimizer's state with these moments; without any, they begin anew."""
    optimizer = trainer.optimizer.init(params)
    if moments is None:
        return optimizer
    if _moments(optimizer, params) is None:
        raise UsageError(
            f"{_settings(trainer.config)} has no place for Adam's two moments of every parameter, as SRC has them; "
            "give optimizer=adamw lr_rules="
        )
    mu, nu = (nested(trainer.model.shapes, moment) for moment in (moments.mu, moments.nu))
    return optax.tree.set(optimizer, count=np.int32(moments.count), mu=mu, nu=nu)


def _moments(optimizer, params):
    """Adam's (count, mu, nu) where an optimizer's state has them of every parameter."""
    try:
        count, mu, nu = (optax.tree.get(optimizer, name) for name in ("count", "mu", "nu"))
    except KeyError:  # there are several
        return None
    complete = jax.tree.structure(mu) == jax.tree.structure(nu) == jax.tree.structure(params)
    return (count, mu, nu) if complete else None


def _settings(config: Config) -> str:
    return f"optimizer={config.optimizer}{config.lr_rules and f' lr_rules={config.lr_rules}'}"


def _trainer(config: Config) -> Trainer:
    alone = config.replace(mesh="1x1", coordinator="", processes=0, process_id=0)
    return Trainer(alone, mesh.make(alone))


def flat(params) -> Leaves:
    return {f"{module}/{name}": np.asarray(leaf) for module, named in params.items() for name, leaf in named.items()}


def nested(like, flat: Leaves):
    return {module: {name: flat[f"{module}/{name}"] for name in named} for module, named in like.items()}
