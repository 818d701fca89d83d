"""Records what TRL 1.16 computes for preference pairs: losses, rewards and gradients of a tiny random model.

    python -m tests.objectives.record_preferences

The environment needs torch, transformers and trl. Writes tests/objectives/goldens/preferences: the model, pairs.json
with TRL's token ids and numbers, and the gradients of each case in Hugging Face's names.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "goldens" / "preferences"
VOCAB, END = 61, 1  # the end of text pads as well, as in many published tokenizers
REFERENCE = 0.75  # factor of the matrices of the reference
PAIRS = 4
# Keys of ours, and TRL's trainer with its options.
CASES: dict[str, tuple[dict, str, dict]] = {
    "dpo": ({"objective": "dpo", "beta": 0.3}, "DPO", {"beta": 0.3}),
    "dpo_sft": (
        {"objective": "dpo", "beta": 0.3, "sft_weight": 0.4},
        "DPO",
        {"beta": 0.3, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.4]},
    ),
    "dpo_norm": (
        {"objective": "dpo", "beta": 2.0, "length_norm": True},
        "DPO",
        {"beta": 2.0, "loss_type": ["sigmoid_norm"]},
    ),
    "ipo": ({"objective": "ipo", "beta": 0.5}, "DPO", {"beta": 0.5, "loss_type": ["ipo"]}),
    "kto": ({"objective": "kto", "beta": 0.3}, "KTO", {"beta": 0.3}),
    "simpo": (
        {"objective": "simpo", "beta": 2.0, "reward_gap": 0.7},
        "CPO",
        {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.0},
    ),
    "simpo_smooth": (
        {"objective": "simpo", "beta": 2.0, "reward_gap": 0.0, "label_smoothing": 0.2},
        "CPO",
        {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.0, "cpo_alpha": 0.0, "label_smoothing": 0.2},
    ),
    "orpo": ({"objective": "orpo", "beta": 0.4, "sft_tokens": "all"}, "ORPO", {"beta": 0.4}),
}


def make_records() -> list[dict]:
    """Returns pairs of words, of different lengths; every answer has a different one."""
    draw = np.random.RandomState(0)

    def words(least: int, most: int) -> str:
        return " ".join(f"t{n}" for n in draw.randint(3, VOCAB, draw.randint(least, most + 1)))

    return [{"prompt": words(1, 4), "chosen": " " + words(1, 6), "rejected": " " + words(1, 6)} for _ in range(PAIRS)]


def make_model():
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False, pad_token_id=END,
        bos_token_id=2, eos_token_id=END,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        width = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        parameter.data = width * torch.randn_like(parameter) + (parameter.ndim == 1)
    return model


def in_double(model):
    """Returns the model in float64, so that only our results are rounded.

    Names of float32 mean float64 from here on: transformers asks for float32 in norms and angles, and TRL in its head,
    whatever the type of the model is. That was 1.9e-6 in RLOO's gradient.
    """
    import torch

    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    return model.double()


def make_reference():
    result = make_model()
    for parameter in result.parameters():
        if parameter.ndim > 1:
            parameter.data *= REFERENCE
    return result


def make_tokenizer():
    import tokenizers
    import transformers

    words = {"<unk>": 0, "<eos>": END, "<bos>": 2} | {f"t{n}": n for n in range(3, VOCAB)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokens = {"eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **tokens)


def make_trainer(kind: str, options: dict, folder: str):
    """Returns a TRL trainer and the function that gives the loss of a batch."""
    import datasets
    import trl
    from trl.experimental import cpo, orpo

    model, data, tokenizer = in_double(make_model()), datasets.Dataset.from_list(make_records()), make_tokenizer()
    shared = {
        "output_dir": folder, "per_device_train_batch_size": PAIRS, "use_cpu": True, "report_to": [], "bf16": False,
        "gradient_checkpointing": False, "max_length": 16,
    }  # fmt: skip
    if kind == "DPO":
        trainer = trl.DPOTrainer(
            model=model, ref_model=in_double(make_reference()), args=trl.DPOConfig(**shared, **options),
            train_dataset=data, processing_class=tokenizer,
        )  # fmt: skip
        return trainer, lambda batch: trainer._compute_loss(trainer.model, batch, False)
    if kind == "KTO":
        trainer = trl.KTOTrainer(
            model=model, ref_model=in_double(make_reference()), args=trl.KTOConfig(**shared, **options),
            train_dataset=data, processing_class=tokenizer,
        )  # fmt: skip
        return trainer, lambda batch: trainer._compute_loss(trainer.model, batch, False)
    module, make = (cpo, cpo.CPOConfig) if kind == "CPO" else (orpo, orpo.ORPOConfig)
    args = make(**shared, **options)
    trainer = getattr(module, f"{kind}Trainer")(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    return trainer, lambda batch: trainer.get_batch_loss_metrics(trainer.model, batch)[0]


def in_order(trainer):
    """Returns the trainer's batch of all pairs, in the order of the records."""
    rows = [trainer.train_dataset[n] for n in range(PAIRS)]
    return rows, trainer.data_collator(rows)


def unpair(trainer, pairs: list[dict]):
    """Returns KTO's batch of both sides of all pairs; the other answers are those of the pair before."""
    rows = [
        {"prompt_ids": pair["prompt"], "completion_ids": pair[side], "KL_completion_ids": pairs[n - 1][side],
         "label": side == "chosen"}
        for side in ("chosen", "rejected")
        for n, pair in enumerate(pairs)
    ]  # fmt: skip
    return rows, trainer.data_collator(rows)


def main() -> None:
    from safetensors.numpy import save_file

    FOLDER.mkdir(parents=True, exist_ok=True)
    make_model().save_pretrained(FOLDER)
    found: dict = {"cases": {}}
    for name, (_, kind, options) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer, compute = make_trainer(kind, options, folder)
            rows, batch = unpair(trainer, found["pairs"]) if kind == "KTO" else in_order(trainer)
            trainer.model.train()
            loss = compute(batch)
            loss.backward()
        metrics = {}
        if kind in ("DPO", "KTO"):
            metrics = {key: values[-1] for key, values in trainer._metrics["train"].items()}
        if kind == "DPO":
            found["pairs"] = [{side: row[f"{side}_ids"] for side in ("prompt", "chosen", "rejected")} for row in rows]
        if kind in ("CPO", "ORPO"):
            ids = [[row["chosen_input_ids"], row["rejected_input_ids"]] for row in rows]
            expected = [[p["prompt"] + p["chosen"], p["prompt"] + p["rejected"]] for p in found["pairs"]]
            assert ids == expected, (name, ids, expected)
        found["cases"][name] = {"loss": float(loss)} | {
            k: float(v) for k, v in metrics.items() if "/" in k or k == "kl"
        }
        gradients = {key: p.grad.numpy().astype(np.float32) for key, p in trainer.model.named_parameters()}
        save_file(gradients, FOLDER / f"{name}.gradients")
        print(name, found["cases"][name])
    (FOLDER / "pairs.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
