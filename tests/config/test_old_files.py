"""Keys that earlier versions had: a config.json may have them, as long as they change nothing."""

import json

import pytest

from shardformer.config import Config, parse_config
from shardformer.config.old_files import REMOVED
from shardformer.config.parsing import parse_overrides
from shardformer.errors import RunError, UsageError

DEFAULTS = {
    "ema_names": "*", "skip_limit": 5, "rollbacks": 3, "skip_window": 128, "t5_buckets": 32, "embed_split": "vocab",
    "long_conversations": "drop", "json_as_text": False, "pack": True, "mask_documents": False,
    "lora_rank_pattern": "", "lora_alpha_pattern": "", "norm_plus_one": False,
    "embed_bias": False, "embed_norm": False, "from_step": 0, "eval_include": "",
    "eval_tokens": 64, "score_every": None, "heartbeat": 60,
}  # fmt: skip
RUN = Config.of(vocab=61, ema=0.9, skip_steps=6.0, positions="t5")


def text_with(config: Config, **keys) -> str:
    return json.dumps(json.loads(config.to_json()) | keys)


def test_every_removed_key_has_its_default_here():
    assert DEFAULTS.keys() == REMOVED.keys()


def test_defaults_of_removed_keys_are_accepted():
    assert parse_config(text_with(RUN, **DEFAULTS), "config.json") == RUN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ema_names", "embed"),
        ("skip_limit", 2),
        ("rollbacks", 0),
        ("skip_window", 64),
        ("t5_buckets", 8),
    ],
)
def test_removed_key_with_an_effect_is_rejected(name, value):
    with pytest.raises(RunError, match=f"run/config.json has {name}={value}, and this key was removed: .* 0.1.0"):
        parse_config(text_with(RUN, **{name: value}), "run/config.json")
    off = RUN.replace(ema=0.0, skip_steps=0.0, positions="alibi")
    assert parse_config(text_with(off, **{name: value}), "config.json") == off


def test_run_on_the_characters_of_json_is_rejected():
    with pytest.raises(RunError, match=r"has json_as_text=True, and this key was removed: .* 0\.1\.0"):
        parse_config(text_with(RUN, json_as_text=True), "config.json")


@pytest.mark.parametrize("name", REMOVED)
def test_removed_key_of_a_command_says_so(name):
    with pytest.raises(UsageError, match=f"^{name} was removed: "):
        parse_overrides([f"{name}=1"], Config)


@pytest.mark.parametrize(("old", "new"), [(True, "full"), (False, "none"), ("true", "full"), ("false", "none")])
def test_old_values_of_remat_keep_their_meaning(old, new):
    assert parse_config(text_with(RUN, remat=old), "config.json") == RUN.replace(remat=new)


@pytest.mark.parametrize(
    ("pack", "mask_documents", "documents"),
    [(True, False, "packed"), (True, True, "masked"), (False, False, "padded"), (False, True, "padded")],
)
def test_old_keys_of_documents_are_joined(pack, mask_documents, documents):
    stored = json.loads(RUN.to_json())
    del stored["documents"]
    text = json.dumps(stored | {"pack": pack, "mask_documents": mask_documents})
    assert parse_config(text, "config.json") == RUN.replace(documents=documents)


def test_old_patterns_of_adapters_join_the_targets():
    run = RUN.replace(lora_rank=8, lora_targets="q,v:4,o:8:2.5,down:2:32.0")
    stored = json.loads(run.to_json()) | {"lora_targets": "q,v,o,down"}
    stored |= {"lora_rank_pattern": "v=4,down=2", "lora_alpha_pattern": "down=32,o=2.5"}
    assert parse_config(json.dumps(stored), "config.json").lora.adapters == run.lora.adapters


@pytest.mark.parametrize("embed", ["bias", "norm"])
def test_old_keys_of_the_embedding_are_values_of_one(embed):
    run = RUN.replace(embed=embed, norm="rmsnorm_plus_one")
    stored = json.loads(run.to_json()) | {"norm": "rmsnorm", "norm_plus_one": True, f"embed_{embed}": True}
    del stored["embed"]
    assert parse_config(json.dumps(stored), "config.json") == run
    for together in ({"embed_bias": True, "embed_norm": True}, {"norm": "layernorm"}):
        with pytest.raises(RunError, match=r"this key was removed: .* 0\.1\.0"):
            parse_config(json.dumps(stored | together), "config.json")


def test_old_step_of_a_base_joins_its_path():
    stored = json.loads(RUN.to_json()) | {"base": "runs/a", "from_step": 12}
    training = parse_config(json.dumps(stored), "config.json").training
    assert (training.base, training.base_run, training.base_step) == ("runs/a/step_00000012", "runs/a", 12)


@pytest.mark.parametrize(("old", "new"), [(True, None), (False, 1.0)])
def test_old_values_of_embed_scale_keep_their_meaning(old, new):
    assert parse_config(text_with(RUN, embed_scale=old), "config.json") == RUN.replace(embed_scale=new)


def test_old_name_of_the_order_is_read():
    stored = json.loads(RUN.to_json())
    stored["windows"] = stored.pop("order")
    assert parse_config(json.dumps(stored), "config.json") == RUN
