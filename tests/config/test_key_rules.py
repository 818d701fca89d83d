"""Values that a configuration rejects; each message names a fix that works."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardformer.config import FIELDS, Config, parsing, preset
from shardformer.errors import UsageError

CHOICES = {name: values for name, field in FIELDS.items() if (values := parsing.choices(field))}
GRPO = {"objective": "grpo", "batch": 16}
LBFGS = {"optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0}
LATENT = {"kv_latent": 16, "rotary_dims": 4, "bias": "none"}
NUMBERS = [name for name, field in FIELDS.items() if parsing.plain_type(field.type) is float]


@pytest.mark.parametrize(
    "text",
    [
        "4",
        "4x",
        "x2",
        "0x8",
        "4x0",
        "4x2x",
        "4x2x0",
        "4x2x1x1",
        "-4x2",
        "4 x 2",
        "axb",
        "",
        "1x" + 5000 * "9",
        "\u0664x2",
        "dp2.cp2.dp2",
        "cp2.",
        "dp2xcp2",
        "cp0",
        "tp2",
    ],
)
def test_malformed_mesh(text):
    words = (
        "mesh takes AxB (dp x mp, such as 4x2), AxBxC (and pp stages of a pipeline, such as 2x2x2), axes by name "
        "(such as dp2.cp2.mp2, where cp splits the context) or auto, got "
    )
    with pytest.raises(UsageError, match=re.escape(words + parsing.shorten(text))):
        Config.of(mesh=text)


def or_code(name: str) -> str:
    return ", or FILE.py:NAME" if FIELDS[name].metadata["takes_code"] else ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: wrong}, f"{name} is one of {', '.join(map(str, some))}{or_code(name)}; got {wrong!r}")
            for name, some in CHOICES.items()
            for wrong in [type(some[0])(7)]
        ),
        ({"ema": 0.99999}, "too close to 1 for float32; give at most 0.9999"),
        ({"batch": 8, "accum": 3}, "batch=8 does not divide into accum=3 microbatches; try batch=9"),
        ({"lora_rank": 2, "lora_alpha": 0.0}, "lora_alpha=0 would switch the adapters off; try lora_alpha=16"),
        ({"ema": 1.0}, "ema is the decay of an average, in [0, 1), got 1.0"),
        ({"beta2": 1 - 1e-8}, "beta2=0.99999999 is too close to 1 for float32; give at most 0.999999"),
        ({"lora_rank": 2, "lora_targets": "q,w"}, "lora_targets takes some of q,k,v,o,up,down, got 'q,w'"),
        ({"lora_rank": 2, "lora_targets": "q,q"}, "lora_targets takes each matrix once, got 'q,q'"),
        ({"lora_rank": 2, "lora_dropout": 1.0}, "lora_dropout is a probability below 1, got 1.0"),
        ({"lora_rank": 2, "lora_targets": "q:1.5"}, "lora_targets takes MATRIX, MATRIX:RANK or MATRIX:RANK:ALPHA with"),
        ({"lora_rank": 2, "lora_targets": "v,q=3"}, "lora_targets takes some of q,k,v,o,up,down, got 'v,q=3'"),
        ({"lora_rank": 2, "lora_targets": "v,q:3:0"}, "separated by commas, such as q,v:4,down:16:32; got 'q:3:0'"),
        ({"lora_rank": 2, "lora_targets": "q:3:4:5"}, "separated by commas, such as q,v:4,down:16:32; got 'q:3:4:5'"),
        (
            {"layers": 2000, "scan": False},
            "scan=false compiles every layer by itself, at most 1,000 of them, got layers=2000; give scan=true",
        ),
        ({"layers": 2_000_000_000}, "layers must be below 100001, got 2000000000"),
        ({"grad_metrics": True, "zero": 3}, "grad_metrics=true needs zero below 3"),
        ({"grad_metrics": True, "batch": 1}, "needs 2 or more in a batch"),
        ({"mesh": "4x1", "accum": 2}, "batch=12 does not divide over dp * accum = 8 (mesh=4x1, accum=2); try batch=16"),
        (
            {"mesh": "2x2x3", "layers": 4},
            "layers=4 do not divide over pp=3 stages (mesh=2x2x3); try mesh=2x2x2",
        ),
        (
            {"mesh": "1x2x2", "layers": 6, "accum": 2, "pipeline_rounds": 2},
            "layers=6 do not divide over pp=2 stages (mesh=1x2x2) in pipeline_rounds=2; try pipeline_rounds=1",
        ),
        ({"mesh": "1x1x4"}, "accum=1 microbatches do not divide over pp=4 stages (mesh=1x1x4); try accum=4"),
        ({"mesh": "1x1x2", "accum": 3}, "accum=3 microbatches do not divide over pp=2 stages (mesh=1x1x2); try acc"),
        ({"mesh": "1x1x2", "accum": 2, "accum_mode": "manual"}, "give accum_mode=scan, grad_metrics=false and an opt"),
        ({"mesh": "2x1x2", "accum": 2, "grad_metrics": True}, "optimizer other than lbfgs, or mesh=4x1"),
        ({"mesh": "1x1x2", "accum": 1, "optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0}, "or mesh=2x1"),
        ({"mesh": "1x4", "sequence_parallel": True, "seq": 62},
         "sequence_parallel=true splits seq=62 over mp=4 (mesh=1x4), which does not divide it; try seq=64"),
        ({"block": "parallell"}, "did you mean 'parallel'?"),
        *(
            ({name: 0}, f"{name} must be at least 1, got 0")
            for name in ("layers", "d_model", "heads", "seq", "vocab_multiple", "pipeline_rounds",
                         "batch", "steps", "log_every", "eval_every", "keep", "start_timeout")
        ),
        *(
            ({name: -1}, f"{name} must not be negative, got -1")
            for name in ("vocab", "seed", "epochs", "z_loss", "lr", "lr_min", "warmup", "weight_decay", "clip", "accum",
                         "lora_rank", "lora_alpha", "save_every", "save_minutes", "keep_every", "processes",
                         "process_id")
        ),
        *(
            ({name: -1}, f"{name} must be at least 1, or {none}, got -1")
            for name, none in {"kv_heads": "auto", "d_ff": "auto", "rotary_dims": "auto", "decay_steps": "auto",
                               "head_dim": "auto", "embed_dim": "auto", "loss_chunk": "auto",
                               "eval_batches": "all"}.items()
        ),
        *(({name: -1}, f"{name} must not be negative, or {none}, got -1") for name, none in
          {"init_std": "fan_in", "attention_scale": "auto", "logits_cap": "none", "embed_scale": "sqrt",
           "quantize_after": "auto"}.items()),
        *(({name: -1}, f"{name} must not be negative, got -1") for name in ("residual_scale", "logits_scale")),
        ({"previous_tokens": -1}, "previous_tokens must not be negative, got -1"),
        ({"previous_tokens": 16, "seq": 16}, "previous_tokens=16 reaches beyond seq=16; give at most 15"),
        *(({name: 0}, f"{name} must be above 0, got 0") for name in ("residual_scale", "logits_scale")),
        ({"embed_scale": 0.0}, "embed_scale must be above 0, or sqrt, got 0.0"),
        ({"qk_norm": "rotated_plain", "positions": "none"}, "rotated_plain is of queries and keys that rotate, got"),
        ({"norm": "plain_layernorm"}, "norm=plain_layernorm has no parameters, got bias=ff; give bias=none"),
        ({"rotary_scaling": "longrope:64,1.2,1,2,3"}, "longrope:OLD_SEQ,ATTENTION,SHORT,...,LONG,..., such as"),
        ({"rotary_scaling": "longrope:64,1.2,1,2"}, "rotary_scaling=longrope:64,1.2,1,2 must have 32 numbers after"),
        *(({name: float("nan")}, f"{name} must be a finite number, got nan") for name in NUMBERS),
        *(({name: float("inf")}, f"{name} must be a finite number, got inf") for name in NUMBERS),
        ({"seed": 2**31}, "seed must be below 2**31, got 2147483648"),
        ({"layers": 10**20}, "layers must be below 2**31"),
        ({"lr": 10**400}, "lr must be a finite number, got 1000"),
        ({"remat": "some"}, "remat is one of none, attention, dots, full; got 'some'"),
        ({"attention": "block"}, "attention is one of auto, plain, blocks, fused; got 'block'; did you mean 'blocks'?"),
        ({"attention": "fused", "dropout": 0.1}, "attention=fused has no kernel with dropout=0.1; give attention=auto"),
        ({"attention": "fused", "positions": "t5"}, "attention=fused has no kernel with positions=t5; give"),
        ({"attention": "fused", "positions": "alibi"}, "attention=fused has no kernel with positions=alibi; give"),
        ({"lr": 1e300}, "lr must be below 3.4e+38, the largest of float32, got 1e+300"),
        ({"norm_eps": 10**30}, "norm_eps must be below 2**31, or written as 1e10, got 1000"),
        ({"data": "a\0b"}, r"data has a character that no path may have, got 'a\x00b'"),
        ({"out": "\ud800"}, r"out has a character that no path may have, got '\ud800'"),
        *(({"data": path}, f"data={path} is a device or a pipe") for path in ("/dev/zero", "/dev/null")),
        ({"dropout": 1.0}, "dropout is a probability below 1, got 1.0"),
        ({"dropout": -0.1}, "dropout is a probability below 1, got -0.1"),
        ({"beta1": 1.0}, "beta1 is the decay of an average, in [0, 1), got 1.0"),
        ({"beta2": -0.5}, "beta2 is the decay of an average, in [0, 1), got -0.5"),
        ({"momentum": 1.0, "optimizer": "muon"}, "momentum is the decay of an average, in [0, 1), got 1.0"),
        ({"layers": "2"}, "layers takes int, got '2'"),
        ({"layers": True}, "layers takes int, got True"),
        ({"scan": 1}, "scan takes bool, got 1"),
        ({"heads": 5}, "d_model=128 does not divide into heads=5; try heads=4"),
        ({"rotary_dims": 3}, "rotary_dims=3 must be even and at most the head size 32; "
                             "try rotary_dims=2"),
        ({"rotary_dims": 64}, "try rotary_dims=32"),
        ({"heads": 128}, "try positions=learned"),
        ({"rotary_scaling": "yarn:4,1,32,64"}, "yarn:FACTOR,LOW,HIGH,OLD_SEQ,ATTENTION or yarn_untruncated:FACTOR,"),
        ({"rotary_scaling": "yarn:4,32,1,64,1.1"}, "rotary_scaling=yarn:4,32,1,64,1.1: LOW must be at most HIGH"),
        ({"rotary_scaling": "llama3:8,4,3,64"}, "rotary_scaling=llama3:8,4,3,64: LOW must be at most HIGH"),
        *(({"rotary_scaling": "longrope:64,1,1,1", "head_dim": 2, "window": 8} | changes,
           "rotary_scaling=longrope:64,1,1,1 has the same frequencies in all layers; give no window_rotary_theta")
          for changes in ({"window_rotary_theta": 100.0}, {"window_pattern": "wn"})),
        ({"head_dim": 5}, "rotary_dims=5 must be even and at most the head size 5; try rotary_dims=4"),
        ({"head_dim": 5000}, "the head size 5000 must be at most 4096; give a smaller head_dim, or more heads"),
        ({"lora_rank": 2, "lora_targets": "gate", "activation": "silu"}, "lora_targets takes some of q,k,v,o,up,down"),
        *(
            (changes, "several processes take coordinator=HOST:PORT of process 0 (port 1 to 65535), processes=N")
            for changes in ({"processes": 2}, {"process_id": 1}, {"coordinator": "host:1"},
                            {"coordinator": "host", "processes": 2}, {"coordinator": ":1", "processes": 2},
                            {"coordinator": "host:99999", "processes": 2}, {"coordinator": "host:0", "processes": 2},
                            {"coordinator": "host:1", "processes": 2, "process_id": 2})
        ),
        ({"mesh": "5x1"}, "batch=12 does not divide over dp=5 (mesh=5x1); try batch=15"),
        ({"mesh": "2x8"}, "heads=4 does not divide over mp=8 (mesh=2x8); try mesh=2x4"),
        ({"mesh": "2x3x2", "heads": 8, "accum": 2}, "heads=8 does not divide over mp=3 (mesh=2x3x2); try mesh=2x2x2"),
        ({"tokenizer": ""}, "tokenizer is empty; give chars, bytes, bpe:N, ids, auto or the path of a tokenizer.json"),
        ({"mesh": "2x4", "d_ff": 6}, "feed-forward width=6 does not divide over mp=4 (mesh=2x4); try mesh=2x2"),
        ({"mesh": "1x3", "heads": 3, "d_model": 96}, "set vocab_multiple=3"),
        ({"order": "file", "documents": "padded"}, "order=file reads rows as they are stored; give documents=p"),
        *(({"tokenizer": f"bpe:{size}"}, "tokenizer=bpe:N takes N from 257 (all bytes and one more) to")
          for size in ("256", "many", "-300", 10**9)),
        ({"batch": 2**20, "seq": 2**12}, "is 4294967296 tokens a step, which must be below 2**31; try batch=524287"),
        ({"profile": "90:95", "steps": 80}, "profile=90:95 begins after the last step, steps=80"),
        ({"quantize_aware": "int8", "lora_rank": 2}, "quantize_aware=int8 trains all weights, got weights=float lora"),
        ({"quantize_aware": "int8", "offload": "optimizer"}, "quantize_aware=int8 has masters of its own"),
        ({"quantize_aware": "nf4", "quantize_after": 9, "steps": 8}, "quantize_after=9 is after the last step"),
        ({"param_dtype": "bfloat16"}, "the type that they multiply in: give dtype=bfloat16; got dtype=float32"),
        ({"scale": "completep:64x2", "experts": 4, "bias": "none"}, "has no rule for experts=4"),
        ({"scale": "completep:64x2", "embed_dim": 16}, "has no rule for embed_dim=16"),
        ({"scale": "completep:64x2", "block": "sequential_sum_norms"}, "no rule for block=sequential_sum_norms"),
        (LATENT | {"scale": "completep:64x2"}, "has no rule for kv_latent=16"),
        ({"scale": "completep:64x2"} | LBFGS, "needs optimizer=adamw, muon or normuon, whose updates have known"),
        *(({"scale": text}, "scale takes completep:WIDTHxLAYERS, the size for which lr was tuned, such as")
          for text in ("mup", "completep:64", "completep:0x2", "completep:64x2x2")),
        ({"optimizer": "muon", "lora_rank": 2}, "lora_rank trains adapters; give optimizer=adamw"),
        ({"skip_steps": 3.0, "accum": 2, "accum_mode": "multisteps"}, "updates by microbatches; give accum_mode=scan"),
        ({"objective": "dpo", "beta": 0.0}, "beta must be above 0, got 0.0"),
        ({"objective": "grpo", "beta": -1.0}, "beta must be at least 0, got -1.0"),
        ({"clip_ratio": 1.0}, "clip_ratio is a distance from 1 in (0, 1), got 1.0"),
        *(({"objective": "grpo", name: 0}, f"{name} must be at least {least}, got 0") for name, least in
          {"group_size": 2, "answer_tokens": 1, "rollout_steps": 1}.items()),
        *(({"objective": "grpo", "rollout_top_p": value}, f"rollout_top_p must be in (0, 1], got {value}")
          for value in (0.0, 1.5)),
        ({"objective": "grpo", "rollout_top_k": -1}, "rollout_top_k must not be negative, got -1"),
        ({"objective": "grpo", "batch": 12}, "batch=12 answers do not divide into groups of group_size=8"),
        (GRPO | {"answer_tokens": 80, "seq": 64}, "answer_tokens=80 leave no room for a prompt"),
        (GRPO | {"dropout": 0.1}, "objective=grpo compares with a sampler that drops nothing"),
        (GRPO | {"documents": "masked"}, "objective=grpo has one prompt in a row, got documents=masked"),
        (GRPO | {"mesh": "1x1x2", "accum": 2}, "objective=grpo samples tokens one by one, for which all stages would"),
        ({"reward": "match"}, "reward does nothing with objective=lm; give objective=grpo"),
        ({"objective": "dpo", "label_smoothing": 0.5}, "label_smoothing is the probability of a wrong label, below"),
        ({"objective": "dpo", "accum": 2, "accum_mode": "manual"}, "objective=dpo finds the mean over all micro"),
        ({"objective": "kto", "documents": "masked"}, "objective=kto compares each pair with the answers of"),
        ({"objective": "distill"}, "objective=distill learns from a teacher; give the folder of its run or of Hugging"),
        ({"distill_weight": 1.5}, "distill_weight is a share, at most 1, got 1.5"),
        ({"distill_weight": -1.0}, "distill_weight must not be negative, got -1.0"),
        ({"distill_temperature": 0.0}, "distill_temperature must be above 0, got 0.0"),
        ({"objective": "distill", "teacher": "x", "mesh": "1x1x2", "accum": 2},
         "needs all layers of the teacher in each stage, which has room for some of them, got mesh=1x1x2"),
        ({"objective": "dpo", "order": "random"}, "objective=dpo reads complete pairs, whose prompts have no loss"),
        ({"skip_steps": 3.0, "save_every": 0, "keep_every": 0}, "got save_every=0 and keep_every=0, give save_every"),
        ({"optimizer": "lbfgs", "clip": 1.0, "weight_decay": 0.0},
         "give clip=0 weight_decay=0 accum=1; got clip=1.0 weight_decay=0.0 accum=1"),
        ({"heads": 4, "kv_heads": 3}, "heads=4 does not divide over kv_heads=3; try kv_heads=2"),
        ({"vocab": 2**31 - 1}, "vocab=2147483647 padded to vocab_multiple=8 must be below 2**31"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0, got 0.0"),
        *(({name: 0.0}, f"{name} must be above 0, or {none}, got 0.0") for name, none in
          {"init_std": "fan_in", "attention_scale": "auto", "attention_cap": "none", "logits_cap": "none"}.items()),
        ({"rotary_theta": 1.0}, "rotary_theta must be above 1, got 1.0"),
        ({"optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0, "lr_rules": "head=0.1x"},
         "lr_rules with optimizer=lbfgs can only freeze, as one line search finds one rate for all; got head=0.1x"),
        ({"optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0, "moment_dtype": "bfloat16"},
         "optimizer=lbfgs needs moment_dtype=float32; got moment_dtype=bfloat16"),
        ({"offload": "optimizer", "optimizer": "muon"},
         "but muon exchanges the matrices of all layers at once, lbfgs has products over all parameters, and bfloat16 "
         "moments are rounded by bits for all layers: give optimizer=adamw and moment_dtype=float32; got "),
        ({"offload": "optimizer", "ema": 0.9, "dtype": "bfloat16", "param_dtype": "bfloat16"},
         "ema=0.9 averages the float32 masters of param_dtype=bfloat16, which offload=optimizer moves to the host"),
        ({"offload": "optimizer", "accum": 2, "accum_mode": "multisteps"}, "give accum_mode=scan or manual"),
        ({"offload": "optimizer", "mesh": "1x1x2", "accum": 2},
         "the stages of mesh=1x1x2 have different layers; give offload=none or mesh=2x1"),
        ({"tracker": "module"}, "tracker takes wandb, mlflow, aim, tensorboard or module:function, got 'module'"),
        ({"decay": 0}, "decay must be at least 1, or auto, got 0"),
        *(({name: -1}, f"{name} must not be negative, got -1") for name in ("eval_limit", "skip_steps")),
        *(({name: -1}, f"{name} must not be negative, got -1")
          for name in ("label_smoothing", "reward_gap", "reward_center")),
        ({"sft_weight": -1.0}, "sft_weight must not be negative, or auto, got -1.0"),
        *(({name: -1}, f"{name} must not be negative, got -1")
          for name in ("experts", "dense_first", "shared_width", "balance_loss", "router_z_loss", "balance_rate")),
        ({"experts_per_token": 0}, "experts_per_token must be at least 1, got 0"),
        ({"experts": 4, "bias": "none", "router_scale": 0.0}, "router_scale must be above 0, got 0.0"),
        ({"expert_width": 0}, "expert_width must be at least 1, or auto, got 0"),
        ({"zero": "3"}, "zero is one of 0, 1, 3; got '3'; give 3 without quotes"),
        ({"experts": 10**9}, "experts must be below 100001, got 1000000000"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token=3 must be at most experts=2"),
        *(({name: 0}, f"{name} must be at least 1, got 0") for name in ("expert_groups", "groups_per_token")),
        *(({name: 0}, f"{name} must be at least 1, or none, got 0") for name in ("kv_latent", "q_latent")),
        ({"value_dim": 0}, "value_dim must be at least 1, or auto, got 0"),
        ({"experts": 6, "bias": "none", "expert_groups": 4},
         "experts=6 does not divide into expert_groups=4; try expert_groups=3"),
        ({"experts": 4, "bias": "none", "expert_groups": 4, "router": "sigmoid", "groups_per_token": 2},
         "router=sigmoid ranks a group by its best two experts, and expert_groups=4 have one each"),
        ({"experts": 8, "bias": "none", "expert_groups": 4, "experts_per_token": 3},
         "experts_per_token=3 must be in groups_per_token=1 of expert_groups=4 with 2 each; try groups_per_token=2"),
        ({"experts": 8, "bias": "none", "expert_groups": 4, "groups_per_token": 5}, "must be in groups_per_token=5 of"),
        ({"query_growth_tokens": 0}, "query_growth_tokens must be at least 1, or auto, got 0"),
        ({"query_growth": -0.1, "rotary_scaling": "yarn:4,1,32,12,1"}, "query_growth must not be negative, got -0.1"),
        *((keys | {"query_growth": 0.1}, "query_growth=0.1 counts the shorter context of rotary_scaling=yarn:... or")
          for keys in ({}, {"rotary_scaling": "linear:4"},
                       {"rotary_scaling": "yarn:4,1,32,12,1", "window": 5, "window_rotary_theta": 20.0})),
        (LATENT | {"rotary_dims": None},
         "give positions=rotary and rotary_dims below the head size 32; got positions=rotary rotary_dims=None"),
        (LATENT | {"positions": "learned"}, "kv_latent=16 needs keys of which a part rotates: give positions=rotary"),
        (LATENT | {"kv_heads": 2}, "kv_heads=2 is not computed with kv_latent=16; leave kv_heads out"),
        (LATENT | {"qk_norm": "head"}, "qk_norm=head is not computed with kv_latent=16; leave qk_norm out"),
        (LATENT | {"sinks": True}, "sinks=True is not computed with kv_latent=16; leave sinks out"),
        (LATENT | {"bias": "qkv"}, "bias=qkv has biases of q, k and v, which kv_latent=16 does not have"),
        (LATENT | {"lora_rank": 2}, "lora_targets takes some of q,o,up,down, got 'q,v'"),
        (LATENT | {"attention": "fused", "weights": "int4", "q_latent": 5}, "has an odd number of q_latent 5"),
        ({"experts": 4, "bias": "none", "expert_pattern": "ex"},
         "expert_pattern takes the letters e (experts) and d (dense), such as de; got expert_pattern=ex"),
        ({"experts": 4, "bias": "none", "layers": 2, "dense_first": 2}, "leave none of layers=2 with experts"),
        ({"experts": 4, "bias": "none", "dense_first": 1, "mesh": "1x1x2", "accum": 2},
         "all stages run one program, and stages of 2 layers (mesh=1x1x2) have experts in different layers with "
         "dense_first=1 expert_pattern=; give mesh=2x1"),
        ({"experts": 4, "bias": "none", "dense_first": 1, "d_ff": 6, "expert_width": 8, "mesh": "1x4"},
         "feed-forward width=6 does not divide over mp=4"),
        ({"experts": 4}, "bias=ff has biases in a dense feed-forward, and not in experts; give bias=none or bias=norm, "
                         "and expert_bias=true for biases of the experts"),
        ({"experts": 4, "bias": "none", "grad_metrics": True},
         "that of an expert mixes the tokens of all dp and the balance of the batch; give grad_metrics=false"),
        ({"experts": 4, "bias": "none", "optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0},
         "and experts make it jump where routes change; give another one"),
        ({"experts": 4, "bias": "none", "lora_rank": 2, "lora_targets": "up"},
         "lora_targets takes some of q,k,v,o,expert_up,expert_down, got 'up'"),
        ({"experts": 6, "bias": "none", "expert_axes": "dp", "mesh": "4x2", "batch": 8},
         "expert_axes=dp splits experts=6 over dp * mp = 8 (mesh=4x2), which does not divide them"),
        ({"experts": 4, "bias": "none", "lora_rank": 2, "lora_targets": "expert_up", "lora_dropout": 0.1},
         "lora_dropout=0.1 drops inputs of a token, and expert_up of lora_targets have the inputs of each expert"),
        ({"experts": 6, "bias": "none", "expert_width": 6, "mesh": "1x4"},
         "the width of an expert=6 does not divide over mp=4 (mesh=1x4); try mesh=1x2"),
        ({"weights": "nf4", "d_ff": 6, "mesh": "1x2"},
         "weights=nf4 stores two inputs in a byte, and each device of mesh=1x2 has an odd number of d_ff 3"),
        ({"weights": "int4", "d_ff": 255, "expert_width": 256, "experts": 4, "dense_first": 1, "bias": "none"},
         "weights=int4 stores two inputs in a byte, and each device of mesh=auto has an odd number of d_ff 255"),
        ({"weights": "nf4", "d_ff": 255, "mesh": "auto"},
         "each device of mesh=auto has an odd number of d_ff 255; give weights=int8"),
        (
            {"objective": "task", "d_model": 64},
            "d_model is a key of the language model and does nothing with a task; leave it out, got d_model=64",
        ),
        ({"objective": "task", "param_dtype": "bfloat16"}, "param_dtype is a key of the language model"),
        ({"objective": "task", "lora_rank": 4}, "lora_rank is a key of the language model"),
        ({"objective": "task", "mesh": "2x1x2", "accum": 2}, "a task is split over dp and mp, got mesh=2x1x2"),
        ({"objective": "dpo", "task": "a.py:A"}, "a task has a loss of its own, got objective=dpo"),
    ],
)  # fmt: skip
def test_every_rule(changes, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Config.of(**changes)


@settings(deadline=None)
@given(
    d_model=st.integers(1, 96), heads=st.integers(1, 12), d_ff=st.integers(1, 60), batch=st.integers(1, 24),
    dp=st.integers(1, 9), mp=st.integers(1, 9), vocab=st.integers(0, 70), vocab_multiple=st.integers(1, 9),
    rotary_dims=st.integers(1, 20), positions=st.sampled_from(CHOICES["positions"]),
)  # fmt: skip
def test_following_the_advice_leads_to_a_valid_configuration(dp, mp, **changes):
    changes["mesh"] = f"{dp}x{mp}"
    rejections = []
    while True:
        try:
            Config.of(**changes)
            break
        except UsageError as error:
            rejections.append(str(error))
            assert len(rejections) < 8, rejections
            (advice,) = re.findall(r"(?:try|set) (\w+=\w+)", rejections[-1])
            changes |= parsing.parse_overrides([advice], Config)
    assert len(set(rejections)) == len(rejections)
    assume(rejections)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_alpha": 16.0}, "lora_alpha does nothing without lora_rank; give lora_rank as well"),
        ({"lora_dropout": 0.1}, "lora_dropout does nothing without lora_rank"),
        ({"rslora": True}, "rslora does nothing without lora_rank"),
        *(
            ({name: value}, f"{name} does nothing without experts; give experts as well")
            for name, value in {
                "dense_first": 1,
                "expert_pattern": "de",
                "experts_per_token": 1,
                "expert_width": 8,
                "shared_width": 8,
                "expert_bias": True,
                "router": "sigmoid",
                "router_norm": False,
                "gate_inputs": True,
                "router_scale": 2.0,
                "expert_groups": 2,
                "balance_loss": 0.1,
                "router_z_loss": 0.1,
                "balance_rate": 0.1,
                "expert_axes": "dp",
            }.items()
        ),
        (
            {"experts": 4, "bias": "none", "balance_rate": 0.001, "lora_rank": 2},
            "balance_rate does nothing with lora_rank, which freezes the biases; give balance_rate=0",
        ),
        ({"groups_per_token": 2, "experts": 4, "bias": "none"}, "groups_per_token does nothing without expert_groups"),
        ({"q_latent": 8}, "q_latent does nothing without kv_latent; give kv_latent as well"),
        ({"value_dim": 8}, "value_dim does nothing without kv_latent; give kv_latent as well"),
        ({"shared_gate": True}, "shared_gate does nothing without shared_width; give shared_width as well"),
        ({"window_chunks": True}, "window_chunks does nothing without window; give window as well"),
        *(
            (
                keys,
                "query_growth_tokens does nothing without query_growth and a layer that is n by window_pattern; give",
            )
            for keys in (
                {"query_growth_tokens": 5, "window_pattern": "fn"},
                {"query_growth_tokens": 5, "query_growth": 1},
                {"query_growth_tokens": 5, "query_growth": 1, "window": 4, "window_pattern": "wwn"},
            )
        ),
        ({"rotary_dims": 4, "positions": "learned"}, "rotary_dims does nothing without positions=rotary; got rotary_"),
        ({"beta1": 0.5, "optimizer": "lbfgs", "clip": 0.0, "weight_decay": 0.0}, "beta1 does nothing with optimizer=l"),
        ({"momentum": 0.9}, "momentum does nothing without optimizer=muon or normuon"),
        ({"pipeline_rounds": 2, "mesh": "2x2"}, "pipeline_rounds does nothing without pipeline stages"),
        ({"special_tokens": True, "tokenizer": "bytes"}, "special_tokens does nothing with a tokenizer that has none"),
        ({"text": "body"}, "text does nothing without data from .jsonl records"),
        ({"beta": 0.2}, "beta does nothing without pairs or rewards; give objective=dpo, grpo or another of them"),
        *(
            ({name: value}, f"{name} does nothing with another objective; give objective=grpo")
            for name, value in {
                "group_size": 4,
                "answer_tokens": 5,
                "rollout_steps": 2,
                "rollout_top_k": 5,
                "rollout_top_p": 0.9,
            }.items()
        ),
        ({"token_mean": "answer"}, "token_mean does nothing with another objective, which fixes it;"),
        ({"sft_weight": 0.2}, "sft_weight does nothing without pairs"),
        (
            {"sft_tokens": "all"},
            "sft_tokens does nothing without pairs and the loss of chosen answers; give objective=",
        ),
        ({"sft_tokens": "all", "objective": "dpo"}, "sft_tokens does nothing without pairs and the loss of chosen"),
        (
            GRPO | {"clip_ratio": 0.1, "seq": 128},
            "clip_ratio does nothing while a step learns from answers of",
        ),
        ({"teacher": "x"}, "teacher does nothing with another objective; give objective=distill"),
        ({"divergence": "reverse"}, "divergence does nothing with another objective; give objective=distill"),
        ({"distill_weight": 0.5}, "distill_weight does nothing with another objective; give objective=distill"),
        (
            {"distill_temperature": 2.0},
            "distill_temperature does nothing with another objective; give objective=distill",
        ),
        ({"label_smoothing": 0.2, "objective": "ipo"}, "label_smoothing does nothing with an objective that has no"),
        ({"length_norm": True, "objective": "ipo"}, "length_norm does nothing with another objective, which fixes it"),
        (
            {"reward_center": 0.2, "objective": "dpo"},
            "reward_center does nothing with another objective; give objective=r",
        ),
        ({"mtp_weight": 0.1}, "mtp_weight does nothing with another objective; give objective=mtp"),
        ({"reward_gap": 0.2, "objective": "dpo"}, "reward_gap does nothing with another objective; give objective=sim"),
        ({"quantize_after": 5}, "quantize_after does nothing without quantize_aware=; got quantize_after=5"),
        ({"bad_rows": "skip"}, "bad_rows does nothing without data from .jsonl records"),
        *(
            ({name: value} | LBFGS, f"{name} does nothing with optimizer=lbfgs, whose line search finds the rate")
            for name, value in {"beta2": 0.5, "lr": 0.5, "schedule": "linear", "warmup": 3}.items()
        ),
        *(
            ({name: value, "schedule": "constant"}, f"{name} does nothing with optimizer=lbfgs or schedule=constant")
            for name, value in {"lr_min": 0.5, "decay_steps": 5}.items()
        ),
        (
            {"bos": "true", "tokenizer": "bytes"},
            "bos does nothing with a tokenizer that has none; give a tokenizer.json or bpe:N",
        ),
        (
            {"chat_template": "chatml"},
            "chat_template does nothing without data from .jsonl records; name them with data=",
        ),
        ({"context_parallel": "ring"}, "context_parallel does nothing unless the mesh splits the context; give a mesh"),
        ({"decay": 5}, "decay does nothing without schedule=wsd"),
        ({"eval_limit": 2.0}, "eval_limit does nothing without eval_tasks; give eval_tasks as well"),
        ({"grad_dtype": "bfloat16"}, "grad_dtype does nothing without zero=3, or with cp > 1"),
        ({"lora_targets": "q"}, "lora_targets does nothing without lora_rank; give lora_rank as well"),
        ({"rotary_theta": 5.0, "positions": "none"}, "rotary_theta does nothing without positions=rotary"),
        ({"rotary_scaling": "linear:2", "positions": "none"}, "rotary_scaling does nothing without positions=rotary"),
        ({"window_pattern": "wf"}, "window_pattern does nothing without window; give window as well"),
        ({"window_rotary_theta": 500.0}, "window_rotary_theta does nothing without window"),
        (
            {"window": 4, "window_rotary_theta": 5.0, "positions": "none"},
            "window_rotary_theta does nothing without pos",
        ),
    ],
)
def test_key_without_effect_is_rejected(given, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        preset("tiny", **given)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"window": 4, "window_pattern": "5:1"},
            "window_pattern takes the letters w (windowed), f (full) and n",
        ),
        ({"window_pattern": "fn", "positions": "none"}, "window_pattern=fn has layers without rotary positions, and"),
        ({"window": 4, "window_pattern": "ff"}, "window=4 does nothing: window_pattern=ff makes no layer windowed"),
        ({"window": -1}, "window must be at least 1, or none, got -1"),
        ({"window": 4, "window_rotary_theta": 1.0}, "window_rotary_theta must be above 1, got 1.0"),
        ({"attention_cap": -2.0}, "attention_cap must not be negative, or none, got -2.0"),
    ],
)
def test_invalid_window_is_rejected(values, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Config.of(**values)


def test_key_with_its_default_may_be_given_anywhere():
    assert preset("tiny", pipeline_rounds=1).parallel.pipeline_rounds == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": "dp2.cp2.pp3", "accum": 3, "batch": 12},
            "over pp=3 stages (mesh=dp2.cp2.pp3); try mesh=dp2.cp2.mp1.pp2",
        ),
        ({"grad_metrics": True}, "splits its tokens over cp=2; give grad_metrics=false or mesh=4x2"),
        ({"seq": 18}, "seq=18 does not divide over 2 * cp = 4 (mesh=dp2.cp2.mp2); try seq=20"),
        ({"seq": 20, "sequence_parallel": True}, "does not divide over 2 * cp * mp = 8, as sequence_parallel=true"),
        ({"mesh": "dp2.cp2.mp3"}, "heads=8 does not divide over mp=3 (mesh=dp2.cp2.mp3); try mesh=dp2.cp2.mp2"),
        ({"mesh": "dp3.cp2.mp2"}, "batch=8 does not divide over dp=3 (mesh=dp3.cp2.mp2)"),
    ],
)
def test_split_context_that_cannot_run_is_rejected(changes, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Config.of(**{"mesh": "dp2.cp2.mp2", "batch": 8, "seq": 16, "layers": 4, "heads": 8, "vocab": 64} | changes)


def test_context_parallel_needs_a_split_context():
    with pytest.raises(UsageError, match="context_parallel does nothing unless the mesh splits the context"):
        preset("tiny", mesh="4x2", context_parallel="ring")


def test_yarn_may_blend_from_one_pair_to_the_next():
    """Kimi K2 has beta_fast = beta_slow = 1."""
    assert Config.of(rotary_scaling="yarn:32,1,1,4096,1").model.rotary_scaling
