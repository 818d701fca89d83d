"""Records the gradients that PEFT's adapters have over the weights that bitsandbytes dequantises: those of QLoRA.

python -m tests.convert.record_qlora   (needs bitsandbytes, peft, transformers and torch; writes goldens/qlora.npz)
"""

from pathlib import Path

import numpy as np

from tests.convert.hf_models import FOLDER as MODELS
from tests.convert.hf_models import VOCAB

GOLDEN = Path(__file__).parent / "goldens" / "qlora.npz"
MODEL = "llama"
RANK, ALPHA = 3, 12.0
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def draw_tokens() -> np.ndarray:
    """Returns rows of inputs and, shifted by one, of targets."""
    return np.random.RandomState(5).randint(0, VOCAB, (8, 24))


def draw_factor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the adapter's factor of PEFT's name."""
    seed = sum(name.encode()) * 7919 + len(name)
    return np.random.RandomState(seed % 2**32).normal(0, 0.05, shape).astype(np.float32)


def round_rows(table):
    """Rounds a table to int8 with a scale for each row, as `weights=nf4` stores the token table and the head."""
    scales = table.abs().amax(1, keepdim=True) * np.float32(1 / 127)
    return (table * (1 / scales)).round() * scales


def round_weights(model) -> None:
    """Replaces the weights by those that QLoRA multiplies by."""
    from bitsandbytes import functional

    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            options = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": True}
            weight.data = functional.dequantize_4bit(*functional.quantize_4bit(weight.data, **options))
        elif weight.ndim == 2:
            weight.data = round_rows(weight.data)


def record() -> dict[str, np.ndarray]:
    import peft
    import torch
    import transformers

    folder = MODELS / MODEL
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    round_weights(model)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(MODULES), bias="none")
    adapted = peft.get_peft_model(model.double(), config)
    tokens, arrays = torch.from_numpy(draw_tokens()), {}
    factors = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    for name, parameter in factors.items():
        stored = name.replace(".default", "")
        factor = draw_factor(stored, tuple(parameter.shape))
        parameter.data = torch.from_numpy(factor).double()
        arrays[f"factor {stored}"] = factor
    logits = adapted(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    arrays |= {
        f"gradient {name.replace('.default', '')}": p.grad.numpy().astype(np.float32) for name, p in factors.items()
    }
    return arrays | {"loss": np.float64(loss.item())}


if __name__ == "__main__":
    np.savez_compressed(GOLDEN, **record())
