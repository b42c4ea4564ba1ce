"""The small world of the speaking checkpoint: its words, what may be asked, and what is answered.

A prompt is what the user says or writes, and the reply that is right. A few prompts of every kind
are held out: `held_out` says which, by the words alone, so that training never meets them and
`assess.py` asks nothing else.
"""

import random
import zlib
from dataclasses import dataclass

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "orange")
SPEAKERS = ("chelsie", "ethan", "aiden")
GREETINGS = ("hello", "goodbye")
SORRY = "sorry"
SPOKEN = (*DIGITS, *COLOURS, "yes", "no", *GREETINGS, *SPEAKERS, SORRY)
"""Every word that a reply may hold."""

UNKNOWN = (
    *("apple", "bridge", "candle", "doctor", "engine", "forest", "garden", "hammer", "island"),
    *("jacket", "kitchen", "ladder", "mountain", "number", "ocean", "paper", "question", "river"),
    *("summer", "table", "umbrella", "village", "window", "winter", "money", "music", "letter"),
    *("picture", "station", "weather", "bottle", "coffee", "dinner", "flower", "animal", "market"),
)
"""Words that are heard and read, and mean nothing here: the reply is "sorry"."""

SAY = ("say", "please say")
SUM = ("", "what is", "say", "please say")
MOST_WORDS = 4
TEXT_ONLY = "Answer in text only."
SYSTEMS = ("You are a helpful assistant.", "You speak with people.", TEXT_ONLY)
SUMS = 0.18  # the share of sums among prompts
HELD_OUT_SHARE = 8  # one prompt in so many


@dataclass(frozen=True)
class Prompt:
    """What the user says or writes, and the right reply."""

    words: str
    reply: str

    @property
    def says_again(self) -> bool:
        """Whether the reply is made of words of the prompt."""
        return "plus" not in self.words and self.words.endswith(self.reply)

    @property
    def held_out(self) -> bool:
        """Whether training never meets it. Prompts of one word are too few to spare any."""
        return " " in self.words and zlib.crc32(self.words.encode()) % HELD_OUT_SHARE == 0


def random_prompt(rng: random.Random, sums: float = SUMS) -> Prompt:
    """A prompt of any kind: words to say again, a sum, a greeting, or something unknown.

    sums: the share of sums, which words to say again make room for.
    """
    kind = rng.random()
    if kind < 0.8 - sums:
        words = _words(rng)
        return Prompt(_after(rng, SAY, words), words)
    if kind < 0.8:
        return _sum(rng)
    if kind < 0.85:
        greeting = rng.choice(GREETINGS)
        return Prompt(greeting, greeting)
    return Prompt(_unknown(rng), SORRY)


def heard_prompt(rng: random.Random, sums: float = SUMS) -> Prompt:
    """As `random_prompt`; and words that are only heard are said again without being asked to."""
    prompt = random_prompt(rng, sums)
    return Prompt(prompt.reply, prompt.reply) if rng.random() < 0.3 else prompt


def prompts(
    rng: random.Random, count: int, *, heard: bool, held_out: bool, sums: float = SUMS
) -> list[Prompt]:
    """So many prompts, in speech or in text, of those that training meets or of the others."""
    draw = heard_prompt if heard else random_prompt
    found: list[Prompt] = []
    while len(found) < count:
        prompt = draw(rng, sums)
        if prompt.held_out == held_out:
            found.append(prompt)
    return found


def written(reply: str, system: str | None) -> str:
    """The reply as text. Where the system turn asks for text only it stands in brackets, and
    what stands in brackets is not spoken."""
    return f"({reply})" if system == TEXT_ONLY else reply


def _words(rng: random.Random) -> str:
    count = rng.choice((1, 2, 2, 3, 3, 4, 4))
    return " ".join(rng.choice(SPOKEN) for _ in range(count))


def _sum(rng: random.Random) -> Prompt:
    first = rng.randrange(10)
    second = rng.randrange(10 - first)
    words = f"{DIGITS[first]} plus {DIGITS[second]}"
    return Prompt(_after(rng, SUM, words), DIGITS[first + second])


def _unknown(rng: random.Random) -> str:
    words = [rng.choice(UNKNOWN) for _ in range(rng.choice((1, 2, 2, 3)))]
    start = rng.random()
    if start < 0.3:
        return _after(rng, SAY, " ".join(words))
    if start < 0.5:
        return f"what is {words[0]}"
    return " ".join(words)


def _after(rng: random.Random, starts: tuple[str, ...], words: str) -> str:
    return f"{rng.choice(starts)} {words}".strip()
