"""The tuned model of the README's walk in transformers, where it is installed (pip install transformers torch)."""

import numpy as np
import pytest

from shardformer.run import Run
from tests.data.chat.walk import record, walk

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


def test_transformers_takes_the_tuned_model(tmp_path, monkeypatch):
    assert walk(monkeypatch, tmp_path) == [0] * 5
    tokenizer = transformers.AutoTokenizer.from_pretrained("tuned")
    model = transformers.AutoModelForCausalLM.from_pretrained("tuned").eval()
    messages = record(3)["messages"]
    ids = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    reply = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id)
    assert np.isfinite(model(ids).logits.detach().numpy()).all()
    assert Run.open("checkpoints/chat").vocabulary.decode(ids[0]) == tokenizer.decode(ids[0])
    assert reply.shape[1] > ids.shape[1]
