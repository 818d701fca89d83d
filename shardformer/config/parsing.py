"""Parses the arguments of a command into typed values; a UsageError names what a key accepts."""

import dataclasses
import difflib
import math
import re
import types
import typing
from typing import Any, NamedTuple, TypeVar

from shardformer.config.registries import list_functions
from shardformer.errors import UsageError

MAX_FACTOR = 1e6  # for lr_rules: a factor times a rate and an update must stay in the range of float32
CLOSE = 0.7  # of difflib: ipo for ppo (0.67) and step for system (0.6) would be guesses
PICTURES = (".png", ".svg", ".pdf", ".jpg")  # formats that every matplotlib draws
T = TypeVar("T")

# Names of Megatron-LM, nanoGPT and transformers for keys of this package.
AXIS_NAMES = ("dp", "tp", "mp", "pp", "cp", "tensor_model_parallel_size", "pipeline_model_parallel_size")
# Their names for what a key of this package says in another form: (our key, advice, names).
_OTHER_FORMS = (
    ("mesh", "give the mesh, data x tensor parallel: mesh=4x2, or its axes by name: mesh=dp2.pp2.cp2.mp2", AXIS_NAMES),
    ("documents", "rows are packed already; documents=masked or padded lays them out otherwise", ("packing",)),
    (
        "tracker",
        "TensorBoard's events are always written; name another tracker: tracker=wandb, mlflow, aim or module:function",
        ("report_to", "wandb", "use_wandb", "wandb_log", "wandb_project"),
    ),
    ("d_model", "depth=N stands in place of a preset; a run, a base and a task have their own sizes", ("depth",)),
)
_OTHER_NAMES = """
layers: num_layers n_layer n_layers num_hidden_layers
d_model: hidden_size n_embd dim
heads: num_attention_heads num_heads n_head n_heads
kv_heads: num_query_groups num_key_value_heads n_kv_heads
d_ff: ffn_hidden_size intermediate_size
seq: seq_length seq_len block_size max_position_embeddings context_length max_length max_seq_length
vocab: vocab_size
batch: batch_size global_batch_size per_device_train_batch_size train_batch_size
accum: gradient_accumulation_steps grad_accum gradient_accumulation
steps: train_iters max_steps max_iters
epochs: num_epochs max_epochs num_train_epochs
lr: learning_rate
lr_min: min_lr
warmup: lr_warmup_iters warmup_iters warmup_steps
clip: clip_grad grad_clip max_grad_norm
experts: num_experts num_local_experts
remat: recompute_granularity gradient_checkpointing
schedule: lr_scheduler_type
eval_every: eval_steps eval_interval
save_every: save_steps
log_every: logging_steps log_interval
lora_rank: lora_r
lora_targets: target_modules
group_size: num_generations
reward: reward_funcs
reward_center: center_rewards_coefficient
answer_tokens: max_completion_length
rollout_steps: num_iterations
rollout_top_p: top_p
data: data_path dataset
out: out_dir output_dir
tokens: max_new_tokens max_tokens
"""
OTHER_NAMES = {
    theirs: ours
    for ours, _, names in (line.partition(":") for line in _OTHER_NAMES.strip().splitlines())
    for theirs in names.split()
}


def choices(field: dataclasses.Field) -> tuple:
    """Returns the values of a key of a Literal type, or the functions of its registry; else ()."""
    if file := field.metadata.get("registry"):
        return tuple(list_functions(file))
    kind = plain_type(field.type)
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def is_optional(kind) -> bool:
    return isinstance(kind, types.UnionType) and type(None) in typing.get_args(kind)


def plain_type(kind):
    """Returns the type of a value that is given: `int` for `int | None`."""
    return next(t for t in typing.get_args(kind) if t is not type(None)) if is_optional(kind) else kind


def flat_name(field: dataclasses.Field) -> str:
    """Returns a key's name on the command line and in config.json."""
    return field.metadata.get("flat") or field.name


def keys_of(options: type) -> dict[str, dataclasses.Field]:
    """Returns the keys of a dataclass by their flat names; the keys of its groups, if its fields are groups."""
    keys: dict[str, dataclasses.Field] = {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]  # a dataclass
        group: Any = field.default_factory
        is_group = dataclasses.is_dataclass(group)
        keys |= keys_of(group) if is_group else {flat_name(field): field}
    return keys


def parse_overrides(arguments: list[str], *options: type) -> dict:
    """Returns ['lr=3e-4', 'mesh=4x2'] as {"lr": 3e-4, "mesh": "4x2"}, typed as the fields of dataclasses are.

    The first of two or more dataclasses with a key decides its type.
    """
    fields = {name: field for each in reversed(options) for name, field in keys_of(each).items()}
    parsed: dict[str, object] = {}
    for word in arguments:
        key, equals, text = word.partition("=")
        plain = key.lstrip("-").replace("-", "_")
        if not equals:
            meant = plain if plain in fields else OTHER_NAMES.get(plain, plain)
            fix = f"; write {meant}=..." if meant in fields else ""
            raise UsageError(f"expected key=value, got {shorten(word)}{fix}")
        if key not in fields:
            keys = f"; the keys are {', '.join(fields)}" if len(fields) < 20 else "; see COMMAND --help"
            fix = _translate(plain, fields) or suggest_closest(plain, fields) or keys
            raise UsageError(f"unknown key {shorten(key)}{fix}")
        if key in parsed:
            raise UsageError(f"{key} is given twice: {shorten(parsed[key])} and {shorten(text)}")
        parsed[key] = parse_value(fields[key], text)
    return parsed


def parse_options(arguments: list[str], options: type[T]) -> T:
    """Returns the options of a command that 'key=value' arguments give."""
    return options(**parse_overrides(arguments, options))


def parse_known_options(arguments: list[str], options: type[T]) -> tuple[T, list[str]]:
    """Returns the options that some arguments set, and the other arguments."""
    names = keys_of(options)
    matching = [word for word in arguments if word.partition("=")[0] in names]
    return parse_options(matching, options), [word for word in arguments if word not in matching]


def parse_value(field: dataclasses.Field, text: str):
    """Returns `text` as a value of the field's type."""
    kind, rest = plain_type(field.type), ""
    if is_optional(field.type):
        rest = f" or {field.metadata.get('none', 'auto')}"
        if text == field.metadata.get("none", "auto"):
            return None
    if zero := field.metadata.get("zero"):
        rest = f" or {zero}"
        if text == zero:
            return 0
    if known := choices(field):
        return next((choice for choice in known if str(choice) == text), text)  # its check lists the choices
    try:
        return _convert(text, kind)
    except (ValueError, KeyError, OverflowError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise UsageError(f"{flat_name(field)} takes {wanted}{rest}, got {shorten(text)}") from None


def _convert(text: str, kind):
    if kind in (int, float) and not text.isascii():  # Python would accept the digits of any script
        raise ValueError
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if kind is int:
        number = float(text)
        if number != int(number):
            raise ValueError
        return int(number) if abs(number) >= 2**53 or "e" in text.lower() else int(text)
    return text if kind is object else kind(text)


class MeshSizes(NamedTuple):
    """The sizes of the mesh's axes, in the order of names.AXES."""

    dp: int = 1
    mp: int = 1
    pp: int = 1
    cp: int = 1

    def __str__(self):
        """Returns the text that `parse_mesh` reads: only numbers, if they suffice."""
        if self.cp > 1:
            stages = f".pp{self.pp}" if self.pp > 1 else ""
            return f"dp{self.dp}.cp{self.cp}.mp{self.mp}{stages}"
        return f"{self.dp}x{self.mp}" + (f"x{self.pp}" if self.pp > 1 else "")


def parse_mesh(text: str) -> MeshSizes:
    """Returns the sizes of '4x2' (dp x mp), '2x2x2' (dp x mp x pp) or 'dp2.cp2.mp2' (an axis without a name is 1)."""
    if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){1,2}", text, re.ASCII):
        return MeshSizes(*map(int, text.split("x")))
    names = [word[:2] for word in text.split(".")]
    named = re.fullmatch(r"(dp|cp|mp|pp)[1-9]\d{0,5}(\.(dp|cp|mp|pp)[1-9]\d{0,5})*", text, re.ASCII)
    if named and len(set(names)) == len(names):
        return MeshSizes(**{word[:2]: int(word[2:]) for word in text.split(".")})
    raise UsageError(
        "mesh takes AxB (dp x mp, such as 4x2), AxBxC (and pp stages of a pipeline, such as 2x2x2), axes by name "
        f"(such as dp2.cp2.mp2, where cp splits the context) or auto, got {shorten(text)}"
    )


def parse_steps_range(key: str, text: str) -> tuple[int, int] | None:
    """Returns the first and the last step of '100:110'; None for an empty text."""
    if not text:
        return None
    first, _, last = text.partition(":")
    fits = re.fullmatch(r"\d{1,9}:\d{1,9}", text, re.ASCII) and 1 <= int(first) <= int(last)
    if not fits:
        raise UsageError(f"{key} takes FROM:TO, two steps from 1 such as 100:110, got {shorten(text)}")
    return int(first), int(last)


class LrRule(NamedTuple):
    """A factor on the learning rate of the parameters whose names match a pattern; 0 freezes them."""

    pattern: str
    factor: float

    def __str__(self):
        return f"{self.pattern}={f'{self.factor:g}x' if self.factor else 'frozen'}"


def parse_lr_rules(text: str) -> tuple[LrRule, ...]:
    """Returns the rules of 'bias=10x,norm=frozen', in their order."""
    rules: list[LrRule] = []
    for word in text.split(",") if text else ():
        pattern, _, effect = word.strip().partition("=")
        number = "0" if effect == "frozen" else effect.removesuffix("x") if effect.endswith("x") else "nan"
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not (pattern and 0 <= factor < math.inf):
            raise UsageError(f"lr_rules takes PATTERN=FACTORx or PATTERN=frozen, such as bias=10x; got {shorten(word)}")
        if factor > MAX_FACTOR:
            raise UsageError(f"lr_rules takes factors up to {MAX_FACTOR:g}x, got {shorten(word)}")
        if pattern in (rule.pattern for rule in rules):
            raise UsageError(f"lr_rules has two rules for {shorten(pattern)}, of which the first would win; leave one")
        rules.append(LrRule(pattern, factor))
    return tuple(rules)


class SizeRatio(NamedTuple):
    """The sizes of a model over those of the smaller one for which the learning rate was tuned."""

    width: float = 1.0
    depth: float = 1.0


def parse_scale(text: str, d_model: int, layers: int) -> SizeRatio:
    """Returns the ratios of a model of this size for `scale=`; '' is none.

    >>> parse_scale("completep:128x4", d_model=512, layers=8)
    SizeRatio(width=4.0, depth=2.0)
    """
    if not text:
        return SizeRatio()
    match = re.fullmatch(r"completep:([1-9]\d{0,8})x([1-9]\d{0,8})", text)
    if not match:
        raise UsageError(
            "scale takes completep:WIDTHxLAYERS, the size for which lr was tuned, such as completep:128x4; "
            f"got {shorten(text)}"
        )
    return SizeRatio(d_model / int(match[1]), layers / int(match[2]))


def split_checkpoint(path: str) -> tuple[str, int]:
    """Returns the run and the step of 'RUN/step_12'; the path and 0 if it names no checkpoint."""
    named = re.fullmatch(r"(.+)/step_0*([1-9][0-9]{0,9})/?", path, re.DOTALL)
    return (named[1], int(named[2])) if named else (path, 0)


def shorten(value, most: int = 80) -> str:
    """Returns what a user gave as a message quotes it: one readable line of bounded length."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _translate(name: str, known) -> str:
    """Returns '; did you mean ...?' for a name that other trainers give a known key, else an empty text."""
    for key, advice, names in _OTHER_FORMS:
        if key in known and name in names:
            return f"; {advice}"
    ours = OTHER_NAMES.get(name, "")
    return f"; did you mean {ours!r}?" if ours in known else ""


def suggest_closest(word: str, known, cutoff: float = CLOSE) -> str:
    """Returns '; did you mean ...?' if a known word is close, else an empty text."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]!r}?" if matches else ""
