"""Rollouts: answers that the model samples, their rewards, and the arrays of a step. Host side.

A rollout is a function of the weights at its first step, its number, the seed and the rewards. It is in the state, so
that a resume in its middle has the same one.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from shardformer.adapters.adapter_keys import remove_adapters
from shardformer.config import Config
from shardformer.config.registries import names_code
from shardformer.data import Data
from shardformer.data.corpus import choose_row_layout
from shardformer.data.order import scramble
from shardformer.data.prompt_windows import SCANNED, PromptRow, read_prompts
from shardformer.data.windows import Batch
from shardformer.devices import processes, programs
from shardformer.errors import RunError, UsageError, forbid_exit
from shardformer.inference import Generator, Sampling, Stops
from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.generator import Continuation, place
from shardformer.inference.text_codec import TextCodec
from shardformer.logs import goodput
from shardformer.messages import log
from shardformer.model import Model, Sums
from shardformer.model.measuring import Measures
from shardformer.objectives.answers_objective import SampledAnswers
from shardformer.objectives.objective_keys import ObjectiveKeys
from shardformer.objectives.reward_model import names_run
from shardformer.objectives.reward_run import FILE as REWARD_FILE
from shardformer.objectives.reward_run import RewardOfRun
from shardformer.objectives.weight_digests import check_weights, digest_weights
from shardformer.tables import format_count
from shardformer.training.evaluation import Evaluator
from shardformer.training.host_feature import HostFeature
from shardformer.training.run_folder import Run
from shardformer.training.step import TrainState
from shardformer.training.trainer import Trainer
from shardformer.user_code import import_function

FILE = "reference.json"
Reward = Callable[[str, str, str], float]
TAKES = "reward takes FILE.py:FUNCTION, match, length:N or the folder of a run with objective=reward"
SMALLEST_SPREAD = 1e-4  # added to the deviation of a group's rewards, as TRL adds it


class Answers(NamedTuple):
    """The codec of the sampled answers: the text of a prompt or an answer, and the condition that ends one."""

    decode: Callable[[list[int]], str]
    read: Callable[[list[int]], str]  # without the end
    stops: Stops

    @staticmethod
    def of(run: Run) -> "Answers":
        """Returns the codec of a run: a reply under its chat template, else a text up to the end of text."""
        codec = TextCodec(run.vocabulary, run.special_tokens)
        if run.vocabulary.chat:
            chat = ChatCodec(run.vocabulary, run.vocabulary.chat, sorted(codec.ends))
            return Answers(codec.decode, chat.read_reply, chat.make_stops())
        stops = Stops(run.vocabulary, (), codec.ends)
        return Answers(codec.decode, codec.decode_without_special_tokens, stops)


class Reference:
    """The log-probabilities of tokens under the weights that the run started from."""

    def __init__(self, run: Run, trainer: Trainer, state: TrainState):
        self._model, self._params = trainer.model, None
        if run.config.lora.lora_rank:  # the frozen weights, which are in the state already
            plain = run.config.objective.as_language_model().replace(lora_rank=0)
            self._model = Model.on(plain, trainer.model.mesh)  # type: ignore[arg-type]
        else:
            self._params = self._make_first(run, trainer, state)
        measure, rows = Measures(self._model).token_loss, self._model.sharding(self._model.row_spec)
        self._measure = programs.jit(lambda *arrays: -measure(*arrays).nats_BT, out_shardings=rows)

    def _make_first(self, run: Run, trainer: Trainer, state: TrainState):
        """Returns a second copy of the first weights; raises RunError if they are not those of the first start."""
        if int(state.step):
            origin = run
            while origin.config.training.base_step:  # a branch continues a run with this reference
                origin = Run.open(origin.config.training.base_run)
            params = origin.make_first_state(trainer).params
        else:
            params = jax.tree.map(lambda leaf: leaf.copy(), state.params)
        weights = digest_weights(params, trainer.model.sharding(jax.sharding.PartitionSpec()))
        name = f"base={run.config.training.base}" if run.config.training.base else f"seed={run.config.training.seed}"
        processes.run_on_first_process(lambda: check_weights(run, FILE, name, weights, 0))
        return params

    def measure(self, params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns log-probabilities [B, T] of the targets; `params` are those of the step."""
        return self._measure(remove_adapters(params) if self._params is None else self._params, tokens, targets)


class RewardSource(Protocol):
    """The rewards of answers. Its methods are called in this order."""

    def check(self, run: Run, corpus: Data) -> None:
        """Raises UsageError for a reward that does not fit a run, before any device starts."""

    def open(self, run: Run, trainer: Trainer) -> None:
        """Loads what `compute` needs."""

    def check_unchanged(self, run: Run) -> None:
        """Raises RunError if a training run has had other rewards before."""

    def compute(self, rows: list[PromptRow], answers: list[Continuation]) -> np.ndarray:
        """Returns the reward of every answer, on every process."""


class RewardOfText:
    """The rewards of a function of texts, which the first process calls."""

    def __init__(self, name: str, objective: str):
        self._name, self._function = name, open_reward(name, objective)

    def check(self, run: Run, corpus: Data) -> None:
        """Raises UsageError if the function gives no number for the first record of a run."""
        splits = [split for name, split in corpus.named_splits().items() if name.endswith("/train")]
        for split in splits[:1]:
            windows, answers = split.make_windows(choose_row_layout(run.config)), Answers.of(run)
            rows = read_prompts(windows.gather(np.arange(min(windows.count, SCANNED))))
            for row in [row for row in rows if row.prompt][:1]:
                try_reward(self._name, answers.decode(row.prompt), answers.read(row.expected))

    def open(self, run: Run, trainer: Trainer) -> None:
        """Opens the codec of the texts."""
        self._answers = Answers.of(run)

    def check_unchanged(self, run: Run) -> None:
        """Raises RunError for a run that has learned from a reward model; the code of a reward may change."""

        def check_record() -> None:
            path = run.records / REWARD_FILE
            if path.exists():
                raise RunError(
                    f"reward={self._name} is no run, and this run has learned from the rewards of one; name "
                    f"that run, or remove {path} to go on with this reward"
                )

        processes.run_on_first_process(check_record)

    def compute(self, rows: list[PromptRow], answers: list[Continuation]) -> np.ndarray:
        """Returns the reward of every answer, on every process."""

        def compute_here() -> np.ndarray:
            if jax.process_index():
                return np.zeros(len(rows), np.float64)
            read = self._answers.read
            texts = [(self._answers.decode(row.prompt), read(answer.ids), read(row.expected))
                     for row, answer in zip(rows, answers, strict=True)]  # fmt: skip
            return np.array([compute_reward(self._function, *text) for text in texts], np.float64)

        return processes.array_of_first_process(processes.succeed_or_fail_together(compute_here))


class Rollouts:
    """The rollouts and the evaluations of one run."""

    def __init__(self, run: Run, model: Model, reference: Reference | None, reward: RewardSource):
        self._config, self._model, self._reference, self._reward = run.config, model, reference, reward
        self._answers, self._size = Answers.of(run), len(run.vocabulary)
        self._generator = Generator(model)
        rows = model.sharding(model.row_spec)
        self._to_rows = functools.partial(place, sharding=rows)
        penalise = functools.partial(penalise_divergence, run.config.preferences)
        self._penalise = programs.jit(penalise, out_shardings=rows)

    def make(self, params, batch: Batch, number: int) -> dict[str, jax.Array]:
        """Returns the arrays of rollout `number`: `group_size` answers to each prompt of a batch."""
        keys, rows = self._config.preferences, read_prompts(batch)
        seed = int(scramble(self._config.training.seed, number)[0] >> np.uint64(33))
        # The log-probabilities remain those of all tokens, as the policy's are: a ratio starts at 1.
        sampling = Sampling(
            keys.answer_tokens, temperature=1.0, top_k=keys.rollout_top_k, top_p=keys.rollout_top_p,
            samples=keys.group_size, seed=seed,
        )  # fmt: skip
        answers = self._sample(params, rows, sampling)
        repeated = [row for row in rows for _ in range(keys.group_size)]
        rewards = self._reward.compute(repeated, answers)
        arrays = self._lay_out(repeated, answers, rewards)
        placed = {name: self._to_rows(values) for name, values in arrays.items()}
        if self._reference:
            placed["references"] = self._reference.measure(params, placed["tokens"], placed["targets"])
        if self._reference and keys.objective == "rloo":
            placed["advantages"] = self._penalise(placed)
        return placed

    def evaluate(self, params, batch: Batch) -> Sums:
        """Returns sums over greedy answers: their number, minus their rewards, and those with a reward above 0."""
        rows = [row for row in read_prompts(batch) if row.prompt]  # not padding
        sampling = Sampling(self._config.preferences.answer_tokens, temperature=0.0)
        rewards = self._reward.compute(rows, self._sample(params, rows, sampling))
        return Sums(len(rows), -rewards.sum(), (rewards > 0).sum(), 0)  # type: ignore[arg-type]

    def _sample(self, params, rows: list[PromptRow], sampling: Sampling) -> list[Continuation]:
        prompts = [row.prompt for row in rows]
        return self._generator.continue_prompts(
            params, prompts, sampling, self._size, self._answers.stops, batch=self._config.training.batch, apart=True
        )

    def _lay_out(self, rows: list[PromptRow], answers: list[Continuation], rewards: np.ndarray) -> Batch:
        """Returns the arrays of a step: each row is a prompt and its answer."""
        keys, shape = self._config.preferences, (len(rows), self._config.model.seq + 1)
        ids = np.zeros(shape, np.int32)
        weights, sampled = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        weighs_answers = cast(SampledAnswers, self._config.objective).weighs_answers
        for n, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            start, end = len(row.prompt), len(row.prompt) + len(answer.ids)
            ids[n, :end] = [*row.prompt, *answer.ids]
            weights[n, start:end] = 1 / len(answer.ids) if weighs_answers else 1
            sampled[n, start:end] = answer.logprobs
        advantages = np.repeat(compute_advantages(rewards, keys.group_size, keys.objective)[:, None], shape[1] - 1, 1)
        lengths = np.array([len(answer.ids) for answer in answers], np.float32)
        return {
            "tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights[:, 1:], "sampled": sampled[:, 1:],
            "advantages": advantages.astype(np.float32), "rewards": rewards.astype(np.float32), "lengths": lengths,
        }  # fmt: skip


def compute_advantages(rewards: np.ndarray, group_size: int, objective: str) -> np.ndarray:
    """Returns each reward's distance from the mean of its group: with grpo and gspo in the group's standard deviations.

    With rloo it is the distance from the mean of the others.
    """
    groups = rewards.reshape(-1, group_size)
    if objective == "rloo":
        return compare_with_others(groups).reshape(-1)
    centred = groups - groups.mean(1, keepdims=True)
    if objective == "dr_grpo":
        return centred.reshape(-1)
    return (centred / (groups.std(1, ddof=1, keepdims=True) + SMALLEST_SPREAD)).reshape(-1)


def penalise_divergence(keys: ObjectiveKeys, batch: dict) -> jax.Array:
    """Returns rloo's advantages [B, T]: each reward less beta times its answer's divergence from the first weights."""
    gap_BT = jnp.where(batch["weights"] > 0, batch["sampled"] - batch["references"], 0)
    groups = (batch["rewards"] - keys.beta * gap_BT.sum(-1)).reshape(-1, keys.group_size)
    return jnp.broadcast_to(compare_with_others(groups).reshape(-1, 1), gap_BT.shape)


def compare_with_others(groups):
    """Returns the distance of each reward [groups, answers] from the mean of the others in its group."""
    answers = groups.shape[1]
    return (groups - groups.mean(1, keepdims=True)) * (answers / (answers - 1))


class RolloutTrainer(Trainer):
    """A trainer whose batches are prompts, from which it makes rollouts. Everything else is the wrapped trainer's."""

    def __init__(self, trainer: Trainer, rollouts: Rollouts):
        self._trainer, self._rollouts = trainer, rollouts
        self._made: tuple[int, dict[str, jax.Array]] | None = None  # step and arrays, until the step consumes them

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    @property
    def local_rows(self) -> np.ndarray:
        """All prompts: every process samples with the others."""
        return np.arange(self.config.data_rows)

    def step(self, state: TrainState, batch, step: int) -> tuple[TrainState, jax.Array]:
        state = state._replace(rollout=self.place_batch(state, batch, step))
        self._made = None
        return self._trainer.step(state, {}, step)

    def sums(self, params, batch) -> Sums:
        with goodput.CLOCK.spending("evaluation"):
            return self._rollouts.evaluate(params, batch)

    def place_batch(self, state: TrainState, batch, step: int) -> dict[str, jax.Array]:
        """Returns the rollout of a step: a new one every `rollout_steps` steps."""
        number, rest = divmod(step, self.config.preferences.rollout_steps)
        if rest:
            return state.rollout
        if not self._made or self._made[0] != step:
            with goodput.CLOCK.spending("data"):
                self._made = step, self._rollouts.make(state.params, batch, number)
        return self._made[1]


class RolloutsOfRun(HostFeature):
    """The reward of a start, and the trainer that samples the answers."""

    def __init__(self, config: Config):
        name = config.start.reward
        self._reward: RewardSource = (
            RewardOfRun(name) if names_run(name) else RewardOfText(name, config.preferences.objective)
        )

    def check(self, run: Run, corpus: Data) -> None:
        self._reward.check(run, corpus)

    def prepare(self, run: Run, evaluator: Evaluator, state: TrainState, is_stopped: Callable[[], bool]) -> None:
        keys = run.config.preferences
        reference = Reference(run, evaluator.trainer, state) if keys.beta else None
        log.info(
            f"rollouts: {keys.group_size} answers of at most {format_count(keys.answer_tokens, 'token')} to each of "
            f"{format_count(run.config.data_rows, 'prompt')}, for {format_count(keys.rollout_steps, 'step')}; "
            "val_loss is minus the mean reward of greedy answers"
        )
        self._sample_with(run, evaluator, reference)
        self._reward.check_unchanged(run)

    def prepare_evaluation(self, run: Run, evaluator: Evaluator) -> None:
        self._sample_with(run, evaluator, None)

    def _sample_with(self, run: Run, evaluator: Evaluator, reference: Reference | None) -> None:
        self._reward.open(run, evaluator.trainer)
        rollouts = Rollouts(run, evaluator.trainer.model, reference, self._reward)
        evaluator.trainer = RolloutTrainer(evaluator.trainer, rollouts)


# Rewards of texts: a function of the user's file, or one of two that are built in.


def match(prompt: str, answer: str, expected: str) -> float:
    """Returns 1 for the record's own answer, but for spaces around it; else 0."""
    return float(answer.strip() == expected.strip())


def open_reward(name: str, objective: str = "grpo") -> Reward:
    """Returns the function that reward= names."""
    if not name:
        raise UsageError(f"objective={objective} learns from rewards, which each start names; {TAKES}")
    if name == "match":
        return match
    kind, _, value = name.rpartition(":")
    if kind == "length":
        if not (value.isascii() and value.isdigit() and int(value)):
            raise UsageError(f"reward=length:N takes a number of characters of at least 1, got {value!r:.40}")
        return _make_length_reward(int(value))
    if not names_code(name):
        raise UsageError(f"{TAKES}; got reward={name:.100}")
    function = import_function("reward", name, TAKES)
    _check_parameters(name, function)

    def reward(prompt: str, answer: str, expected: str) -> float:
        with forbid_exit(f"reward={name}"):
            return function(prompt, answer, expected)

    return reward


def _make_length_reward(wanted: int) -> Reward:
    def reward(prompt: str, answer: str, expected: str) -> float:
        return max(1 - abs(len(answer) - wanted) / wanted, 0.0)

    return reward


def _check_parameters(name: str, function: Reward) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables of C have none; the first call shows it
        return
    try:
        signature.bind("prompt", "answer", "expected")
    except TypeError:
        raise UsageError(
            f"reward={name} has the parameters {signature}, and is called with three texts; write "
            "(prompt, answer, expected)"
        ) from None


def try_reward(name: str, prompt: str, expected: str) -> None:
    """Raises UsageError unless a reward gives a number for a record's own answer, before a run starts."""
    try:
        compute_reward(open_reward(name), prompt, expected, expected)
    except RunError as error:
        raise UsageError(f"reward={name}, called with the first record's own answer: {error}") from None


def compute_reward(reward: Reward, prompt: str, answer: str, expected: str) -> float:
    """Returns the reward of an answer; raises RunError for a function that fails or gives no finite number."""
    try:
        value = reward(prompt, answer, expected)
    except Exception as error:  # a function may raise anything
        raise RunError(
            f"reward failed for the answer {answer!r:.80}: {type(error).__name__}: {error!s:.200}"
        ) from error
    try:
        number = float(value)
    except Exception:  # of an array's own conversion, perhaps
        number = math.nan
    if not math.isfinite(number):
        raise RunError(f"reward gave {value!r:.80} for the answer {answer!r:.80}; expected a finite number")
    return number
