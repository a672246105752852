"""The German of a tree: articles and endings, the sentence bracket, and who stands where."""

from writehead.data.grammar.nouns import GENDERS
from writehead.data.grammar.numbers import german_number
from writehead.data.grammar.tree import (
    LIKE,
    MUST,
    Clause,
    Name,
    Phrase,
    Pronoun,
    Relative,
    Sentence,
)
from writehead.data.grammar.verbs import GermanVerb

NOMINATIVE, ACCUSATIVE, DATIVE, GENITIVE = range(4)

# rows are cases; columns masculine, feminine, neuter, plural
_ARTICLES = ("der die das die", "den die das die", "dem der dem den", "des der des der")
DEFINITE = tuple(row.split() for row in _ARTICLES)
_EIN = tuple(row.split(",") for row in (",e,,e", "en,e,,e", "em,er,em,en", "es,er,es,er"))
_DIESER = tuple(row.split() for row in ("er e es e", "en e es e", "em er em en", "es er es er"))
_WEAK = tuple(row.split() for row in ("e e e en", "en e e en", "en en en en", "en en en en"))
_MIXED = tuple(row.split() for row in ("er e es en", "en e es en", "en en en en", "en en en en"))
_STRONG = tuple(row.split() for row in ("er e es e", "en e es e", "em er em en", "en er en er"))
RELATIVE = (*DEFINITE[:2], ["dem", "der", "dem", "denen"], ["dessen", "deren", "dessen", "deren"])

# the German stem of each English determiner, its endings and those of the adjectives after it
_DETERMINERS = {
    "a": ("ein", _EIN, _MIXED),
    "no": ("kein", _EIN, _MIXED),
    "my": ("mein", _EIN, _MIXED),
    "your": ("Ihr", _EIN, _MIXED),
    "his": ("sein", _EIN, _MIXED),
    "her": ("ihr", _EIN, _MIXED),
    "our": ("unser", _EIN, _MIXED),
    "their": ("ihr", _EIN, _MIXED),
    "this": ("dies", _DIESER, _WEAK),
    "every": ("jed", _DIESER, _WEAK),
    "all": ("all", _DIESER, _WEAK),
    "many": ("viel", _DIESER, _STRONG),
    "some": ("einig", _DIESER, _STRONG),
}
_CONTRACTED = {
    ("in", "dem"): "im", ("in", "das"): "ins", ("an", "dem"): "am", ("an", "das"): "ans",
    ("zu", "dem"): "zum", ("zu", "der"): "zur", ("bei", "dem"): "beim", ("von", "dem"): "vom",
}  # fmt: skip
_AUXILIARIES = {
    "haben": (("habe", "hat", "haben"), ("hatte", "hatte", "hatten")),
    "sein": (("bin", "ist", "sind"), ("war", "war", "waren")),
}
_WILL = ("werde", "wird", "werden")


def noun_phrase(phrase: Phrase, case: int, *, denied: bool = False, whole: bool = True) -> str:
    """The phrase in a case; `denied` makes ein kein; `whole` keeps the relative clause."""
    head = phrase.head
    if isinstance(head, Pronoun):
        return head.german[case]
    if isinstance(head, Name):
        text = head.english + ("s" if case == GENITIVE else "")
    else:
        column = 3 if phrase.plural else GENDERS.index(head.gender)
        word, endings = _determiner(phrase, case, column, denied)
        words = [word] if word else []
        if phrase.count:
            words.append(german_number(phrase.count))
        ending = endings[case][column]
        degree = phrase.degree
        stems = []
        for adjective in reversed(phrase.adjectives):
            stems.append(adjective.stems[degree] + ending)
            degree = 0
        words += stems[::-1]
        words.append((head.plural if phrase.plural else head.singular)[case])
        if phrase.owner and not isinstance(phrase.owner.head, Name):
            words.append(noun_phrase(phrase.owner, GENITIVE))
        text = " ".join(words)
    if phrase.also:
        text = f"{text} und {noun_phrase(phrase.also, case)}"
    if phrase.relative and whole:
        text = f"{text} , {relative(phrase.relative, phrase)} ,"
    return text


def _determiner(
    phrase: Phrase, case: int, column: int, denied: bool
) -> tuple[str, tuple[list[str], ...]]:
    """The article or its like, and the endings of adjectives after it."""
    determiner = phrase.determiner
    if determiner == "'s":
        assert phrase.owner
        if isinstance(phrase.owner.head, Name):
            return noun_phrase(phrase.owner, GENITIVE), _STRONG
        return DEFINITE[case][column], _WEAK
    if determiner == "the":
        return DEFINITE[case][column], _WEAK
    if denied:
        return "kein" + _EIN[case][column], _MIXED
    if determiner in ("", "piano", "whose") or (determiner == "a" and column == 3):
        return "", _STRONG
    stem, articles, adjectives = _DETERMINERS[determiner]
    return stem + articles[case][column], adjectives


def prepositional(preposition: str, phrase: Phrase, case: int, *, whole: bool = True) -> str:
    """The preposition and its phrase: in + dem = im, unless a relative clause points at it."""
    text = noun_phrase(phrase, case, whole=whole)
    if phrase.determiner == "the" and not phrase.relative:
        first, _, rest = text.partition(" ")
        short = _CONTRACTED.get((preposition, first))
        if short:
            return f"{short} {rest}"
    return f"{preposition} {text}"


def relative(part: Relative, about: Phrase) -> str:
    """The relative clause about a noun, without its commas."""
    head = about.head
    assert not isinstance(head, Pronoun | Name)
    column = 3 if about.plural else GENDERS.index(head.gender)
    if part.role == "place":
        assert part.place
        lead = f"{part.place[1]} {RELATIVE[DATIVE][column]}"
    elif part.role == "about":
        assert part.clause.verb.preposition
        _, word, case = part.clause.verb.preposition
        lead = f"{word} {RELATIVE[case][column]}"
    else:
        case = {"nominative": 0, "accusative": 1, "dative": 2, "whose": 3}[part.role]
        lead = RELATIVE[case][column]
    return clause(part.clause, "last", lead=lead, agreeing=about)


def clause(part: Clause, order: str, *, lead: str = "", agreeing: Phrase | None = None) -> str:
    """The words of a clause, commas apart, whose finite verb is first, second or last.

    `lead` stands before everything: a conjunction, a question word, a relative pronoun.
    """
    if part.swapped:
        subject, dative = part.accusative, part.subject
        accusative = None
    else:
        subject, accusative, dative = part.subject, part.accusative, part.dative
    finite, bracket = _verb(part, subject or agreeing)
    words = [lead] if lead else []
    named = [noun_phrase(subject, NOMINATIVE)] if subject else []
    middle = _middle(part, subject or agreeing, accusative, dative)
    inner = order != "second" or (part.time and part.front)
    if part.verb.german.reflexive and inner and subject and not subject.pronominal:
        named.insert(0, middle.pop(0))  # heute freut sich der Mann, but heute freut er sich
    if order == "last":
        prefix = part.modal in (None, LIKE) and part.tense in (
            "present",
            "past",
            "progressive",
            "since",
        )
        if prefix and bracket:
            finite = bracket + ("" if part.verb.german.prefix[-1] != "_" else " ") + finite
            bracket = ""
        time = [part.time[1]] if part.time and part.front else []
        words += [*named, *time, *middle, bracket, finite]
    elif order == "second" and part.time and part.front:
        words += [part.time[1], finite, *named, *middle, bracket]
    elif order == "second":
        words += [*named, finite, *middle, bracket]
    else:
        words += [finite, *named, *middle, bracket]
    last = part.about or accusative or dative
    if last and last.relative:
        words.append(f", {relative(last.relative, last)} ,")
    words += _after(part, subject or agreeing)
    return " ".join(word for word in words if word)


def infinitive(part: Clause, who: Phrase | None = None) -> str:
    """The words of a clause that `who` is to do, ending in its infinitive with zu."""
    words = _middle(part, who, part.accusative, part.dative)
    return " ".join([*words, part.verb.german.to])


def _after(part: Clause, who: Phrase | None) -> list[str]:
    """What follows the closing bracket: infinitives with zu."""
    words = []
    if part.infinitive:
        words.append(f", {infinitive(part.infinitive, who)} ,")
    if part.purpose:
        words.append(f", um {infinitive(part.purpose, who)} ,")
    return words


def _middle(
    part: Clause, who: Phrase | None, accusative: Phrase | None, dative: Phrase | None
) -> list[str]:
    """What stands between the two halves of the bracket, in its order.

    Pronouns come first, then what is known, then time, then what is new, then how and where.
    """
    denied = part.negated and part.modal is not LIKE
    none = denied and accusative is not None and not accusative.definite
    nicht = denied and not none
    early: list[str] = []
    if part.verb.german.reflexive:
        early.append("sich" if who is None or not who.first else "uns" if who.many else "mich")
    late: list[str] = []
    what = noun_phrase(accusative, ACCUSATIVE, denied=none, whole=False) if accusative else ""
    if accusative and accusative.pronominal:
        early.append(what)
    if dative:
        known = dative.pronominal or dative.definite
        (early if known else late).append(noun_phrase(dative, DATIVE, whole=False))
    if accusative and not accusative.pronominal:
        (early if nicht and accusative.definite else late).append(what)
    when = [part.time[1]] if part.time and not part.front else []
    around = [pair[1] for pair in (part.manner, part.place) if pair]
    if accusative and not accusative.definite:
        late[-1:-1] = around  # trinkt im Garten Bier, but trinkt das Bier im Garten
        around = []
    words = [*early, *when, *_often(part), *late]
    if nicht:
        words.append("nicht")
    words += around
    if part.about and part.verb.preposition:
        _, word, case = part.verb.preposition
        words.append(prepositional(word, part.about, case, whole=False))
    for pair in (part.predicate, part.direction):
        if pair:
            words.append(pair[1])
    return words


def _often(part: Clause) -> list[str]:
    """How often, or gerade for what goes on right now, or gern for what one likes."""
    if part.modal is LIKE:
        return ["nicht gern" if part.negated else "gern"]
    if part.often:
        return [part.often[1]]
    return ["gerade"] if part.tense == "progressive" and not part.time else []


def _verb(part: Clause, who: Phrase | None) -> tuple[str, str]:
    """The finite verb and what closes the bracket."""
    verb = part.verb.german
    person = 2 if who and who.many else 0 if who and who.first else 1
    past = part.tense in ("past", "pluperfect")
    if part.modal and part.modal is not LIKE:
        return _modal(part, person), verb.joined
    if part.tense in ("perfect", "pluperfect"):
        return _AUXILIARIES[verb.auxiliary][past][person], verb.perfect
    if part.tense == "future":
        return _WILL[person], verb.joined
    return _simple(verb, person, past), verb.prefix.replace("_", "")


def _simple(verb: GermanVerb, person: int, past: bool) -> str:
    """The present or the preterite."""
    if verb.infinitive in _AUXILIARIES:
        return _AUXILIARIES[verb.infinitive][past][person]
    if past:
        return verb.past_plural if person == 2 else verb.past
    return (verb.first, verb.third, verb.infinitive)[person]


def _modal(part: Clause, person: int) -> str:
    """The modal's form; "must not" is a matter of dürfen."""
    assert part.modal
    singular, plural, past = part.modal.german
    if part.modal is MUST and part.negated:
        singular, plural = "darf", "dürfen"
    if part.tense == "past":
        return past + ("n" if person == 2 else "")
    return plural if person == 2 else singular


def sentence(part: Sentence) -> str:
    """The sentence with its commas, its capital and its full stop."""
    main = part.main
    if part.kind == "order":
        words = [
            part.main.verb.german.infinitive,
            "Sie",
            *_middle(main, None, main.accusative, main.dative),
        ]
        text = " ".join(["bitte", *words, main.verb.german.prefix])
    elif part.kind == "statement":
        text = clause(main, "first" if part.reversed else "second")
    else:
        text = clause(main, "first", lead=part.asked[1])
    if part.second:
        second = clause(
            part.second, "second" if part.coordinated else "last",
            lead="" if part.coordinated else part.conjunction[1],
        )  # fmt: skip
        if part.reversed:
            text = f"{second} , {text}"
        elif part.coordinated:
            comma = "" if part.conjunction[1] == "und" else " ,"
            text = f"{text}{comma} {part.conjunction[1]} {second}"
        else:
            text = f"{text} , {second}"
    while " , ," in text:
        text = text.replace(" , ,", " ,")
    text = text.removesuffix(" ,").replace(" ,", ",").strip()
    question = part.kind in ("whether", "which")
    return text[0].upper() + text[1:] + ("?" if question else ".")
