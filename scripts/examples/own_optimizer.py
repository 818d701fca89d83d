"""An optimizer of your own: any optax transformation trains on every mesh, its state split over dp by ZeRO.

    python scripts/examples/own_optimizer.py

It trains a small model twice, by Adam and by the Lion below, on two devices, and prints the loss of each.
"""

import shutil
from pathlib import Path

import optax

from shardformer import Session, preset

# From the shell: python -m shardformer train tiny optimizer=scripts/examples/own_optimizer.py:lion zero=1


def lion(rate, keys, decay_mask):
    """Returns the transformation. The names of the parameters choose what it gets; see optim/README.md.

    rate: the learning rate as a function of the step. keys: those of the run, such as lr and beta1. decay_mask: which
    parameters are matrices, so that norms and biases do not decay.
    """
    return optax.lion(rate, b1=keys.beta1, b2=0.99, weight_decay=keys.weight_decay, mask=decay_mask)


def train(optimizer: str, lr: float, steps: int) -> float:
    """Returns the loss on held-out text after some steps."""
    out = f"checkpoints/optimizer_{Path(optimizer).stem}"
    shutil.rmtree(out, ignore_errors=True)  # of an earlier start
    config = preset("tiny", data="builtin", mesh="2x1", zero=1, optimizer=optimizer, lr=lr, steps=steps, out=out)
    return Session.create(config).train().best.val_loss


def main(steps: int = 100) -> dict[str, float]:
    losses = {"adamw": train("adamw", 3e-3, steps), "lion": train(f"{__file__}:lion", 2e-3, steps)}
    for name, loss in losses.items():
        print(f"{name:>6}: {loss:.3f} nats a character on held-out text")
    return losses


if __name__ == "__main__":
    main()
