"""Keys that earlier versions had: a config.json may have them, as long as they change nothing."""

import json

import pytest

from shardformer.config import Config, parse_config
from shardformer.config.old_files import REMOVED
from shardformer.config.parsing import parse_overrides
from shardformer.errors import RunError, UsageError

DEFAULTS = {"ema_names": "*", "skip_limit": 5, "rollbacks": 3}
RUN = Config.of(vocab=61, ema=0.9, skip_steps=6.0)


def text_with(config: Config, **keys) -> str:
    return json.dumps(json.loads(config.to_json()) | keys)


def test_every_removed_key_has_its_default_here():
    assert DEFAULTS.keys() == REMOVED.keys()


def test_defaults_of_removed_keys_are_accepted():
    assert parse_config(text_with(RUN, **DEFAULTS), "config.json") == RUN


@pytest.mark.parametrize(("name", "value"), [("ema_names", "embed"), ("skip_limit", 2), ("rollbacks", 0)])
def test_removed_key_with_an_effect_is_rejected(name, value):
    with pytest.raises(RunError, match=f"run/config.json has {name}={value}, and this key was removed: .* 0.1.0"):
        parse_config(text_with(RUN, **{name: value}), "run/config.json")
    off = RUN.replace(ema=0.0, skip_steps=0.0)
    assert parse_config(text_with(off, **{name: value}), "config.json") == off


@pytest.mark.parametrize("name", REMOVED)
def test_removed_key_of_a_command_says_so(name):
    with pytest.raises(UsageError, match=f"^{name} was removed: "):
        parse_overrides([f"{name}=1"], Config)


@pytest.mark.parametrize(("old", "new"), [(True, "full"), (False, "none"), ("true", "full"), ("false", "none")])
def test_old_values_of_remat_keep_their_meaning(old, new):
    assert parse_config(text_with(RUN, remat=old), "config.json") == RUN.replace(remat=new)


@pytest.mark.parametrize(("old", "new"), [(True, None), (False, 1.0)])
def test_old_values_of_embed_scale_keep_their_meaning(old, new):
    assert parse_config(text_with(RUN, embed_scale=old), "config.json") == RUN.replace(embed_scale=new)


def test_old_name_of_the_order_is_read():
    stored = json.loads(RUN.to_json())
    stored["windows"] = stored.pop("order")
    assert parse_config(json.dumps(stored), "config.json") == RUN
