"""One server for the tests of this folder, which restore what they change."""

import pytest

from shardformer.config.sampling_keys import Sampling
from shardformer.inference.sampling import Stops

DRAWN = {"prompt": "to be", "max_tokens": 24, "temperature": 3.0, "top_p": 0.95, "seed": 5}


@pytest.fixture(scope="package")
def service():
    from tests.inference.serve.http_server import make_service  # needs the extra `serve`

    return make_service()


@pytest.fixture(scope="package")
def generated(service):
    """Returns the jobs of DRAWN by the engine itself, as `generate` runs them before the server starts."""
    from shardformer.inference.serve.jobs import Job, make_jobs

    sampling = Sampling(tokens=24, samples=3, temperature=3.0, top_p=0.95, seed=5)
    prompt = service.codec.encode("to be")
    engine, weights = service.thread.engine, service.models["small"].weights
    jobs = list(engine.run(make_jobs([prompt], sampling, weights, Stops(service.codec.vocabulary))))
    list(engine.run([Job(0, prompt, 0, weights=weights, scores_prompt=True, draws=False)]))
    return jobs


@pytest.fixture(scope="package")
def port(service, generated):
    from tests.inference.serve.http_server import running

    with running(service) as port:
        yield port
