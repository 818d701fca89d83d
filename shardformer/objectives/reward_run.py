"""Rewards that a run of objective=reward gives: its weights on the devices of the run that learns from them."""

import dataclasses

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer import checkpoint
from shardformer.config import Config
from shardformer.config.keys import next_multiple
from shardformer.data import Data, Vocabulary
from shardformer.data.prompt_windows import PromptRow
from shardformer.devices import processes, programs
from shardformer.errors import RunError, UsageError
from shardformer.inference.generator import Continuation, place
from shardformer.messages import log
from shardformer.objectives.reward_model import RewardModel, fit_rows, read_reward_config
from shardformer.objectives.weight_digests import check_weights, digest_weights
from shardformer.training.run_folder import Run
from shardformer.training.trainer import Trainer

FILE = "reward.json"


class RewardOfRun:
    """The rewards of the best weights of a run, which reads the ids of prompts and answers."""

    def __init__(self, name: str):
        self._name = name
        read_reward_config(name)  # raises UsageError for a folder that is no reward model
        self._run = Run.open(name)
        if not checkpoint.list_steps(self._run.out):  # choosing one would start JAX
            raise UsageError(f"reward={name} has no checkpoint yet")

    def check(self, run: Run, corpus: Data) -> None:
        """Raises UsageError unless the reward model reads the tokens and the rows of a run."""
        check_tokens(self._name, self._run.vocabulary, run.vocabulary)
        check_positions(self._run.config, run.config)
        if run.config.parallel.mesh != "auto":
            fit_rows(self._run.config, run.config)  # raises for sizes that the mesh does not divide

    def open(self, run: Run, trainer: Trainer) -> None:
        """Loads the weights onto the policy's mesh."""
        self._config = fit_rows(self._run.config, run.config)
        self._model = RewardModel.on(self._config, trainer.model.mesh)
        step, self._params = self._run.restore_params(self._model)
        self._digest = step, digest_weights(self._params, self._model.sharding(P()))
        self._score = programs.jit(self._model.score, out_shardings=self._model.sharding(P()))
        log.info(f"reward: step {step} of {self._run.out}, weights {self._digest[1][:12]}")

    def check_unchanged(self, run: Run) -> None:
        """Raises RunError if the weights are not those of the run's first start."""
        step, weights = self._digest
        processes.run_on_first_process(lambda: check_weights(run, FILE, f"reward={self._name}", weights, step))

    def compute(self, rows: list[PromptRow], answers: list[Continuation]) -> np.ndarray:
        """Returns the reward of every answer."""
        size, width = self._config.training.batch, self._config.model.seq
        count = next_multiple(len(rows), size)
        ids, last = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
        for n, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            text = [*row.prompt, *answer.ids]
            ids[n, : len(text)], last[n, len(text) - 1] = text, 1
        parts = [self._compute_part(ids[i : i + size], last[i : i + size]) for i in range(0, count, size)]
        rewards = np.concatenate(parts)[: len(rows)].astype(np.float64)
        if not np.isfinite(rewards).all():
            raise RunError(
                f"reward={self._name} gave a number that is not finite, with its weights of step {self._digest[0]}; "
                "train it with dtype=float32"
            )
        return rewards

    def _compute_part(self, ids: np.ndarray, last: np.ndarray) -> np.ndarray:
        rows = self._model.sharding(self._model.row_spec)
        batch: dict[str, jax.Array] = {"tokens": place(ids, rows), "scored": place(last, rows)}
        return np.asarray(self._score(self._params, batch))


def check_tokens(name: str, reward: Vocabulary, policy: Vocabulary) -> None:
    """Raises UsageError if a reward model was trained on other ids than those of a policy with the same texts."""
    for keys, describe in {
        "tokenizer": describe_tokenizer,
        "special_tokens and bos": describe_options,
        "chat_template": describe_template,
    }.items():
        (of_reward, first), (of_policy, second) = describe(reward), describe(policy)
        if first != second:
            raise UsageError(
                f"reward={name} has {of_reward}, and this run {of_policy}: it reads other tokens; give a reward model "
                f"with this {keys}"
            )


# Each returns the arguments that give a vocabulary a property, and the property itself.


def describe_tokenizer(vocabulary: Vocabulary) -> tuple[str, str]:
    return f"tokenizer={vocabulary.name}", vocabulary.without_options().sha256


def describe_options(vocabulary: Vocabulary) -> tuple[str, str]:
    special = vocabulary.record.get("special_tokens", False)
    return f"special_tokens={special} bos={bool(vocabulary.beginning)}".lower(), vocabulary.sha256


def describe_template(vocabulary: Vocabulary) -> tuple[str, str]:
    if not vocabulary.chat:
        return "no chat_template", ""
    undated = dataclasses.replace(vocabulary.chat, date="")  # the day of a start tells no runs apart
    return f"chat_template={undated.name} ({undated.identity[:8]})", undated.identity


def check_positions(reward: Config, policy: Config) -> None:
    """Raises UsageError if a reward model's table of learned positions is shorter than a prompt and its answer."""
    longest, seq = policy.model.seq + 1, reward.model.seq
    if reward.model.positions == "learned" and seq < longest:
        raise UsageError(
            f"reward={policy.start.reward} has learned positions for seq={seq}, and a prompt and its answer have up to "
            f"{longest} tokens; give seq={seq - 1}"
        )
