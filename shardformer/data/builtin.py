"""A corpus that needs no download: scenes written by a small grammar, the same on every machine.

There is something to learn at every distance: spelling, agreement of subject and verb, rhyme, who answers whom, and
where each play has hidden the thing that its cast looks for.
"""

import functools
import random
import re

CHARACTERS = 1_100_000  # about as many as tiny_shakespeare
SEED = 1_115_394

# A word in braces is replaced by one of its alternatives, repeatedly, until none is left. A name that ends in
# `_s` is singular and its twin in `_p` plural, so that a subject finds its verb, past a noun of the other number.
GRAMMAR = {
    "speaker": "Brannoc|Fenn|Hobbin|Jory|Kestrel|Marlow|Odelia|Quilla|Tamsin|Umber|Vesper|Xanthe|Ysolde|Zebedee",
    "line": "{sentence}.|{sentence}.|{sentence}.|{sentence}!|{opening}, {clause}.|{adjective_up}, {adjective} {noun_s}!"
    "|{proverb}.|{couplet}",
    "sentence": "The {clause_s}|The {clause_p}|My {clause_s}|Our {clause_p}|Every {clause_s}|These {clause_p}"
    "|I {verb_p} you, {address}, as I {verb_p} my {thing}|They that {verb_p} the {thing} must {verb_p} the {thing}",
    "clause": "the {clause_s}|these {clause_p}|I {verb_p} the {thing}|we {verb_p} our {thing}",
    "clause_s": "{group_s} {verb_s} the {thing}",
    "clause_p": "{group_p} {verb_p} the {thing}",
    "group_s": "{adjective} {noun_s}|{noun_s}|{noun_s} of the {noun_p}|{noun_s} that {speaker} {verb_s}",
    "group_p": "{adjective} {noun_p}|{noun_p}|{noun_p} of the {noun_s}|{noun_p} that {speaker} {verb_s}",
    "thing": "{group_s}|{adjective} {noun_s}|{adjective} {noun_p}|{noun_s}",
    "noun_s": "{noun}",
    "noun_p": "{noun}s",
    "verb_p": "{verb}",
    "verb_s": "{verb}s",
    "address": "good {speaker}|dear {speaker}|old {speaker}|my lord|my lady|kind neighbour|brave captain",
    "couplet": "{verse} night,\n{verse} light.|{verse} day,\n{verse} way.|{verse} heart,\n{verse} part."
    "|{verse} stone,\n{verse} bone.|{verse} sea,\n{verse} tree.|{verse} rain,\n{verse} chain."
    "|{verse} hand,\n{verse} sand.|{verse} gold,\n{verse} cold.|{verse} deep,\n{verse} sleep.",
    "verse": "The {adjective} {noun_s} will {verb_p} the|My {adjective} {noun_s} and all its"
    "|I gave the {noun_s} my only|When {adjective} {noun_p} have lost their"
    "|Go, tell the {noun_s} about the|O {adjective} {noun_s}, O {adjective}",
    "opening": "Peace|Alas|Hark|Come|Nay|Well|Marry|Softly|In truth|Believe me|I pray you|Good news",
    "proverb": "A borrowed candle burns at both ends|Who counts the crows will miss the corn"
    "|The well remembers every bucket|No lock was ever fond of a key|Trust the bridge, but learn to swim"
    "|He who sells the wind must buy the storm|Let the bread tell the baker's story|Snow is the rich man of one morning"
    "|Ask the thief what the lock is worth|Never argue with an open window; it has the last word",
    "adjective_up": "Absent|Bitter|Foolish|Faithless|Jealous|Quarrelsome|Unhappy|Vain|Wretched",
    "adjective": "amber|ancient|bright|broken|calm|cold|crimson|cruel|curious|dark|dull|eager|empty|faithful|false|"
    "fierce|frosty|gentle|gloomy|golden|green|happy|hollow|honest|humble|idle|ivory|jealous|kind|lonely|merry|narrow|"
    "noble|pale|patient|proud|quiet|ragged|rare|royal|silent|silver|solemn|strange|tender|thirsty|velvet|weary|wild",
    "noun": "acorn|anchor|apple|bargain|barrel|basket|beacon|bird|bottle|bridge|brother|bucket|candle|castle|chain|"
    "cloud|cradle|crown|daughter|dragon|dream|feather|fiddle|flower|friend|garden|ghost|hammer|harbour|hawk|hill|island|"
    "jewel|kettle|king|ladder|lantern|letter|lizard|meadow|merchant|mirror|mountain|needle|oak|orchard|owl|parrot|"
    "pebble|pilgrim|poet|potion|prayer|queen|rabbit|raven|river|road|sailor|secret|shadow|shepherd|shield|soldier|song|"
    "sparrow|spell|stranger|sword|table|temple|tiger|tower|treasure|tree|valley|voyage|wall|weaver|wheel|widow|window",
    "verb": "admire|answer|blame|borrow|break|bring|build|burn|choose|claim|count|curse|doubt|draw|dread|fear|find|"
    "follow|forget|gather|greet|guard|hate|hear|hide|hold|honour|hunt|join|judge|keep|know|learn|lift|lose|love|measure|"
    "mend|mock|need|obey|open|paint|praise|question|remember|scorn|seek|serve|spare|steal|trade|trust|visit|want|warn",
    "place": "behind the chapel door|beneath the seventh stair|inside the broken clock|below the frozen well"
    "|among the captain's boots|over the kitchen fire|within the hollow oak|beside the harbour wall",
    "scene": "The mill by the river|The harbour at low tide|A great hall|The chapel at midnight|A road near the border"
    "|The queen's garden|A tavern with one window|The forest, under an oak|The ramparts before dawn",
    "exit": "Exeunt|Exeunt in haste|Exeunt, weeping|They fight|Music; exeunt",
}
ALTERNATIVES = {name: text.split("|") for name, text in GRAMMAR.items()}
SPEAKERS = ALTERNATIVES["speaker"]
PIECES = {text: re.split(r"{(\w+)}", text) for texts in ALTERNATIVES.values() for text in texts}  # every 2nd is a name


@functools.cache
def text() -> str:
    """Returns the corpus: about CHARACTERS characters of plays."""
    choose = _Chooser(SEED)
    plays, length = [], 0
    while length < CHARACTERS:
        plays.append(_write_play(choose))
        length += len(plays[-1])
    return "".join(plays)


class _Chooser:
    """Random choices by `random()`, the only method whose results Python promises never to change."""

    def __init__(self, seed: int):
        self.random = random.Random(seed).random

    def pick(self, options):
        return options[int(self.random() * len(options))]

    def expand(self, name: str) -> str:
        text, *rest = PIECES[self.pick(ALTERNATIVES[name])]
        for i in range(0, len(rest), 2):
            text += self.expand(rest[i]) + rest[i + 1]
        return text


def _write_play(choose: _Chooser) -> str:
    """Returns a play: a cast looks for a lost thing, and in all five acts the same thief lies about its place."""
    cast = sorted({choose.pick(SPEAKERS) for _ in range(6)} | {"Hobbin", "Jory"})
    thief, lost, hiding_place = (
        choose.pick(cast),
        choose.expand("adjective") + " " + choose.expand("noun"),
        choose.expand("place"),
    )
    lines = [f"THE COMEDY OF THE {lost.upper()}", ""]
    for number in ("I", "II", "III", "IV", "V"):
        lines += [f"ACT {number}. {choose.expand('scene')}.", ""]
        speaker = asker = None
        for _ in range(8 + int(choose.random() * 16)):
            speaker = choose.pick([name for name in cast if name != speaker])
            lines.append(f"{speaker.upper()}:")
            if asker:
                answer = f"The {lost} is {hiding_place}" if speaker != thief else f"I know of no {lost}"
                lines.append(f"{answer}, good {asker}.")
            lines += [choose.expand("line") for _ in range(1 + int(choose.random() * 3))]
            asker = speaker if choose.random() < 0.3 else None
            lines += [f"Where is the {lost}?", ""] if asker else [""]
        lines += [f"[{choose.expand('exit')}.]", ""]
    return "\n".join(lines) + "\n"
