"""moto's S3 with the generations and preconditions of Google's XML API: `python gcs_stand_in.py PORT`.

It runs in the emulators' own environment and imports nothing of this repository.
"""

import itertools
import sys
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

S3 = DomainDispatcherApplication(create_backend_app)
AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
generations: dict[str, int] = {}
new_generation = itertools.count(1_700_000_000_000_001)
one_at_a_time = threading.Lock()  # a condition and its write are atomic


def application(environment, start):
    environment["HTTP_AUTHORIZATION"] = AUTHORIZATION
    key, method, query = (environment[name] for name in ("PATH_INFO", "REQUEST_METHOD", "QUERY_STRING"))
    with one_at_a_time:
        expected = environment.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
        if expected is not None and int(expected) != generations.get(key, 0):
            start("412 Precondition Failed", [("Content-Type", "text/plain")])
            return [b"precondition"]

        def start_with_generation(status, headers, exc_info=None):
            if status.startswith("2"):
                if (method == "PUT" and "partNumber" not in query) or (method == "POST" and "uploadId=" in query):
                    generations[key] = next(new_generation)
                if method == "DELETE" and "uploadId" not in query:
                    generations.pop(key, None)
            if key in generations:
                headers = [*headers, ("x-goog-generation", str(generations[key])), ("x-goog-metageneration", "1")]
            return start(status, headers, exc_info)

        return S3(environment, start_with_generation)


if __name__ == "__main__":
    make_server("127.0.0.1", int(sys.argv[1]), application, threaded=True).serve_forever()
