"""`data`: prepares, shows and exports the data of a run."""

import os
import sys
from pathlib import Path

import numpy as np

from shardformer import storage
from shardformer.cli.arguments import say, split_paths
from shardformer.cli.chat_display import show_chat_file, show_conversation, show_pair, take_first_pair
from shardformer.cli.data_options import BPE, ExportOptions, PrepareOptions, ShowOptions
from shardformer.cli.loading import ShownProgress
from shardformer.config import parsing
from shardformer.data import choose_vocabulary, corpus, file_sources, prepare, tfrecords
from shardformer.data.chat.chat_windows import ChatSplit
from shardformer.data.chat.preference_windows import PreferenceSplit
from shardformer.data.file_sources import TokenFile
from shardformer.data.recipe import Recipe
from shardformer.data.shakespeare import import_shakespeare
from shardformer.data.source import Source, SourceOptions
from shardformer.data.token_folder import TokenFolder
from shardformer.data.tokens import describe_largest_id
from shardformer.data.vocabulary import TokenIds
from shardformer.errors import RunError, UsageError
from shardformer.files import replacing
from shardformer.tables import escape_controls, format_bytes, format_count, format_table

USAGE = (
    "data takes: prepare SRC ... out=FOLDER, show FOLDER|CHATS, export FOLDER out=FILE.tfrecords, or import INPUT.TXT"
)
MAX_SOURCES = 20  # in a table
SHOWN_TOKENS = 200


def main(arguments: list[str]) -> None:
    commands = {"import": import_data, "prepare": prepare_data, "show": show_data, "export": export_data}
    if not arguments or arguments[0] not in commands:
        raise UsageError(USAGE)
    commands[arguments[0]](arguments[1:])


def import_data(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UsageError(USAGE)
    say(f"tiny_shakespeare is prepared in {import_shakespeare(storage.on_disk(arguments[0], 'INPUT.TXT'))}")


def prepare_data(arguments: list[str]) -> None:
    """Writes the tokens of documents and token files into a folder that `data=` accepts."""
    names, rest = split_paths(arguments)
    options = parsing.parse_options(rest, PrepareOptions)
    if not names:
        raise UsageError("data prepare needs at least one text or token file: a file, a folder or a glob")
    out = storage.on_disk(options.out, "out")
    if out.exists():
        raise UsageError(f"out={out} exists; name a folder that does not")
    without = options.validation == "none"
    share = None if without else corpus.parse_validation(options.validation)[1]
    source = SourceOptions(
        options.text,
        share,
        named_validation=without,
        chat_template=options.chat_template,
        skips_bad_rows=options.bad_rows == "skip",
        pairs=options.pairs,
    )
    recipe = file_sources.find_recipe(names, source, with_ids=True)
    if options.dedup != "none" or options.against:
        recipe.check_encoding()
        recipe = _remove_documents(recipe, options, out.parent)
    inputs: list[Source] = [TokenFile(path, source) for path in recipe.token_files]
    if recipe.files:
        text_files = file_sources.TextFiles(recipe)
        text_files.check_encoding()
        inputs.append(text_files)
    tokenizer = options.tokenizer
    if tokenizer == "auto":
        tokenizer = BPE if recipe.files else TokenIds.name
    vocabulary = choose_vocabulary.choose_vocabulary(
        tokenizer, inputs, special_tokens=options.special_tokens, bos=options.bos
    )
    vocabulary = choose_vocabulary.choose_chat_template(options.chat_template, inputs, vocabulary)
    with ShownProgress() as progress:
        folder = prepare.prepare(recipe, vocabulary, out, progress.show)
    say(describe(folder))
    empty = [name for name, split in folder.index["splits"].items() if not split["tokens"]]
    if empty and recipe.files and not recipe.in_order and not without:
        say(
            f"no document is in {' or '.join(empty)}, as a hash of each chooses its split; give more documents or a "
            "larger share (validation=0.2), or train with validation=PATH"
        )


def _remove_documents(recipe: Recipe, options: PrepareOptions, folder: Path) -> Recipe:
    from shardformer.data.removal import remove_documents  # which most commands of data do without

    with ShownProgress("compared") as progress, ShownProgress("paired") as of_pairs:
        return remove_documents(recipe, options.dedup, options.against, folder, progress.show, of_pairs.show)


def show_data(arguments: list[str]) -> None:
    """Prints sizes, sources, a sample and the lengths of a prepared folder's documents; or a file's conversation."""
    if arguments and _is_text_file(arguments[0]):
        return show_chat_file(arguments[0], parsing.parse_options(arguments[1:], ShowOptions), sys.stdout.isatty())
    if len(arguments) > 1 and TokenFolder.is_folder(Path(arguments[0])):
        raise UsageError(
            f"{arguments[1]}: {arguments[0]} is prepared and has its tokenizer and its template; leave it out"
        )
    folder = _open_folder(arguments)
    say(describe(folder))
    by_size = sorted(folder.index["sources"], key=lambda source: -source["tokens"])
    rows = [[escape_controls(source["path"]), source["tokens"], source["bytes"]] for source in by_size[:MAX_SOURCES]]
    rest = len(by_size) - len(rows)
    say("\n" + format_table(rows, ["source", "tokens", "file bytes"]) + (f"\n... and {rest:,} more" if rest else ""))
    if not (splits := folder.splits()):
        return
    name, split = next(iter(splits.items()))
    ids = split.tokens.take(0, min(SHOWN_TOKENS, len(split.tokens)))
    if (largest := int(ids.max())) >= len(folder.vocabulary):
        raise RunError(f"{describe_largest_id(str(folder.path), largest, len(folder.vocabulary))}; the data is damaged")
    if isinstance(split, PreferenceSplit):
        say(f"\n{show_pair((*take_first_pair(split), folder.vocabulary), sys.stdout.isatty())}")
    elif isinstance(split, ChatSplit):
        say(f"\n{show_conversation(split, folder.vocabulary, sys.stdout.isatty())}")
    else:
        say(f"\nThe {name} split begins:\n{escape_controls(folder.vocabulary.decode(ids))}")
    if split.ends is not None:
        say(f"\nlengths of documents: {_try_to_draw(np.diff(split.ends, prepend=0), folder.path / 'lengths.png')}")


def export_data(arguments: list[str]) -> None:
    """Writes a split as records of equal length, as create_finetune_tfrecords.py does; drops an incomplete one."""
    folder = _open_folder(arguments[:1])
    if folder.has_masks:
        kind = "preference pairs" if folder.has_pairs else "conversations"
        raise UsageError(f"{folder.path} holds {kind}, and TFRecords cannot keep what of them is learned")
    options = parsing.parse_options(arguments[1:], ExportOptions)
    if options.split not in (splits := folder.splits()):
        raise UsageError(f"{folder.path} has no split {options.split!r}; there are {', '.join(splits)}")
    tokens = splits[options.split].tokens
    count, left = divmod(len(tokens), options.ids)
    if not count:
        raise UsageError(
            f"{folder.path} has {len(tokens)} {options.split} tokens, fewer than one record of {options.ids}"
        )
    out = storage.on_disk(options.out, "out")
    index = out.with_suffix(".index")
    if existing := [path for path in (out, index) if os.path.lexists(path)]:
        raise UsageError(f"{existing[0]} exists; give another out=, or remove it")
    folder.check_contents()
    tfrecords.write_records(out, (tokens.take(record * options.ids, options.ids) for record in range(count)))
    with replacing(index) as temporary:
        temporary.write_text(f"{out}\n", "utf-8")
    records = f"{format_count(count, 'record')} of {options.ids} ids, {format_count(left, 'token')} left over"
    say(f"{out}: {records}; {index} names it for data= and GPT-J")


def describe(folder: TokenFolder) -> str:
    """Returns a table of sizes by split."""
    rows = [
        [name, split["tokens"], split["documents"], split["bytes"], split["bytes"] / max(split["tokens"], 1)]
        for name, split in folder.index["splits"].items()
    ]
    name = escape_controls(folder.vocabulary.name)
    title = f"{escape_controls(str(folder.path))}: tokenizer {name}, {len(folder.vocabulary):,} entries"
    lines = [*folder.rows.describe(), *_describe_removed(folder.index.get("removed"))]
    notices = "".join(f"\n{escape_controls(line)}" for line in lines)
    return f"{title}\n{format_table(rows, ['split', 'tokens', 'documents', 'bytes', 'bytes/token'])}{notices}"


def _describe_removed(report: dict | None) -> list[str]:
    """Returns lines with the documents that dedup= and against= left out, by reason, and examples."""
    if not report:
        return []
    counts = {reason: f"{each['documents']:,} ({format_bytes(each['bytes'])})" for reason, each in
              report["reasons"].items()}  # fmt: skip
    read = f"of {report['documents']:,} documents ({format_bytes(report['bytes'])})"
    removed = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    lines = [f"left out {read}: {removed or 'none'}"]
    for reason, each in report["reasons"].items():
        lines += [f"  {reason}: {example}" for example in each["examples"]]
    return lines


def _try_to_draw(lengths: np.ndarray, path: Path) -> str:
    """Returns the path of the picture, or the shortest and the longest length if the folder cannot be written."""
    try:
        return str(draw_lengths(lengths, path))
    except OSError as error:
        return f"{lengths.min():,} to {lengths.max():,} tokens ({path.name} was not drawn: {error.strerror})"


def draw_lengths(lengths: np.ndarray, path: Path) -> Path:
    """Draws a histogram of documents by their tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    edges = np.unique(np.geomspace(max(int(lengths.min()), 1), max(int(lengths.max()) + 1, 2), 50).astype(int))
    axes.hist(np.maximum(lengths, 1), bins=edges.tolist(), color="#4472c4")
    axes.set(xscale="log", xlabel="tokens of a document", ylabel="documents")
    with replacing(path) as temporary:
        figure.savefig(temporary)
    return path


def _is_text_file(name: str) -> bool:
    path = storage.local_path(name, file_sources.check_copy)
    return path.exists() and not TokenFolder.is_folder(path)


def _open_folder(arguments: list[str]) -> TokenFolder:
    if len(arguments) != 1:
        raise UsageError(USAGE)
    path = storage.local_path(arguments[0], file_sources.check_copy)
    if not path.exists():
        raise UsageError(f"{path} does not exist; expected a folder made by `data prepare`, or a file of conversations")
    if not TokenFolder.is_folder(path):
        raise UsageError(
            f"{path} is not a prepared folder: it has no index.json; make one: data prepare SRC out={path}"
        )
    return TokenFolder.open(path)
