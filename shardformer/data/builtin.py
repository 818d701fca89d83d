"""A corpus that needs no download: plays written by a grammar, the same on every machine.

There is something to learn at every distance: spelling, rhyme, agreement across a relative clause, each speaker's own
things and manner, who was spoken to, and what the play has said of its thief.
"""

import dataclasses
import functools
import random

from shardformer.data import lexicon
from shardformer.data.lexicon import Speaker

CHARACTERS = 1_100_000  # about as many as tiny_shakespeare; the play that reaches it is finished
SEED = 1_115_394
NUMERALS = ("I", "II", "III", "IV", "V")
PLAIN, THIRD, PAST = range(3)  # the forms of a verb


@functools.cache
def text() -> str:
    """The whole corpus."""
    chance = Chance(SEED)
    plays, length = [], 0
    while length < CHARACTERS:
        plays.append(Play(chance).text())
        length += len(plays[-1])
    return "".join(plays)


class Chance:
    """Every choice goes through `random()`, the one method whose numbers Python promises never to change."""

    def __init__(self, seed: int):
        self._random = random.Random(seed).random

    def happens(self, probability: float) -> bool:
        return self._random() < probability

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def pick(self, options):
        return options[self.below(len(options))]

    def sample(self, options, count: int) -> list:
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class Question:
    """What was asked, so that the answer fits."""

    kind: str
    verb: tuple[str, str, str]
    noun: str
    time: str


class Play:
    """One play: a cast, a lost thing, the thief who took it and the place where it lies."""

    def __init__(self, chance: Chance):
        self.chance = chance
        self.cast = chance.sample(lexicon.SPEAKERS, 4 + chance.below(3))
        self.thief, self.scapegoat = chance.sample(self.cast, 2)
        owner = chance.pick(self.cast)
        self.lost = f"{chance.pick(lexicon.ADJECTIVES)} {chance.pick(owner.things)}"
        self.hidden = chance.pick(lexicon.HIDING_PLACES)
        self.refrain = chance.pick(lexicon.REFRAINS)
        self.lines: list[str] = []

    def text(self) -> str:
        self.lines = [f"THE {self.chance.pick(('COMEDY', 'TRAGEDY', 'HISTORY'))} OF THE {self.lost.upper()}", ""]
        for act in NUMERALS[: 3 + self.chance.below(3)]:
            for scene in NUMERALS[: 2 + self.chance.below(3)]:
                self.lines += [f"ACT {act}. SCENE {scene}. {_sentence(self.chance.pick(lexicon.PLACES))}", ""]
                self.scene()
        return "\n".join(self.lines) + "\n\n"

    def scene(self) -> None:
        """Two begin; each speech answers the one before, and any other of the cast may come or go."""
        present = self.chance.sample(self.cast, 2)
        self.direct(f"Enter {present[0].name} and {present[1].name}.")
        speaker, asker, question = present[0], present[1], None
        for _ in range(6 + self.chance.below(12)):
            question = self.speech(speaker, asker, question)
            self.move(present, speaker)
            others = [other for other in present if other is not speaker]
            # A question is answered by the one it was put to, where that one is still here.
            speaker, asker = (asker if asker in others else self.chance.pick(others)), speaker
            if question is None and len(others) > 1:
                speaker = self.chance.pick(others)
        self.direct("Exeunt.")

    def move(self, present: list[Speaker], speaker: Speaker) -> None:
        absent = [other for other in self.cast if other not in present]
        if absent and self.chance.happens(0.12):
            present.append(self.chance.pick(absent))
            self.direct(f"Enter {present[-1].name}, {self.chance.pick(lexicon.ENTRANCES)}.")
        elif len(present) > 2 and self.chance.happens(0.15):
            leaving = self.chance.pick([other for other in present if other is not speaker])
            present.remove(leaving)
            self.direct(f"Exit {leaving.name}.")

    def direct(self, words: str) -> None:
        self.lines += [f"[{words}]", ""]

    def speech(self, speaker: Speaker, to: Speaker, question: Question | None) -> Question | None:
        """Adds one speech and returns the question it ends on, if it does."""
        self.lines.append(f"{speaker.name.upper()}:")
        if self.chance.happens(0.08):
            self.lines.append(f"[{self.chance.pick(lexicon.GESTURES)}]")
        if question:
            self.lines.append(self.answer(question, speaker, to))
        if self.chance.happens(speaker.verse):
            self.couplet(speaker)
        if question is None or self.chance.happens(0.7):
            self.lines += [self.statement(speaker, to) for _ in range(1 + self.chance.below(3))]
        if self.chance.happens(0.03):
            self.lines += [self.refrain, f"And {self.refrain[0].lower()}{self.refrain[1:-1]}."]
        asked = self.question(speaker) if self.chance.happens(speaker.asking) else None
        if asked:
            self.lines.append(self.ask(asked, to))
        self.lines.append("")
        return asked

    def question(self, speaker: Speaker) -> Question:
        kind = self.chance.pick(("where", "who", "will", "will", "many", "many"))
        return Question(kind, self.verb(), self.noun(speaker), self.chance.pick(lexicon.TIMES))

    def ask(self, question: Question, to: Speaker) -> str:
        match question.kind:
            case "where":
                return f"Where is the {self.lost}, {to.title}?"
            case "who":
                return f"Who took the {self.lost}, {to.title}?"
            case "will":
                return f"Will you {question.verb[PLAIN]} the {question.noun} {question.time}, {to.title}?"
            case "many":
                return f"How many {plural(question.noun)} did you {question.verb[PLAIN]}, {to.title}?"

    def answer(self, question: Question, speaker: Speaker, to: Speaker) -> str:
        """The thief lies: blames always the same other, and says that the thing is nowhere."""
        lying = speaker is self.thief
        match question.kind:
            case "where":
                return f"The {self.lost} is {'nowhere that I know' if lying else self.hidden}, {to.title}."
            case "who":
                culprit = self.scapegoat if lying else self.thief
                return f"{culprit.name} took the {self.lost}, {speaker.oath}."
            case "will":
                refusal = "not " if self.chance.happens(0.5) else ""
                return f"I will {refusal}{question.verb[PLAIN]} the {question.noun} {question.time}, {speaker.oath}."
            case "many":
                number = self.chance.pick(lexicon.NUMBERS)
                things = plural(question.noun)
                return f"I {question.verb[PAST]} {number} {things}, {to.title}, and no {question.noun} more."

    def statement(self, speaker: Speaker, to: Speaker) -> str:
        form = self.chance.pick(
            (
                self.clause,
                self.clause,
                self.clause,
                self.pair,
                self.rule,
                self.vow,
                self.deed,
                self.insult,
                self.proverb,
            )
        )
        words = form(speaker, to)
        if self.chance.happens(0.3):
            words = f"{self.chance.pick(lexicon.OPENINGS)}, {words}"
        stop = "!" if form == self.insult or self.chance.happens(0.1) else "."
        return _sentence(words, stop)

    def clause(self, speaker: Speaker, to: Speaker) -> str:
        """A subject whose verb agrees with it, sometimes past a noun of the other number."""
        many = self.chance.happens(0.5)
        subject = self.described(speaker, many)
        determiner = self.chance.pick(("the", "these", "my", "our") if many else ("the", "this", "my", "every"))
        if self.chance.happens(0.25):
            owner = self.chance.pick([other for other in self.cast if other is not speaker])
            subject += f" that {owner.name} {self.verb()[THIRD]}"
        elif self.chance.happens(0.3):
            subject += f" of the {self.described(speaker, not many)}"
        elif self.chance.happens(0.3):
            subject += f" of {self.village()}"
        verb = self.verb()[PLAIN if many else THIRD]
        return f"{determiner} {subject} {verb} the {self.described(speaker, self.chance.happens(0.3))}"

    def pair(self, speaker: Speaker, to: Speaker) -> str:
        return f"{self.clause(speaker, to)}, and {self.clause(speaker, to)}"

    def rule(self, speaker: Speaker, to: Speaker) -> str:
        first, second = self.verb()[PLAIN], self.verb()[PLAIN]
        return f"they that {first} the {self.described(speaker)} must {second} the {self.described(speaker)}"

    def vow(self, speaker: Speaker, to: Speaker) -> str:
        return f"I {self.verb()[PLAIN]} you, {to.title}, as I {self.verb()[PLAIN]} my {self.described(speaker)}"

    def deed(self, speaker: Speaker, to: Speaker) -> str:
        return f"{speaker.oath}, I {self.verb()[PAST]} the {self.described(speaker)} at {self.village()}"

    def insult(self, speaker: Speaker, to: Speaker) -> str:
        first, second = self.chance.sample(lexicon.EPITHETS, 2)
        return f"you {self.noun(speaker)}-{first}, {self.noun(speaker)}-{second} {self.noun(speaker)}"

    def proverb(self, speaker: Speaker, to: Speaker) -> str:
        return self.chance.pick(lexicon.PROVERBS)

    def couplet(self, speaker: Speaker) -> None:
        ends = self.chance.sample(self.chance.pick(lexicon.RHYMES), 2)
        for opening, end, stop in zip(self.chance.sample(lexicon.VERSE_OPENINGS, 2), ends, ",.", strict=True):
            noun = self.noun(speaker)
            adjective = self.chance.pick(lexicon.ADJECTIVES)
            words = opening.format(a=adjective, n=noun, ns=plural(noun), v=self.verb()[PLAIN])
            self.lines.append(f"{words} {end}{stop}")

    def described(self, speaker: Speaker, many: bool = False) -> str:
        noun = plural(self.noun(speaker)) if many else self.noun(speaker)
        return f"{self.chance.pick(lexicon.ADJECTIVES)} {noun}" if self.chance.happens(0.6) else noun

    def noun(self, speaker: Speaker) -> str:
        return self.chance.pick(speaker.things if self.chance.happens(0.25) else lexicon.NOUNS)

    def verb(self) -> tuple[str, str, str]:
        return self.chance.pick(lexicon.VERBS)

    def village(self) -> str:
        return "".join(self.chance.pick(halves) for halves in lexicon.VILLAGES)


@functools.cache
def plural(noun: str) -> str:
    irregular = {"child": "children", "wolf": "wolves", "thief": "thieves", "loaf": "loaves", "grief": "griefs"}
    if noun in irregular:
        return irregular[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def _sentence(words: str, stop: str = ".") -> str:
    return words[0].upper() + words[1:] + stop
