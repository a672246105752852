"""Renders noun phrases and clauses in English: word order and inflection."""

from writehead.data.corpus.syntax import THIRD, Clause, NounPhrase, Pronoun, join


def noun_phrase(phrase: NounPhrase, *, is_object: bool = False) -> str:
    """Returns the noun phrase as the subject or an object."""
    head = phrase.head
    if isinstance(head, Pronoun):
        return head.english[is_object]
    adjective = phrase.adjective.english if phrase.adjective else ""
    noun = head.english_plural if phrase.plural else head.english
    noun = join([phrase.count[0] if phrase.count else "", adjective, noun])
    determiner = phrase.determiner
    if phrase.plural:
        determiner = {"a": "", "this": "these"}.get(determiner, determiner)
    elif determiner == "a" and noun[0] in "aeiou":
        determiner = "an"
    return join([determiner, noun])


def clause(part: Clause, *, lead: str = "", inverted: bool = False) -> str:
    """Returns the clause after its `lead`, such as a conjunction; `inverted`: auxiliary first."""
    auxiliary, verb = _verb(part, part.subject.person if part.subject else THIRD, inverted)
    subject = noun_phrase(part.subject) if part.subject else ""
    words = [lead, auxiliary, subject] if inverted else [lead, subject, auxiliary]
    if part.time and part.time_first:
        words.insert(1, part.time[0] + ("," if " " in part.time[0] else ""))
    words += ["not" if part.negated else "", verb, *_after_verb(part)]
    return join(words).replace("can not", "cannot")


def infinitive(part: Clause) -> str:
    """Returns the clause without its subject, with the verb as a bare infinitive."""
    return join([part.verb.english.base, *_after_verb(part)])


def _verb(part: Clause, person: int, inverted: bool) -> tuple[str, str]:
    """Returns the auxiliary, if any, and the rest of the verb."""
    verb, modal, past, third = part.verb.english, part.modal, part.tense == "past", person == THIRD
    do = "" if not (inverted or part.negated) else "did" if past else "does" if third else "do"
    if modal:
        if modal.do_support and do:
            return do, f"{modal.english[0]} {verb.base}"
        auxiliary, _, rest = modal.english[2 if past else int(third)].partition(" ")
        return auxiliary, f"{rest} {verb.base}".strip()
    if part.tense == "perfect":
        return "has" if third else "have", verb.participle
    if part.tense == "future":
        return "will", verb.base
    if part.tense == "progressive" or verb.base == "be":
        be = (("am", "is", "are"), ("was", "was", "were"))[past][person]
        return be, "" if verb.base == "be" else verb.ing
    if do:
        return do, verb.base
    return "", verb.past if past else verb.third if third else verb.base


def _after_verb(part: Clause) -> list[str]:
    """Returns the objects and adverbials: "switch it on", but "look for it"."""
    verb = part.verb.english
    direct, indirect, about = (
        noun_phrase(phrase, is_object=True) if phrase else ""
        for phrase in (part.accusative, part.dative, part.prepositional)
    )
    words = [verb.particle, indirect, direct]
    if verb.movable and part.accusative and isinstance(part.accusative.head, Pronoun):
        words = [direct, verb.particle]
    words += [part.verb.preposition[0] if about else "", about]
    words += [pair[0] for pair in (part.predicate, part.place) if pair]
    if part.time and not part.time_first:
        words.append(part.time[0])
    if part.infinitive:
        words += ["to", infinitive(part.infinitive)]
    return words
