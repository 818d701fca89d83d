"""The keys of each conversion. Imports no JAX."""

import dataclasses
from typing import Literal

from shardformer.config.keys import key
from shardformer.errors import UsageError
from shardformer.quantized.weight_keys import MEANING

FLOAT_NAMES = ("float32", "bfloat16", "float16")  # of a Hugging Face folder


def check_float(dtype: str) -> None:
    if dtype not in FLOAT_NAMES:
        raise UsageError(f"dtype is one of {', '.join(FLOAT_NAMES)}; got {dtype!r}")


@dataclasses.dataclass(frozen=True)
class FromGptj:
    """GPT-J's shards to a run (every key of a run is taken as well)."""

    config: str = key("", "GPT-J's JSON file; empty means the one in SRC, or GPT-J-6B's own")
    moments: bool = key(True, "take Adam's moments, if SRC has them; without them a resume starts from zero moments")


@dataclasses.dataclass(frozen=True)
class ToGptj:
    """A run to GPT-J's shards."""

    format: str = key("gptj", "the format to write: gptj, hf or peft")
    shards: int = key(8, "number of shards to write")
    dtype: str = key("float32", "number type of the parameters: float32 or bfloat16")
    moments: bool = key(
        True, "write Adam's moments if the run has them; never with ema=true, as they belong to other weights"
    )
    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "write the average of the weights (for a run trained with ema)")

    def __post_init__(self):
        for name, choices in {"format": ("gptj", "hf", "peft"), "dtype": ("float32", "bfloat16")}.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} is one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.shards < 1:
            raise UsageError(f"shards must be at least 1, got {self.shards}")


@dataclasses.dataclass(frozen=True)
class FromHf:
    """A Hugging Face folder (every key of a run is taken as well)."""

    ignore_config: str = key("", "keys of config.json, separated by commas, that are to be ignored")

    @property
    def ignored(self) -> list[str]:
        return [name for name in self.ignore_config.split(",") if name]


@dataclasses.dataclass(frozen=True)
class FromMaxtext:
    """MaxText's or levanter's checkpoint (every key of a run is taken as well)."""

    config: str = key("", "Hugging Face folder with the model's config.json and tokenizer, which SRC lacks")


@dataclasses.dataclass(frozen=True)
class ToHf:
    """A run to a Hugging Face folder (format=hf)."""

    format: str = key("hf", "the format to write: hf")
    dtype: str = key("float32", "number type of the parameters: float32, bfloat16 or float16")
    shard_gb: float = key(5.0, "largest file in GB; a larger model takes several files and an index")
    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "write the average of the weights (for a run trained with ema)")

    def __post_init__(self):
        check_float(self.dtype)
        if not 0 < self.shard_gb < 1e6:
            raise UsageError(f"shard_gb must be above 0 and below 1,000,000, got {self.shard_gb}")


@dataclasses.dataclass(frozen=True)
class ToGguf:
    """A run to llama.cpp's format (FILE.gguf)"""

    dtype: Literal["f32", "f16", "q8_0", "q4_0"] = key("f16", "number type of the matrices")
    tokenizer: bool = key(True, "write the tokenizer and the chat template")
    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "write the average of the weights (for a run trained with ema)")


@dataclasses.dataclass(frozen=True)
class Merging:
    """A run with adapters to a run without."""

    merge_lora: bool = key(True, "merge the adapters into the weights")
    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "merge the average of the adapters (for a run trained with ema)")
    onto: Literal["stored", "float"] = key(
        "stored",
        "the weights to add to, for a run with weights=int8, int4 or nf4; stored: dequantised codes; float: the "
        "float weights of its base",
    )

    def __post_init__(self):
        if not self.merge_lora:
            raise UsageError("merge_lora=false has no effect; leave it out, or give merge_lora=true")


@dataclasses.dataclass(frozen=True)
class Storing:
    """A run to one that stores its weights in another form"""

    weights: Literal["float", "int8", "int4", "nf4"] = key("float", MEANING)
    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "write the average of the weights (for a run trained with ema)")


@dataclasses.dataclass(frozen=True)
class ToPeft:
    """The adapters of a run to PEFT's folder (format=peft)."""

    format: str = key("peft", "the format to write: peft")
    dtype: str = key("float32", "number type of the adapters: float32, bfloat16 or float16")
    base_name: str = key("", "the model that adapter_config.json names: a Hugging Face folder or name")
    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "write the average of the adapters (for a run trained with ema)")

    def __post_init__(self):
        check_float(self.dtype)


@dataclasses.dataclass(frozen=True)
class FromPeft:
    """PEFT's adapters to a run, next to the weights of another."""

    base: str = key("", "run with the weights that the adapters belong to, such as a converted Hugging Face folder")
    step: int = key(0, "step of the base's checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "take the average of the base's weights, if it was trained with ema")
