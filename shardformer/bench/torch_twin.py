"""A step in plain torch that computes the same, if torch is installed: eager, or through `torch.compile`."""

import atexit
import dataclasses
from multiprocessing import get_context
from typing import Any

import jax
import numpy as np

from shardformer import optim
from shardformer.bench import reference, torch_model
from shardformer.bench.contenders import Contender
from shardformer.config import Config
from shardformer.errors import RunError
from shardformer.optim.chain import is_decayed

RATES = 4096  # learning rates computed in advance, so that no step needs JAX


@dataclasses.dataclass
class TorchContender(Contender):
    """A contender whose state and steps are in another process."""

    batches: Any = None

    def run(self, steps: int) -> float:
        loss, seconds = self._ask([self.batches[step] for step in range(self.done, self.done + steps)])
        self.done += steps
        self.cpu_seconds += seconds
        return loss

    def read_parameters(self) -> dict:
        named: dict[str, dict] = {}
        for path, value in self._ask(torch_model.PARAMETERS).items():
            module, _, name = path.rpartition("/")
            named.setdefault(module, {})[name] = value
        return named

    def _ask(self, request) -> Any:
        try:
            self.state.send(request)
            answer = self.state.recv()
        except (EOFError, OSError):
            raise RunError("the process of torch ended by itself; it may have been out of memory") from None
        if isinstance(answer, str):
            raise RunError(f"torch: {answer}")
        return answer


def torch_step(c: Config, batches, compiled: bool = False) -> Contender:
    """Returns torch's step on one device, from our parameters, in a process where only torch has threads and memory."""
    parameters = {
        f"{module}/{name}": np.asarray(leaf)
        for module, leaves in reference.initial_parameters(c.replace(dropout=0.0)).items()
        for name, leaf in leaves.items()
    }
    decayed = {name for name in parameters if is_decayed(name.rpartition("/")[2])}
    rates = np.asarray(jax.vmap(optim.learning_rate(c))(np.arange(RATES)))
    connection, rest_end = get_context("spawn").Pipe()
    arguments = (rest_end, c, compiled, jax.default_backend() == "gpu", parameters, decayed, rates)
    get_context("spawn").Process(target=torch_model.run_steps, args=arguments).start()
    rest_end.close()
    atexit.register(connection.close)  # ends the process before Python waits for it
    name = "torch compiled" if compiled else "torch eager"
    return TorchContender(name, 1, _step_elsewhere, connection, batches=batches)


def _step_elsewhere(state, step):
    raise NotImplementedError("TorchContender.run sends its batches to torch's process")
