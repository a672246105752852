"""Renders noun phrases and clauses in German: word order and inflection."""

from writehead.data.corpus.lexicon import ACCUSATIVE, DATIVE, NOMINATIVE
from writehead.data.corpus.syntax import PLURAL, THIRD, Clause, NounPhrase, Pronoun, join


def _table(*rows: str) -> list[list[str]]:
    """Parses a row per case; columns are masculine, feminine, neuter and plural. "-" is empty."""
    return [[ending.replace("-", "") for ending in row.split()] for row in rows]


_DEFINITE = _table("der die das die", "den die das die", "dem der dem den")
_EIN = _table("- e - e", "en e - e", "em er em en")
# endings of adjectives after der, after ein, and without an article; dieser has the last, too
_WEAK = _table("e e e en", "en e e en", "en en en en")
_MIXED = _table("er e es en", "en e es en", "en en en en")
_STRONG = _table("er e es e", "en e es e", "em er em en")

_EIN_WORDS = {
    "a": "ein", "my": "mein", "your": "Ihr", "his": "sein", "her": "ihr", "our": "unser",
    "their": "ihr",
}  # fmt: skip
_CONTRACTIONS = {
    "in dem": "im", "in das": "ins", "an dem": "am", "zu dem": "zum", "zu der": "zur",
    "von dem": "vom",
}  # fmt: skip
# present and past for ich, er and the plural
_AUXILIARIES = {
    "haben": (("habe", "hat", "haben"), ("hatte", "hatte", "hatten")),
    "sein": (("bin", "ist", "sind"), ("war", "war", "waren")),
    "werden": (("werde", "wird", "werden"), ("wurde", "wurde", "wurden")),
}


def noun_phrase(phrase: NounPhrase, case: int, *, negated: bool = False) -> str:
    """Returns the noun phrase in a case; `negated` turns "ein" into "kein"."""
    head = phrase.head
    if isinstance(head, Pronoun):
        return head.german[case]
    column = 3 if phrase.plural else "mfn".index(head.gender)
    determiner, endings = _determiner(phrase, case, column, negated)
    words = [determiner, phrase.count[1] if phrase.count else ""]
    if phrase.adjective:
        words.append(phrase.adjective.stem + endings[case][column])
    return join([*words, (head.german_plural if phrase.plural else head.german)[case]])


def _determiner(
    phrase: NounPhrase, case: int, column: int, negated: bool
) -> tuple[str, list[list[str]]]:
    """Returns the determiner and the endings of an adjective after it."""
    determiner = phrase.determiner
    if determiner == "the":
        return _DEFINITE[case][column], _WEAK
    if determiner == "this":
        return "dies" + _STRONG[case][column], _WEAK
    if negated:
        return "kein" + _EIN[case][column], _MIXED
    if not determiner or (determiner == "a" and phrase.plural):
        return "", _STRONG
    return _EIN_WORDS[determiner] + _EIN[case][column], _MIXED


def prepositional(preposition: str, phrase: NounPhrase, case: int) -> str:
    """Returns a preposition and its noun phrase, contracted where usual: "im" for "in dem"."""
    first, _, rest = noun_phrase(phrase, case).partition(" ")
    words = f"{preposition} {first}"
    return join([_CONTRACTIONS.get(words, words), rest])


def clause(part: Clause, order: str, *, lead: str = "") -> str:
    """Returns the clause after its `lead`, with the finite verb first, second or last."""
    finite, final = _verb(part, part.subject.person if part.subject else THIRD)
    subject = noun_phrase(part.subject, NOMINATIVE) if part.subject else ""
    middle = _middle_field(part)
    if order == "last":
        separable = final == part.verb.german.prefix
        words = [lead, subject, *middle, final + finite if separable else f"{final} {finite}"]
    elif order == "first":
        words = [lead, finite, subject, *middle, final]
    elif part.time and part.time_first:
        words = [lead, part.time[1], finite, subject, *middle, final]
    else:
        words = [lead, subject, finite, *middle, final]
    text = join(words)
    if part.infinitive:
        verb = part.infinitive.verb.german
        zu = f"{verb.prefix}zu{verb.infinitive}" if verb.prefix else f"zu {verb.infinitive}"
        text += ", " + join([*_middle_field(part.infinitive), zu])
    return text


def _middle_field(part: Clause) -> list[str]:
    """Returns the words between finite and final verb: known phrases, time, new phrases, place."""
    accusative, dative = part.accusative, part.dative
    kein = part.negated and accusative is not None and not accusative.is_definite
    nicht = part.negated and not kein
    known: list[str] = []
    new: list[str] = []
    if dative:
        (known if dative.is_definite else new).append(noun_phrase(dative, DATIVE))
    place = part.place[1] if part.place else ""
    if accusative:
        text = noun_phrase(accusative, ACCUSATIVE, negated=kein)
        if not accusative.is_definite:  # trinkt im Garten Tee, but trinkt den Tee im Garten
            new += [place, text]
            place = ""
        else:
            early = nicht or isinstance(accusative.head, Pronoun)
            (known if early else new).append(text)
    time = part.time[1] if part.time and not part.time_first else ""
    now = "gerade" if part.tense == "progressive" else ""
    words = [*known, time, now, *new, "nicht" if nicht else "", place]
    if part.prepositional:
        _, preposition, case = part.verb.preposition
        words.append(prepositional(preposition, part.prepositional, case))
    return [*words, part.predicate[1] if part.predicate else ""]


def _verb(part: Clause, person: int) -> tuple[str, str]:
    """Returns the finite verb, and the rest of the verb at the end of a main clause."""
    verb, modal, past, plural = part.verb.german, part.modal, part.tense == "past", person == PLURAL
    infinitive = verb.prefix + verb.infinitive
    if modal:
        return modal.german[2] + "n" * plural if past else modal.german[plural], infinitive
    if part.tense == "perfect":
        return _AUXILIARIES[verb.auxiliary][0][person], verb.participle
    if part.tense == "future":
        return _AUXILIARIES["werden"][0][person], infinitive
    if verb.infinitive in _AUXILIARIES:
        return _AUXILIARIES[verb.infinitive][past][person], ""
    if past:
        ending = "" if not plural else "n" if verb.past.endswith("e") else "en"
        return verb.past + ending, verb.prefix
    return (verb.first, verb.third, verb.infinitive)[person], verb.prefix
