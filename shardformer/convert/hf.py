"""`convert` between Hugging Face's folders (config.json, weights, tokenizer files) and runs."""

from collections.abc import Callable, Mapping
from pathlib import Path

from shardformer import storage
from shardformer.checkpoint import read_config
from shardformer.config import ARCHITECTURE, Config, parsing
from shardformer.convert import hf_settings, hf_special_tokens, hf_state, reward_heads, runs
from shardformer.convert.convert_options import FromHf, ToHf
from shardformer.convert.hf_settings import PublishedModel
from shardformer.convert.hf_special_tokens import find_end_of_turn
from shardformer.convert.leaves import State
from shardformer.convert.new_folder import (
    describe_average,
    describe_form,
    describe_rounding,
    describe_size,
    describe_source,
    new_folder,
    new_folder_on_disk,
)
from shardformer.convert.runs import open_vocabulary
from shardformer.data import hf_tokenizer
from shardformer.data.chat import chat_format
from shardformer.data.stored_vocabulary import TOKENIZER_FOLDER
from shardformer.errors import UsageError
from shardformer.files import read_bytes
from shardformer.messages import log
from shardformer.objectives.objective import OBJECTIVES, choose_objective
from shardformer.storage import BucketPath
from shardformer.training.run_folder import Run

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.model", "generation_config.json", "chat_template.jinja",
)  # fmt: skip


def hf_to_run(source: Path, target: Path, arguments: list[str]) -> str:
    options, rest = parsing.parse_known_options(arguments, FromHf)
    return model_to_run(source, target, rest, options.ignored, source, lambda model: hf_state.find_tensors(source))


def model_to_run(
    folder: Path,
    target: Path,
    words: list[str],
    ignored: list[str],
    weights: Path,
    find_tensors: Callable[[PublishedModel], Mapping[str, hf_state.Source]],
) -> str:
    """Writes a run with the model of a folder's config.json, its tokenizer, and the arrays that are found in `weights`.

    words: keys of the run. ignored: keys of config.json.
    """
    changes = parsing.parse_overrides(words, Config)
    if "out" in changes:
        raise UsageError("the run's folder is DST; out= cannot name another")
    model = hf_settings.read_model(folder, ignored, changes.get("seq", 0))
    family, config = model.family, model.config
    for name in ARCHITECTURE:
        if name in changes and changes[name] != config.get(name):
            path, said = folder / hf_settings.NAME, config.shown(name)
            raise UsageError(f"{name}={changes[name]} contradicts {path}, which has {name}={said}")
    if model.ignored:
        log.info(hf_settings.describe_ignored(folder, model.ignored))
    objective, own = changes.get("objective", config.preferences.objective), config.objective
    if objective in OBJECTIVES and choose_objective(objective).has_vocabulary != own.has_vocabulary:
        raise UsageError(f"objective={objective} contradicts {folder / hf_settings.NAME}, which has {own.trained}")
    config = config.replace(**changes | {"out": str(target)})
    config = choose_tokenizer(folder, config)
    config, vocabulary, fingerprint = open_vocabulary(config, model.special_tokens.first)
    not_finite: set[str] = set()
    tensors = find_tensors(model)
    state = State(0, hf_state.open_params(weights, family, config, not_finite, model.positions, tensors))
    with new_folder(target) as temporary:
        run = Run(config, vocabulary, fingerprint, model.special_tokens)
        runs.write_run(temporary, run, state)
        keep_tokenizer_files(folder, temporary)
    return (
        f"{target}: {describe_size(state.params)} of a {family} model, {config.data.tokenizer} as its "
        f"tokenizer{describe_form(config)}{describe_not_finite(not_finite)}"
        f"{reward_heads.describe_padding(config, model.special_tokens)}"
    )


def describe_not_finite(names: set[str]) -> str:
    """Returns a line that warns of arrays with NaN or infinity, if there are any."""
    if not names:
        return ""
    return f"\nwarning: {len(names)} arrays have weights that are NaN or infinite, {min(names)} first"


def keep_tokenizer_files(source: Path, run: Path | BucketPath) -> None:
    """Copies the files of the tokenizer of a folder into a run."""
    target = run / TOKENIZER_FOLDER
    if present := [name for name in TOKENIZER_FILES if (source / name).is_file()]:
        target.mkdir()
        for name in present:
            (target / name).write_bytes(read_bytes(source / name, hf_tokenizer.MAX_FILE))


def choose_tokenizer(source: Path, config: Config) -> Config:
    """Names the folder's tokenizer, unless another was given; an unreadable one is an error later."""
    uses_folder = config.data.tokenizer == "auto" and hf_tokenizer.has_tokenizer(source)
    return config.replace(tokenizer=str(source)) if uses_folder else config


def run_to_hf(source: Path, target: Path, arguments: list[str]) -> str:
    options = parsing.parse_options(arguments, ToHf)
    run = Run.open(source)
    if run.config.lora.lora_rank:
        raise UsageError(
            f"{source} has adapters; merge them first: convert {source} MERGED merge_lora=true; or "
            "write only the adapters: format=peft"
        )
    config = run.config.with_factors()
    family = hf_settings.choose_family(config, run.special_tokens.config.get("model_type"))
    opened = runs.open_state(run, options.step, False, options.ema, with_rewards=True)
    with opened as state, new_folder_on_disk(target) as temporary:
        shard_bytes = int(options.shard_gb * 1e9)
        params = hf_state.fold_embedding_bias(state.params)
        hf_state.write_params(temporary, family, config, params, options.dtype, shard_bytes)
        special, vocabulary = run.special_tokens, run.vocabulary
        hf_settings.write_config(temporary, family, config, options.dtype, special, vocabulary)
        _write_tokenizer(run, temporary)
        end_of_turn = find_end_of_turn(run)
        hf_special_tokens.write_generation_config(temporary, special, vocabulary, end_of_turn)
    return (
        f"{target}: step {state.step}, {describe_size(state.params)} as a {family} model in {options.dtype}"
        f"{describe_source(run)}{describe_rounding(run, state.step)}{describe_average(run, options.ema)}"
        f"{reward_heads.describe_written_padding(config, special)}"
    )


def copy_tokenizer(run: Run, target: Path | BucketPath) -> None:
    """Copies the tokenizer files that came with the run or, if it has none, with the nearest of its bases."""
    # A link could name any file of this machine, and the copy may be published.
    folders = [folder / TOKENIZER_FOLDER for folder in _list_records(run)]
    if nearest := next((folder for folder in folders if folder.is_dir() and not folder.is_symlink()), None):
        target.mkdir(exist_ok=True)
        for name in TOKENIZER_FILES:
            if (nearest / name).is_file() and not (nearest / name).is_symlink():
                (target / name).write_bytes(read_bytes(nearest / name, hf_tokenizer.MAX_FILE))


def _list_records(run: Run) -> list[Path]:
    """Returns the folders of a run, its base, the base of that and so on, as far as they exist."""
    result, config = [run.stored], run.config
    while config.training.base:
        stored = storage.read_records(storage.location(config.training.base_run))
        if stored in result:  # a damaged config.json may name the run itself
            break
        result.append(stored)
        if not (stored / hf_settings.NAME).is_file():
            break
        config = read_config(stored)
    return result


def _write_tokenizer(run: Run, target: Path) -> None:
    copy_tokenizer(run, target)
    documents = run.vocabulary.documents(source=run.config.data.source, fingerprint=run.fingerprint)
    if hf_tokenizer.COPY in documents:
        (target / hf_tokenizer.COPY).write_text(documents[hf_tokenizer.COPY], "utf-8")
    if run.vocabulary.chat:
        chat_format.write_template(target, run.vocabulary.chat)
