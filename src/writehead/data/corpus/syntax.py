"""Noun phrases and clauses: the structure of a sentence, independent of the language."""

from dataclasses import dataclass

from writehead.data.corpus.lexicon import Adjective, Noun, Pair, Verb

FIRST, THIRD, PLURAL = range(3)  # agreement of the verb; German "Sie" takes the plural


@dataclass(frozen=True, slots=True, eq=False)
class Pronoun:
    """A personal pronoun: English subject and object, German by case."""

    english: Pair
    german: tuple[str, str, str]
    person: int
    possessive: str


I = Pronoun(("I", "me"), ("ich", "mich", "mir"), FIRST, "my")  # noqa: E741
YOU = Pronoun(("you", "you"), ("Sie", "Sie", "Ihnen"), PLURAL, "your")
HE = Pronoun(("he", "him"), ("er", "ihn", "ihm"), THIRD, "his")
SHE = Pronoun(("she", "her"), ("sie", "sie", "ihr"), THIRD, "her")
WE = Pronoun(("we", "us"), ("wir", "uns", "uns"), PLURAL, "our")
THEY = Pronoun(("they", "them"), ("sie", "sie", "ihnen"), PLURAL, "their")
PRONOUNS = (I, YOU, HE, SHE, WE, THEY)
IT = {
    "m": Pronoun(("it", "it"), HE.german, THIRD, ""),
    "f": Pronoun(("it", "it"), SHE.german, THIRD, ""),
    "n": Pronoun(("it", "it"), ("es", "es", "ihm"), THIRD, ""),
}


@dataclass(frozen=True, slots=True, eq=False)
class NounPhrase:
    """A pronoun, or a noun with an English `determiner`; "a" in the plural means no article."""

    head: Noun | Pronoun
    determiner: str = ""
    plural: bool = False
    count: Pair | None = None
    adjective: Adjective | None = None

    @property
    def person(self) -> int:
        """The agreement of the verb."""
        if isinstance(self.head, Pronoun):
            return self.head.person
        return PLURAL if self.plural else THIRD

    @property
    def is_definite(self) -> bool:
        """Whether the phrase refers to something known."""
        if isinstance(self.head, Pronoun) or "name" in self.head.kinds:
            return True
        return self.determiner not in ("", "a")

    def pronoun(self) -> Pronoun | None:
        """Returns the pronoun for this phrase; None for a child, whose gender is ambiguous."""
        if isinstance(self.head, Pronoun):
            return self.head
        kinds = self.head.kinds
        if self.plural:
            return THEY
        if "male" in kinds or "female" in kinds:
            return HE if "male" in kinds else SHE
        return None if "person" in kinds else IT[self.head.gender]


@dataclass(frozen=True, slots=True, eq=False)
class Modal:
    """A modal verb. English: I and they, he, past. German: er, plural, past."""

    english: tuple[str, str, str]
    german: tuple[str, str, str]
    do_support: bool = False  # "does not want to", but "cannot"


CAN = Modal(("can", "can", "could"), ("kann", "können", "konnte"))
MUST = Modal(("must", "must", ""), ("muss", "müssen", ""))
MUST_NOT = Modal(("must", "must", ""), ("darf", "dürfen", ""))  # the negation of MUST
HAVE_TO = Modal(("have to", "has to", "had to"), ("muss", "müssen", "musste"), do_support=True)
WANT = Modal(("want to", "wants to", "wanted to"), ("will", "wollen", "wollte"), do_support=True)
WOULD_LIKE = Modal(("would like to", "would like to", ""), ("möchte", "möchten", ""))
MODALS = (CAN, MUST, HAVE_TO, WANT, WOULD_LIKE)


@dataclass(frozen=True, slots=True, eq=False)
class Clause:
    """A verb with its participants and adverbials; a question omits what it asks for."""

    verb: Verb
    subject: NounPhrase | None
    tense: str = "present"  # or progressive, past, perfect, future
    modal: Modal | None = None
    negated: bool = False
    accusative: NounPhrase | None = None
    dative: NounPhrase | None = None
    prepositional: NounPhrase | None = None
    predicate: Pair | None = None
    place: Pair | None = None
    time: Pair | None = None
    time_first: bool = False
    infinitive: "Clause | None" = None


def join(words: list[str]) -> str:
    """Joins the words that are not empty with spaces."""
    return " ".join(word for word in words if word)
