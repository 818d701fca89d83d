"""The tuned model of the README's walk in transformers, where it is installed (pip install transformers torch)."""

import numpy as np
import pytest

from shardformer.training.run_folder import Run
from tests.data.chat.walk import record, walk

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


def test_transformers_takes_the_tuned_model(tmp_path, monkeypatch):
    assert walk(monkeypatch, tmp_path) == [0] * 5
    tokenizer = transformers.AutoTokenizer.from_pretrained("tuned")
    model = transformers.AutoModelForCausalLM.from_pretrained("tuned").eval()
    messages = record(3)["messages"]
    ids = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    reply = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert np.isfinite(model(ids).logits.detach().numpy()).all()
    assert Run.open("checkpoints/chat").vocabulary.decode(ids[0]) == tokenizer.decode(ids[0])
    assert reply.shape[1] > ids.shape[1]
    assert count_tokens(model, ids) == 3
    model.generation_config.eos_token_id = 0  # the negative twin
    assert count_tokens(model, ids) == 8


def count_tokens(model, ids) -> int:
    """Returns how many tokens are generated if the third one is the end of turn."""
    end = transformers.AutoTokenizer.from_pretrained("tuned").convert_tokens_to_ids("<|im_end|>")

    def force(tokens, scores):
        if tokens.shape[1] == ids.shape[1] + 2:
            scores[:, end] = 1e9
        return scores

    reply = model.generate(ids, max_new_tokens=8, do_sample=False, suppress_tokens=[0, 2], logits_processor=[force])
    return reply.shape[1] - ids.shape[1]
