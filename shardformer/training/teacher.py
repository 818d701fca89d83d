"""The teacher of a distillation: its weights on the run's devices, the same in every start of the run."""

import json

from jax.sharding import PartitionSpec as P

from shardformer.devices import processes
from shardformer.errors import RunError, UsageError
from shardformer.files import make_folder, read_text, replacing
from shardformer.messages import log
from shardformer.training.preference_references import digest_weights
from shardformer.training.run_folder import Run
from shardformer.training.trainer import Trainer

FILE = "teacher.json"


def add_teacher(run: Run, trainer: Trainer) -> None:
    """Loads the teacher's best weights; raises RunError if they are not those of the run's first start."""
    teacher = Run.open(run.config.preferences.teacher)
    if teacher.vocabulary.without_options().sha256 != run.vocabulary.without_options().sha256:
        raise UsageError(
            f"teacher={teacher.out} has tokenizer={teacher.vocabulary.name}, and this run "
            f"tokenizer={run.vocabulary.name}: distributions over different tokens; give tokenizer= of the teacher"
        )
    step, params = teacher.restore_params(trainer.model.teacher)  # type: ignore[attr-defined]
    weights = digest_weights(params, trainer.model.sharding(P()))
    name = f"teacher={run.config.preferences.teacher}"
    processes.run_on_first_process(lambda: check_weights(run, FILE, name, weights, step))
    trainer.constants["teacher"] = params
    log.info(f"teacher: step {step} of {teacher.out}, weights {weights[:12]}")


def check_weights(run: Run, file: str, name: str, weights: str, step: int) -> None:
    """Compares the weights with those of the first start, or notes them in a file of the run."""
    path = run.records / file
    try:
        before = json.loads(read_text(path))["weights"]
    except FileNotFoundError:
        make_folder(run.records)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"weights": weights, "step": step}) + "\n")
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error!s:.100}); remove it to go on with {name} as it is") from None
    if before != weights:
        raise RunError(
            f"{name} has changed: the run started with weights of sha256 "
            f"{str(before)[:12]}, and its best are {weights[:12]} (step {step}) now; restore them, or remove {path} to "
            "go on with these"
        )
