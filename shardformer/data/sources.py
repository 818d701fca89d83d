"""The sources that `data=` can name, each as splits of token ids."""

from pathlib import Path

from shardformer.data import builtin, shakespeare, text_files, tfrecords
from shardformer.data.chat.chat_files import are_chat_files
from shardformer.data.chat.preferences import are_preference_files, holds_messages
from shardformer.data.listing import TOKEN_FILES, check_suffix, is_code, list_files
from shardformer.data.recipe import Recipe
from shardformer.data.source import SHARE, Say, Source, SourceOptions
from shardformer.data.text_sources import TextFiles, Texts, split_text
from shardformer.data.token_folder import TokenFolder
from shardformer.data.token_sources import PreparedFolder, TFRecordFiles, TokenFile
from shardformer.data.tokens import open_token_file
from shardformer.errors import UsageError
from shardformer.files import expand_home
from shardformer.storage import BucketPath, copy_to_disk, is_url, local_path, location

TAKES = (
    "data takes auto, tiny_shakespeare, builtin, tfds:NAME, a text file, a folder or a glob of them, .jsonl, .json, "
    ".gz or .zst, .bin or .npy token files, an index of TFRecords (.index), a folder made by `data prepare`, or "
    "several with weights: a.bin=3,b.bin=1; files and folders may be in a bucket: gs://BUCKET/..."
)


def find_source(name: str, options: SourceOptions, say: Say) -> Source:
    """Returns the source that a name stands for."""
    if is_url(name):
        origin = location(name)
        assert isinstance(origin, BucketPath)
        return _find_in_bucket(origin, options, say)
    if name == "auto":
        return _find_shakespeare_or_builtin(say)
    if name == "tiny_shakespeare":
        return Texts(name, shakespeare.load_splits(), through_tf=True)
    if name == "builtin":
        return Texts(name, split_text(builtin.text(), SHARE))
    if name.startswith("tfds:"):
        splits = shakespeare.load_tfds_splits(name.removeprefix("tfds:"), options.field)
        return Texts(name, splits, through_tf=True)
    path = Path(expand_home(name))
    return _find_files(name, path, options, say)


def _find_in_bucket(origin: BucketPath, options: SourceOptions, say: Say) -> Source:
    """Returns the source of a copy on this machine's disk, under its name in the bucket."""
    if set("*?[") & set(origin.key):
        raise UsageError(f"data={origin}: patterns are not looked up in a bucket; name a file or a folder there")
    path = copy_to_disk(origin, say, check_copy)
    source = _find_files(str(origin), path, options, say, origin)
    source.name = str(origin)
    return source


def check_copy(path: Path) -> None:
    """Raises RunError if the copy of a prepared folder differs from its index."""
    if TokenFolder.is_folder(path):
        TokenFolder.open(path).check_contents()


def _find_files(name: str, path: Path, options: SourceOptions, say: Say, origin: BucketPath | None = None) -> Source:
    """Returns the source of a path; `origin` is the location in a bucket that it is a copy of."""
    if path.is_dir() and TokenFolder.is_folder(path):
        return PreparedFolder(path)
    if path.suffix in TOKEN_FILES and path.is_file():
        return TokenFile(path, options)
    if path.suffix in (".index", *tfrecords.SUFFIXES) and path.is_file():
        return TFRecordFiles(path, options, origin, say)
    return _find_texts(name, path, options, say)


def find_recipe(names: list[str], options: SourceOptions, say: Say = print, *, with_ids: bool = False) -> Recipe:
    """Returns the text files of the given names as one corpus; with_ids=True accepts token files among them."""
    files: list[Path] = []
    for name in names:
        files += list_files(name, local_path(name, say), options.out, say, TAKES)
    files = [file.resolve() for file in files]
    if repeated := _find_repeated(files):
        raise UsageError(f"{repeated} is named twice; name every file once")
    token_files = [file for file in files if with_ids and file.suffix in TOKEN_FILES]
    text_paths = [file for file in files if file not in token_files]
    for file in text_paths:
        check_suffix(file)
        if text_files.is_json(file) or not is_code(file):
            text_files.check_not_records(file)
    name = ",".join(name if is_url(name) else str(Path(expand_home(name)).resolve()) for name in names)
    if tables := [file for file in text_paths if file.suffix.lower() == ".csv"]:
        say(
            f"data={name}: {len(tables):,} .csv read as text, with its header, commas and quotes; to train on its "
            "columns as records, write them to .jsonl or .parquet"
        )
    one_text = len(files) == 1 and bool(text_paths) and text_files.FileRange(text_paths[0], 0, 0, True).is_plain
    size = sum(file.stat().st_size for file in text_paths) + sum(len(open_token_file(file)) for file in token_files)
    is_chat = not options.pairs and are_chat_files(text_paths, options.field)
    pairs = not is_chat and are_preference_files(text_paths, options.field)
    if options.pairs and not pairs and are_chat_files(text_paths, options.field):
        raise UsageError(
            f"data={name} holds conversations, expected preference pairs; give records with prompt, chosen and "
            "rejected, or read conversations: objective=lm, without pairs=true"
        )
    if pairs:
        is_chat = holds_messages(text_files.peek_record(text_paths[0]))
    return Recipe(
        name,
        tuple(text_paths),
        options.field,
        options.share_of(size),
        in_order=one_text,
        format=options.format,
        token_files=tuple(token_files),
        chat=options.chat_template if is_chat else "",
        skips_bad_rows=options.skips_bad_rows,
        pairs=pairs,
    )


def _find_repeated(files: list[Path]) -> Path | None:
    seen: set[Path] = set()
    for file in files:
        if file in seen:
            return file
        seen.add(file)
    return None


def _find_texts(name: str, path: Path, options: SourceOptions, say: Say) -> Source:
    recipe = find_recipe([name], options, say)
    if recipe.has_masks or not recipe.in_order or recipe.files[0].stat().st_size > text_files.LIMITS.in_memory:
        return TextFiles(recipe)
    splits = split_text(text_files.read_text(recipe.files[0]), recipe.share)
    if min(len(text) for text, wanted in zip(splits, (1, recipe.share, recipe.share), strict=True) if wanted) < 2:
        length = sum(map(len, splits))
        raise UsageError(
            f"data={path} is {f'too short ({length} characters)' if length else 'empty'}: its 90/5/5 split "
            "needs two characters in each part; give a longer text"
        )
    return Texts(str(path.resolve()), splits, fixed_splits=False)


def _find_shakespeare_or_builtin(say: Say) -> Source:
    try:
        return Texts("tiny_shakespeare", shakespeare.load_splits(), through_tf=True)
    except UsageError as reason:
        say(f"{reason}\nUntil then, the built-in corpus is used, whose losses are not Shakespeare's.")
        return Texts("builtin", split_text(builtin.text(), SHARE))
