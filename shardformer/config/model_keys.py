"""Keys of the model: everything that its parameters' shapes and its outputs depend on, besides the seed."""

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Literal

from shardformer.config.keys import KeyGroup, UsedIf, key, largest_divisor, require
from shardformer.config.names import ROTARY_SCALINGS
from shardformer.config.parsing import SizeRatio, parse_scale
from shardformer.config.registries import asks_for

if TYPE_CHECKING:
    from shardformer.config.rotary_scaling import RotaryScaling

WITH_ROTARY = UsedIf(lambda model: model.rotates, "without positions=rotary")

ACTIVATIONS, NORMS, POSITIONS = "kernels/activations.py", "shards/norm.py", "shards/positions.py"
POSITION_PARAMETERS = ("position_BT", "distance_TS", "long_rows")
_LATE = ("up", "down", "norm", "head")
BIASES: dict[str, tuple[str, ...]] = {
    "none": (),
    "ff": _LATE,
    "all_but_qkv": ("o", *_LATE),
    "all": ("q", "k", "v", "o", *_LATE),
    "attention": ("q", "k", "v", "o"),
    "qkv": ("q", "k", "v"),
    "norm": ("norm",),
    "qkv_norm": ("q", "k", "v", "norm"),
}
MAX_HEAD_SIZE = 4096  # a matrix of head size x head size is traced with rotary positions


@dataclasses.dataclass(frozen=True)
class ModelKeys(KeyGroup):
    """The model (cannot change on resume)"""

    layers: int = key(4, "transformer layers", least=1, below=100_001)  # each has a window in a tuple
    d_model: int = key(128, "width of the residual stream", least=1)
    heads: int = key(4, "attention heads per layer", least=1)
    kv_heads: int | None = key(
        None, "key/value heads, each shared by heads / kv_heads query heads; auto: as many as heads", least=1
    )
    head_dim: int | None = key(None, "size of a head; auto: d_model / heads", least=1)
    kv_latent: int | None = key(
        None,
        "width of the latent that keys and values are computed from, as DeepSeek's (MLA): each token caches it and one "
        "rotary key of rotary_dims for all heads; none: they are computed from activations",
        least=1,
        none="none",
    )
    q_latent: int | None = key(
        None, "width of the latent that queries are computed from; none: from activations", least=1, none="none",
        needs="kv_latent",
    )  # fmt: skip
    value_dim: int | None = key(None, "size of a head's values; auto: that of its keys", least=1, needs="kv_latent")
    d_ff: int | None = key(None, "feed-forward width; auto: 4 * d_model", least=1)
    activation: str = key(
        "gelu",
        "feed-forward activation; gelu: tanh form; gelu_exact: erf; relu2: squared relu; swiglu: gated silu; geglu: "
        "gated gelu (tanh form); clamped_swiglu: gpt-oss's",
        registry=ACTIVATIONS,
    )
    seq: int = key(64, "context length in tokens", least=1)
    vocab: int = key(0, "tokens that the model predicts; auto: as many as the data has", least=0, zero="auto")
    vocab_multiple: int = key(8, "pad the token table to a multiple of this, which mp must divide", least=1)
    block: Literal[
        "parallel",
        "parallel_two_norms",
        "sequential",
        "sequential_four_norms",
        "sequential_post_norms",
        "sequential_sum_norms",
    ] = key(
        "parallel",
        "residual block; parallel: GPT-J's, one all-reduce per layer; parallel_two_norms: GPT-NeoX's; "
        "sequential: GPT-2's, two all-reduces; sequential_four_norms: Gemma 2's, norms before and after branches; "
        "sequential_post_norms: OLMo 2's, norms only after branches; sequential_sum_norms: GPT-1's, norms after "
        "branches are added, and none in front of the head",
    )
    norm: str = key(
        "layernorm",
        "type of norm; rmsnorm_plus_one: multiplies by 1 + scale, as Gemma's, scales start at 0; layernorm_plus_one: "
        "likewise, as Nemotron's; plain_layernorm: without scale and offset, as OLMo 1's",
        registry=NORMS,
    )
    norm_eps: float = key(1e-5, "number added to the variance in every norm")
    qk_norm: Literal["none", "head", "all", "rotated_head", "rotated_plain"] = key(
        "none",
        "RMSNorm of queries and keys before rotary; head: of each head, as Qwen3; all: over heads, as OLMo 2; "
        "rotated_head: of each head after rotary, as Hunyuan; rotated_plain: likewise, without scales and only in "
        "layers with rotary positions, as Llama 4",
    )
    bias: Literal["none", "ff", "all_but_qkv", "all", "attention", "qkv", "norm", "qkv_norm"] = key(
        "ff",
        "biases; ff: feed-forward, norms and head, as GPT-J; all_but_qkv: GPT-Neo; attention: q, k, v and o, as "
        "gpt-oss; qkv: Qwen2; norm: StableLM",
    )
    head_bias: bool = key(True, "give an untied output head a bias, if bias= has biases in the feed-forward")
    positions: str = key(
        "rotary",
        "position encoding; t5: learned bias on the attention logits, by distance; alibi: fixed one, as BLOOM's; "
        "sinusoids: fixed vectors, as XGLM's",
        registry=POSITIONS,
    )
    rotary_dims: int | None = key(
        None, "rotated dimensions of each head; auto: all of them", least=1, used_if=WITH_ROTARY
    )
    rotary_theta: float = key(10_000.0, "base of the rotary frequencies", used_if=WITH_ROTARY)
    rotary_scaling: str = key(
        "", f"scaling for longer contexts: {' or '.join(ROTARY_SCALINGS.values())}", used_if=WITH_ROTARY
    )
    attention_scale: float | None = key(None, "factor on the attention logits; auto: 1 / sqrt(head size)", least=0)
    query_growth: float = key(
        0.0,
        "factor 1 + query_growth * log(1 + n) on queries after n times the shorter context of rotary_scaling, as "
        "Ministral 3; 0: none",
        least=0,
    )
    query_growth_tokens: int | None = key(
        None,
        "tokens of a context in query_growth, which then only layers without rotary positions have, as Llama 4; auto: "
        "the shorter context, in all layers",
        least=1,
        used_if=UsedIf(
            lambda model: model.query_growth and any(model.layers_without_rotary),
            "without query_growth and a layer that is n by window_pattern; give both as well",
        ),
    )
    attention_cap: float | None = key(
        None,
        "bound of the attention logits, each cap * tanh(logit / cap), as Gemma 2; after the bias of positions=t5 or "
        "alibi",
        least=0,
        none="none",
    )
    sinks: bool = key(False, "give each head a trainable logit that only its softmax's denominator has, as gpt-oss")
    window: int | None = key(
        None, "tokens that a windowed layer attends to, its own token included; none: all", least=1, none="none"
    )
    window_pattern: str = key(
        "",
        "kinds of the layers, repeated; w: windowed, f: full, n: full without rotary positions, such as wwwwwf for "
        "Gemma 3 and fffn for SmolLM3; empty: all windowed",
        used_if=UsedIf(
            lambda model: model.window or "n" in model.window_pattern, "without window; give window as well"
        ),
    )
    window_chunks: bool = key(
        False,
        "split rows into chunks of window tokens, and attend only to tokens of the same chunk in windowed layers, as "
        "Llama 4",
        needs="window",
    )
    window_rotary_theta: float | None = key(
        None,
        "rotary base of windowed layers, to which rotary_scaling then does not apply; auto: as in full layers",
        used_if=WITH_ROTARY,
        needs="window",
    )
    embed: Literal["plain", "bias", "norm"] = key(
        "plain",
        "token embeddings; bias: and a bias, as GPT-J's; norm: normed, with positions=learned after their sum, as "
        "BLOOM's",
    )
    embed_dim: int | None = key(
        None, "width of token embeddings and head, by matrices to and from d_model, as OPT-350M; auto: d_model", least=1
    )
    embed_scale: float | None = key(
        1.0,
        "factor on the token embeddings, as Granite; sqrt: sqrt(d_model), rounded to dtype, as Gemma",
        least=0,
        none="sqrt",
    )
    previous_tokens: int = key(
        0, "add to each token's vector those of the N tokens before it, from one table per distance; 0: off", least=0
    )
    residual_scale: float = key(1.0, "factor on each branch before it joins the residual stream, as Granite", least=0)
    logits_scale: float = key(1.0, "factor on the output logits, before logits_cap, as Cohere", least=0)
    logits_cap: float | None = key(
        None, "bound of the output logits, each cap * tanh(logit / cap), as Gemma 2", least=0, none="none"
    )
    tied: bool = key(False, "share one table between the embedding and the output head")
    init_std: float | None = key(
        0.02, "standard deviation of initial weights; fan_in: 1 / sqrt(fan in)", least=0, none="fan_in"
    )
    scale: str = key(
        "",
        "completep:WIDTHxLAYERS: initial values, factors and rates with which the lr that was tuned at this size "
        "carries over to others (arXiv:2505.01618)",
    )

    @functools.cached_property
    def size_ratio(self) -> SizeRatio:
        """The sizes over those for which the rate was tuned; `optim/completep.py` has the rules of the optimizer."""
        return parse_scale(self.scale, self.d_model, self.layers)

    @functools.cached_property
    def branch_scale(self) -> float:
        """Factor on each residual branch, so that all layers together change the stream as much as fewer would."""
        return self.residual_scale / self.size_ratio.depth

    @functools.cached_property
    def head_scale(self) -> float:
        """Factor on the logits, which training makes larger in proportion to the width."""
        return self.logits_scale / self.size_ratio.width

    @functools.cached_property
    def table_std(self) -> float:
        """Standard deviation of the initial tables of tokens and of the output head."""
        return self.init_std or 1 / math.sqrt(self.table_size / self.size_ratio.width)

    @functools.cached_property
    def position_std(self) -> float:
        """Standard deviation of the initial tables of positions, and of the head of a reward model."""
        return self.init_std or 1 / math.sqrt(self.d_model / self.size_ratio.width)

    @functools.cached_property
    def matrix_std(self) -> float | None:
        """Standard deviation of the initial matrices of layers; None: 1 / sqrt(fan in)."""
        return self.init_std and self.init_std / math.sqrt(self.size_ratio.width)

    @functools.cached_property
    def summed_layers(self) -> float:
        """The layers whose branches are summed as they are; with `scale`, more of them have smaller factors."""
        return self.layers / self.size_ratio.depth

    @functools.cached_property
    def head_size(self) -> int:
        return self.head_dim or self.d_model // self.heads

    @functools.cached_property
    def value_size(self) -> int:
        return self.value_dim or self.head_size

    @functools.cached_property
    def attention_size(self) -> int:
        """Width of the values of all heads together."""
        return self.heads * self.value_size

    @functools.cached_property
    def cached_heads(self) -> int:
        """Heads of keys and values that a cache has."""
        return 1 if self.kv_latent else self.key_value_heads

    @functools.cached_property
    def cached_sizes(self) -> tuple[int, ...]:
        """Numbers of a cached head's key and value of a token; of its latent and its rotary key if they are one."""
        return (self.kv_latent + self.rotary_size,) if self.kv_latent else (self.head_size, self.head_size)

    @functools.cached_property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @functools.cached_property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: the layer attends to all earlier tokens."""
        types = itertools.islice(itertools.cycle(self.window_pattern or "w"), self.layers)
        return tuple(self.window if kind == "w" else None for kind in types)

    @functools.cached_property
    def cache_windows(self) -> tuple[int | None, ...]:
        """The window of each cache of a row: of the layers and, behind them, of the ids for `previous_tokens`."""
        return (*self.layer_windows, self.previous_tokens + 1) if self.previous_tokens else self.layer_windows

    @functools.cached_property
    def layers_without_rotary(self) -> tuple[bool, ...]:
        """True for each layer that does not rotate its queries and keys although positions=rotary."""
        return tuple(kind == "n" for kind in itertools.islice(itertools.cycle(self.window_pattern or "w"), self.layers))

    @functools.cached_property
    def window_period(self) -> int:
        """The number of layers after which windows repeat."""
        return min(len(self.window_pattern), self.layers) if len(set(self.layer_windows)) > 1 else 1

    @functools.cached_property
    def ff_size(self) -> int:
        return self.d_ff or 4 * self.d_model

    @functools.cached_property
    def biased_by_distance(self) -> bool:
        """True if attention logits get a bias of each head and distance."""
        return asks_for(POSITIONS, self.positions, "distance_TS")

    @functools.cached_property
    def embeds_positions(self) -> bool:
        """True if a vector of each position is added to the token embeddings."""
        return asks_for(POSITIONS, self.positions, "position_BT")

    @functools.cached_property
    def rotates(self) -> bool:
        """True if queries and keys are rotated by an angle of each position."""
        return asks_for(POSITIONS, self.positions, "long_rows")

    @functools.cached_property
    def rotary_size(self) -> int:
        return self.rotary_dims or self.head_size

    @functools.cached_property
    def parsed_scaling(self) -> "RotaryScaling | None":
        """The values of rotary_scaling."""
        if not self.rotary_scaling:
            return None
        from shardformer.config.rotary_scaling import parse_rotary_scaling  # not imported without one

        return parse_rotary_scaling(self.rotary_scaling)

    @functools.cached_property
    def rotary_factor(self) -> float:
        """Factor on rotated queries and keys."""
        return self.parsed_scaling.attention if self.parsed_scaling else 1.0

    @functools.cached_property
    def shorter_context(self) -> int:
        """The context before a scaling of kind yarn or llama3 made it longer; 0: there is no such scaling."""
        scaling = self.parsed_scaling
        return int(scaling.old_seq) if scaling and scaling.kind in ("llama3", "yarn") else 0

    @functools.cached_property
    def longest_short_row(self) -> int:
        """The tokens of the longest row with longrope's numbers for short rows; 0: all rows have the same numbers."""
        scaling = self.parsed_scaling
        return int(scaling.old_seq) if scaling and scaling.kind == "longrope" else 0

    @functools.cached_property
    def gated(self) -> bool:
        return asks_for(ACTIVATIONS, self.activation, "gate")

    @functools.cached_property
    def biased(self) -> tuple[str, ...]:
        """Names of the matrices that have a bias, with "norm" and "head" among them."""
        return BIASES[self.bias]

    @functools.cached_property
    def table_size(self) -> int:
        """Width of the token table and of the output head."""
        return self.embed_dim or self.d_model

    @functools.cached_property
    def pre_norms(self) -> bool:
        return self.block not in ("sequential_post_norms", "sequential_sum_norms")

    @functools.cached_property
    def post_norms(self) -> bool:
        return self.block in ("sequential_four_norms", "sequential_post_norms")

    @functools.cached_property
    def sum_norms(self) -> bool:
        return self.block == "sequential_sum_norms"

    @functools.cached_property
    def padded_vocab(self) -> int:
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    def check(self) -> None:
        parse_scale(self.scale, self.d_model, self.layers)
        require(
            self.head_dim or self.d_model % self.heads == 0,
            f"d_model={self.d_model} does not divide into heads={self.heads}; "
            f"try heads={largest_divisor(self.d_model, self.heads)}, or give head_dim",
        )
        require(
            self.heads % self.key_value_heads == 0,
            f"heads={self.heads} does not divide over kv_heads={self.kv_heads}; "
            f"try kv_heads={largest_divisor(self.heads, self.key_value_heads)}",
        )
        require(
            self.padded_vocab < 2**31,
            f"vocab={self.vocab} padded to vocab_multiple={self.vocab_multiple} must be below 2**31",
        )
        require(
            self.head_size <= MAX_HEAD_SIZE,
            f"the head size {self.head_size} must be at most {MAX_HEAD_SIZE}; give a smaller head_dim, or more heads",
        )
        for name, word in (
            ("attention_scale", "auto"), ("attention_cap", "none"), ("logits_cap", "none"), ("init_std", "fan_in"),
            ("embed_scale", "sqrt"),
        ):  # fmt: skip
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be above 0, or {word}, got {value}")
        for name in ("norm_eps", "residual_scale", "logits_scale"):
            require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        require(
            self.norm != "plain_layernorm" or "norm" not in self.biased,
            f"norm=plain_layernorm has no parameters, got bias={self.bias}; give bias=none or bias=qkv",
        )
        require(
            self.previous_tokens < self.seq,
            f"previous_tokens={self.previous_tokens} reaches beyond seq={self.seq}; give at most {self.seq - 1}",
        )
        self._check_positions()
        self._check_window()

    def _check_positions(self) -> None:
        encodes = self.embeds_positions or self.biased_by_distance or self.rotates
        require(
            encodes or self.positions == "none",
            f"positions={self.positions} has no parameter of {', '.join(POSITION_PARAMETERS)}, so it would encode "
            f"nothing; name one of them in {POSITIONS}",
        )
        require(self.rotary_theta > 1, f"rotary_theta must be above 1, got {self.rotary_theta}")
        require(
            not (self.longest_short_row and (self.window_rotary_theta or "n" in self.window_pattern)),
            f"rotary_scaling={self.rotary_scaling:.40} has the same frequencies in all layers; give no "
            "window_rotary_theta, and a window_pattern without n",
        )
        require(
            self.rotates or self.qk_norm != "rotated_plain",
            f"qk_norm=rotated_plain is of queries and keys that rotate, got positions={self.positions}; give "
            "positions=rotary, or qk_norm=none",
        )
        require(
            not self.query_growth
            or self.query_growth_tokens
            or (self.shorter_context and not self.window_rotary_theta),
            f"query_growth={self.query_growth} counts the shorter context of rotary_scaling=yarn:... or llama3:...; "
            f"got rotary_scaling={self.rotary_scaling:.40}; give one of them and no window_rotary_theta, or "
            "query_growth_tokens",
        )
        if self.rotates:
            even = min(self.rotary_size, self.head_size) // 2 * 2
            fix = f"rotary_dims={even}" if even else "positions=learned"
            require(
                self.rotary_size == even > 0,
                f"rotary_dims={self.rotary_size} must be even and at most the head size {self.head_size}; try {fix}",
            )
            scaling = self.parsed_scaling
            pairs = self.rotary_size // 2
            require(
                not scaling or scaling.kind != "longrope" or len(scaling.short) == pairs,
                f"rotary_scaling={self.rotary_scaling:.40} must have {2 * pairs} numbers after ATTENTION: {pairs} for "
                f"short rows, one for each rotating pair, and {pairs} for long rows",
            )

    def _check_window(self) -> None:
        theta = self.window_rotary_theta
        require(theta is None or theta > 1, f"window_rotary_theta must be above 1, got {theta}")
        require(
            set(self.window_pattern) <= {"w", "f", "n"},
            "window_pattern takes the letters w (windowed), f (full) and n (full, without rotary positions), such as "
            f"wwwwwf; got {self.window_pattern!r}",
        )
        require(
            "n" not in self.window_pattern or self.rotates,
            f"window_pattern={self.window_pattern} has layers without rotary positions, and positions={self.positions} "
            "has none; give f instead of n",
        )
        require(
            not self.window or any(self.layer_windows),
            f"window={self.window} does nothing: window_pattern={self.window_pattern} makes no layer windowed; "
            "give window=none, or a pattern that has a w",
        )
