"""Records the codes and scales of bitsandbytes on a CPU, of matrices drawn by NumPy.

python -m tests.quantized.record_nf4   (needs bitsandbytes and torch; goldens/nf4.npz is of bitsandbytes 0.50.2)
"""

from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "goldens" / "nf4.npz"
SHAPES = ((64, 8), (192, 96), (128, 300))  # [I, O]: one block of scales, two of which one is full, and three


def draw(number: int) -> np.ndarray:
    """Returns a matrix [I, O] with columns of different sizes; one is zero."""
    random = np.random.RandomState(number)
    w = random.normal(size=SHAPES[number]) * random.uniform(0.01, 3, SHAPES[number][1])
    w[:, 3] = 0
    return w.astype(np.float32)


def record() -> dict:
    import torch
    from bitsandbytes import functional

    arrays = {"dynamic_levels": functional.create_dynamic_map().numpy()}
    for number in range(len(SHAPES)):
        linear = torch.from_numpy(np.ascontiguousarray(draw(number).T))  # as torch.nn.Linear has its weight
        options = {"blocksize": 64, "quant_type": "nf4"}
        codes, state = functional.quantize_4bit(linear, compress_statistics=True, **options)
        plain = functional.quantize_4bit(linear, **options)[1]
        arrays |= {
            f"codes{number}": codes.numpy(),
            f"plain_scales{number}": plain.absmax.numpy(),
            f"scales{number}": state.absmax.numpy(),
            f"blocks{number}": state.state2.absmax.numpy(),
            f"mean{number}": state.offset.numpy(),
            f"dense{number}": functional.dequantize_4bit(codes, state).numpy()[:4],
        }
    return arrays


if __name__ == "__main__":
    np.savez_compressed(GOLDEN, **record())
