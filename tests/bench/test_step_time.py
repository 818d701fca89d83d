"""What the benches measure is what was asked for, and what they cannot compare is refused."""

import math
import re

import pytest

from shardformer.bench import command_line, costs, reference, step_time
from shardformer.errors import UsageError
from shardformer.training.step import Trainer
from tests import shared


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"optimizer": "muon"}, "optimizer=adamw"),
        ({"ema": 0.9}, "ema=0"),
        ({"lr_rules": "bias=2x"}, "lr_rules="),
        ({"lora_rank": 2}, "lora_rank=0"),
        ({"accum": 2}, "accum=1"),
        ({"dropout": 0.1, "positions": "t5"}, "dropout=0 positions=rotary"),
        ({"embed_bias": True}, "embed_bias=false"),
    ],
)
def test_what_a_plain_step_does_not_know_is_refused_with_what_it_knows(changes, fix):
    with pytest.raises(UsageError, match=f"give {fix}$"):
        reference.check(shared.tiny(**changes))


def test_a_mesh_and_zero_are_what_ours_is_measured_with():
    reference.check(shared.tiny(mesh="4x2", zero=3, remat="full", scan=False))


@pytest.mark.parametrize(("mode", "used"), [("scan", {"compiled_step"}), ("multisteps", {"_part"}),
                                            ("manual", {"_add_part", "_finish"})])  # fmt: skip
def test_a_step_is_measured_in_the_way_that_was_asked_for(mode, used, monkeypatch):
    calls = set()

    class Watched(Trainer):
        def __init__(self, *args):
            super().__init__(*args)
            for name in ("compiled_step", "_part", "_add_part", "_finish"):
                setattr(self, name, watched(name, getattr(self, name)))

    def watched(name, compiled):
        def call(*args):
            calls.add(name)
            return compiled(*args)

        call.lower = compiled.lower
        return call

    monkeypatch.setattr(step_time, "Trainer", Watched)
    settings = shared.tiny(mesh="1x1", accum=2, accum_mode=mode)
    ours = step_time.ours(settings, step_time.make_batch(settings), mode)
    assert not calls
    assert math.isfinite(ours.run(1))
    assert calls == used
    assert len(ours.programs) == len(used)


@pytest.mark.parametrize(
    ("batch", "parts", "told"), [(16, 16, "16 x 16"), (12, 16, "64 x 16"), (12, 48, "192 x 16"), (12, 4, "12 x 16")]
)
def test_a_batch_that_does_not_divide_is_replaced_and_told_of(batch, parts, told):
    base = shared.tiny(mesh="1x1", batch=batch)
    settings = costs.with_batch(base, parts)
    assert settings.batch % parts == 0
    why = "" if settings.batch == batch else " (batch=12 does not divide into the parts)"
    assert costs.title(step_time.Measuring(preset="tiny"), settings, base) == f"tiny: {told} tokens a step{why}"


def test_bench_zero_tells_what_a_step_takes_beside_the_state(capsys):
    command_line.main(["zero", "preset=tiny", "mesh=4x1", "layers=6", "d_model=128", "seq=4", "batch=4"])
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("tiny: 4 x 4 tokens a step, of one device")
    at = re.split(r"\s{2,}", header).index("peak temporary MB")
    temporary = [float(row.split()[at]) for row in rows]
    assert len(temporary) == 3
    assert temporary[2] < temporary[1] < temporary[0]
