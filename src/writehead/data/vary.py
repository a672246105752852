"""Varies training pairs: the case of their letters, and the words that a translation copies."""

import re
from random import Random

from writehead.config import PrepareConfig
from writehead.data.sources import Row

MAX_CAPITALS = 60  # characters; people write only short texts in capitals
# does not match addresses, paths and placeholders, which may depend on case
_PROSE = re.compile(r"[^\W_][\w\s.,:;!?'’\"“”„()%&+-]*")
_WORD = re.compile(r"\w+")
_EMOJI = (
    *(range(0x1F600, 0x1F645), range(0x1F90D, 0x1F93A), range(0x1F440, 0x1F4FD)),
    *(range(0x1F300, 0x1F321), range(0x1F32D, 0x1F37E), range(0x1F380, 0x1F394)),
    *(range(0x1F680, 0x1F6C6), range(0x2705, 0x2706), range(0x2728, 0x2729)),
    *(range(0x1F4A0, 0x1F4B0), range(0x1F64B, 0x1F650), range(0x2B50, 0x2B51)),
)
EMOJI = [
    *(chr(code) for codes in _EMOJI for code in codes),
    *("❤️", "☀️", "☺️", "✌️", "✔️", "⚠️", "👍🏻", "👍🏽", "🙏🏼", "👩‍💻", "🤷‍♂️", "🇩🇪", "🇬🇧", "🇺🇸", "🇫🇷"),
]
_STARTS = (*"bcdfghjklmnprstvwyz", "br", "ch", "gr", "kh", "sh", "st", "th")
_VOWELS = "aeiou"
_ENDS = ("", "", "", "l", "m", "n", "r", "s", "x", "tt", "nd", "ng")
_DOMAINS = ("com", "org", "net", "de", "eu", "io", "co.uk")


class Variation:
    """Changes pairs at random but reproducibly, in the shares that the config sets."""

    def __init__(self, config: PrepareConfig) -> None:
        self._case, self._copies = config.vary_case, config.vary_copies
        self._random = Random(f"{config.seed}/vary")

    def __bool__(self) -> bool:
        return max(self._case, self._copies) > 0

    def __call__(self, pair: Row) -> Row | None:
        """Returns the changed pair, or None if it stays as it is."""
        draw = self._random.random()
        if draw < self._copies:
            changed = self._vary_copies(pair)
        elif draw < self._copies + self._case:  # never both: words to copy keep their case
            changed = self._vary_case(pair)
        else:
            return None
        return None if changed == pair else changed

    def _vary_case(self, pair: Row) -> Row:
        """Changes the first letter, or all letters.

        A lower-case source keeps its translation, because German nouns need their capitals.
        """
        source, target = pair
        if not _PROSE.fullmatch(source):
            return pair
        if source[0].islower() and self._random.random() < 0.5:
            return _capitalised(source), _capitalised(target)
        if len(source) <= MAX_CAPITALS and self._random.random() < 0.25:
            return source.upper(), target.upper()
        if self._random.random() < 0.5 or source[1:2].isupper():  # not iP, but ip
            return source.lower(), target
        return source[0].lower() + source[1:], target

    def _vary_copies(self, pair: Row) -> Row:
        """Replaces a number or name on both sides, or adds something to copy to both."""
        random, (source, target) = self._random, pair
        words = [[*_WORD.finditer(text)] for text in pair]
        texts = [[word[0] for word in side] for side in words]
        shared = [
            word
            for word in dict.fromkeys(texts[0])
            if _is_copied(word) and texts[0].count(word) == texts[1].count(word) == 1
        ]
        if shared:
            old = random.choice(shared)
            new = self._number(len(old)) if old.isdecimal() else self._name(numbers=0)
            spans = [side[text.index(old)].span() for side, text in zip(words, texts, strict=True)]
            return tuple(
                text[:start] + new + text[end:]
                for text, (start, end) in zip(pair, spans, strict=True)
            )
        new = self._emoji() if random.random() < 0.6 else self._name(numbers=2)
        kind = random.random()
        if kind < 0.05:
            return new, new
        if kind < 0.2:
            return f"{new} {source}", f"{new} {target}"
        return f"{source} {new}", f"{target} {new}"

    def _number(self, digits: int) -> str:
        return str(self._random.randrange(10 ** (digits - 1), 10**digits))

    def _emoji(self) -> str:
        return "".join(self._random.choices(EMOJI, k=self._random.choice((1, 1, 1, 2, 3))))

    def _word(self) -> str:
        choose, count = self._random.choice, self._random.choice((1, 2, 2, 3))
        return "".join(choose(_STARTS) + choose(_VOWELS) + choose(_ENDS) for _ in range(count))

    def _name(self, *, numbers: int) -> str:
        """Returns a made-up name, code, number (`numbers` times in 18), e-mail address or URL."""
        random, word = self._random, self._word()
        match random.choices(range(5), (10 - numbers, 2, numbers, 3, 3))[0]:
            case 0:
                return word.capitalize()
            case 1:
                return f"{word[:3].upper()}{random.choice(('', '-'))}{self._number(3)}"
            case 2:
                count, separator = random.randint(2, 3), random.choice(".-")
                return separator.join(self._number(random.randint(1, 4)) for _ in range(count))
            case 3:
                user = random.choice((word, f"{word}.{self._word()}", f"{word}{self._number(2)}"))
                return f"{user}@{self._word()}.{random.choice(_DOMAINS)}"
            case _:
                start = random.choice(("https://", "https://www.", "http://", "www."))
                path = random.choice(("", "/", f"/{self._word()}", f"/{self._word()}.html"))
                return f"{start}{word}.{random.choice(_DOMAINS)}{path}"


def _is_copied(word: str) -> bool:
    """Returns whether a word that both sides have is a number or a name."""
    return word.isdecimal() or (len(word) > 2 and word.isalpha() and word[0].isupper())


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]
