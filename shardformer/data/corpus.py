"""The data of a run: the sources that `data=` names, under one vocabulary, as batches."""

import dataclasses
import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardformer.config import Config
from shardformer.data import batches
from shardformer.data.batches import Data
from shardformer.data.choose_vocabulary import choose_chat_template, choose_vocabulary
from shardformer.data.digests import join_fingerprints
from shardformer.data.row_report import join_faults
from shardformer.data.source import (
    LARGER_SHARES,
    SHARE,
    TAKES,
    OpenedSource,
    Progress,
    Source,
    SourceOptions,
    Texts,
    split_text,
)
from shardformer.data.vocabulary import Vocabulary
from shardformer.data.windows import AnySplit, Batch, RowLayout
from shardformer.errors import UsageError
from shardformer.files import expand_home
from shardformer.messages import log, silence
from shardformer.storage import BucketPath, is_url, location


@dataclasses.dataclass(frozen=True)
class Corpus(Data):
    name: str  # the sources as they were resolved, so that a resume reads the same
    vocabulary: Vocabulary
    sources: tuple[OpenedSource, ...]
    weights: tuple[float, ...] = (1.0,)
    validation: OpenedSource | None = None  # a separate source for validation
    checks: tuple["BackgroundCheck", ...] = ()  # of stored data, which may still be running

    @property
    def fingerprint(self) -> str:
        if len(self.sources) == 1 and not self.validation:
            return self.sources[0].fingerprint
        mixed = [[source.fingerprint, weight] for source, weight in zip(self.sources, self.weights, strict=True)]
        content = json.dumps([mixed, self.validation and self.validation.fingerprint])
        fingerprints = [source.fingerprint for source in self._opened]
        return join_fingerprints(fingerprints, hashlib.sha256(content.encode()).hexdigest())

    @property
    def _opened(self) -> list[OpenedSource]:
        return [*self.sources, *([self.validation] if self.validation else [])]

    @property
    def held_out(self) -> tuple[str, ...]:
        names = ("validation", "test")
        return tuple(name for name in names if any(len(split.tokens) > 1 for split in self.splits(name)))

    def adapt(self, config: Config) -> Config:
        """Returns a configuration with what this corpus needs: its vocabulary, and conversations that are separated.

        For `load_corpus` from Python; a run adapts its configuration by itself.
        """
        return self.separate_documents(config.replace(vocab=config.model.vocab or len(self.vocabulary)))

    def separate_documents(self, config: Config) -> Config:
        config.objective.check_source(self.name, any(split.is_pairs for split in self.splits("train")))
        return config.replace(**config.objective.separate_documents(self.has_chat))

    def check(self) -> None:
        """Raises RunError if a check in the background has found damaged data."""
        for check in self.checks:
            check.raise_failure()

    @property
    def has_chat(self) -> bool:
        return any(split.is_chat for split in self.splits("train"))

    def has_known_arrays(self, config: Config) -> bool:
        is_plain = config.objective.has_plain_batches and not self.has_chat
        return is_plain and not choose_row_layout(config).weighs_targets

    def describe_rows(self, config: Config) -> Iterator[str]:
        layout = choose_row_layout(config)
        for source in self.sources:
            if "train" in source.splits:
                [split] = select_rows([source.splits["train"]], layout)
                yield from split.describe(source.name, layout)

    def named_splits(self) -> dict[str, AnySplit]:
        return {f"{source.name}/{name}": split for source in self._opened for name, split in source.splits.items()}

    def with_splits(self, splits: dict[str, AnySplit]) -> "Corpus":
        def select(source: OpenedSource) -> OpenedSource:
            names = [name for name in source.splits if f"{source.name}/{name}" in splits]
            return dataclasses.replace(source, splits={name: splits[f"{source.name}/{name}"] for name in names})

        validation = self.validation and select(self.validation)
        return dataclasses.replace(self, sources=tuple(map(select, self.sources)), validation=validation)

    def splits(self, name: str) -> list[AnySplit]:
        """Returns the split of every source that has it."""
        if name != "train" and self.validation:
            return [self.validation.splits["train"]] if name == "validation" else []
        return [source.splits[name] for source in self.sources if name in source.splits]

    def train_batches(
        self, config: Config, first_step: int = 0, rows: batches.Rows = batches.EVERY_ROW
    ) -> batches.BatchStream:
        layout = choose_row_layout(config)
        splits = select_rows(self.splits("train"), layout)
        every = config.objective.steps_of_a_batch
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
        layout = choose_row_layout(config)
        splits = select_rows(self.splits(split), layout)
        if not splits:
            raise UsageError(f"data={self.name} has no {split} split; there are train, {', '.join(self.held_out)}")
        lengths, size = self.vocabulary.byte_lengths(), len(self.vocabulary)
        return batches.EvalBatches(
            splits, layout, batch=config.data_rows, limit=limit, byte_lengths=lengths, vocab_size=size
        )


class BackgroundCheck:
    """A check that runs in a thread; `raise_failure` raises the error that it ended with."""

    def __init__(self, check: Callable[[], object]):
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(check,), name="check of the data", daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    def wait(self) -> None:
        """Waits for the check to end, then raises its error."""
        self._thread.join()
        self.raise_failure()

    def _run(self, check: Callable[[], object]) -> None:
        try:
            check()
        except Exception as error:
            self._failure = error


def choose_row_layout(config: Config) -> RowLayout:
    documents = config.data.documents
    pack, mask = documents != "padded", documents == "masked"
    return RowLayout(config.model.seq, pack, mask, config.data.mask_prompt, **config.objective.row_layout)


def select_rows(splits: list[AnySplit], layout: RowLayout) -> list[AnySplit]:
    """Returns the splits whose rows an objective reads: those of prompts if it samples the answers."""
    if not layout.answer_tokens:
        return splits
    from shardformer.data.prompt_windows import PromptSplit  # not imported without sampled answers

    return [PromptSplit(split, layout.answer_tokens) for split in splits]


def _choose_options(config: Config) -> SourceOptions:
    named_validation, share = parse_validation(config.data.validation)
    out = Path(expand_home(config.run.out)) if config.run.out and not is_url(config.run.out) else None
    options = SourceOptions(config.data.text, share, bool(named_validation), out, config.data.chat_template)
    skips = config.data.bad_rows == "skip"
    return dataclasses.replace(options, skips_bad_rows=skips, pairs=config.objective.reads_pairs)


def check_sources(config: Config) -> None:
    """Raises UsageError for files of this machine that do not exist or hold no text, without reading them."""
    named_validation, _ = parse_validation(config.data.validation)
    with silence():  # the lines about the files come when they are read
        for name in [*parse_mixture(config.data.source)[0], *filter(None, [named_validation])]:
            if not (is_url(name) or name.startswith("tfds:") or name in ("auto", "tiny_shakespeare", "builtin")):
                find_source(name, _choose_options(config))


def load_corpus(
    config: Config,
    vocabulary: Vocabulary | None = None,
    progress: Progress = lambda *_: None,
    *,
    resumes: bool = False,
) -> Corpus:
    """Opens the sources that `config.data` names, under a given vocabulary or the one that `config.tokenizer` names.

    Stored data is compared with its checksums in the background; resumes=True reads all of it first.

    >>> from shardformer import load_corpus, preset
    >>> corpus = load_corpus(preset("tiny", data="builtin"))
    >>> len(corpus.vocabulary), corpus.held_out
    (63, ('validation', 'test'))
    """
    if not config.data.source:
        raise UsageError(f"this run has no data yet; give data=...: {TAKES}")
    named_validation, share = parse_validation(config.data.validation)
    options = _choose_options(config)
    names, weights = parse_mixture(config.data.source)
    inputs = [find_source(name, options) for name in names]
    if share is not None and all(source.fixed_splits for source in inputs):
        raise UsageError(
            f"validation={share:g} does nothing, as data={config.data.source} has its own splits; leave it empty "
            "(validation=), or prepare the texts again with it"
        )
    for_validation = dataclasses.replace(options, named_validation=True)
    validation = find_source(named_validation, for_validation) if named_validation else None
    every = [*inputs, *([validation] if validation else [])]
    vocabulary = vocabulary or choose_vocabulary(
        config.data.tokenizer, every, config.model.vocab, config.data.special_tokens, config.data.bos
    )
    vocabulary = choose_chat_template(config.data.chat_template, every, vocabulary)
    opened = _open_all(every, vocabulary, progress)
    if not validation:
        opened = _hold_out_more(opened, every, vocabulary, progress)
    opened, held_out = opened[: len(inputs)], opened[-1] if validation else None
    for source in opened:
        config.objective.check_source(source.name, any(split.is_pairs for split in source.splits.values()))
    _check_splits(opened, bool(validation), any(source.fixed_splits for source in inputs))
    for source in (*opened, *([held_out] if held_out else [])):
        for notice in source.notices:
            log.info(f"{source.name}: {notice}")
    if held_out and "train" not in held_out.splits:
        raise UsageError(f"validation={held_out.name} has nothing to validate on; name a source that holds some text")
    return Corpus(
        _join_names([source.name for source in opened], weights),
        vocabulary,
        opened,
        tuple(weights),
        held_out,
        _check_stored([*opened, *([held_out] if held_out else [])], resumes),
    )


def _open_all(every: Sequence[Source], vocabulary: Vocabulary, progress: Progress) -> tuple[OpenedSource, ...]:
    """Opens the sources; raises UsageError with the faulty rows of all of them."""

    def open_one(source: Source) -> list[OpenedSource]:
        return [source.open(vocabulary, progress)]

    return tuple(join_faults(functools.partial(open_one, source) for source in every))


def _hold_out_more(
    opened: tuple[OpenedSource, ...], sources: Sequence[Source], vocabulary: Vocabulary, progress: Progress
) -> tuple[OpenedSource, ...]:
    """Opens sources of few documents again with a larger share for validation if none of their hashes fell into it."""
    shares = () if any("validation" in source.splits for source in opened) else LARGER_SHARES
    for share in shares:
        larger = _open_all([source.with_share(share) for source in sources], vocabulary, progress)
        if any("validation" in source.splits for source in larger) and all("train" in s.splits for s in larger):
            name = opened[0].name
            log.info(f"{name}: no hash of its few documents fell into validation, so it has {share:.0%} of them")
            return larger
    return opened


def _check_stored(opened: list[OpenedSource], resumes: bool) -> tuple[BackgroundCheck, ...]:
    """Compares stored data with its checksums: all of it before a resume, else the changed files in the background."""
    checks = [source.check for source in opened if source.check]
    if resumes:
        if checks:
            log.info("reading the data once to compare it with its checksums")
        for check in checks:
            check(remembered=False)
        return ()
    return tuple(BackgroundCheck(functools.partial(check, remembered=True)) for check in checks)


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
            raise UsageError(f"data={source.name} has nothing to train on; {TAKES}")
    if not named_validation and not any("validation" in source.splits for source in opened):
        raise UsageError(
            f"data={opened[0].name} has no document whose hash falls into validation; name another source for it "
            f"(validation=PATH), {'prepare it again with' if fixed_splits else 'or give'} more documents or a larger "
            "share (validation=0.4)"
        )


def find_source(name: str, options: SourceOptions) -> Source:
    """Returns the source that a name stands for; imports only what reads it."""
    if name == "builtin":
        from shardformer.data import builtin

        return Texts(name, split_text(builtin.text(), SHARE))
    if name == "auto":
        return _find_shakespeare_or_builtin(options)
    if name == "tiny_shakespeare" or name.startswith("tfds:"):
        from shardformer.data import shakespeare

        if name == "tiny_shakespeare":
            return Texts(name, shakespeare.load_splits(), through_tf=True)
        splits = shakespeare.load_tfds_splits(name.removeprefix("tfds:"), options.field)
        return Texts(name, splits, through_tf=True)
    from shardformer.data import file_sources

    if is_url(name):
        origin = location(name)
        assert isinstance(origin, BucketPath)
        return file_sources.find_in_bucket(origin, options)
    return file_sources.find_files(name, Path(expand_home(name)), options)


def _find_shakespeare_or_builtin(options: SourceOptions) -> Source:
    try:
        return find_source("tiny_shakespeare", options)
    except UsageError as reason:
        log.info(f"{reason}\nUntil then, the built-in corpus is used, whose losses are not Shakespeare's.")
        return find_source("builtin", options)
