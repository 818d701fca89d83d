"""A server that answers one request, which it makes itself, and ends the process."""

import os
import types

request = types.SimpleNamespace(method="POST", json={"context": "Once upon", "top_p": 0.9, "temp": 0.75})


class Answer:
    def __init__(self, content=None):
        self.content, self.headers = content, types.SimpleNamespace(add=lambda *_: None)


make_response = jsonify = Answer


class Flask:
    def __init__(self, name):
        self._handlers = {}

    def route(self, path, methods):
        return lambda handler: self._handlers.setdefault(path, handler)

    def run(self, port, host):
        print(self._handlers["/complete"]().content, flush=True)
        os._exit(0)
