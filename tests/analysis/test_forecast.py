"""The forecast of a step's speed against published and compiled steps of large models, which it is fitted on."""

import math

import pytest

from shardformer.__main__ import main
from shardformer.analysis import plan, roofline
from shardformer.bench.compiled_schedule import ROWS, read_config
from shardformer.devices.chips import parse_slice

LLAMA = (
    "tiny block=sequential dtype=bfloat16 grad_dtype=bfloat16 norm=rmsnorm bias=none activation=swiglu tied=false "
    "dropout=0 zero=3 "
)
OF_7B = LLAMA + "layers=32 d_model=4096 heads=32 d_ff=11008 vocab=32000 seq=4096 "
OF_8B = LLAMA + "layers=32 d_model=4096 heads=32 kv_heads=8 d_ff=14336 vocab=128256 seq=8192 "
OF_70B = LLAMA + "layers=80 d_model=8192 heads=64 kv_heads=8 d_ff=28672 "
MIXTRAL = (
    LLAMA
    + "layers=32 d_model=4096 heads=32 kv_heads=8 d_ff=14336 vocab=32000 experts=8 experts_per_token=2 remat=full "
)
COMPILED = {"v5e": 0.642, "v4": 0.603, "v5p": 0.675, "7B": 0.639, "1.3B": 0.493, "125M": 0.279}
# (chip, settings, MFU). The batch and remat of the last column's source, where it states them, else as is usual.
PUBLISHED = {
    "MaxText 22B": ("v4:4x4x4", LLAMA + "layers=48 d_model=6144 heads=24 d_ff=24576 vocab=32000 seq=2048 remat=full "
                    "mesh=64x1 batch=832", 0.567),
    "MaxText 52B": ("v4:4x4x8", LLAMA + "layers=32 d_model=12288 heads=32 d_ff=49152 vocab=32000 seq=2048 remat=full "
                    "mesh=128x1 batch=896", 0.589),
    "MaxText Llama-2-70B": ("v5p:4x8x8", OF_70B + "vocab=32000 seq=4096 mesh=256x1 remat=dots batch=1024", 0.654),
    "tpu-recipes Llama-3.1-8B": ("v6e:8x8", OF_8B + "mesh=64x1 remat=full batch=256", 0.457),
    "tpu-recipes Llama-3.1-70B": ("tpu7x:4x4x4", OF_70B + "vocab=128256 seq=8192 mesh=128x1 remat=full batch=256",
                                  0.523),
    "MaxText Llama-2-7B": ("h100:8", OF_7B + "mesh=8x1 remat=dots batch=32", 0.497),
    "torchtitan Llama-3-8B, 6,667 tok/s": ("h100:8", OF_8B + "mesh=8x1 remat=dots batch=8", 0.347),
    "NGC 70B": ("h100:128", OF_70B + "vocab=128256 seq=8192 mesh=128x1 remat=full batch=128", 0.512),
    "1.3B, 45 to 50% is usual": ("a100:8", "tiny block=sequential dtype=bfloat16 vocab=50304 positions=learned "
                                 "bias=none tied=true layers=24 d_model=2048 heads=32 seq=2048 mesh=8x1 zero=1 "
                                 "remat=dots batch=64", 0.475),
    "MaxText Mixtral": ("v5p:4x4x4", MIXTRAL + "seq=4096 mesh=64x1 batch=512", 0.526),
    "GPT-2 124M on an H200, scanned": ("h200:1", "gpt1 layers=12 d_model=768 heads=12 seq=1024 batch=16 remat=none "
                                       "vocab=50304 positions=learned bias=none tied=true dtype=bfloat16 mesh=1x1",
                                       0.317),  # scripts/accelerator_check.sh's, of jax 0.11.2
    "Mixtral, compiled": ("v5p:4x4x4", MIXTRAL + "seq=4096 mesh=64x1 batch=256", 0.418),
    "tpu-recipes Mixtral": ("v6e:16x16", MIXTRAL + "seq=1024 mesh=256x1 batch=8192", 0.352),
}  # fmt: skip
STEPS = {f"compiled {name}": (*ROWS[name], share) for name, share in COMPILED.items()} | PUBLISHED


def forecast_error(name: str) -> float:
    """Returns the logarithm of the forecast over the published MFU."""
    chip, settings, share = STEPS[name]
    return math.log(plan.estimate(read_config(settings), parse_slice(chip)).utilization / share)


@pytest.mark.parametrize(
    "name", ["compiled v4", "MaxText Llama-2-7B", "MaxText Mixtral", "GPT-2 124M on an H200, scanned"]
)
def test_forecast_is_near_what_was_measured(name):
    assert abs(forecast_error(name)) < 2 * roofline.FORECAST_ERROR


@pytest.mark.slow
def test_typical_error_is_the_one_that_is_printed():
    errors = {name: forecast_error(name) for name in STEPS}
    assert math.sqrt(sum(error**2 for error in errors.values()) / len(errors)) == pytest.approx(
        roofline.FORECAST_ERROR, abs=0.01
    ), errors


def test_bound_alone_is_no_forecast(broken):
    """The negative twin: at the chip's peak rates every step is much faster than measured."""
    broken(roofline, "forecast_seconds", lambda times, *_: times.seconds)
    assert forecast_error("compiled v4") > 2 * roofline.FORECAST_ERROR


@pytest.mark.parametrize("compute", [1.0, 1e-3])
def test_forecast_is_above_the_bound(compute):
    chips = parse_slice("v5e:2x2")
    times = roofline.Roofline(compute, 0.2, 0.1, 0.05, 0.01)
    assert roofline.forecast_seconds(times, read_config("tiny"), chips) >= times.seconds


def test_command_prints_the_forecast_with_its_error(capsys):
    assert main(["plan", "tiny", "chip=h100:8", "compiler=none", "vocab=64", "batch=64", "tokens=1e9"]) == 0
    printed = capsys.readouterr().out
    assert "forecast: " in printed
    assert printed.count(f"typical error {roofline.FORECAST_ERROR:.0%}, against published steps") == 2
    assert "100% MFU" not in printed
