"""The keys of a conversion from EasyLM, with its models. Imports no JAX."""

import dataclasses

from shardformer.config.keys import key
from shardformer.errors import UsageError

# What the arrays do not show: heads, the context, and the epsilon of the norms.
LLAMA_1, _LLAMA_2 = {"seq": 2048, "norm_eps": 1e-6}, {"seq": 4096, "norm_eps": 1e-5}
_LLAMA_3 = {"seq": 8192, "norm_eps": 1e-5, "rotary_theta": 5e5}
BASE_MODELS: dict[str, dict] = {
    "llama_1b": LLAMA_1 | {"heads": 16},
    "llama_3b": LLAMA_1 | {"heads": 32},
    "llama_7b": LLAMA_1 | {"heads": 32},
    "llama_13b": LLAMA_1 | {"heads": 40},
    "llama_30b": LLAMA_1 | {"heads": 52},
    "llama_65b": LLAMA_1 | {"heads": 64, "norm_eps": 1e-5},
    "llama2_7b": _LLAMA_2 | {"heads": 32},
    "llama2_13b": _LLAMA_2 | {"heads": 40},
    "llama2_70b": _LLAMA_2 | {"heads": 64},
    "llama3_8b": _LLAMA_3 | {"heads": 32},
    "llama3_70b": _LLAMA_3 | {"heads": 64},
}


@dataclasses.dataclass(frozen=True)
class FromEasylm:
    """EasyLM's stream of a Llama (every key of a run is taken as well)"""

    base_model: str = key("", f"EasyLM's name of the model's size: {', '.join(BASE_MODELS)}")

    def __post_init__(self):
        if self.base_model and self.base_model not in BASE_MODELS:
            raise UsageError(f"base_model is one of {', '.join(BASE_MODELS)}; got {self.base_model!r:.80}")
