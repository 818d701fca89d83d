"""`generate`: continuations of the prompts of a file, as JSON lines; `score`: how likely a model finds a text."""

import dataclasses
import itertools
import json
import math
from typing import Any

import jax

from shardformer import storage
from shardformer.cli.arguments import parse_run_and_options, say
from shardformer.cli.generation_options import MOST_ROWS, GenerateOptions, ScoreOptions, parse_stops
from shardformer.cli.record_output import RecordOutput
from shardformer.cli.sample_command import load_model, open_chat_codec, open_codec
from shardformer.data import TokenIds
from shardformer.devices import processes
from shardformer.errors import UsageError
from shardformer.inference import Continuation, Stops
from shardformer.inference.chat_codec import parse_prompt
from shardformer.inference.prompts import read_documents, read_prompts
from shardformer.inference.scoring import Score, score_documents
from shardformer.inference.serve.engine import Engine
from shardformer.inference.serve.jobs import make_jobs
from shardformer.training.run_folder import Run


@processes.ending_all_on_failure()
def generate(arguments: list[str]) -> None:
    """Prints or writes one JSON object a line for each sample of each prompt, in order."""
    folder, options = parse_run_and_options(arguments, GenerateOptions)
    run = Run.open(folder)
    codec = open_codec(run, options)
    prompts = read_prompts(options.prompts, options.chat)
    chat = open_chat_codec(run, codec, options, parse_stops(options.stop)) if options.chat else None
    ids = chat.encode_all(list(map(parse_prompt, prompts))) if chat else codec.encode_all(prompts, "prompt")
    if empty := next((i + 1 for i, row in enumerate(ids) if not row), None):
        raise UsageError(f"prompt {empty} is empty: give at least one character")
    ends = () if options.ignore_eos else codec.ends
    stops = chat.make_stops(options.ignore_eos) if chat else Stops(codec.vocabulary, parse_stops(options.stop), ends)
    with _open_output(run, options, prompts) as output:
        if output.done == len(ids) * options.samples:
            return
        model, params = load_model(run, options)
        if options.out and jax.process_count() > 1:
            raise UsageError(f"out={options.out} is written by one process, got {jax.process_count()}; leave it out")
        rows = _continue(model, params, ids, options, len(run.vocabulary), stops, output.done)
        del params
        for i, row in enumerate(rows, output.done):
            number, sample = divmod(i, options.samples)
            text = chat.read_reply(row.ids) if chat else stops.cut(row.ids)
            record = {"prompt": prompts[number], "sample": sample} | _describe(text, row)
            if options.logprobs:
                record["token_logprobs"] = [round(logprob, 6) for logprob in row.logprobs]
            output.write(record, len(row.ids))


def _open_output(run: Run, options: GenerateOptions, prompts: list[str]) -> RecordOutput:
    if not options.out:
        return RecordOutput(None)
    unread = ("out", "batch", "mesh")
    settings = {name: value for name, value in dataclasses.asdict(options).items() if name not in unread}
    settings |= {"run": str(run.out), "step": run.choose_step(options.step, options.ema)}
    return RecordOutput(storage.on_disk(options.out, "out"), settings, prompts, options.samples)


def _continue(model, params, ids, options: GenerateOptions, vocab_size: int, stops: Stops, done: int):
    """Yields the continuations after the first `done`, by the engine of `serve`, whose bits they have."""
    engine = Engine(model, options.batch or _choose_rows(len(ids) * options.samples, model), vocab_size)
    jobs = make_jobs(ids, options, engine.load(params, donate=True), stops)
    del params
    yield from (job.result() for job in engine.run(itertools.islice(jobs, done, None)))


def _choose_rows(texts: int, model) -> int:
    """Returns the rows for a number of texts.

    Measured: a CPU rounds products of 2 to 16 rows alike, and those of one row in another order.
    """
    return min(max(texts, 2 * model.config.parallel.dp), MOST_ROWS)


def _describe(text: str, row: Continuation) -> dict[str, Any]:
    """Returns a record whose text ends before the stop; its counts include every drawn token."""
    return {
        "text": text,
        "tokens": len(row.ids),
        "logprob": round(sum(row.logprobs), 6),
        "finish": "stop" if row.stopped else "length",
    }


@processes.ending_all_on_failure()
def score(arguments: list[str]) -> None:
    """Prints nats per token and per byte for each document of a file and for all of them."""
    if len(arguments) < 2:
        raise UsageError("score takes RUN FILE [key=value ...]")
    folder, options = parse_run_and_options([arguments[0], *arguments[2:]], ScoreOptions)
    run = Run.open(folder)
    codec = open_codec(run, options)
    documents = read_documents(arguments[1])
    ids = codec.encode_all(documents, "document")
    model, params = load_model(run, options)
    scores = score_documents(model, params, ids, options.batch, codec.beginning, run.vocabulary.end_of_text)
    total = Score(0.0, 0, 0)
    for i, (document, result) in enumerate(zip(documents, scores, strict=True)):
        size = 0 if isinstance(run.vocabulary, TokenIds) else len(document.encode("utf-8", "surrogatepass"))
        result = result._replace(bytes=size)
        total = Score(total.nats + result.nats, total.tokens + result.tokens, total.bytes + result.bytes)
        if len(documents) > 1:
            say(json.dumps({"document": i + 1} | _as_json(result)))
    say(json.dumps({"document": "all"} | _as_json(total)))


def _as_json(result: Score) -> dict:
    def per(count: int) -> float | None:
        return round(result.nats / count, 6) if count else None

    return {
        "nats": round(result.nats, 4),
        "tokens": result.tokens,
        "bytes": result.bytes,
        "nats_per_token": per(result.tokens),
        "nats_per_byte": per(result.bytes),
        "perplexity": round(math.exp(min(result.nats / result.tokens, 700)), 4) if result.tokens else None,
    }
