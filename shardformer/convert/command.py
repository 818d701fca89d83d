"""`convert SRC DST`: the kind of SRC determines the direction; DST is written completely or not at all."""

import contextlib
import dataclasses
from pathlib import Path

import jax

from shardformer import data, storage
from shardformer.config import ARCHITECTURE, Config, parsing
from shardformer.convert import (
    easylm,
    flax_files,
    gguf,
    gptj,
    gptj_settings,
    gptj_state,
    grok,
    hf,
    hf_settings,
    levanter,
    maxtext,
    merge,
    orbax_folder,
    peft,
    runs,
    seed,
    shard_files,
    stored_weights,
)  # fmt: skip
from shardformer.convert.convert_options import FromGptj, Merging, Storing, ToGptj
from shardformer.convert.new_folder import (
    check_free,
    describe_average,
    describe_form,
    describe_rounding,
    describe_size,
    describe_source,
    new_folder,
    new_folder_on_disk,
)
from shardformer.convert.runs import open_vocabulary
from shardformer.data import Vocabulary
from shardformer.data.stored_vocabulary import TOKENIZER_FOLDER
from shardformer.data.vocabulary import FILE as VOCABULARY
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.messages import log
from shardformer.storage import BucketPath
from shardformer.storage.local_copy import copy_to_disk
from shardformer.training.run_folder import Run


def convert(arguments: list[str]) -> None:
    if len(arguments) < 2 or not all(map(storage.is_path, arguments[:2])):
        raise UsageError("convert takes SRC DST [key=value ...]: a folder to read and one to write")
    source, target, options = storage.location(arguments[0]), storage.location(arguments[1]), arguments[2:]
    check_free(target)
    if isinstance(source, BucketPath) and not _is_run(source):
        source = copy_to_disk(source)
    converter = _choose_converter(source, target, options)
    if target.name.endswith(gguf.SUFFIX) and converter is not gguf.run_to_gguf:
        raise UsageError(f"{target} is written from a run only; convert {source} to a run first, or name a folder")
    if isinstance(target, BucketPath) and converter in (run_to_gptj, hf.run_to_hf, peft.run_to_peft, gguf.run_to_gguf):
        raise UsageError(f"{target} is in a bucket, where only runs are written; give a folder on a disk, and copy it")
    mesh.use_cpu_devices(1)
    jax.config.update("jax_platforms", "cpu")  # nothing is computed: no accelerator needs to hold the model
    log.info(converter(source, target, options))


def _is_run(folder: BucketPath) -> bool:
    """Returns whether a folder is a run; the formats of others have a config.json too."""
    foreign = (folder / "shard_0").is_dir() or hf_settings.is_hf_folder(folder)
    return not foreign and (folder / "config.json").is_file()


def _choose_converter(source: Path | BucketPath, target: Path | BucketPath, arguments: list[str]):
    if isinstance(source, Path) and shard_files.has_shards(source):
        return gptj_to_run
    if isinstance(source, Path) and grok.find_checkpoint(source):
        return grok.grok_to_run
    if isinstance(source, Path) and flax_files.is_stream(source):
        return easylm.easylm_to_run
    if isinstance(source, Path) and seed.is_seed_folder(source):
        seed.refuse_to_convert(source)
    if isinstance(source, Path) and peft.is_peft_folder(source):
        return peft.peft_to_run
    if isinstance(source, Path) and hf_settings.is_hf_folder(source):
        return hf.hf_to_run
    if (source / "config.json").is_file():
        _check_one_target(arguments)
        if target.name.endswith(gguf.SUFFIX):
            return gguf.run_to_gguf
        if merge.asks_to_merge(arguments):
            return run_to_merged_run
        if stored_weights.asks_to_store(arguments):
            return run_to_stored_run
        formats = {"format=hf": hf.run_to_hf, "format=peft": peft.run_to_peft}
        return next((convert for word, convert in formats.items() if word in arguments), run_to_gptj)
    if isinstance(source, Path) and orbax_folder.find_state(source):
        return maxtext.maxtext_to_run
    if isinstance(source, Path) and levanter.find_checkpoint(source):
        return levanter.levanter_to_run
    inside = (
        next((path.parent for path in sorted(source.glob("*/shard_0"))), None) if isinstance(source, Path) else None
    )
    reason = "cannot be converted" if source.exists() else "does not exist"
    raise UsageError(
        f"{source} {reason}; expected a run, a Hugging Face folder, PEFT's adapters, GPT-J's shards "
        "(shard_0/0.npz), Grok-1's checkpoint (ckpt-0/tensor00000_000), EasyLM's stream, or a checkpoint of MaxText's "
        "or levanter's"
        f"{f'; did you mean {inside}?' if inside else ''}"
    )


def _check_one_target(arguments: list[str]) -> None:
    """Rejects another format together with a key that writes another run."""
    names = {word.partition("=")[0]: word for word in arguments}
    for name in ("merge_lora", "weights"):
        if name in names and "format" in names:
            raise UsageError(
                f"{names[name]} writes another run, and {names['format']} is not one; leave one of them out"
            )


def gptj_to_run(source: Path, target: Path, arguments: list[str]) -> str:
    options, changes = _parse_options(arguments)
    count = shard_files.count_shards(source)
    config = _choose_config(source, options.config, count, changes).replace(out=str(target))
    gptj.check_expressible(config, count)
    if config.training.ema:
        raise UsageError(
            f"ema={config.training.ema}: GPT-J's format has no average of the weights to continue from; give ema=0"
        )
    config, vocabulary, fingerprint = _choose_vocabulary(source, config)
    state = gptj_state.open_state(source, config, options.moments)
    with new_folder(target) as temporary:
        runs.write_run(temporary, Run(config, vocabulary, fingerprint), state)
    moments = f"Adam's moments after step {state.moments.steps}" if state.moments else "Adam's moments start from zero"
    next_step = f"next: python -m shardformer eval {target}"
    if not fingerprint:
        next_step = "it has no data yet: give `train --resume` data=..., and `sample` a prompt" + (
            " of token ids, such as prompt='464 2068'" if config.data.tokenizer == "ids" else ""
        )
    return (
        f"{target}: step {state.step}, {describe_size(state.params)} from {count} shards, "
        f"{moments}{describe_form(config)}\n{next_step}"
    )


def run_to_merged_run(source: Path, target: Path, arguments: list[str]) -> str:
    options = parsing.parse_options(arguments, Merging)
    adapted = Run.open(source)
    merge.check_adapters(adapted)
    with contextlib.ExitStack() as stack:
        result = stack.enter_context(runs.open_state(adapted, options.step, False, options.ema))
        result, drift = merge.choose_base(adapted, result, options.onto, stack)
        run, state = merge.merge_adapters(adapted, result)
        run = dataclasses.replace(run, config=run.config.replace(out=str(target)))
        with new_folder(target) as temporary:
            runs.write_run(temporary, run, state)
            hf.copy_tokenizer(adapted, temporary / TOKENIZER_FOLDER)
    return (
        f"{target}: step {state.step}, {describe_size(state.params)}, adapters merged, Adam's moments start from zero"
        f"{describe_average(adapted, options.ema)}{drift}"
    )


def run_to_stored_run(source: Path, target: Path, arguments: list[str]) -> str:
    options = parsing.parse_options(arguments, Storing)
    before = Run.open(source)
    if options.weights == before.config.stored.weights:
        raise UsageError(f"{source} stores weights={options.weights} already; give another form")
    run = stored_weights.change_form(before, options.weights)
    run = dataclasses.replace(run, config=run.config.replace(out=str(target)))
    trained = options.weights == before.config.stored.quantize_aware  # whose rounded values have codes a little off
    with (
        runs.open_state(before, options.step, False, options.ema, before_rounding=trained, with_rewards=True) as state,
        new_folder(target) as temporary,
    ):
        runs.write_run(temporary, run, state)
        hf.copy_tokenizer(before, temporary / TOKENIZER_FOLDER)
    return (
        f"{target}: step {state.step}, {describe_size(state.params)}, weights={options.weights} instead of "
        f"weights={before.config.stored.weights}{describe_rounding(before, state.step)}"
        f"{describe_average(before, options.ema)}"
    )


def run_to_gptj(source: Path, target: Path, arguments: list[str]) -> str:
    options = parsing.parse_options(arguments, ToGptj)
    run = Run.open(source)
    _check_gptj(run.config, options.shards, is_named=any(word.startswith(("format=", "shards=")) for word in arguments))
    with_moments = options.moments and not options.ema
    with (
        runs.open_state(run, options.step, with_moments, options.ema) as state,
        new_folder_on_disk(target) as temporary,
    ):
        gptj_state.write_state(temporary, run.config, state, options.shards, jax.numpy.dtype(options.dtype))
        gptj_settings.write_config(temporary / gptj_settings.NAME, run.config, options.shards)
        for name, text in run.vocabulary.documents(source=run.config.data.source, fingerprint=run.fingerprint).items():
            (temporary / name).write_text(text, "utf-8")
    moments = "with" if state.moments else "without"
    return (
        f"{target}: step {state.step}, {describe_size(state.params)} in {options.shards} shards, {options.dtype}, "
        f"{moments} Adam's moments{describe_source(run)}{describe_rounding(run, state.step)}"
        f"{describe_average(run, options.ema)}"
    )


def _check_gptj(config: Config, shards: int, is_named: bool) -> None:
    """Rejects a run that GPT-J's format lacks; names the other targets if none was chosen."""
    try:
        gptj.check_expressible(config, shards)
    except UsageError as error:
        if is_named:
            raise
        raise UsageError(
            f"without another target, convert writes GPT-J's shards, and {error}; other targets are format=hf (a "
            "Hugging Face folder), FILE.gguf (llama.cpp), format=peft (only adapters), merge_lora=true and weights=nf4 "
            "(another run)"
        ) from None


def _parse_options(arguments: list[str]) -> tuple[FromGptj, dict]:
    """Returns the options of the conversion, and the keys of the run."""
    options, rest = parsing.parse_known_options(arguments, FromGptj)
    changes = parsing.parse_overrides(rest, Config)
    if "out" in changes:
        raise UsageError("the run's folder is DST; out= cannot name another")
    return options, changes


def _choose_config(source: Path, path: str, count: int, changes: dict) -> Config:
    """Returns the run's configuration; the model is the JSON's, or else GPT-J-6B with the given changes."""
    if not path and not (source / gptj_settings.NAME).exists():
        return gptj_settings.default_config().replace(**changes)
    file = Path(storage.local_path(path)) if path else source / gptj_settings.NAME
    config, said = gptj_settings.read_config(file)
    if said is not None and said != count:
        missing = f"; {source / f'shard_{count}'} is missing: copy it" if said > count else ""
        raise UsageError(
            f"{source} has {count} shards, and {file} has {gptj_settings.SHARDS}={said}{missing}, or correct the number"
        )
    for name in ARCHITECTURE:
        if name in changes and changes[name] != config.get(name):
            raise UsageError(
                f"{name}={changes[name]} contradicts {file}, which has {name}={config.shown(name)}; leave it out, "
                "or give config=FILE.json of the right model"
            )
    return config.replace(**changes)


def _choose_vocabulary(source: Path, config: Config) -> tuple[Config, Vocabulary, str]:
    """Returns the vocabulary that a run of ours left in SRC, or else that of `tokenizer`, or bare token ids."""
    if (source / VOCABULARY).exists():
        return config, *data.load_vocabulary(source)
    return open_vocabulary(config)
