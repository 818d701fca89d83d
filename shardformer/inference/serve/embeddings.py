"""The vectors of texts: the activations of their tokens after the model's last norm, pooled to length 1."""

import base64
import dataclasses
from typing import Any

import numpy as np

from shardformer.inference.serve.jobs import Job, Tokens
from shardformer.inference.serve.request_fields import ApiError, take

MOST_INPUTS = 2048  # OpenAI's
POOLINGS, ENCODINGS = ("last", "mean"), ("float", "base64")
FIELDS = ("model", "input", "encoding_format", "dimensions", "pooling", "user")


@dataclasses.dataclass(frozen=True)
class EmbeddingFields:
    """The checked fields of a request but its texts."""

    model: str | None
    pooling: str  # last: the vector of the last token, as of Qwen3-Embedding and E5-Mistral; or mean
    encoding: str
    dimensions: int  # numbers of a vector, the first ones of the model's


def read_embedding_fields(body: dict[str, Any], width: int) -> EmbeddingFields:
    """Checks all fields but the texts; raises ApiError that names the wrong one. width: numbers of a vector."""
    for name in body:
        if name not in FIELDS:
            raise ApiError(400, f"{name!r:.60} is not a field of this endpoint; leave it out", str(name)[:60])
    if body.get("input") in (None, "", []):
        raise ApiError(400, "input is missing or empty; give text, token ids, or a list of either", "input")
    dimensions = take(body, "dimensions", int, width, least=1, most=width)
    pooling, encoding = _choose(body, "pooling", POOLINGS), _choose(body, "encoding_format", ENCODINGS)
    return EmbeddingFields(take(body, "model", str, None), pooling, encoding, dimensions)


def _choose(body: dict[str, Any], name: str, known: tuple[str, ...]) -> str:
    value = take(body, name, str, known[0])
    if value not in known:
        raise ApiError(400, f"{name} is {value!r:.60}; expected {' or '.join(known)}", name)
    return value


class EmbeddingAnswer:
    """The object of one request."""

    def __init__(self, fields: EmbeddingFields, model: str, jobs: list[Job]):
        self._fields, self._model, self._jobs = fields, model, jobs

    def add(self, index: int, tokens: Tokens) -> None:
        """Does nothing: no token is drawn."""

    def as_object(self) -> dict[str, Any]:
        data = [{"object": "embedding", "index": n, "embedding": self._encode(job)} for n, job in enumerate(self._jobs)]
        tokens = sum(len(job.prompt) for job in self._jobs)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _encode(self, job: Job) -> str | list[float]:
        vector = np.asarray(job.pooled)[: self._fields.dimensions]
        vector = (vector / max(float(np.linalg.norm(vector)), np.finfo(np.float32).tiny)).astype("<f4")
        return vector.tolist() if self._fields.encoding == "float" else base64.b64encode(vector.tobytes()).decode()
