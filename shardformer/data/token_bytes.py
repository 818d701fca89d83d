"""The bytes of each entry of a tokenizer.json, as its decoder writes them inside a text."""

import re
from typing import Any

# Decoders after which the entries of a text are its pieces, one after the other.
JOINING = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def list_token_bytes(document: dict[str, Any], ids: dict[str, int], size: int) -> list[bytes] | None:
    """Returns the bytes by id, none for special tokens; None if the decoder changes entries by what is around them."""
    steps = _list_steps(document.get("decoder"))
    kinds = {step["type"] for step in steps}
    if not kinds <= JOINING or not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        return None
    if not all(_is_known(step, [before["type"] for before in steps[:n]]) for n, step in enumerate(steps)):
        return None
    special = {token["content"] for token in document.get("added_tokens") or () if token.get("special")}
    letters = _list_letters() if "ByteLevel" in kinds else {}
    result = [b""] * size
    for entry, number in ids.items():
        if entry not in special:
            result[number] = _write_entry(entry, steps, letters)
    return result


def _list_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder and decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _list_steps(each)]
    return [decoder] if decoder else []


def _is_known(step: dict[str, Any], before: list[str]) -> bool:
    """Returns whether `_write_entry` does what a step does after others."""
    is_fused = "Fuse" in before  # then a step reads the whole text, and may find what no entry has alone
    if step["type"] == "Replace":
        text = step["pattern"].get("String", "")  # none of a regular expression
        is_byte = len(text) == 1 and (text.isascii() or "ByteFallback" not in before)
        return bool(text) and (is_byte or not is_fused)
    if step["type"] == "ByteFallback":
        return not is_fused
    return step["type"] != "Strip" or (is_fused and not step.get("stop"))  # of the text's first spaces only


def _write_entry(entry: str, steps: list[dict[str, Any]], letters: dict[str, int]) -> bytes:
    if letters and all(letter in letters for letter in entry):
        return bytes(letters[letter] for letter in entry)
    for step in steps:
        if step["type"] == "ByteFallback" and (match := BYTE.fullmatch(entry)):
            return bytes([int(match[1], 16)])
        if step["type"] == "Replace":
            entry = entry.replace(step["pattern"]["String"], step["content"])
        if step["type"] == "Metaspace":
            entry = entry.replace(step.get("replacement", "▁"), " ")
    return entry.encode("utf-8", "replace")


def _list_letters() -> dict[str, int]:
    """Returns the byte of each letter of byte-level vocabularies: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
