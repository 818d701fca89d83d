"""Experts of which a router's sigmoids choose, with a bias that balances their load, as DeepSeek-V3 has them."""

from typing import Any

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import QWEN_NAMES, check_experts, list_experts, list_shared
from shardformer.convert.families.layout import Stored, plain
from shardformer.errors import UsageError

RATE = 0.001  # DeepSeek-V3's change of the biases per step, which no config.json has
NAMES = {
    "experts": "n_routed_experts", "experts_per_token": "num_experts_per_tok", "expert_width": "moe_intermediate_size",
    "router_norm": "norm_topk_prob", "router_scale": "routed_scaling_factor",
}  # fmt: skip
ONE_GROUP: dict[str, tuple] = {"n_group": (1, None), "topk_group": (1, None)}
SILENT = ("output_router_logits", "router_aux_loss_coef")


def list_balanced(c: Config, at: str, bias: str = "gate.e_score_correction_bias") -> list[Stored]:
    """Lists the router with its bias, the experts, and the expert that every token uses."""
    biases = plain(f"{at}.{bias}", "router_bias", c.experts.experts)
    return [*list_experts(c, at, QWEN_NAMES), biases, *list_shared(c, f"{at}.shared_experts")]


def read_balanced(theirs: dict, names: dict[str, str], shared: str = "n_shared_experts") -> dict[str, Any]:
    """Returns our keys of the router and of the shared expert; `shared` is the key with its number of widths."""
    width = names["expert_width"]
    check_experts(theirs, names["experts"], names["experts_per_token"], width, shared)
    return {"router": "sigmoid", "balance_rate": RATE, "shared_width": theirs[shared] * theirs[width]}


def check_groups(theirs: dict) -> None:
    """Rejects a choice of more groups than there are, with which transformers fails when it computes."""
    groups, chosen = theirs["n_group"], theirs["topk_group"]
    if type(groups) is int and type(chosen) is int and chosen > groups:
        raise UsageError(f"topk_group={chosen} is more than n_group={groups}; expected at most {groups}")


def write_balanced(c: Config, shared: str = "n_shared_experts") -> dict[str, Any]:
    return {shared: c.experts.shared_width // c.mixture.expert_size}


def find_variants(c: Config) -> dict[str, tuple | None]:
    """Returns the values that all of these families compute."""
    shared = max(c.experts.shared_width // c.mixture.expert_size, 1) * c.mixture.expert_size
    rate = (c.experts.balance_rate or RATE,)
    return {"router": ("sigmoid",), "balance_rate": rate, "shared_width": (shared,), "dense_first": None}
