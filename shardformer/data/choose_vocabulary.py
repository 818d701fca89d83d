"""Chooses the vocabulary of a run: that of prepared data, one that is made of the text, or one that is named."""

import functools
from collections.abc import Sequence

from shardformer.data.row_report import join_faults
from shardformer.data.source import NO_IDS, Source
from shardformer.data.tokens import SPLITS
from shardformer.data.vocabulary import MAX_IDS, MAX_NAMED, Bytes, Characters, TokenIds, Vocabulary
from shardformer.errors import UsageError
from shardformer.messages import log
from shardformer.storage import local_path


def choose_chat_template(wanted: str, inputs: Sequence[Source], vocabulary: Vocabulary) -> Vocabulary:
    """Returns the vocabulary with the chat template of this data; raises UsageError for a key without effect."""
    if any(source.is_chat for source in inputs):
        from shardformer.data.chat import chat_format  # not imported without conversations

        return vocabulary.with_chat(chat_format.resolve_format(wanted, vocabulary.chat, vocabulary.name))
    if wanted != "auto" and not (vocabulary.chat and vocabulary.chat.name == wanted):
        raise UsageError(
            f"chat_template={wanted} does nothing: data={inputs[0].name} has no conversations; leave it out"
        )
    prepared = next((s.vocabulary.chat for s in inputs if s.vocabulary and s.vocabulary.chat and s.has_chat), None)
    return vocabulary.with_chat(prepared) if prepared else vocabulary


def choose_vocabulary(
    wanted: str, inputs: Sequence[Source], size: int = 0, special_tokens: bool = False, bos: str = "auto"
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
            _collect_characters(text_sources) if wanted == "chars" else _train_bpe(wanted, text_sources, special_tokens)
        )
    vocabulary = open_vocabulary(wanted, size, special_tokens, bos)
    if vocabulary.notice:
        log.info(vocabulary.notice)
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
    from shardformer.data import hf_tokenizer  # not imported for the other vocabularies
    from shardformer.data.chat import chat_format

    path = local_path(tokenizer)
    vocabulary = hf_tokenizer.open_file(path, special_tokens).with_beginning(bos, first)
    folder = path if path.is_dir() else path.parent
    return vocabulary.with_chat(chat_format.load_format(folder) or chat_format.read_format(folder))


def _collect_characters(text_sources: list[Source]) -> Characters:
    """Returns the characters of all splits; reports any that the training text lacks."""
    trained = set(join_faults(functools.partial(source.characters, "train") for source in text_sources))
    known = trained.union(*(source.characters(*SPLITS[1:]) for source in text_sources))
    vocabulary = Characters.from_text(known)
    if unseen := sorted(known - trained):
        named = " ".join(map(repr, unseen[:MAX_NAMED])) + (" ..." if len(unseen) > MAX_NAMED else "")
        log.info(
            f"{len(unseen)} of {len(known)} characters are in validation or test only, and are not learned: {named}; "
            "tokenizer=bytes learns every text"
        )
    return vocabulary


def _train_bpe(wanted: str, text_sources: list[Source], special_tokens: bool) -> Vocabulary:
    from shardformer.data import hf_tokenizer  # not imported for the other vocabularies

    size = int(wanted.removeprefix("bpe:"))
    vocabulary = hf_tokenizer.train_bpe(join_faults(source.sample for source in text_sources), size, special_tokens)
    if len(vocabulary) < size:
        log.info(f"tokenizer=bpe:{size}: the text has pairs for {len(vocabulary):,} entries only, which are used")
    return vocabulary
