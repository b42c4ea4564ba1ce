"""The vocabulary of the speaking checkpoint, its questions and their right replies.

A few prompts of every kind are held out, chosen by their words alone: training never sees them, and
train/assess.py asks only them.
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
"""Words of questions without an answer: the reply is "sorry"."""

SAY = ("say", "please say")
SUM = ("", "what is", "say", "please say")
TEXT_ONLY = "Answer in text only."
SYSTEMS = ("You are a helpful assistant.", "You speak with people.", TEXT_ONLY)
MOST_WORDS = 4  # of a reply
SUMS = 0.18  # the share of sums among prompts
HELD_OUT_SHARE = 8  # one prompt in this many


@dataclass(frozen=True)
class Prompt:
    """A question, spoken or written, and its right reply."""

    words: str
    reply: str

    @property
    def says_again(self) -> bool:
        """True where the reply repeats words of the prompt."""
        return "plus" not in self.words and self.words.endswith(self.reply)

    @property
    def held_out(self) -> bool:
        """True where training leaves it out: never a prompt of one word, since they are few."""
        return " " in self.words and zlib.crc32(self.words.encode()) % HELD_OUT_SHARE == 0


def random_prompt(rng: random.Random, sums: float = SUMS) -> Prompt:
    """Draw a prompt of any kind: words to repeat, a sum, a greeting, or unknown words.

    sums: the share of sums; together with words to repeat they are 0.8.
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
    """Draw a spoken prompt: see random_prompt; some are only the words of the reply."""
    prompt = random_prompt(rng, sums)
    return Prompt(prompt.reply, prompt.reply) if rng.random() < 0.3 else prompt


def prompts(
    rng: random.Random, count: int, *, heard: bool, held_out: bool, sums: float = SUMS
) -> list[Prompt]:
    """Draw `count` prompts, spoken or written, held out or not."""
    draw = heard_prompt if heard else random_prompt
    found: list[Prompt] = []
    while len(found) < count:
        prompt = draw(rng, sums)
        if prompt.held_out == held_out:
            found.append(prompt)
    return found


def written(reply: str, system: str | None) -> str:
    """Return the reply as text.

    Where the system turn asks for text only it is in brackets, and is not spoken.
    """
    return f"({reply})" if system == TEXT_ONLY else reply


def _words(rng: random.Random) -> str:
    count = rng.choice((1, 2, 2, 3, 3, MOST_WORDS, MOST_WORDS))
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
