"""The data of a run: the sources that `data=` names, under one vocabulary, as batches."""

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shardformer.config import Config
from shardformer.data import batches, hf_tokenizer, sources
from shardformer.data.chat import chat_format
from shardformer.data.chat.chat_windows import ChatSplit, ChatWindows, describe_rows
from shardformer.data.chat.preference_windows import PreferenceSplit, PreferenceWindows, describe_pairs
from shardformer.data.digests import BackgroundCheck
from shardformer.data.prepare import Progress
from shardformer.data.prompt_windows import PromptSplit, describe_prompts
from shardformer.data.row_report import join_faults
from shardformer.data.source import NO_IDS, OpenedSource, Say, Source, SourceOptions
from shardformer.data.token_folder import format_of_fingerprint, join_fingerprints
from shardformer.data.tokens import SPLITS
from shardformer.data.vocabulary import MAX_IDS, MAX_NAMED, Bytes, Characters, TokenIds, Vocabulary
from shardformer.data.windows import AnySplit, Batch, RowLayout
from shardformer.errors import UsageError
from shardformer.files import expand_home
from shardformer.storage import is_url, local_path


@dataclasses.dataclass(frozen=True)
class Corpus:
    name: str  # the sources as they were resolved, so that a resume reads the same
    vocabulary: Vocabulary
    sources: tuple[OpenedSource, ...]
    weights: tuple[float, ...] = (1.0,)
    validation: OpenedSource | None = None  # a separate source for validation
    checks: tuple[BackgroundCheck, ...] = ()  # of stored data, which may still be running

    @property
    def fingerprint(self) -> str:
        """Equal if and only if the data is equal."""
        if len(self.sources) == 1 and not self.validation:
            return self.sources[0].fingerprint
        mixed = [[source.fingerprint, weight] for source, weight in zip(self.sources, self.weights, strict=True)]
        content = json.dumps([mixed, self.validation and self.validation.fingerprint])
        every = [*self.sources, *([self.validation] if self.validation else [])]
        return join_fingerprints([source.fingerprint for source in every], hashlib.sha256(content.encode()).hexdigest())

    @property
    def held_out(self) -> tuple[str, ...]:
        """The splits that a run is evaluated on: those with a target."""
        names = ("validation", "test")
        return tuple(name for name in names if any(len(split.tokens) > 1 for split in self.splits(name)))

    def adapt(self, config: Config) -> Config:
        """Returns a configuration with what this corpus needs: its vocabulary, and conversations that are separated.

        For `load_corpus` from Python; a run adapts its configuration by itself.
        """
        return self.separate_documents(config.replace(vocab=config.model.vocab or len(self.vocabulary)))

    def separate_documents(self, config: Config) -> Config:
        """Returns a configuration whose conversations never see each other; without packing, a row has one pair."""
        if config.preferences.learns_rewards:  # a prompt in each row
            return config.replace(documents="padded", mask_prompt=not self.has_chat)
        if not self.has_chat or config.data.documents != "packed":
            return config
        return config.replace(documents="padded" if self.has_pairs else "masked")

    def check(self) -> None:
        """Raises RunError if a check in the background has found damaged data."""
        for check in self.checks:
            check.raise_failure()

    @property
    def has_chat(self) -> bool:
        return any(isinstance(split, ChatSplit) for split in self.splits("train"))

    @property
    def has_pairs(self) -> bool:
        """True if the training data are preference pairs."""
        return any(isinstance(split, PreferenceSplit) for split in self.splits("train"))

    def with_references(self, references: dict[str, np.ndarray]) -> "Corpus":
        """Returns the corpus with reference log-probabilities [pairs, 2] by `SOURCE/SPLIT`."""

        def add(source: OpenedSource) -> OpenedSource:
            splits = {
                name: dataclasses.replace(split, references=references[f"{source.name}/{name}"])
                for name, split in source.splits.items()
                if isinstance(split, PreferenceSplit)
            }
            return dataclasses.replace(source, splits=splits)

        validation = self.validation and add(self.validation)
        return dataclasses.replace(self, sources=tuple(map(add, self.sources)), validation=validation)

    def preference_splits(self) -> dict[str, PreferenceSplit]:
        """Returns the splits of pairs by `SOURCE/SPLIT`."""
        every = [*self.sources, *([self.validation] if self.validation else [])]
        return {
            f"{source.name}/{name}": split
            for source in every
            for name, split in source.splits.items()
            if isinstance(split, PreferenceSplit)
        }

    def describe_chat(self, layout: RowLayout) -> Iterator[str]:
        """Yields a line for every source of conversations: how they are laid out in rows."""
        for source in self.sources:
            split = source.splits.get("train")
            if split and layout.answer_tokens:
                yield describe_prompts(source.name, PromptSplit(split, layout.answer_tokens).make_windows(layout))
                continue
            if isinstance(split, PreferenceSplit):
                yield describe_pairs(source.name, PreferenceWindows(split, layout))
            elif isinstance(split, ChatSplit):
                yield describe_rows(source.name, ChatWindows(split, layout))

    def splits(self, name: str) -> list[AnySplit]:
        """Returns the split of every source that has it."""
        if name != "train" and self.validation:
            return [self.validation.splits["train"]] if name == "validation" else []
        return [source.splits[name] for source in self.sources if name in source.splits]

    def train_batches(
        self, config: Config, first_step: int = 0, rows: batches.Rows = batches.EVERY_ROW
    ) -> batches.BatchStream:
        """Returns batches without end from a step on; `rows` are those of the global batch to gather."""
        splits, layout = select_rows(self.splits("train"), config), choose_row_layout(config)
        every = config.preferences.rollout_steps if config.preferences.learns_rewards else 1
        make = batches.TrainBatches(
            splits,
            self.weights,
            layout,
            batch=config.data_rows,
            seed=config.training.seed,
            order=config.data.order,
        )

        def make_checked(step: int) -> Batch:
            self.check()
            return batches.check_ids(make(step // every, rows), len(self.vocabulary), f"{self.name}, step {step}")

        return batches.stream(make_checked, first_step, all(source.through_tf for source in self.sources))

    def eval_batches(self, split: str, config: Config, limit: int = 0) -> batches.EvalBatches:
        self.check()
        splits = select_rows(self.splits(split), config)
        if not splits:
            raise UsageError(f"data={self.name} has no {split} split; there are train, {', '.join(self.held_out)}")
        layout, lengths, size = choose_row_layout(config), self.vocabulary.byte_lengths(), len(self.vocabulary)
        return batches.EvalBatches(
            splits, layout, batch=config.data_rows, limit=limit, byte_lengths=lengths, vocab_size=size
        )


def choose_row_layout(config: Config) -> RowLayout:
    documents = config.data.documents
    sft_tokens = config.preferences.sft_tokens if config.preferences.has_sft_term else ""
    return RowLayout(
        config.model.seq,
        documents != "padded",
        documents == "masked",
        config.data.mask_prompt,
        sft_tokens,
        config.preferences.measures_kl,
        config.preferences.answer_tokens if config.preferences.learns_rewards else 0,
    )


def select_rows(splits: list[AnySplit], config: Config) -> list[AnySplit]:
    """Returns the splits whose rows an objective reads: those of prompts if it samples the answers."""
    keys = config.preferences
    return [PromptSplit(split, keys.answer_tokens) for split in splits] if keys.learns_rewards else splits


def _choose_options(config: Config, started_with: str = "") -> SourceOptions:
    named_validation, share = parse_validation(config.data.validation)
    format = format_of_fingerprint(started_with)
    out = Path(expand_home(config.run.out)) if config.run.out and not is_url(config.run.out) else None
    options = SourceOptions(config.data.text, share, bool(named_validation), format, out, config.data.chat_template)
    pairs = config.preferences.learns_pairs
    return dataclasses.replace(options, skips_bad_rows=config.data.bad_rows == "skip", pairs=pairs)


def check_sources(config: Config) -> None:
    """Raises UsageError for files of this machine that do not exist or hold no text, without reading them."""
    named_validation, _ = parse_validation(config.data.validation)
    for name in [*parse_mixture(config.data.source)[0], *filter(None, [named_validation])]:
        if not is_url(name) and not name.startswith("tfds:") and name not in ("auto", "tiny_shakespeare", "builtin"):
            sources.find_source(name, _choose_options(config), lambda _: None)


def load_corpus(
    config: Config,
    say: Say = print,
    vocabulary: Vocabulary | None = None,
    progress: Progress = lambda *_: None,
    *,
    started_with: str = "",
    resumes: bool = False,
) -> Corpus:
    """Opens the sources that `config.data` names, under a given vocabulary or the one that `config.tokenizer` names.

    `started_with` is the fingerprint of the data that a run has seen: its splits are chosen by the rule of that time.
    Stored data is compared with its checksums in the background; resumes=True reads all of it first.
    """
    if not config.data.source:
        raise UsageError(f"this run has no data yet; give data=...: {sources.TAKES}")
    named_validation, share = parse_validation(config.data.validation)
    options = _choose_options(config, started_with)
    names, weights = parse_mixture(config.data.source)
    inputs = [sources.find_source(name, options, say) for name in names]
    if share is not None and all(source.fixed_splits for source in inputs):
        raise UsageError(
            f"validation={share:g} does nothing, as data={config.data.source} has its own splits; leave it empty "
            "(validation=), or prepare the texts again with it"
        )
    for_validation = dataclasses.replace(options, named_validation=True)
    validation = sources.find_source(named_validation, for_validation, say) if named_validation else None
    every = [*inputs, *([validation] if validation else [])]
    vocabulary = vocabulary or choose_vocabulary(
        config.data.tokenizer, every, say, config.model.vocab, config.data.special_tokens, config.data.bos
    )
    vocabulary = choose_chat_template(config.data.chat_template, every, vocabulary)
    opened = _open_all(every, vocabulary, progress)
    opened, held_out = opened[: len(inputs)], opened[-1] if validation else None
    check_objective(config, opened)
    _check_splits(opened, bool(validation), any(source.fixed_splits for source in inputs))
    for source in (*opened, *([held_out] if held_out else [])):
        for notice in source.notices:
            say(f"{source.name}: {notice}")
    if held_out and "train" not in held_out.splits:
        raise UsageError(f"validation={held_out.name} has nothing to validate on; name a source that holds some text")
    return Corpus(
        _join_names([source.name for source in opened], weights),
        vocabulary,
        opened,
        tuple(weights),
        held_out,
        _check_stored([*opened, *([held_out] if held_out else [])], resumes, say),
    )


def _open_all(every: Sequence[Source], vocabulary: Vocabulary, progress: Progress) -> tuple[OpenedSource, ...]:
    """Opens the sources; raises UsageError with the faulty rows of all of them."""

    def open_one(source: Source) -> list[OpenedSource]:
        return [source.open(vocabulary, progress)]

    return tuple(join_faults(functools.partial(open_one, source) for source in every))


def check_objective(config: Config, opened: Sequence[OpenedSource]) -> None:
    """Raises UsageError for pairs without a preference objective, and for such an objective without pairs."""
    objective = config.preferences.objective
    for source in opened:
        pairs = any(isinstance(split, PreferenceSplit) for split in source.splits.values())
        if pairs and not config.preferences.learns_pairs:
            raise UsageError(
                f"data={source.name} holds preference pairs (chosen and rejected), and objective={objective} learns "
                "texts; give objective=dpo"
            )
        if not pairs and config.preferences.learns_pairs:
            raise UsageError(
                f"objective={objective} learns from preference pairs, and data={source.name} has none; give records "
                "with prompt, chosen and rejected, or objective=lm"
            )


def choose_chat_template(wanted: str, inputs: Sequence[Source], vocabulary: Vocabulary) -> Vocabulary:
    """Returns the vocabulary with the chat template of this data; raises UsageError for a key without effect."""
    if any(source.is_chat for source in inputs):
        return vocabulary.with_chat(chat_format.resolve_format(wanted, vocabulary.chat, vocabulary.name))
    if wanted != "auto" and not (vocabulary.chat and vocabulary.chat.name == wanted):
        raise UsageError(
            f"chat_template={wanted} does nothing: data={inputs[0].name} has no conversations; leave it out"
        )
    prepared = next((s.vocabulary.chat for s in inputs if s.vocabulary and s.vocabulary.chat and s.has_chat), None)
    return vocabulary.with_chat(prepared) if prepared else vocabulary


def _check_stored(opened: list[OpenedSource], resumes: bool, say: Say) -> tuple[BackgroundCheck, ...]:
    """Compares stored data with its checksums: all of it before a resume, else the changed files in the background."""
    checks = [source.check for source in opened if source.check]
    if resumes:
        if checks:
            say("reading the data once to compare it with its checksums")
        for check in checks:
            check(remembered=False)
        return ()
    return tuple(BackgroundCheck(functools.partial(check, remembered=True)) for check in checks)


def choose_vocabulary(
    wanted: str, inputs: Sequence[Source], say: Say, size: int = 0, special_tokens: bool = False, bos: str = "auto"
) -> Vocabulary:
    """Returns the vocabulary that `tokenizer` names; auto: of prepared data its own, of token files ids, else chars."""
    prepared = next((source.vocabulary for source in inputs if source.vocabulary), None)
    text_sources = [source for source in inputs if source.is_text]
    if wanted == "auto":
        if prepared:
            return prepared if bos == "auto" else prepared.with_beginning(bos)
        wanted = Characters.name if text_sources else TokenIds.name
    if wanted == TokenIds.name and not size:
        largest = max((source.largest_id() for source in inputs), default=NO_IDS)
        if largest >= MAX_IDS:
            raise UsageError(f"data={inputs[0].name} holds the id {largest}, which no vocabulary has; is it token ids?")
        return TokenIds(1 + max(largest, 0))
    if wanted == Characters.name or wanted.startswith("bpe:"):
        if rest := [source for source in inputs if not source.is_text and not (text_sources and source.vocabulary)]:
            raise UsageError(
                f"tokenizer={wanted} is made from text, and data={rest[0].name} holds token ids; "
                f"give the tokenizer.json that they were made with{'' if text_sources else ', or leave tokenizer= out'}"
            )
        return (
            _collect_characters(text_sources, say)
            if wanted == "chars"
            else _train_bpe(wanted, text_sources, special_tokens, say)
        )
    vocabulary = open_vocabulary(wanted, size, special_tokens, bos)
    if vocabulary.notice:
        say(vocabulary.notice)
    return vocabulary


def open_vocabulary(
    tokenizer: str, size: int, special_tokens: bool = False, bos: str = "auto", first: int | None = None
) -> Vocabulary:
    """Opens a vocabulary that needs no text: bytes, token ids below `size`, or the path of a tokenizer.json.

    first: the beginning of text that a published model names, for bos=true.
    """
    if tokenizer == Bytes.name:
        return Bytes()
    if tokenizer in ("auto", TokenIds.name):
        return TokenIds(size)
    if tokenizer == Characters.name or tokenizer.startswith("bpe:"):
        raise UsageError(f"tokenizer={tokenizer} is made from a text, and there is none; give a tokenizer.json, or ids")
    path = local_path(tokenizer)
    vocabulary = hf_tokenizer.open_file(path, special_tokens).with_beginning(bos, first)
    folder = path if path.is_dir() else path.parent
    return vocabulary.with_chat(chat_format.load_format(folder) or chat_format.read_format(folder))


def _collect_characters(text_sources: list[Source], say: Say) -> Characters:
    """Returns the characters of all splits; reports any that the training text lacks."""
    trained = set(join_faults(functools.partial(source.characters, "train") for source in text_sources))
    known = trained.union(*(source.characters(*SPLITS[1:]) for source in text_sources))
    vocabulary = Characters.from_text(known)
    if unseen := sorted(known - trained):
        named = " ".join(map(repr, unseen[:MAX_NAMED])) + (" ..." if len(unseen) > MAX_NAMED else "")
        say(
            f"{len(unseen)} of {len(known)} characters are in validation or test only, and are not learned: {named}; "
            "tokenizer=bytes learns every text"
        )
    return vocabulary


def _train_bpe(wanted: str, text_sources: list[Source], special_tokens: bool, say: Say) -> Vocabulary:
    size = int(wanted.removeprefix("bpe:"))
    vocabulary = hf_tokenizer.train_bpe(join_faults(source.sample for source in text_sources), size, special_tokens)
    if len(vocabulary) < size:
        say(f"tokenizer=bpe:{size}: the text has pairs for {len(vocabulary):,} entries only, which are used")
    return vocabulary


def parse_mixture(text: str) -> tuple[list[str], list[float]]:
    """Returns names and weights of 'a.bin=3,b.bin=1'; a name without a weight weighs 1."""
    if os.path.exists(os.path.expanduser(text)):
        return [text], [1.0]
    names, weights = [], []
    for word in text.split(","):
        match = re.fullmatch(r"(.+?)(?:=([0-9.eE+-]+))?", word.strip())
        try:
            weight = float(match[2]) if match and match[2] else 1.0
        except ValueError:
            weight = 0.0
        if not match or not 0 < weight < float("inf"):
            raise UsageError(f"data takes SOURCE or SOURCE=WEIGHT,SOURCE=WEIGHT with weights above 0; got {word!r}")
        names.append(match[1])
        weights.append(weight)
    if len(set(names)) < len(names):
        raise UsageError(f"data={text} names a source twice; give it one weight")
    return names, weights


def _join_names(names: list[str], weights: list[float]) -> str:
    if len(names) == 1:
        return names[0]
    # All digits: a resumed run parses this, and another weight would be other data.
    return ",".join(f"{name}={repr(weight).removesuffix('.0')}" for name, weight in zip(names, weights, strict=True))


def parse_validation(text: str) -> tuple[str, float | None]:
    """Returns (a source, a share of the documents): one of them, or neither."""
    if not text:
        return "", None
    try:
        share = float(text)
    except ValueError:
        return text, None
    if not 0 < share < 0.5:
        raise UsageError(f"validation is a share in (0, 0.5) or a source, got {text!r}")
    return "", share


def _check_splits(opened: tuple[OpenedSource, ...], named_validation: bool, fixed_splits: bool) -> None:
    for source in opened:
        if "train" not in source.splits:
            raise UsageError(f"data={source.name} has nothing to train on; {sources.TAKES}")
    if not named_validation and not any("validation" in source.splits for source in opened):
        raise UsageError(
            f"data={opened[0].name} has no document whose hash falls into validation; name another source for it "
            f"(validation=PATH), {'prepare it again with' if fixed_splits else 'or give'} more documents or a larger "
            "share (validation=0.2)"
        )
