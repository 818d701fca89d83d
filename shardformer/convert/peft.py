"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, without the base's weights.

PEFT's A is [rank, inputs] and its B [outputs, rank], for each matrix of the Hugging Face model. If that model has q, k
and v in one matrix, their adapters are joined: the ranks are concatenated, and B is zero between different matrices.
Experts are parameters there (`target_parameters`), whose module has one A and one B for all experts.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardformer.adapters import lora
from shardformer.adapters.adapter_keys import Adapter, format_targets, is_adapter, scale_of
from shardformer.config import Config, parsing
from shardformer.config.names import EXPERT_MATRICES, MATRICES, SHARED_MATRICES, is_part
from shardformer.convert import hf_settings, peft_experts, runs, safetensors_files, weight_files
from shardformer.convert.convert_options import FromPeft, ToPeft
from shardformer.convert.families import Part, Stored, list_stored
from shardformer.convert.hf import copy_tokenizer
from shardformer.convert.hf_state import FLOATS, first_of
from shardformer.convert.leaves import Array, Filled, State, copy_into, flatten
from shardformer.convert.new_folder import describe_form, new_folder, new_folder_on_disk
from shardformer.convert.safetensors_files import CreatedTensor, Tensor
from shardformer.data.stored_vocabulary import TOKENIZER_FOLDER
from shardformer.errors import RunError, UsageError
from shardformer.files import read_text
from shardformer.model import Model
from shardformer.training.run_folder import Run

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PUBLISHED = "peft"  # a run keeps the adapters that it was made of in this folder, for the conversion back
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
LAYERS = "transformer/layers/"
# Settings by which modules differ. A run has one rank and one scale for a matrix, and keeps the published files.
PATTERNS = ("rank_pattern", "alpha_pattern", "layers_to_transform", "use_rslora")
# Settings that do not change an adapter's values, or that are read from the arrays.
SILENT = {
    "task_type", "base_model_name_or_path", "auto_mapping", "inference_mode", "lora_dropout", "target_modules",
    "layers_to_transform", "layers_pattern", "revision", "use_dora", "peft_type", "r", "lora_alpha", "fan_in_fan_out",
    "rank_pattern", "alpha_pattern", "use_rslora", "exclude_modules", "eva_config", "loftq_config", "peft_version",
    "megatron_core", "qalora_group_size", "runtime_config", "target_parameters",
}  # fmt: skip
# With any other initialisation, the weights of the base change too.
PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


class Target(NamedTuple):
    """A matrix of the Hugging Face model in one layer, or those of all experts, and our matrices that it holds."""

    stored: Stored
    names: tuple[str, ...]
    is_conv1d: bool  # a matrix of GPT-2, which stores [inputs, outputs]
    experts: int = 0  # 0: a module of PEFT's target_modules; else a parameter of its target_parameters

    @property
    def module(self) -> str:
        return self.stored.name.removesuffix(".weight")

    @property
    def kind(self) -> str:
        """The name in all layers: 'attn.c_attn' for 'transformer.h.3.attn.c_attn'."""
        return self.module.rpartition(f".{self.stored.layer}.")[2]

    @property
    def indices(self) -> list[tuple[int, ...]]:
        """The indices of its matrices in our stacked factors: of the layer's row, and of the expert."""
        row = self.stored.row or 0
        return [(row, expert) for expert in range(self.experts)] or [(row,)]

    def parts_of(self, name: str) -> list[Part]:
        return [part for part in self.stored.parts if part.ours == f"{LAYERS}{name}"]

    def outputs_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape that its parts index, with a rank instead of its inputs."""
        shape = self.stored.seen or self.stored.shape
        return (rank, *shape[1:]) if self.is_conv1d else (*shape[:-1], rank)


def find_weights(folder: Path) -> Path:
    """Returns the file of a folder's adapters: safetensors, else PyTorch's."""
    for name in (WEIGHTS, PICKLED):
        if (folder / name).is_file():
            return folder / name
    raise UsageError(f"{folder} has no weights of adapters: expected {WEIGHTS} or {PICKLED}")


def is_peft_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def list_targets(family: str, config: Config) -> list[Target]:
    result = []
    for stored in list_stored(family, config):
        names = tuple(dict.fromkeys(part.ours.removeprefix(LAYERS) for part in stored.parts))
        if stored.layer is not None and set(names) <= {*MATRICES, *SHARED_MATRICES}:
            result.append(Target(stored, names, family == "gpt2"))
    for stored in peft_experts.list_parameters(family, config):
        names = tuple(part.ours.removeprefix(LAYERS) for part in stored.parts)
        result.append(Target(stored, names, False, config.experts.experts))
    return result


# A run's adapters to PEFT's.


def run_to_peft(source: Path, target: Path, arguments: list[str]) -> str:
    options = parsing.parse_options(arguments, ToPeft)
    run = Run.open(source)
    if not run.config.lora.lora_rank:
        raise UsageError(
            f"{source} has no adapters: lora_rank={run.config.lora.lora_rank}; write its weights with format=hf"
        )
    family = hf_settings.choose_family(run.config.with_factors().replace(lora_rank=0))
    with runs.open_state(run, options.step, False, options.ema) as state, new_folder_on_disk(target) as temporary:
        factors = {name: np.asarray(leaf) for name, leaf in state.params.items() if is_adapter(name)}
        published = _read_unchanged(run, family, factors)
        if published:
            arrays, settings = published
        else:
            arrays, adapters = join_factors(family, run.config, factors)
            settings = _write_settings(family, run.config, adapters)
        if options.base_name or "base_model_name_or_path" not in settings:
            settings["base_model_name_or_path"] = options.base_name or None
        kind = FLOATS[options.dtype]
        created = [
            CreatedTensor(name, kind, array.shape, functools.partial(np.asarray, array))
            for name, array in arrays.items()
        ]
        safetensors_files.write_file(temporary / WEIGHTS, created)
        (temporary / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    count = sum(math.prod(array.shape) for array in arrays.values())
    return f"{target}: step {state.step}, adapters of {count:,} parameters for a {family} model in {options.dtype}"


def _read_unchanged(
    run: Run, family: str, factors: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Returns the adapters that the run was made of and still holds, as arrays by name, and their settings."""
    stored = run.stored / PUBLISHED
    if not (stored / CONFIG).is_file():
        return None
    settings = read_settings(stored / CONFIG)
    _, expected = split_factors(stored, family, run.config.replace(lora_rank=0), settings)
    same = expected.keys() == factors.keys() and all(np.array_equal(expected[name], factors[name]) for name in factors)
    tensors = weight_files.find_tensors(find_weights(stored))
    return ({name: tensor.read() for name, tensor in tensors.items()}, settings) if same else None


def join_factors(family: str, config: Config, factors: dict[str, np.ndarray]) -> tuple[dict, dict[str, Adapter]]:
    """Returns PEFT's arrays by name, and the rank and alpha of each type of module, from our stacked factors."""
    arrays: dict[str, np.ndarray] = {}
    adapters: dict[str, Adapter] = {}
    adapted = peft_experts.find_adapted(config)
    targets = list_targets(family, config)
    written = {name for target in targets for name in target.names}
    if missing := [name for name in config.lora.lora_names if name not in written]:
        raise UsageError(
            f"adapters of {', '.join(missing)} of a {family} model have no form in PEFT's format here; merge them into "
            "the weights: convert RUN MERGED merge_lora=true"
        )

    @functools.cache
    def have_same_first(*names: str) -> bool:
        """Returns whether matrices have equal first factors, as factors from one matrix of PEFT have."""
        return all(
            np.array_equal(factors[f"{LAYERS}{names[0]}{lora.IN}"], factors[f"{LAYERS}{name}{lora.IN}"])
            for name in names[1:]
        )

    for target in targets:
        names = [name for name in target.names if name in config.lora.lora_names]
        if not names:
            continue
        same = have_same_first(*names)
        pairs = [_join_matrix(target, names, config, factors, index, same) for index in target.indices]
        rank, module = len(pairs[0][0]), target.module
        a, b = peft_experts.stack(pairs) if target.experts else pairs[0]
        if target.experts:
            module = peft_experts.name_module(module, adapted)
        arrays |= {f"{PREFIX}{module}{A}": a, f"{PREFIX}{module}{B}": b}
        adapters[target.kind] = Adapter(rank, _find_alpha(config, names[0], rank))
    return arrays, adapters


def _join_matrix(
    target: Target, names: list[str], config: Config, factors: dict[str, np.ndarray], index: tuple[int, ...], same: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (A, B) of one matrix, which may hold two or more of ours; `same`: with equal first factors."""
    firsts = [factors[f"{LAYERS}{name}{lora.IN}"] for name in names[: 1 if same else None]]
    starts = np.cumsum([0, *(first.shape[-1] for first in firsts)]).tolist()
    rank, scale = starts[-1], config.lora.adapter_scale(names[0])
    a_RI = np.concatenate([first[index].T for first in firsts])
    seen = np.zeros(target.outputs_shape(rank), np.float32)
    for start, name in zip([0] * len(names) if same else starts, names, strict=False):
        second = factors[f"{LAYERS}{name}{lora.OUT}"][index]
        if (factor := config.lora.adapter_scale(name) / scale) != 1:
            second = second * np.float32(factor)
        padded = np.zeros((rank, second.shape[-1]), np.float32)
        padded[start:][: len(second)] = second
        for part in target.parts_of(name):
            seen[part.cut] = part.view(padded)
    return a_RI, seen.reshape(rank, -1).T if target.is_conv1d else seen.reshape(-1, rank)


def _find_alpha(config: Config, name: str, rank: int) -> float:
    """Returns the alpha that gives an adapter of this rank the scale of a matrix."""
    own_rank, alpha = (*config.lora.adapters[name],)
    return alpha * (math.sqrt(rank / own_rank) if config.lora.rslora else rank / own_rank)


def _write_settings(family: str, config: Config, adapters: dict[str, Adapter]) -> dict[str, Any]:
    default, alpha = config.lora.lora_rank, config.lora.lora_alpha
    parameters = set(filter(peft_experts.is_parameter, adapters))
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM",
        "r": default, "lora_alpha": _shorten(alpha), "target_modules": sorted(adapters.keys() - parameters),
        "rank_pattern": {kind: each.rank for kind, each in adapters.items() if each.rank != default},
        "alpha_pattern": {kind: _shorten(each.alpha) for kind, each in adapters.items() if each.alpha != alpha},
        "fan_in_fan_out": family == "gpt2", "lora_dropout": config.lora.lora_dropout, "bias": "none",
        "inference_mode": True, "init_lora_weights": True, "use_rslora": config.lora.rslora, "use_dora": False,
        "modules_to_save": None,
    }  # fmt: skip
    return settings | ({"target_parameters": sorted(parameters)} if parameters else {})


def _shorten(number: float) -> float:
    return int(number) if number == int(number) else number


# PEFT's adapters to a run.


def peft_to_run(source: Path, target: Path, arguments: list[str]) -> str:
    options = parsing.parse_options(arguments, FromPeft)
    if not options.base:
        raise UsageError(f"{source} has adapters without weights; give the run with the weights: base=RUN")
    base = Run.open(options.base)
    if base.config.lora.lora_rank:
        raise UsageError(f"base={options.base} has adapters; merge them first: merge_lora=true")
    frozen = base.config.objective.without_training_layers().replace(quantize_aware="none")
    family = hf_settings.choose_family(frozen.with_factors())
    settings = read_settings(source / CONFIG)
    config, factors = split_factors(source, family, frozen, settings)
    config = config.replace(
        base=str(options.base), out=str(target), ema=0.0, lr_rules="", optimizer="adamw", param_dtype="float32",
        moment_dtype="float32",
    )  # fmt: skip
    with runs.open_state(base, options.step, False, options.ema, with_codes=True) as state:
        weights = {
            name: Filled(leaf.shape, _choose_dtype(name, leaf), functools.partial(copy_into, source=leaf))
            for name, leaf in state.params.items()
        }
        added = {
            name: Filled(array.shape, array.dtype, functools.partial(np.copyto, src=array))
            for name, array in factors.items()
        }
        run = Run(config, base.vocabulary, base.fingerprint, base.special_tokens)
        with new_folder(target) as temporary:
            runs.write_run(temporary, run, State(state.step, weights | added))
            copy_tokenizer(base, temporary / TOKENIZER_FOLDER)
            if any(settings.get(name) for name in PATTERNS):
                (temporary / PUBLISHED).mkdir()
                for name in (CONFIG, find_weights(source).name):
                    (temporary / PUBLISHED / name).write_bytes((source / name).read_bytes())
    return (
        f"{target}: the weights of {options.base} with adapters of rank {config.lora.lora_rank} for "
        f"{config.lora.lora_targets}, "
        f"lora_alpha={config.lora.lora_alpha:g}{describe_form(config)}"
    )


def _choose_dtype(name: str, leaf: Array) -> np.dtype:
    return leaf.dtype if is_part(name) else np.dtype(np.float32)


def read_settings(path: Path) -> dict[str, Any]:
    """Reads adapter_config.json; rejects a setting that is not computed here."""
    try:
        settings = json.loads(read_text(path))
        rank, alpha = settings["r"], settings["lora_alpha"]
        patterns = [settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
        figures = [rank, alpha, *patterns[0].values(), *patterns[1].values()]
        if not all(type(number) in (int, float) and 0 < number < 2**31 for number in figures):
            raise ValueError("ranks and alphas are numbers above 0")
        dropout = settings.get("lora_dropout") or 0.0
        if type(dropout) not in (int, float) or not 0 <= dropout < 1:
            raise ValueError("lora_dropout is a number from 0, below 1")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {type(error).__name__}: {error!s:.100}") from None
    expected = {"peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": PLAIN_BEGINNINGS}
    for name, values in expected.items():
        if settings.get(name, values[0]) not in values:
            raise UsageError(
                f"{path}: {name}={settings[name]!r:.80} is not computed here; expected {', '.join(map(repr, values))}"
            )
    if settings.get("use_dora"):
        raise UsageError(
            f"{path}: use_dora=true is not computed here: DoRA divides by the column norms of w + B A in every step; "
            "merge it with PEFT (merge_and_unload) and convert the merged model"
        )
    for name, value in settings.items():
        if name not in SILENT and name not in expected and value not in (None, False, [], {}):
            raise UsageError(f"{path}: {name}={value!r:.80} is not known here, and may change what the model computes")
    return settings


def split_factors(source: Path, family: str, base: Config, settings: dict) -> tuple[Config, dict[str, np.ndarray]]:
    """Returns the configuration with adapters, and our stacked factors, from the arrays of a folder."""
    pairs = _match(source, list_targets(family, base))
    ranks = {target.module: a.shape[0] // max(target.experts, 1) for target, a, _ in pairs}
    adapters = _find_rank_alphas(source / CONFIG, settings, ranks)
    by_matrix = {
        name: of_targets
        for name in (*MATRICES, *EXPERT_MATRICES, *SHARED_MATRICES)
        if (of_targets := [adapters[target.module] for target, _, _ in pairs if name in target.names])
    }
    config = _choose_config(base, settings, by_matrix)
    shapes = flatten(Model.abstract_parameters(config))
    factors = {name: np.zeros(leaf.shape, np.float32) for name, leaf in shapes.items() if is_adapter(name)}
    for target, a, b in pairs:
        a_RI, b_OR = a.read().astype(np.float32), b.read().astype(np.float32)
        if not (np.isfinite(a_RI).all() and np.isfinite(b_OR).all()):
            raise UsageError(f"{source / WEIGHTS}: the adapter of {target.module} has numbers that are NaN or infinite")
        scale = scale_of(*adapters[target.module], config.lora.rslora)
        if (factor := scale / config.lora.adapter_scale(target.names[0])) != 1:
            b_OR = b_OR * np.float32(factor)
        matrices = peft_experts.unstack(a_RI, b_OR, target.experts) if target.experts else [(a_RI, b_OR)]
        for index, pair in zip(target.indices, matrices, strict=True):
            _split_matrix(target, factors, index, *pair)
    return config, factors


def _split_matrix(target: Target, factors: dict[str, np.ndarray], index: tuple, a_RI: np.ndarray, b_OR: np.ndarray):
    """Writes the factors of our matrices that one matrix holds."""
    rank = len(a_RI)
    seen = (b_OR.T if target.is_conv1d else b_OR).reshape(target.outputs_shape(rank))
    for name in target.names:
        factors[f"{LAYERS}{name}{lora.IN}"][index][:, :rank] = a_RI.T
        for part in target.parts_of(name):
            part.view(factors[f"{LAYERS}{name}{lora.OUT}"][index][:rank])[...] = seen[part.cut]


def _choose_config(base: Config, settings: dict, by_matrix: dict[str, list[Adapter]]) -> Config:
    """Returns the configuration of adapters with these ranks and alphas in each layer that has them.

    If the layers of a matrix differ, it has their largest rank, and the scale of most of them.
    """
    rslora, chosen = bool(settings.get("use_rslora")), {}
    for name, adapters in by_matrix.items():
        scales = [scale_of(*each, rslora) for each in adapters]
        rank = max(each.rank for each in adapters)
        alpha = max(scales, key=scales.count) * (math.sqrt(rank) if rslora else rank)
        chosen[name] = adapters[0] if len(set(adapters)) == 1 else Adapter(rank, alpha)
    first = next(iter(chosen.values()))  # for settings that a pattern overrules in every module
    default = settings["r"] if any(each.rank == settings["r"] for each in chosen.values()) else first.rank
    given = settings["lora_alpha"]
    common = given if any(each.alpha == given for each in chosen.values()) else first.alpha
    return base.replace(
        lora_rank=default, lora_alpha=float(common), rslora=rslora,
        lora_targets=format_targets(chosen, Adapter(default, common)),
        lora_dropout=float(settings.get("lora_dropout") or 0.0),
    )  # fmt: skip


def _find_rank_alphas(path: Path, settings: dict, ranks: dict[str, int]) -> dict[str, Adapter]:
    """Returns the rank and the alpha of each module in PEFT."""
    alphas = dict.fromkeys(ranks, settings["lora_alpha"])
    for pattern, alpha in reversed((settings.get("alpha_pattern") or {}).items()):  # PEFT takes the first
        fitting = [module for module in ranks if f".{module}".endswith(f".{pattern}")]
        if not fitting:
            raise UsageError(f"{path}: alpha_pattern has {pattern!r:.80}, which names no module with adapters")
        alphas |= dict.fromkeys(fitting, alpha)
    return {module: Adapter(rank, float(alphas[module])) for module, rank in ranks.items()}


def _match(source: Path, targets: list[Target]) -> list[tuple[Target, Tensor, Tensor]]:
    """Returns the two arrays of each matrix with adapters; rejects any other array."""
    path = find_weights(source)
    left, pairs = weight_files.find_tensors(path), []
    shapes = {name: tensor.shape for name, tensor in left.items()}
    for target in targets:
        (first, second) = target.stored.shape
        inputs, outputs = (first, second) if target.is_conv1d else (second, first)
        module = target.module
        if target.experts:
            module = peft_experts.find_module(module, shapes, inputs, outputs)
        a, b = (left.pop(f"{PREFIX}{module}{end}", None) for end in (A, B))
        if a is None and b is None:
            continue
        if a is None or b is None:
            raise RunError(f"{path} has only one of the two arrays of {target.module}; copy it again")
        rank, experts = a.shape[0] if a.shape else 0, max(target.experts, 1)
        if not rank or (a.shape, b.shape) != ((rank, inputs), (outputs, rank)) or rank % experts:
            rows = f"{target.experts} x rank" if target.experts else "rank"
            raise UsageError(
                f"{path}: {target.module} has adapters of {list(a.shape)} and {list(b.shape)}, and the base makes them "
                f"[{rows}, {inputs}] and [{outputs}, {rows}]"
            )
        if a.dtype not in FLOATS.values() or b.dtype not in FLOATS.values():
            raise UsageError(f"{path}: {target.module} has {a.dtype} and {b.dtype}, expected floats")
        pairs.append((target, a, b))
    if left:
        raise UsageError(f"{path} has {first_of(list(left))}, which no layer of the base has a place for")
    if not pairs:
        raise UsageError(f"{path} has no adapters")
    return pairs
