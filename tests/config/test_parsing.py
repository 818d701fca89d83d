"""Arguments of a command as typed values, and the messages for invalid ones."""

import re

import pytest

from shardformer.config import FIELDS, Config, parsing
from shardformer.errors import UsageError


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("lr=3e-4", 3e-4), ("lr=1", 1.0), ("steps=1_000", 1000), ("steps=1e3", 1000), ("lr=1_0.5", 10.5),
        ("seed=2147483647", 2**31 - 1),
        ("scan=true", True), ("scan=False", False), ("scan=1", True), ("scan=0", False),
        ("mesh=4x2", "4x2"), ("data=a=b.txt", "a=b.txt"), ("out=", ""),
    ],
)  # fmt: skip
def test_values_have_their_field_s_type(word, value):
    (parsed,) = parsing.parse_overrides([word], Config).values()
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layer=3"], "unknown key 'layer'; did you mean 'layers'?"),
        (["n_embd=3"], "unknown key 'n_embd'; did you mean 'd_model'?"),
        (["--num-layers", "3"], "expected key=value, got '--num-layers'; write layers=..."),
        (["tp=2"], "unknown key 'tp'; give the mesh, data x tensor parallel: mesh=4x2, or its axes by name"),
        (["batchsize=3"], "did you mean 'batch'?"),
        (["--layers", "3"], "expected key=value, got '--layers'; write layers=..."),
        (["nonsense"], "expected key=value, got 'nonsense'"),
        (["lr=1", "lr=2"], "lr is given twice: 1.0 and '2'"),
        (["layers=two"], "layers takes a whole number, got 'two'"),
        (["layers=2.5"], "layers takes a whole number, got '2.5'"),
        (["layers=inf"], "layers takes a whole number"),
        (["lr="], "lr takes a number, got ''"),
        *(([f"layers={text}"], f"layers takes a whole number, got {text!r}")
          for text in ("1__0", "_1", "1_", "\uff11", "1e\u0663")),
        *(([f"lr={text}"], f"lr takes a number, got {text!r}") for text in ("1__0", "_1", "0.1_", "\u0663")),
        (["scan=yes"], "scan takes true or false or auto, got 'yes'"),
    ],
)  # fmt: skip
def test_wrong_words(words, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parsing.parse_overrides(words, Config)


def test_names_of_other_trainers_stand_for_keys():
    keys = {*FIELDS, "tokens"}  # tokens: of sample
    assert set(parsing.OTHER_NAMES.values()) <= keys
    assert not keys & {*parsing.OTHER_NAMES, *parsing.AXIS_NAMES}


def test_top_k_of_experts_is_not_mistaken_for_rollouts():
    """Trainers of experts call experts_per_token so, and others the tokens that answers are drawn from."""
    with pytest.raises(UsageError, match=r"unknown key 'top_k'; see COMMAND --help$"):
        parsing.parse_overrides(["top_k=2"], Config)
    with pytest.raises(UsageError, match="did you mean 'rollout_top_p'"):
        parsing.parse_overrides(["top_p=0.9"], Config)
