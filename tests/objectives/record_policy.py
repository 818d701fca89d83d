"""Records what TRL 1.16 computes for sampled answers (GRPOTrainer, RLOOTrainer): losses and gradients of a tiny model.

    python -m tests.objectives.record_policy [CASE ...]

Needs what record_preferences.py needs, whose model and pairs it takes: both sides of a pair are answers to its prompt.
"""

import json
import sys
import tempfile

import numpy as np

from tests.objectives.record_preferences import (
    END,
    FOLDER,
    PAIRS,
    REFERENCE,
    in_double,
    make_model,
    make_records,
    make_tokenizer,
)  # fmt: skip

# Keys of ours, and options of TRL's trainer.
CASES: dict[str, tuple[dict, dict]] = {
    "grpo": (
        {"beta": 0.3, "token_mean": "answer", "clip_ratio": 0.1},
        {"loss_type": "grpo", "beta": 0.3, "epsilon": 0.1},
    ),
    "dapo": ({"beta": 0.05, "token_mean": "batch"}, {"loss_type": "dapo", "beta": 0.05}),
    "clip": ({"beta": 0.0, "token_mean": "batch"}, {"loss_type": "dapo", "beta": 0.0}),
    "dr_grpo": (
        {"objective": "dr_grpo", "beta": 0.05},
        {"loss_type": "dr_grpo", "beta": 0.05, "scale_rewards": "none"},
    ),
    "gspo": (
        {"objective": "gspo", "beta": 0.05, "clip_ratio": 0.1},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.05, "epsilon": 0.1},
    ),
    "rloo": ({"objective": "rloo", "beta": 0.2, "clip_ratio": 0.5}, {"beta": 0.2, "epsilon": 0.5}),
}
REWARDS = [1.0, 0.0, 0.25, 0.75, 0.5, 0.5, 3.0, -1.0]  # of the answers; each two are a group


def make_trainer(name: str, options: dict, folder: str):
    import datasets
    import trl

    kinds = (trl.RLOOTrainer, trl.RLOOConfig) if name == "rloo" else (trl.GRPOTrainer, trl.GRPOConfig)
    args = kinds[1](
        output_dir=folder, per_device_train_batch_size=2 * PAIRS, num_generations=2, use_cpu=True, report_to=[],
        bf16=False, gradient_checkpointing=False, max_completion_length=8, **options | {"beta": 0.0},
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": record["prompt"]} for record in make_records()])
    trainer = kinds[0](
        model=in_double(make_model()), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
        train_dataset=data, processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.beta = options["beta"]  # given above, it would have the trainer look for a reference on the hub
    return trainer


def compute_advantages(name: str, rewards):
    """Returns the advantages of groups of two, by the lines of TRL's trainers that sample, too, and do not run here."""
    from trl.trainer.utils import nanstd

    rewards = rewards.view(-1, 2)
    if name == "rloo":
        return (rewards - (rewards.sum(1, keepdim=True) - rewards)).view(-1)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred if name == "dr_grpo" else centred / (nanstd(rewards, dim=1).view(-1, 1) + 1e-4)).view(-1)


def make_inputs(pairs: list[dict]) -> dict:
    """Returns TRL's batch: prompts with padding before them, answers with padding behind them."""
    import torch
    from trl.trainer.utils import pad

    def tensors(rows):
        return [torch.tensor(row) for row in rows]

    prompts = tensors(pair["prompt"] for pair in pairs for _ in range(2))
    answers = tensors(pair[side] for pair in pairs for side in ("chosen", "rejected"))
    inputs = {"num_items_in_batch": torch.tensor(sum(map(len, answers)))}
    for name, rows, side in (("prompt", prompts, "left"), ("completion", answers, "right")):
        inputs[f"{name}_ids"] = pad(rows, padding_value=END, padding_side=side)
        inputs[f"{name}_mask"] = pad([torch.ones_like(row) for row in rows], padding_value=0, padding_side=side)
    return inputs


def find_logps(trainer, inputs: dict, factor: float = 1.0):
    """Returns TRL's log-probabilities of the answers under the model, or with a factor of its matrices."""
    import torch

    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    matrices = [parameter.data for parameter in trainer.model.parameters() if parameter.ndim > 1]
    saved = [matrix.clone() for matrix in matrices]
    for matrix in matrices:
        matrix *= factor
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, inputs["completion_ids"].shape[1])
    for matrix, before in zip(matrices, saved, strict=True):
        matrix.copy_(before)
    return found[0]


def main() -> None:
    import torch
    from safetensors.numpy import save_file

    pairs, target = json.loads((FOLDER / "pairs.json").read_text())["pairs"], FOLDER / "policy.json"
    found: dict = json.loads(target.read_text()) if sys.argv[1:] else {"cases": {}, "advantages": {}}
    for name in sys.argv[1:] or CASES:
        options = CASES[name][1]
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(name, options, folder)
            inputs = make_inputs(pairs)
            logps, mask = find_logps(trainer, inputs), inputs["completion_mask"]
            torch.manual_seed(1)
            sampled = logps + 0.3 * torch.randn_like(logps)
            references = find_logps(trainer, inputs, REFERENCE)
            inputs |= {"old_per_token_logps": sampled, "ref_per_token_logps": references}
            rewards = torch.tensor(REWARDS, dtype=torch.float64)
            if name == "rloo":
                inputs["old_logps"] = (sampled * mask).sum(1)
                rewards = rewards - options["beta"] * ((sampled - references) * mask).sum(1)
            inputs["advantages"] = compute_advantages(name, rewards)
            trainer.model.train()
            trainer.current_gradient_accumulation_steps = 1
            loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()
        if not sys.argv[1:]:
            counts = mask.sum(1).tolist()
            for key, values in (("sampled", sampled), ("references", references)):
                found[key] = [row[:count].tolist() for row, count in zip(values, counts, strict=True)]
        found["advantages"][name] = inputs["advantages"].tolist()
        metrics = {key: values[-1] for key, values in trainer._metrics["train"].items()}
        found["cases"][name] = {"loss": float(loss)} | {key: float(value) for key, value in metrics.items()}
        gradients = {key: p.grad.numpy().astype(np.float32) for key, p in trainer.model.named_parameters()}
        save_file(gradients, FOLDER / f"policy_{name}.gradients")
        print(name, found["cases"][name])
    target.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
