"""The arithmetic of a train step, and how much of a chip's peak it takes (MFU)."""

from shardformer.adapters.adapter_keys import select_trainable
from shardformer.config import Config
from shardformer.config.names import LAYERS, is_of_experts, is_stacked
from shardformer.devices.chips import Chip
from shardformer.layout import specs
from shardformer.model.model import Model
from shardformer.model.task_on_mesh import choose_task

EMBED = "transformer/embed"


def flops_per_token(config: Config) -> float:
    """Returns the FLOPs of a train step: 6 for each multiplying parameter, and the causal half of attention.

    Two of the six are the forward pass, two the activation's gradient, two the parameter's gradient. The frozen weights
    besides adapters have no parameter gradient; weights frozen by `lr_rules` count as trainable. Embedding tables do
    not multiply, a tied head does. Recomputation (remat) does not count. Experts count as often as a token uses them.
    """
    if (of_a_row := choose_task(config).count_flops(config)) is not None:
        return of_a_row
    shapes = choose_task(config).abstract_parameters(config)
    trainable = _count_multiplying(select_trainable(shapes, config), config)
    return 4 * _count_multiplying(shapes, config) + 2 * trainable + 3 * attention_flops(config)


def layer_flops_per_token(config: Config) -> tuple[int, int]:
    """Returns the layers' FLOPs (in a train step, in its forward pass), without the head."""
    shapes = Model.abstract_parameters(config)
    layers = {module: leaves for module, leaves in shapes.items() if is_stacked(module)}
    trainable = _count_active(select_trainable(layers, config), config)
    attention = attention_flops(config)
    forward = 2 * _count_active(layers, config) + attention
    return 2 * forward + 2 * trainable + attention, forward


def expert_flops_per_token(config: Config) -> tuple[int, int]:
    """Returns the FLOPs of the experts that a token chooses (in a train step, in its forward pass)."""
    leaves = Model.abstract_parameters(config)[LAYERS]
    of_experts = {LAYERS: {name: leaf for name, leaf in leaves.items() if is_of_experts(name)}}
    active = _count_active(of_experts, config)
    return 4 * active + 2 * _count_active(select_trainable(of_experts, config), config), 2 * active


def attention_flops(config: Config, layers: slice = slice(None)) -> int:
    """Returns the FLOPs of a token's forward pass through attention, of pairs that a causal mask and windows leave."""
    seq = config.model.seq
    windows = [min(window or seq, seq) for window in config.model.layer_windows[layers]]
    if config.model.window_chunks:
        pairs = sum((seq // window * window**2 + (seq % window) ** 2) // seq for window in windows)
    else:
        pairs = sum(2 * window - window * window // seq for window in windows)  # twice the tokens attended to
    return pairs * config.model.heads * (config.model.head_size + config.model.value_size)


def _count_multiplying(parameters: dict, config: Config) -> int:
    """Counts the parameters that multiply an activation."""
    of_tokens = {name: leaf for name, leaf in parameters.get(EMBED, {}).items() if name != "project"}
    table = specs.count_parameters(of_tokens)
    has_tied_head = config.model.tied and config.objective.has_vocabulary and EMBED in parameters
    tied_head = config.model.padded_vocab * config.model.table_size if has_tied_head else 0
    return _count_active(parameters, config) - table + tied_head


def _count_active(parameters: dict, config: Config) -> int:
    """Counts the parameters that one token uses: of the experts, those that it chooses."""
    total = specs.count_parameters(parameters)
    if not config.experts.experts:
        return total
    leaves = parameters.get(LAYERS, {})
    of_experts = sum(leaf.size for name, leaf in leaves.items() if is_of_experts(name))
    unused = config.experts.experts - config.experts.experts_per_token
    return total - of_experts * unused // config.experts.experts


def describe_active(config: Config) -> str:
    """Formats the number of parameters that one token uses, if that is not all of them."""
    if not config.experts.experts:
        return ""
    active = _count_active(choose_task(config).abstract_parameters(config), config)
    return f", {active / 1e6:,.2f}M of them active for a token"


def describe_formula(config: Config) -> str:
    """Formats the sum that `flops_per_token` computes."""
    parameters = "6 x multiplying parameters"
    if config.lora.lora_rank:
        parameters = "4 x multiplying parameters + 2 x trainable parameters"
    attended = "seq" if not config.model.window else "(2 x window - window^2 / seq in windowed layers, else seq)"
    attended = "(window in windowed layers, else seq)" if config.model.window_chunks else attended
    width = "heads x head_dim" if config.model.head_dim else "d_model"
    width = "heads x (head_dim + value_dim) / 2" if config.model.value_dim else width
    return f"{parameters} + 6 x layers x {attended} x {width}"


def peak_tokens_per_second(config: Config, chip: Chip) -> float:
    """Returns the speed of the config's mesh at an MFU of 1; 0 if the FLOPs are not known."""
    flops = flops_per_token(config)
    return config.parallel.devices * chip.flops / flops if flops else 0.0


def describe_peak(config: Config, chip: Chip) -> str:
    """Formats, in one line, the peak that a run's MFU is relative to."""
    return (
        f"{flops_per_token(config) / 1e9:,.4g} GFLOP a token; MFU 1 would be "
        f"{peak_tokens_per_second(config, chip):,.0f} tokens/s, at {chip.flops / 1e12:,.0f} TFLOP/s in bfloat16 "
        f"on each device ({chip.source})"
    )
