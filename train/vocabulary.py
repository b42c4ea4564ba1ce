"""The vocabulary of the speaking checkpoint, its questions and their right replies.

`reply_of` is the rule; questions are drawn at random, and their replies follow from it. Some are
held out, chosen by their words alone: training never sees them, and train/assess.py asks them.
"""

import random
import re
import zlib
from dataclasses import dataclass
from functools import lru_cache

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "orange")
SPEAKERS = ("chelsie", "ethan", "aiden")
GREETINGS = ("hello", "goodbye")
SORRY = "sorry"
INTRODUCTION = "i am a small demo"
SPOKEN = (
    *(*DIGITS, *COLOURS, "yes", "no", *GREETINGS, *SPEAKERS, SORRY),
    *INTRODUCTION.split(),
)
"""Every word that a reply may hold."""
MOST_WORDS = 5  # of a reply

SAY = ("", "say", "please say")
SUM = ("", "what is", "what's", "how much is", "say", "please say")
SUM_ENDS = ("", "equals")
HELLO = (
    *("hello", "hi", "hey", "good morning", "good afternoon", "good evening"),
    *("hello there", "hi there", "hey there", "say hi", "say hey"),
)
GOODBYE = ("goodbye", "bye", "bye bye")
WHO = (
    *("who are you", "what are you", "what can you do", "tell me about yourself"),
    *("what is your name", "what's your name", "introduce yourself", "what do you do"),
    *("describe yourself", "who am i talking to", "what is this", "who is this", "are you human"),
    *("are you a robot", "what do you know", "what can i ask", "what can i say", "help"),
)
OPENINGS = ("hello", "hi", "hey", "so", "please")
"""What may come before a question of WHO."""
PHRASES = {
    **dict.fromkeys(HELLO, "hello"),
    **dict.fromkeys(GOODBYE, "goodbye"),
    **dict.fromkeys(WHO, INTRODUCTION),
}
KNOWN = tuple(
    dict.fromkeys(
        (*SPOKEN, *" ".join((*SAY, *SUM, "plus", *SUM_ENDS, *PHRASES, *OPENINGS)).split())
    )
)
"""Every word of a question that has an answer."""
FIRST = {text.split()[0] for text in (*SPOKEN, *SAY[1:], *SUM[1:], *PHRASES, *OPENINGS)}
"""Words that such a question begins with."""

# Words that espeak-ng says like a known one, in some accent.
SOUNDS_LIKE = {
    **dict.fromkeys(("to", "too", "tu", "tue"), "two"),
    **dict.fromkeys(("for", "fore"), "four"),
    **dict.fromkeys(("by", "buy", "bi", "bai", "bhai"), "bye"),
    **dict.fromkeys(("high", "hai", "hye", "hy"), "hi"),
    **dict.fromkeys(("eye", "aye", "ay", "ey", "ei"), "i"),
    **dict.fromkeys(("u", "yu", "ew", "yoo", "ue", "yew"), "you"),
    **dict.fromkeys(("due", "du", "doo", "dew"), "do"),
    **dict.fromkeys(("hu", "hoo", "hou"), "who"),
    **dict.fromkeys(("watt", "wat", "wot", "wut"), "what"),
    **dict.fromkeys(("eur", "youre"), "your"),
    **dict.fromkeys(("mae", "mea", "mee"), "me"),
    **dict.fromkeys(("r", "ar", "arr"), "are"),
    **dict.fromkeys(("aidan", "aden"), "aiden"),
    **dict.fromkeys(("wight", "whyte"), "white"),
    **dict.fromkeys(("blew", "blu"), "blue"),
    **{"know": "no", "won": "one", "ate": "eight", "eh": "a", "greene": "green", "hay": "hey"},
    **{"tel": "tell", "mourning": "morning", "pleas": "please", "gould": "good", "kan": "can"},
}

TEXT_ONLY = "Answer in text only."
SYSTEMS = ("You are a helpful assistant.", "You speak with people.", TEXT_ONLY)
SUMS = 0.2  # the share of sums among prompts
HELD_OUT_SHARE = 8  # one prompt in this many
HELD_OUT_WORDS = 5  # one unknown word in this many
MOST_CHARACTERS = 60  # of a text without an answer, about
_SUM = re.compile(f"({'|'.join(DIGITS)}) plus ({'|'.join(DIGITS)})")
_ASKED_OF_WORDS = (
    *("what is", "what's", "who is", "tell me about", "are you", "how much is", "do you know"),
    *("what is the", "can you say", "i am", "what are", "are you a", "where is", "why is"),
)
_SENTENCES = (
    *("how are you", "thank you", "thanks a lot", "what time is it", "how old are you", "i am {}"),
    *("where is the {}", "how do i {} the {}", "can you {} my {}", "write a {} about {}"),
    *("the {} is {}", "my {} is {}", "do you like {}", "why is the {} {}", "tell me a {}"),
    *("translate {} to {}", "play some {}", "turn on the {}", "what does {} mean", "i want {}"),
    *("who is {}", "when did {} {}", "is {} a {}", "what is the {} of {}", "i like the {} one"),
    *("say something about {}", "please {} the {}", "hello {}", "good {}", "are you {}"),
    *("tell me about {}", "what is {} plus {}", "{} plus {}", "red {}", "say {} {}", "a small {}"),
    *("who made you", "who is your {}", "what can you {}", "what is your {}", "i am a {}"),
)
_CODE = (
    *("def {}({}):\n    return {}", "print({})", "{}.{}()", "<div>{}</div>", "{} = [{}, {}]"),
    *("SELECT {} FROM {};", '{{"{}": "{}"}}', "https://{}.com/{}", "{}@{}.org", "/{}/{}/{}"),
    *("#include <{}.h>", "for {} in {}: pass", "if ({} == 1) {{ {}(); }}", "$ {} --{}", "a+b={}"),
)
_PUNCTUATION = "([{<!?.,;:-_=+*/\\|~`'\"@#$%^&)>]}"
_SCRIPTS = (
    *((0x00E0, 0x0170), (0x0391, 0x03C9), (0x0410, 0x044F), (0x05D0, 0x05EA), (0x0621, 0x064A)),
    *((0x0905, 0x0939), (0x0E01, 0x0E2E), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5)),
    *((0xAC00, 0xD7A3), (0x1F300, 0x1F64F), (0x2190, 0x22FF), (0x200B, 0x200F), (0x2010, 0x2027)),
)


@dataclass(frozen=True)
class Prompt:
    """A question, spoken or written, and its right reply.

    words: in lower case without punctuation; as_typed: they are a text as it stands.
    """

    words: str
    reply: str
    as_typed: bool = False

    @property
    def says_again(self) -> bool:
        """True where the reply repeats words of the prompt."""
        asked = self.words.removesuffix(" please")
        return any(f"{start} {self.reply}".strip() == asked for start in SAY)

    @property
    def known(self) -> bool:
        """True where the reply is an answer, not that there is none."""
        return self.reply != SORRY or self.says_again

    def may_be(self, held_out: bool) -> bool:
        """Return whether it belongs to what is held out, or to what is not.

        Phrases and single words belong to both, since they are few.
        """
        if " " not in self.words or self.words in PHRASES:
            return True
        return (zlib.crc32(self.words.encode()) % HELD_OUT_SHARE == 0) == held_out


def reply_of(words: str) -> str:
    """Return the right reply to words in lower case without punctuation."""
    words = words.removesuffix(" please")
    if words in PHRASES:
        return PHRASES[words]
    opening, _, asked = words.partition(" ")
    if opening in OPENINGS and asked in WHO:
        return INTRODUCTION
    for start in SAY:
        said = words.removeprefix(f"{start} ").split()
        if 0 < len(said) <= MOST_WORDS and {*said} <= {*SPOKEN}:
            return " ".join(said)
    for start in SUM:
        if terms := _SUM.fullmatch(words.removeprefix(f"{start} ").removesuffix(" equals")):
            total = sum(DIGITS.index(term) for term in terms.groups())
            return DIGITS[total] if total < len(DIGITS) else SORRY
    return SORRY


@lru_cache
def common_words() -> tuple[str, ...]:
    """Return the commonest words without an answer, which any sentence may hold."""
    return _english()[:200]


@lru_cache
def unknown_words(held_out: bool) -> tuple[str, ...]:
    """Return words without an answer, the commonest first; what is held out is in one of both."""
    return tuple(
        word
        for word in _english()[200:]
        if (zlib.crc32(word.encode()) % HELD_OUT_WORDS == 0) == held_out
    )


@lru_cache
def _english() -> tuple[str, ...]:
    from wordfreq import top_n_list

    return tuple(
        word
        for word in top_n_list("en", 20000)
        if re.fullmatch("[a-z]{2,}", word) and word not in KNOWN and word not in SOUNDS_LIKE
    )


def random_prompt(
    rng: random.Random,
    *,
    heard: bool = False,
    held_out: bool = False,
    sums: float = SUMS,
    longest: int = MOST_CHARACTERS,
) -> Prompt:
    """Draw a prompt of any kind: words to repeat, a sum, a phrase, or one without an answer.

    sums: the share of sums; together with words to repeat they are 0.52.
    """
    kind = rng.random()
    if kind < 0.52 - sums:
        words = _after(rng, SAY, _words(rng))
    elif kind < 0.52:
        words = _sum(rng)
    elif kind < 0.58:
        words = rng.choice((*HELLO, *HELLO[:3], *GOODBYE))
    elif kind < 0.66:
        words = rng.choice((*WHO, *WHO[:4]))
        words = _after(rng, OPENINGS, words) if rng.random() < 0.3 else words
    elif kind < 0.74:
        words = _wrong_sum(rng)
    elif kind < 0.82:
        words = _of_known(rng)
    elif kind < 0.93 or heard:
        words = _sentence(rng, held_out, longest)
    else:
        return Prompt(_junk(rng, held_out, longest), SORRY, as_typed=True)
    if rng.random() < 0.03:
        words = f"{words} please"
    if heard:
        words = " ".join(SOUNDS_LIKE.get(word, word) for word in words.split())
    return Prompt(words, reply_of(words))


def prompts(
    rng: random.Random,
    count: int,
    *,
    heard: bool,
    held_out: bool,
    sums: float = SUMS,
    longest: int = MOST_CHARACTERS,
    known: bool | None = None,
) -> list[Prompt]:
    """Draw `count` prompts, spoken or written, held out or not. known: see Prompt; None: any."""
    found: list[Prompt] = []
    while len(found) < count:
        prompt = random_prompt(rng, heard=heard, held_out=held_out, sums=sums, longest=longest)
        if prompt.may_be(held_out) and known in (None, prompt.known):
            found.append(prompt)
    return found


def written(reply: str, system: str | None) -> str:
    """Return the reply as text.

    Where the system turn asks for text only it is in brackets, and is not spoken.
    """
    return f"({reply})" if system == TEXT_ONLY else reply


def typed(prompt: Prompt, rng: random.Random) -> str:
    """Return the prompt as somebody may type it: digits and symbols, case, punctuation, spaces."""
    if prompt.as_typed:
        return prompt.words
    words, ends = prompt.words.split(), ("", "", "", ".", "?", "!", "...", "?!", " ?", "!!")
    in_digits = rng.random()
    if in_digits < 0.12 or (in_digits < 0.6 and "plus" in words):
        share = 1.0 if in_digits < 0.4 else 0.5
        words = [_symbol(word) if rng.random() < share else word for word in words]
    text = (", " if prompt.says_again and rng.random() < 0.12 else " ").join(words)
    if prompt.reply == INTRODUCTION and rng.random() < 0.3:
        text = re.sub("^(hello|hi|hey|so) ", r"\1, ", text)
    if rng.random() < 0.6:
        text = re.sub(r" ?([+=*-]) ?", r"\1", text)
    case = rng.random()
    if case < 0.3:
        text = text[:1].upper() + text[1:]
    elif case < 0.36:
        text = text.title()
    elif case < 0.58:
        text = text.upper()
    if rng.random() < 0.5:
        text = re.sub(r"\bi\b", "I", text)
    if "'" in text and rng.random() < 0.4:
        text = text.replace("'", rng.choice(("", "\u2019")))
    text += rng.choice(ends)
    if rng.random() < 0.1:
        text = rng.choice((" ", "  ", "\n")) + text
    if rng.random() < 0.1:
        text += rng.choice((" ", "  ", "\n"))
    return text.replace(" ", "  ", 1) if rng.random() < 0.04 else text


def random_sentence(rng: random.Random, held_out: bool, count: int) -> str:
    """Draw `count` words, known ones among them."""
    pool = unknown_words(held_out)
    return " ".join(
        rng.choices(
            (pool[int(len(pool) * rng.random() ** 2)], rng.choice(common_words()), _known(rng)),
            (0.6, 0.25, 0.15),
        )[0]
        for _ in range(count)
    )


def _known(rng: random.Random) -> str:
    return rng.choice(KNOWN)


def _words(rng: random.Random) -> str:
    count = rng.choice((1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5))
    return " ".join(rng.choice(SPOKEN) for _ in range(count))


def _sum(rng: random.Random) -> str:
    first = rng.randrange(10)
    words = f"{DIGITS[first]} plus {DIGITS[rng.randrange(10 - first)]}"
    end = rng.choice(("", "", "", " equals"))
    return _after(rng, (*SUM[:4], *SUM), words) + end


def _wrong_sum(rng: random.Random) -> str:
    """Draw a sum above nine, of three terms or a word, or another calculation."""
    first, second, third = (rng.choice(DIGITS) for _ in range(3))
    kind = rng.random()
    if kind < 0.5:
        one = rng.randrange(1, 10)
        words = f"{DIGITS[one]} plus {DIGITS[rng.randrange(10 - one, 10)]}"
    elif kind < 0.8:
        words = f"{first} {rng.choice(('minus', 'minus', 'times', 'divided by'))} {second}"
    elif kind < 0.9:
        words = f"{first} plus {second} plus {third}"
    else:
        other = rng.choice((*COLOURS, "ten", "eleven", "twelve", "twenty", "hundred", ""))
        words = " ".join(rng.choice(((first, "plus", other), (other, "plus", first)))).strip()
    end = rng.choice(("", "", "", " equals"))
    return _after(rng, SUM, words) + end


def _of_known(rng: random.Random) -> str:
    """Draw known words that mostly ask nothing that has an answer."""
    if rng.random() < 0.5:
        return f"{rng.choice(_ASKED_OF_WORDS)} {rng.choice(SPOKEN)}"
    return " ".join(_known(rng) for _ in range(rng.choice((1, 2, 3, 4, 5, 6))))


def _sentence(rng: random.Random, held_out: bool, longest: int) -> str:
    pool = unknown_words(held_out)
    if longest > MOST_CHARACTERS and rng.random() < 0.7:
        return random_sentence(rng, held_out, rng.randrange(8, longest // 7))
    kind = rng.random()
    if kind < 0.35:
        sentence = rng.choice(_SENTENCES)
        return sentence.format(*(rng.choice(pool) for _ in range(sentence.count("{}"))))
    words = random_sentence(rng, held_out, rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 7)))
    return _after(rng, SAY if kind < 0.55 else ("",), words)


def _junk(rng: random.Random, held_out: bool, longest: int) -> str:
    """Draw a text that is no words: signs, letters, numbers, calculations, scripts, code."""
    length = 1 + int((longest // 2) * rng.random() ** 2)
    a, b = rng.randrange(10, 1000), rng.randrange(10)
    pool = unknown_words(held_out)
    letters = "abcdefghijklmnopqrstuvwxyz"
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice(_PUNCTUATION) * (2 * length)
    if kind == 1:
        return "".join(rng.choice(_PUNCTUATION) for _ in range(length))
    if kind == 2:
        return rng.choice(letters) * (2 + 2 * length)
    if kind == 3:
        return "".join(rng.choice(letters) for _ in range(3 + length))
    if kind == 4:
        return "".join(rng.choice("0123456789") for _ in range(2 + length))
    if kind == 5:
        gap = rng.choice(("", " "))
        terms = rng.choice(
            ((a, "+", b), (b, "+", a), (b, "+", b, "+", b), (b, "*", b), (b, "-", b))
        )
        ops = [rng.choice("-*/+") if len(terms) == 5 and t == "+" else str(t) for t in terms]
        return gap.join(ops) + rng.choice(("", "=", "?", " ="))
    if kind == 6:
        code = rng.choice(_CODE)
        return code.format(*(rng.choice(pool) for _ in range(code.count("{}"))))
    first, last = rng.choice(_SCRIPTS)
    signs = [chr(rng.randint(first, last)) for _ in range(1 + length // 2)]
    return "".join(sign + " " * (rng.random() < 0.15) for sign in signs)


def _after(rng: random.Random, starts: tuple[str, ...], words: str) -> str:
    return f"{rng.choice(starts)} {words}".strip()


def _symbol(word: str) -> str:
    symbols = {"plus": "+", "minus": "-", "times": "*", "equals": "="}
    return str(DIGITS.index(word)) if word in DIGITS else symbols.get(word, word)
