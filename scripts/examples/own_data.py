"""Data of your own, from Python: batches of token ids that a function of the step returns. No corpus is read.

    python scripts/examples/own_data.py

The rows count by an unknown step, modulo 16. The model must find the step in the first two tokens, and then follow it:
the loss falls from ln 16 = 2.8, that of a guess, to less than 0.1.
"""

import shutil

import numpy as np

from shardformer import OwnBatches, Session, preset

TOKENS, LENGTH, ROWS = 16, 16, 32
OUT = "checkpoints/counting"


def draw_batch(seed: int) -> dict[str, np.ndarray]:
    """Returns tokens [ROWS, LENGTH] and the token that follows each; the same for the same seed."""
    random = np.random.default_rng(seed)
    start, step = random.integers(0, TOKENS, (ROWS, 1)), random.integers(1, 4, (ROWS, 1))
    counted = (start + step * np.arange(LENGTH + 1)) % TOKENS
    targets = counted[:, 1:].copy()
    targets[:, 0] = -100  # no loss here, as in PyTorch: the second token is not determined by the first
    return {"tokens": counted[:, :-1].astype(np.int32), "targets": targets.astype(np.int32)}


def batches_from(step: int):
    """Yields the batches from a step on: a resumed run starts at its step and reads what it would have read."""
    while True:
        yield draw_batch(step)
        step += 1


def main(steps: int = 80) -> float:
    held_out = [draw_batch(1_000_000 + i) for i in range(2)]
    data = OwnBatches(batches_from, vocab=TOKENS, validation=held_out, name="counting")
    shutil.rmtree(OUT, ignore_errors=True)  # of an earlier start
    config = preset("tiny", batch=ROWS, seq=LENGTH, mesh="2x1", lr=1e-2, steps=steps, out=OUT)
    trained = Session.create(config, data).train()
    print(f"{trained.best.val_loss:.3f} nats a token on new rows; guessing takes {np.log(TOKENS):.3f}")
    return trained.best.val_loss


if __name__ == "__main__":
    main()
