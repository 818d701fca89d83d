"""The form that a request asks for: any JSON object, or a value of a JSON schema."""

import functools
import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from shardformer.data import Vocabulary
from shardformer.errors import UsageError
from shardformer.inference.grammars.grammar import Automaton, Rules, State
from shardformer.inference.grammars.json_rules import JSON_OBJECT
from shardformer.inference.grammars.json_schema import make_rules
from shardformer.inference.grammars.token_automaton import TokenAutomaton, TokenTexts
from shardformer.inference.serve.request_fields import ApiError, take

MOST_AUTOMATA = 16  # that later requests of the same form find, each with up to 16 MB of masks
LONGEST_TEXT = 1_000_000  # bytes that any text of a form needs
FIELD = "response_format"


class Form:
    """The text of one job, as its automaton reads it: which tokens may follow, and whether it has ended."""

    def __init__(self, automaton: TokenAutomaton, ends: frozenset[int], tokens: int):
        """ends: the tokens that end a text. tokens: as many as can be drawn."""
        self._automaton, self._ends, self._tokens = automaton, ends, tokens
        self._state: State | None = None
        self._count = 0  # tokens that were read

    def allow(self, ids: list[int]) -> np.ndarray:
        """Returns which tokens [V] may follow some ids."""
        self._read(ids)
        allowed, is_complete = self._automaton.allow(self._state, self._tokens - len(ids))
        allowed[[end for end in self._ends if end < len(allowed)]] = is_complete  # the model may have more
        return allowed

    def is_final(self, ids: list[int]) -> bool:
        """Returns whether the text is complete, so that only an end could follow."""
        self._read(ids)
        return self._automaton.is_final(self._state)

    def _read(self, ids: list[int]) -> None:
        for token in ids[self._count :]:
            if token not in self._ends:
                self._state = self._automaton.read(self._state, token)
        self._count = len(ids)


class Forms:
    """The automata of a vocabulary, by a hash of their schemas."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._automata: dict[str, TokenAutomaton] = {}  # the last used one last
        self._lock = threading.Lock()

    @functools.cached_property
    def _tokens(self) -> TokenTexts:
        texts = self._vocabulary.token_bytes()
        if texts is None:
            raise ApiError(
                400, f"{FIELD}: the tokens of tokenizer={self._vocabulary.name} are no bytes of a text; ask for text",
                FIELD,
            )  # fmt: skip
        return TokenTexts(texts)

    def read(self, body: dict[str, Any]) -> TokenAutomaton | None:
        """Returns the automaton of the form that a request asks for; None for any text."""
        wanted = take(body, FIELD, dict, {"type": "text"})
        kind = wanted.get("type")
        if kind == "text":
            return None
        if kind == "json_object" and wanted.get("schema") is None:
            return self.find(kind, lambda: JSON_OBJECT)
        if kind not in ("json_object", "json_schema"):
            raise ApiError(400, f"{FIELD} has the type {kind!r:.60}; expected text, json_object or json_schema", FIELD)
        described = wanted.get("json_schema") if kind == "json_schema" else wanted  # as llama.cpp's clients give it
        if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
            raise ApiError(400, f"{FIELD} has no schema; give it as json_schema: {{name, schema}}", FIELD)
        schema = described["schema"]
        return self.find(schema, lambda: make_rules(schema, FIELD))

    def find(self, form: Any, make: Callable[[], Rules], field: str = FIELD) -> TokenAutomaton:
        """Returns the automaton of the rules that `make` returns, which an earlier request of the form may have made.

        form: a value of JSON that differs for other rules. field: of the request, for errors.
        """
        try:
            name = hashlib.sha256(json.dumps([field, form]).encode()).hexdigest()
            with self._lock:
                found = self._automata.get(name)
            if found is None:
                found = self._make(make(), field)  # takes time, in which other requests need not wait
        except UsageError as error:
            raise ApiError(400, str(error), field) from None
        except RecursionError:
            raise ApiError(400, f"{field} is nested too deeply; make it simpler", field) from None
        with self._lock:
            self._automata.pop(name, None)
            self._automata[name] = found
            if len(self._automata) > MOST_AUTOMATA:
                del self._automata[next(iter(self._automata))]
        return found

    def _make(self, rules: Rules, field: str) -> TokenAutomaton:
        automaton = Automaton(rules)
        if automaton.shortest is None:
            raise ApiError(400, f"{field}: no text is of this form; correct the schema", field)
        if automaton.shortest > LONGEST_TEXT:
            raise ApiError(
                400, f"{field}: a text of this form has more than {LONGEST_TEXT:,} bytes; make minItems or minLength "
                "smaller", field,
            )  # fmt: skip
        if missing := [c for c in automaton.list_choices() if not any(map(self._tokens.can_write, c))]:
            raise ApiError(
                400, f"{field}: tokenizer={self._vocabulary.name} has no token for {min(missing[0])!r}; ask for text",
                field,
            )  # fmt: skip
        return TokenAutomaton(automaton, self._tokens)
