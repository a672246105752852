"""The English of a tree: word order, articles, agreement and do-support."""

from writehead.data.grammar.numbers import english_number
from writehead.data.grammar.tree import (
    MUST,
    Clause,
    Modal,
    Name,
    Phrase,
    Pronoun,
    Relative,
    Sentence,
)

_PLURAL = {"this": "these", "a": ""}


def article(following: str) -> str:
    """The indefinite article before a word: a or an."""
    return "an" if following[0] in "aeiou" and not following.startswith(("uni", "eu")) else "a"


def noun_phrase(phrase: Phrase, *, object: bool = False) -> str:
    """The words of a noun phrase, its relative clause included."""
    head = phrase.head
    if isinstance(head, Pronoun):
        return head.english_object if object else head.english
    if isinstance(head, Name):
        text = head.english
    else:
        text = head.english_plural if phrase.plural else head.english
        degree = phrase.degree
        for adjective in reversed(phrase.adjectives):
            text = f"{adjective.english[degree]} {text}"
            degree = 0
        if phrase.count:
            text = f"{english_number(phrase.count)} {text}"
        text = _determined(phrase, text)
    if phrase.also:
        text = f"{text} and {noun_phrase(phrase.also)}"
    return f"{text} {relative(phrase.relative, phrase)}" if phrase.relative else text


def _determined(phrase: Phrase, text: str) -> str:
    """The noun with what comes before its adjectives."""
    determiner = phrase.determiner
    if determiner == "'s":
        assert phrase.owner
        return f"{noun_phrase(phrase.owner)}'s {text}"
    if determiner == "piano":
        return f"the {text}"
    if phrase.plural:
        determiner = _PLURAL.get(determiner, determiner)
    elif determiner == "a":
        determiner = article(text)
    return f"{determiner} {text}" if determiner else text


def relative(part: Relative, about: Phrase) -> str:
    """The relative clause about a noun: who for people, that for the rest."""
    person = not (isinstance(about.head, Pronoun | Name)) and "person" in about.head.kinds
    if part.role == "nominative":
        return ("who " if person else "that ") + clause(part.clause, agreeing=about)
    if part.role == "place":
        assert part.place
        return f"{part.place[0]} which " + clause(part.clause)
    if part.role == "whose":
        return clause(part.clause)
    word = part.clause.verb.preposition[0] if part.clause.verb.preposition else "-"
    if part.role == "about" and word != "-":
        return f"{word} {'whom' if person else 'which'} " + clause(part.clause)
    return ("whom " if person else "that ") + clause(part.clause)


def clause(
    part: Clause, *, agreeing: Phrase | None = None, inverted: bool = False, lead: str = ""
) -> str:
    """The words of a clause. `agreeing` is the noun its verb agrees with if a relative clause
    has no subject of its own; `inverted` puts the auxiliary first."""
    who = part.subject or agreeing
    auxiliary, rest = _verb(part, who, inverted)
    words = [lead] if lead else []
    if part.time and part.front:
        words.append(part.time[0] + ("," if " " in part.time[0] else ""))
    subject = [noun_phrase(part.subject)] if part.subject else []
    if inverted:
        words += [auxiliary, *subject]
    else:
        words += [*subject, auxiliary]
    if part.negated:
        if words[-1] == "can":
            words[-1] = "cannot"
        else:
            words.append("not")
    if part.often:
        words.append(part.often[0])
    words.append(rest)
    words += _rest(part)
    return " ".join(word for word in words if word)


def infinitive(part: Clause) -> str:
    """The words of a clause without a subject or tense, after "to"."""
    return " ".join([part.verb.english.base, *_rest(part)])


def _rest(part: Clause) -> list[str]:
    """What follows the verb."""
    words = _objects(part)
    if part.about and part.verb.preposition:
        word = part.verb.preposition[0]
        words += [noun_phrase(part.about, object=True)] if word == "-" else [
            word, noun_phrase(part.about, object=True)
        ]  # fmt: skip
    for pair in (part.predicate, part.manner, part.direction, part.place):
        if pair:
            words.append(pair[0])
    if part.time and not part.front:
        words.append(part.time[0])
    if part.infinitive:
        words += ["to", infinitive(part.infinitive)]
    if part.purpose:
        words += ["in order to", infinitive(part.purpose)]
    return words


def _objects(part: Clause) -> list[str]:
    """The objects and the verb's particle, in their order."""
    verb = part.verb.english
    accusative, dative = part.accusative, part.dative
    what = [noun_phrase(accusative, object=True)] if accusative else []
    whom = [noun_phrase(dative, object=True)] if dative else []
    particle = [verb.particle] if verb.particle else []
    if accusative and dative:
        if part.verb.to or accusative.pronominal:
            return [*what, "to", *whom]
        return [*whom, *what]
    if dative and part.verb.accusative:  # what he gives to the child
        return whom if verb.base == "tell" else ["to", *whom]
    if accusative and accusative.pronominal and not verb.fixed:
        return [*what, *particle]
    return [*particle, *what, *whom]


def _verb(part: Clause, who: Phrase | None, inverted: bool) -> tuple[str, str]:
    """The auxiliary, where there is one, and the rest of the verb."""
    verb = part.verb.english
    third = who is None or not (who.many or who.first)
    supported = inverted or part.negated
    if part.modal:
        return _modal(part, part.modal, third, supported)
    if part.tense == "progressive":
        return _be(who, past=False), verb.ing
    if part.tense in ("perfect", "since"):
        return "has" if third else "have", verb.participle
    if part.tense == "pluperfect":
        return "had", verb.participle
    if part.tense == "future":
        return "will", verb.base
    past = part.tense == "past"
    if verb.base == "be":
        return _be(who, past=past), ""
    if supported:
        return "did" if past else "does" if third else "do", verb.base
    return "", verb.past if past else verb.third if third else verb.base


def _modal(part: Clause, modal: Modal, third: bool, supported: bool) -> tuple[str, str]:
    """The modal and the infinitive, with "do" where the modal wants it."""
    base = part.verb.english.base
    past = part.tense == "past"
    if modal.supported:
        if supported:
            return "did" if past else "does" if third else "do", f"{modal.english[0]} {base}"
        return "", f"{modal.english[2 if past else int(third)]} {base}"
    if past and supported and modal is MUST:
        return "did", f"have to {base}"
    first, _, rest = modal.english[2 if past else int(third)].partition(" ")
    return first, f"{rest} {base}" if rest else base


def _be(who: Phrase | None, *, past: bool) -> str:
    """The form of "be"."""
    if who is None:
        return "was" if past else "is"
    if who.many:
        return "were" if past else "are"
    if past:
        return "was"
    return "am" if who.first else "is"


def sentence(part: Sentence) -> str:
    """The sentence with its capital and its full stop."""
    main = part.main
    if part.kind == "order":
        return f"Please {infinitive(main)}."
    if part.kind == "which" and main.subject is None:
        text = clause(main, lead=part.asked[0])
    elif part.kind == "statement":
        text = clause(main)
    else:
        text = clause(main, inverted=True, lead=part.asked[0])
    if part.second:
        second = clause(part.second)
        word = part.conjunction[0]
        if part.reversed:
            text = f"{word} {second}, {text}"
        else:
            text = f"{text}{',' if part.coordinated else ''} {word} {second}"
    return text[0].upper() + text[1:] + ("." if part.kind == "statement" else "?")
