"""Numbers from 0 to 999,999 in words: twenty-one, einundzwanzig."""

from writehead.errors import DataError

_WORDS = """
zero one two three four five six seven eight nine ten
eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
- - twenty thirty forty fifty sixty seventy eighty ninety
null eins zwei drei vier fünf sechs sieben acht neun zehn
elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn
- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig
"""
_ALL = _WORDS.split()
_ENGLISH, _ENGLISH_TENS = _ALL[:20], _ALL[20:30]
_GERMAN, _GERMAN_TENS = _ALL[30:50], _ALL[50:]
LIMIT = 1_000_000


def _check(n: int) -> None:
    """Refuses what has no name here."""
    if not 0 <= n < LIMIT:
        raise DataError(f"{n} has no name here; ask for a number from 0 to {LIMIT - 1}")


def english_number(n: int) -> str:
    """The number in English words, with the British "and"."""
    _check(n)
    if n < 20:
        return _ENGLISH[n]
    if n < 100:
        ten, one = divmod(n, 10)
        return _ENGLISH_TENS[ten] + (f"-{_ENGLISH[one]}" if one else "")
    if n < 1000:
        hundred, rest = divmod(n, 100)
        head = f"{_ENGLISH[hundred]} hundred"
        return f"{head} and {english_number(rest)}" if rest else head
    thousand, rest = divmod(n, 1000)
    head = f"{english_number(thousand)} thousand"
    if not rest:
        return head
    return f"{head} and {english_number(rest)}" if rest < 100 else f"{head} {english_number(rest)}"


def german_number(n: int) -> str:
    """The number in German words, all in one word; 1 is eins, as in counting."""
    _check(n)
    if n < 20:
        return _GERMAN[n]
    if n < 100:
        ten, one = divmod(n, 10)
        return (f"{_before_more(one)}und" if one else "") + _GERMAN_TENS[ten]
    if n < 1000:
        hundred, rest = divmod(n, 100)
        return f"{_before_more(hundred)}hundert" + (german_number(rest) if rest else "")
    thousand, rest = divmod(n, 1000)
    return f"{_before_more(thousand)}tausend" + (german_number(rest) if rest else "")


def _before_more(n: int) -> str:
    """The number as the first part of a longer one: eins loses its s."""
    word = german_number(n)
    return word[:-1] if word.endswith("eins") else word
