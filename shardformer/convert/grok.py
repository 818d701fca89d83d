"""Grok-1's checkpoint to a run: the names, order and shapes of its arrays, and the keys of its model.

A checkpoint has no configuration. The sizes come from its arrays, the rest from Grok-1's `run.py`, unless it is given.
"""

import functools
from pathlib import Path

import numpy as np

from shardformer.config import ARCHITECTURE, Config, parsing
from shardformer.convert import runs
from shardformer.convert.grok_pickles import read_shape, read_weight
from shardformer.convert.leaves import Filled, Leaves, State, flatten
from shardformer.convert.new_folder import describe_form, describe_size, new_folder
from shardformer.errors import RunError, UsageError
from shardformer.model import Model
from shardformer.training.run_folder import Run

FOLDER, FIRST = "ckpt-0", "tensor00000_000"
EMBEDDINGS, LAST_NORM = "language_model/in_out_embed", "language_model/rms_norm"
MODEL = {
    "block": "sequential_four_norms", "norm": "rmsnorm", "norm_eps": 1e-5, "bias": "none", "positions": "rotary",
    "rotary_theta": 10_000.0, "activation": "geglu", "tied": True, "attention_cap": 30.0,
}  # fmt: skip
# What the arrays do not show, as in Grok-1's `run.py`; its factor on the attention logits is 1 / sqrt(head_dim).
UNSEEN = {
    "head_dim": 128, "embed_scale": 78.38367176906169, "logits_scale": 0.5773502691896257, "attention_scale": None,
    "seq": 8192,
}  # fmt: skip
ATTENTION = {
    "multi_head_attention/key": "k", "multi_head_attention/linear": "o", "multi_head_attention/query": "q",
    "multi_head_attention/value": "v",
}  # fmt: skip
NORMS = {
    "rms_norm": "attention_norm/scale", "rms_norm_1": "post_attention_norm/scale",
    "rms_norm_2": "feed_forward_norm/scale", "rms_norm_3": "post_feed_forward_norm/scale",
}  # fmt: skip
DENSE = {"linear": "gate", "linear_1": "down", "linear_v": "up"}
EXPERTS = {"moe/linear": "expert_gate", "moe/linear_1": "expert_down", "moe/linear_v": "expert_up", "router": "router"}


def find_checkpoint(folder: Path) -> Path | None:
    """Returns the folder of a checkpoint's files: the given one, or its `ckpt-0`."""
    return next((path for path in (folder, folder / FOLDER) if (path / FIRST).is_file()), None)


def list_names(layers: int, has_experts: bool) -> list[str]:
    """Lists the modules in the order of the files: JAX sorts them as strings, decoder_layer_10 before _2."""
    in_layer = [*ATTENTION, *NORMS, *(EXPERTS if has_experts else DENSE)]
    names = [f"transformer/decoder_layer_{layer}/{name}" for layer in range(layers) for name in in_layer]
    return sorted([EMBEDDINGS, LAST_NORM, *names])


def grok_to_run(source: Path, target: Path, arguments: list[str]) -> str:
    changes = parsing.parse_overrides(arguments, Config)
    if "out" in changes:
        raise UsageError("the run's folder is DST; out= cannot name another")
    folder = find_checkpoint(source)
    assert folder is not None  # the caller found it
    config, files = read_config(folder, changes)
    config, vocabulary, fingerprint = runs.open_vocabulary(config.replace(out=str(target)))
    state = State(0, open_params(config, files))
    with new_folder(target) as temporary:
        runs.write_run(temporary, Run(config, vocabulary, fingerprint), state)
    return (
        f"{target}: {describe_size(state.params)} of a Grok-1 model, {config.data.tokenizer} as its tokenizer"
        f"{describe_form(config)}"
    )


def read_config(folder: Path, changes: dict) -> tuple[Config, dict[str, Path]]:
    """Returns the configuration of a checkpoint, and the file of each module's array."""
    if (folder / "tensor00000_001").exists():
        raise UsageError(f"{folder} was written by more than one process; only files named tensor?????_000 are read")
    count = len(list(folder.glob("tensor?????_000")))
    paths = [folder / f"tensor{number:05d}_000" for number in range(count)]
    has_experts = count > 2 and len(read_shape(paths[2])) == 3
    each = len(list_names(1, has_experts)) - 2
    layers, left = divmod(count - 2, each)
    if layers < 1 or left:
        raise RunError(
            f"{folder} has {count} files, expected 2 and {each} for each layer: some are missing; copy it again"
        )
    files = dict(zip(list_names(layers, has_experts), paths, strict=True))

    def shape(name: str) -> tuple[int, ...]:
        return read_shape(files[name])

    layer = "transformer/decoder_layer_0"
    vocab, d_model = shape(EMBEDDINGS)
    width = shape(f"{layer}/{'moe/' if has_experts else ''}linear")[-1]
    ours = MODEL | {"layers": layers, "vocab": vocab, "d_model": d_model, "d_ff": width}
    unseen = dict(UNSEEN)
    if has_experts:
        ours |= {"experts": shape(f"{layer}/router")[-1], "router": "softmax", "router_norm": False}
        unseen["experts_per_token"] = 2
    unseen |= {name: value for name, value in changes.items() if name in unseen}
    for name, matrix in {"heads": "query", "kv_heads": "key"}.items():
        size = shape(f"{layer}/multi_head_attention/{matrix}")[-1]
        if not unseen["head_dim"] or size % unseen["head_dim"]:
            raise UsageError(
                f"head_dim={unseen['head_dim']} does not divide the width {size} of the {matrix} matrix in {folder}; "
                "give head_dim=SIZE of this checkpoint"
            )
        ours[name] = size // unseen["head_dim"]
    config = Config.of(**ours | unseen)
    for name in ARCHITECTURE:
        if name in changes and changes[name] != config.get(name):
            raise UsageError(f"{name}={changes[name]} contradicts {folder}, which has {name}={config.shown(name)}")
    return config.replace(**changes), files


def open_params(config: Config, files: dict[str, Path]) -> Leaves:
    """Returns the parameters under our names; each is computed when it is read."""
    experts = bool(config.experts.experts)
    in_layer = {ours: theirs for theirs, ours in (ATTENTION | NORMS | (EXPERTS if experts else DENSE)).items()}
    outside = {"transformer/embed/tokens": EMBEDDINGS, "transformer/head/norm/scale": LAST_NORM}

    def fill(name: str, whole: np.ndarray) -> None:
        if name in outside:
            rows = config.model.vocab if name == "transformer/embed/tokens" else len(whole)
            _copy(files[outside[name]], whole[:rows])
            whole[rows:] = 0  # those that pad the vocabulary
            return
        ours = name.removeprefix("transformer/layers/")
        for layer in range(config.model.layers):
            _copy(files[f"transformer/decoder_layer_{layer}/{in_layer[ours]}"], whole[layer])
        if ours in ("q", "k"):
            whole[...] = _join_pairs(whole, config.model.head_size)

    shapes = {name: leaf.shape for name, leaf in flatten(Model.abstract_parameters(config)).items()}
    return {name: Filled(shape, np.dtype(np.float32), functools.partial(fill, name)) for name, shape in shapes.items()}


def _copy(path: Path, target: np.ndarray) -> None:
    values = read_weight(path)
    if values.shape != target.shape:
        raise RunError(f"{path} is {list(values.shape)}, and this model makes it {list(target.shape)}; copy it again")
    target[...] = values


def _join_pairs(whole: np.ndarray, head_size: int) -> np.ndarray:
    """Makes the rotary pairs (j, j + head_size / 2) of each head neighbours, as ours are."""
    halves = whole.reshape(*whole.shape[:-1], -1, 2, head_size // 2)
    return halves.swapaxes(-1, -2).reshape(whole.shape)
