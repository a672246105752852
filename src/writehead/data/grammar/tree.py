"""What a sentence says, before either language has said it: phrases and clauses."""

from dataclasses import dataclass, replace

from writehead.data.grammar.modifiers import Adjective, Pair
from writehead.data.grammar.nouns import Noun
from writehead.data.grammar.verbs import Frame


@dataclass(frozen=True, slots=True, eq=False)
class Pronoun:
    """A personal pronoun: English subject and object, German by case."""

    english: str
    english_object: str
    german: tuple[str, str, str]
    first: bool = False
    plural: bool = False
    owner: str = ""  # the English possessive


I = Pronoun("I", "me", ("ich", "mich", "mir"), first=True, owner="my")  # noqa: E741
YOU = Pronoun("you", "you", ("Sie", "Sie", "Ihnen"), plural=True, owner="your")
HE = Pronoun("he", "him", ("er", "ihn", "ihm"), owner="his")
SHE = Pronoun("she", "her", ("sie", "sie", "ihr"), owner="her")
WE = Pronoun("we", "us", ("wir", "uns", "uns"), first=True, plural=True, owner="our")
THEY = Pronoun("they", "them", ("sie", "sie", "ihnen"), plural=True, owner="their")
IT = {
    "m": Pronoun("it", "it", ("er", "ihn", "ihm")),
    "f": Pronoun("it", "it", ("sie", "sie", "ihr")),
    "n": Pronoun("it", "it", ("es", "es", "ihm")),
}
SOMEBODY = (I, YOU, HE, SHE, WE, THEY)


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """Somebody's name, the same in both languages."""

    english: str
    pronoun: str


@dataclass(frozen=True, slots=True, eq=False)
class Phrase:
    """A noun phrase. `determiner` is its English word; "a" is also the bare plural.

    "'s" stands for an owner; "piano" for the article of an instrument one plays.
    """

    head: Noun | Name | Pronoun
    determiner: str = ""
    plural: bool = False
    count: int = 0
    adjectives: tuple[Adjective, ...] = ()
    degree: int = 0  # of the first adjective: 0, 1 comparative, 2 superlative
    owner: "Phrase | None" = None
    relative: "Relative | None" = None
    also: "Phrase | None" = None  # Anna and Peter

    @property
    def definite(self) -> bool:
        """Whether the hearer knows which one: it then stands early in German."""
        if not isinstance(self.head, Noun):
            return True
        return self.determiner not in ("", "a", "some", "many", "piano")

    @property
    def many(self) -> bool:
        """Whether the verb takes its plural."""
        return self.plural or self.also is not None

    @property
    def first(self) -> bool:
        """Whether it is I or we."""
        return isinstance(self.head, Pronoun) and self.head.first

    @property
    def pronominal(self) -> bool:
        """Whether it is a pronoun."""
        return isinstance(self.head, Pronoun)

    def pronoun(self) -> "Phrase | None":
        """The pronoun that can take its place later on, if one can without doubt."""
        head = self.head
        if self.many:
            return Phrase(THEY, plural=True) if not isinstance(head, Pronoun) else self
        if isinstance(head, Pronoun):
            return self
        word = head.pronoun
        if word == "it":
            assert isinstance(head, Noun)
            return Phrase(IT[head.gender])
        return {"he": Phrase(HE), "she": Phrase(SHE), "": None}[word]

    def without_relative(self) -> "Phrase":
        """The phrase for itself, its relative clause left for later."""
        return replace(self, relative=None) if self.relative else self


@dataclass(frozen=True, slots=True, eq=False)
class Modal:
    """A modal: English finite forms (I and they, he, past) and German ones (ich, wir, past)."""

    english: tuple[str, str, str]
    german: tuple[str, str, str]
    supported: bool = False  # asks and denies with "do", like "want to"
    negated: tuple[str, str] = ("", "")  # English and German where denying changes the word


CAN = Modal(("can", "can", "could"), ("kann", "können", "konnte"))
MUST = Modal(("must", "must", "had to"), ("muss", "müssen", "musste"))
WANT = Modal(("want to", "wants to", "wanted to"), ("will", "wollen", "wollte"), supported=True)
SHOULD = Modal(("should", "should", ""), ("soll", "sollen", ""))
MAY = Modal(("may", "may", ""), ("darf", "dürfen", ""))
WOULD_LIKE = Modal(("would like to",) * 2 + ("",), ("möchte", "möchten", ""))
LIKE = Modal(("like to", "likes to", "liked to"), ("", "", ""), supported=True)
MODALS = (CAN, MUST, WANT, SHOULD, MAY, WOULD_LIKE, LIKE)


@dataclass(frozen=True, slots=True, eq=False)
class Clause:
    """Who does what to whom, when, how and where.

    `tense` is present, progressive, past, perfect, pluperfect, future or since (English "has
    lived", German "wohnt"). A participant that a question or a relative clause asks for is
    missing here.
    """

    verb: Frame
    subject: Phrase | None
    tense: str = "present"
    modal: Modal | None = None
    accusative: Phrase | None = None
    dative: Phrase | None = None
    about: Phrase | None = None
    predicate: Pair | None = None
    place: Pair | None = None
    direction: Pair | None = None
    manner: Pair | None = None
    time: Pair | None = None
    often: Pair | None = None
    front: bool = False  # the time comes first
    negated: bool = False
    infinitive: "Clause | None" = None  # tries to …
    purpose: "Clause | None" = None  # in order to …
    swapped: bool = False  # likes X -> X gefällt: the German subject is the English object


@dataclass(frozen=True, slots=True, eq=False)
class Relative:
    """A clause about a noun. `role` is the noun's part in it.

    nominative, accusative, dative: the missing participant; about: the object of a preposition;
    place: (English, German preposition) + which; whose: `owned` is the subject's noun.
    """

    clause: Clause
    role: str
    place: Pair | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sentence:
    """A main clause and what is joined to it.

    `kind` is statement, whether (a question for yes or no), which (a question led by `asked`) or
    order ("Please …").
    """

    main: Clause
    kind: str = "statement"
    asked: Pair = ("", "")
    conjunction: Pair = ("", "")
    second: Clause | None = None
    coordinated: bool = False  # the second clause is a main clause too
    reversed: bool = False  # the second clause comes first
