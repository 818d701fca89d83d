"""The interface of lm-evaluation-harness to our answers. It imports lm_eval, so only `harness` imports it."""

from typing import Any

from lm_eval import evaluator, utils
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from shardformer.config.parsing import suggest_closest
from shardformer.errors import UsageError, forbid_exit
from shardformer.inference.lm_eval_answers import Answers, Question


class ShardformerLM(LM):
    """A model of the harness; each request is an Instance whose `args` are the question."""

    def __init__(self, answers: Answers):
        super().__init__()
        self._answers = answers

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        scores = self._answers.score_pairs([request.args for request in requests])
        return [(-score.nats, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        return [-score.nats for score in self._answers.score_documents([request.args[0] for request in requests])]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        return self._answers.continue_prompts([Question(*request.args) for request in requests])


def find_tasks(names: list[str], include: list[str]) -> TaskManager:
    """Finds tasks in the folders `include`, or else among the harness's own, which take half a minute to list."""
    if include:
        manager = TaskManager(include_path=include, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=include or None)
    if unknown := sorted(set(names) - set(manager.all_tasks)):
        where = f"in {', '.join(include)}" if include else "as no folder is named"
        close = suggest_closest(unknown[0], manager.all_tasks)
        raise UsageError(f"tasks={','.join(unknown)}: the harness has no such task, nor have you, {where}{close}")
    return manager


def evaluate(answers: Answers, manager: TaskManager, names: list[str], **options) -> dict[str, Any]:
    """Returns the harness's results for these tasks."""
    with forbid_exit(f"a task of {','.join(names)}"):  # whose functions are Python
        return evaluator.simple_evaluate(
            model=ShardformerLM(answers), tasks=names, task_manager=manager, confirm_run_unsafe_code=False, **options
        )


def format_results(results: dict[str, Any]) -> str:
    tables = [utils.make_table(results)]
    if results.get("groups"):
        tables.append(utils.make_table(results, "groups"))
    return "\n".join(tables)
