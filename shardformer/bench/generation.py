"""`bench generate`: tokens per second of our Generator, interleaved with transformers and llama.cpp where they run.

All have the same random weights, llama.cpp's codes but for their rounding, and choose the most likely token; a round
includes the prefill.
"""

import dataclasses
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from shardformer.bench import llama_cpp_twin
from shardformer.bench.bench_options import Measuring
from shardformer.bench.step_time import choose_peers, describe_machine
from shardformer.config import Config
from shardformer.convert import hf_settings, hf_state, runs
from shardformer.data import TokenIds
from shardformer.data.special_tokens import SpecialTokens
from shardformer.errors import UsageError
from shardformer.inference import Generator, Sampling
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.tables import format_count, format_table

PEERS = ("transformers", "llama_cpp")


def gpt2() -> Config:
    """Returns the smallest GPT-2, of 124M parameters: the default without preset=."""
    return Config.of(
        layers=12, d_model=768, heads=12, seq=1024, vocab=50257, block="sequential", positions="learned", bias="all",
        tied=True, head_bias=False, norm_eps=1e-5,
    )  # fmt: skip


@dataclasses.dataclass
class Contender:
    """A function that continues [rows, tokens] ids by a number of tokens, and the seconds of its rounds."""

    name: str
    continue_ids: Callable[[np.ndarray, int], np.ndarray]
    same: float = 1.0  # the share of its tokens that are ours
    times: list[float] = dataclasses.field(default_factory=list)
    cpu_times: list[float] = dataclasses.field(default_factory=list)  # of all threads; less sensitive to other load

    def run(self, prompts: np.ndarray, tokens: int) -> np.ndarray:
        start, cpu_start = time.perf_counter(), time.process_time()
        ids = self.continue_ids(prompts, tokens)
        self.times.append(time.perf_counter() - start)
        self.cpu_times.append(time.process_time() - cpu_start)
        return ids


def bench_generate(options: Measuring, settings: Config) -> None:
    """Prints a table for each number of rows, and the cost of the last tokens relative to the first."""
    if not 1 <= options.tokens <= settings.model.seq - options.prompt:
        raise UsageError(
            f"tokens={options.tokens} and prompt={options.prompt} do not fit seq={settings.model.seq}; give less"
        )
    settings = mesh.start(settings)
    settings = settings.without_stages()
    settings = settings.replace(batch=settings.parallel.dp, accum=1)
    names = choose_peers(options, lambda name: why_not(name, settings), PEERS, PEERS)
    model = Model.on(settings, mesh.make(settings))
    params = model.init(settings.training.seed)
    generator = Generator(model)
    loaded = generator.load(params)
    arrivals: list[tuple[float, int]] = []

    def ours(prompts, tokens):
        arrivals.clear()
        rows = generator.continue_prompts(
            loaded, prompts, Sampling(tokens=tokens, temperature=0),
            watch=lambda row, ids: arrivals.append((time.perf_counter(), len(ids))) if row == 0 else None,
        )  # fmt: skip
        return np.array([row.ids for row in rows])

    theirs = {}
    if "transformers" in names:
        theirs["transformers (PyTorch)"] = load_transformers(settings, params)
    if "llama_cpp" in names:
        theirs["llama.cpp"] = llama_cpp_twin.load_llama_cpp(settings, params, max(options.row_counts))
    print(_describe(options, settings))
    for count in options.row_counts:
        prompts = np.random.default_rng(count).integers(0, settings.model.vocab, (count, options.prompt))
        contenders = [Contender(f"shardformer {settings.parallel.mesh}", ours)]
        contenders += [Contender(name, continue_ids) for name, continue_ids in theirs.items()]
        slopes = _measure(contenders, prompts, options, arrivals)
        print(f"\n{format_count(count, 'row')}\n{_format(contenders, count * options.tokens)}")
        print(_describe_bandwidth(params, contenders[0], options.tokens))
        print(f"the last tenth of the tokens costs {np.median(slopes):.2f} times the first tenth")


def why_not(name: str, c: Config) -> str:
    """Returns the reason why a peer cannot continue tokens of this model; empty if it can."""
    if name == "llama_cpp":
        return llama_cpp_twin.why_not(c)
    if c.stored.quantized:
        return f"weights={c.stored.weights} is compared with weights=float of another run"
    try:
        hf_settings.choose_family(c)
    except UsageError as error:
        return str(error)
    installed = all(map(importlib.util.find_spec, ("transformers", "torch")))
    return "" if installed else "it is not installed; pip install transformers torch"


def _describe(options: Measuring, c: Config) -> str:
    sizes = f"{format_count(c.model.layers, 'layer')}, d_model {c.model.d_model}, {c.parallel.dtype}"
    sizes += f", weights={c.stored.weights}" if c.stored.quantized else ""
    sizes += f", {options.prompt} + {format_count(options.tokens, 'token')}"
    return f"{sizes}, medians of {format_count(options.rounds, 'turn')} on {describe_machine()}"


def _measure(contenders: list[Contender], prompts: np.ndarray, options: Measuring, arrivals: list) -> list[float]:
    """Runs the rounds; returns the cost of our last tokens over that of the first in each."""
    first, *rest = (contender.run(prompts, options.tokens) for contender in contenders)  # compiles
    for contender, ids in zip(contenders, [first, *rest], strict=True):
        contender.same = float((first == ids).mean())
        contender.times.clear()
        contender.cpu_times.clear()
    slopes = []
    for _ in range(options.rounds):
        for contender in contenders:
            contender.run(prompts, options.tokens)
        slopes.append(_last_against_first(arrivals))
    return slopes


def load_transformers(c: Config, params) -> Callable[[np.ndarray, int], np.ndarray]:
    """Returns the same model in transformers."""
    import torch
    import transformers

    family = hf_settings.choose_family(c)
    leaves: dict = {name: np.asarray(leaf) for name, leaf in runs.flatten(jax.device_get(params)).items()}
    with tempfile.TemporaryDirectory() as name:
        hf_settings.write_config(Path(name), family, c, "float32", SpecialTokens(), TokenIds(c.model.vocab))
        hf_state.write_params(Path(name), family, c, leaves, "float32", 1 << 40)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, c.parallel.dtype)).eval()
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    model = model.to(device)

    def continue_ids(prompts, tokens):
        ids = torch.from_numpy(prompts).to(device)
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            return (
                model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, prompts.shape[1] :].cpu().numpy()
            )

    return continue_ids


def _last_against_first(arrivals: list[tuple[float, int]]) -> float:
    """Returns the seconds per token in the last tenth of the chunks over those in the first tenth."""
    costs = [(later - sooner) / count for (sooner, _), (later, count) in itertools.pairwise(arrivals)]
    tenth = max(len(costs) // 10, 1)
    return float(np.median(costs[-tenth:]) / np.median(costs[:tenth])) if costs else 1.0


def _describe_bandwidth(params, contender: Contender, tokens: int) -> str:
    """Formats the rate at which the weights are read: once for each token of a row."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    rate = size * tokens / float(np.median(contender.times))
    fastest = read_bandwidth()
    read = f"weights of {size / 1e6:,.1f} MB, read once a token: {rate / 1e9:,.2f} GB/s"
    return f"{read}; a product of a vector and a float32 matrix reads {fastest / 1e9:,.2f} GB/s on one device"


def read_bandwidth(rows: int = 1 << 13) -> float:
    """Returns the bytes per second at which one device reads a square matrix of so many rows, at best of five times."""
    multiply = jax.jit(lambda x, w: x @ w)
    x, w = jax.numpy.ones((1, rows)), jax.numpy.ones((rows, rows))
    seconds = []
    for _ in range(6):  # the first one compiles
        start = time.perf_counter()
        multiply(x, w).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return w.nbytes / min(seconds[1:])


def _format(contenders: list[Contender], tokens: int) -> str:
    """Formats a row for each contender, with our speed over its own."""
    ours, rows = contenders[0], []
    for it in contenders:
        seconds = float(np.median(it.times))
        times = f"{seconds:.2f}", f"{min(it.times):.2f}", f"{np.median(it.cpu_times):.2f}"
        ratio = float(np.median(np.divide(it.times, ours.times)))
        rows.append([it.name, *times, f"{tokens / seconds:,.1f}", f"{ratio:.2f}", f"{it.same:.1%}"])
    return format_table(rows, ["generate", "s", "fastest", "CPU s", "tokens/s", "ours over it", "equal tokens"])
