"""Adjectives, adverbs, times and places: what makes a bare sentence say more."""

from dataclasses import dataclass

from writehead.data.grammar.nouns import NOUNS, Noun, nouns

Pair = tuple[str, str]  # the same words in English and in German


@dataclass(frozen=True, slots=True, eq=False)
class Adjective:
    """An adjective in three degrees; `rank` orders two of them before one noun."""

    rank: int
    english: tuple[str, ...]  # positive, comparative, superlative
    german: tuple[str, ...]  # as a predicate; the superlative is a stem
    stems: tuple[str, ...]  # what endings are added to: teuer, but ein teures Auto
    of: frozenset[Noun]  # what it may be said of


# rank, English [comparative superlative] = German [comparative superlative]: kinds
TABLE = """
0 beautiful = schön: building settlement outside clothes sung gift instrument 'woman' 'queen'
0 ugly = hässlich: building clothes furniture 'picture' 'lamp'
0 friendly friendlier friendliest = freundlich: person pet
0 famous = berühmt: noble 'doctor' 'painter' 'actress' sight 'novel' 'poem' sung
0 clever cleverer cleverest = klug klüger klügst: person pet
0 lazy lazier laziest = faul: person 'cat'
0 happy happier happiest = glücklich: person
0 sad sadder saddest = traurig: person tale sung 'poem'
0 tired = müde: person animal
0 hungry = hungrig: person animal
0 thirsty = durstig: person animal
0 sick = krank: person animal
0 rich richer richest = reich: adult
0 poor poorer poorest = arm ärmer ärmst: partner job 'neighbour' 'friend' 'brother' 'sister'
0 strong stronger strongest = stark stärker stärkst: he wild 'horse'
0 polite = höflich: person
0 brave braver bravest = mutig: person
0 curious = neugierig: person pet
0 nervous = nervös: person
0 interesting = interessant: readable settlement sight
0 boring = langweilig: 'book' 'novel' 'poem' 'article' 'report' 'newspaper'
0 difficult = schwierig: 'poem' 'article' 'report' learned
0 expensive = teuer: dear clothes eatery drink
0 cheap cheaper cheapest = billig: dear clothes eatery food drink
0 delicious = lecker: food drink
0 fresh fresher freshest = frisch: fruit 'bread' 'meat' 'egg' 'tomato' 'carrot' 'milk'
0 sweet sweeter sweetest = süß: fruit sweets 'cake'
0 cold colder coldest = kalt kälter kältest: drink
0 hot hotter hottest = heiß: brewed 'milk' 'soup'
0 warm warmer warmest = warm wärmer wärmst: 'coat' 'jacket' 'sweater' 'scarf'
0 dirty dirtier dirtiest = schmutzig: clothes dishes washable room 'window'
0 clean cleaner cleanest = sauber: clothes dishes room 'window'
0 broken = kaputt: machine
0 quiet quieter quietest = ruhig: settlement 'park' 'garden' 'forest' 'lake' 'beach' 'hotel'
0 modern = modern: 'office' 'hotel' 'hospital' 'station' 'airport' 'factory' device
0 dark darker darkest = dunkel: 'forest' 'cellar' 'bedroom'
0 heavy heavier heaviest = schwer: luggage 'table' 'cupboard'
0 loud louder loudest = laut: 'radio' 'television' 'motorbike'
0 dangerous = gefährlich: wild
0 wild wilder wildest = wild: wild
1 big bigger biggest = groß größer größt: animal building furniture luggage settlement outside
1 small smaller smallest = klein kleiner kleinst: child animal building luggage settlement room
1 tall taller tallest = groß größer größt: adult
1 long longer longest = lang länger längst: readable 'coat' 'dress' 'scarf'
1 short shorter shortest = kurz kürzer kürzest: readable 'coat' 'dress'
2 young younger youngest = jung jünger jüngst: child partner job own noble 'uncle' 'aunt' animal
2 old older oldest = alt älter ältest: adult animal building vehicle clothes machine thing
2 new newer newest = neu: vehicle clothes machine thing furniture readable
3 red = rot: clothes fruit 'car' 'bicycle' 'ball' 'flower' 'bag' 'cup'
3 blue = blau: clothes 'car' 'bicycle' 'ball' 'flower' 'bag' 'cup'
3 green = grün: clothes 'car' 'bicycle' 'apple' 'pear' 'sofa' 'bottle' 'door'
3 yellow = gelb: clothes 'car' 'flower' 'pear' 'ball' 'cup'
3 white = weiß: clothes pet 'horse' 'house' 'plate' 'ship' 'cup'
3 black = schwarz: clothes pet 'horse' 'car' 'suitcase' 'umbrella'
3 brown = braun: pet 'horse' 'cow' 'bear' 'coat' 'table' 'bag'
"""

# words before which a superlative or a comparative has another shape than the rule gives
_STEMS = {"teuer": "teur", "dunkel": "dunkl", "müde": "müd"}


def _adjective(line: str) -> Adjective:
    """The adjective of one line of the table; what a degree lacks is regular."""
    forms, kinds = line.split(":")
    english, german = (part.split() for part in forms.split("="))
    rank, positive, *degrees = english
    degrees = degrees or [f"more {positive}", f"most {positive}"]
    word, *german_degrees = german
    stem = _STEMS.get(word, word)
    e = "e" if word.endswith(("t", "d", "ß", "sch", "eu")) else ""
    german_degrees = german_degrees or [f"{stem}er", f"{word.removesuffix('e')}{e}st"]
    comparative, superlative = german_degrees
    if stem == "müd":
        superlative = "müdest"
    return Adjective(
        int(rank),
        (positive, *degrees),
        (word, comparative, superlative),
        (stem, comparative, superlative),
        frozenset(nouns(kinds)),
    )


ADJECTIVES = {a.english[0]: a for a in map(_adjective, TABLE.strip().splitlines())}
# states pass and explain what one does; they are said of a subject, rarely before a noun
STATES = frozenset(["happy", "sad", "tired", "hungry", "thirsty", "sick", "nervous"])
# what a thing is in the eyes of whoever compares
_COMPARED = """
beautiful friendly clever lazy rich poor strong interesting boring expensive cheap sweet
heavy loud big small tall long old dangerous famous modern quiet
"""
COMPARED = frozenset(_COMPARED.split())
BY_NOUN: dict[Noun, tuple[Adjective, ...]] = {
    noun: tuple(a for a in ADJECTIVES.values() if noun in a.of) for noun in NOUNS.values()
}
LASTING: dict[Noun, tuple[Adjective, ...]] = {
    noun: tuple(a for a in several if a.english[0] not in STATES | {"broken"})
    for noun, several in BY_NOUN.items()
}

MANNER: dict[str, Pair] = {
    "well": ("well", "gut"),
    "badly": ("badly", "schlecht"),
    "long": ("for a long time", "lange"),
    "loudly": ("loudly", "laut"),
    "quietly": ("quietly", "leise"),
    "happily": ("happily", "fröhlich"),
    "slowly": ("slowly", "langsam"),
    "quickly": ("quickly", "schnell"),
    "fast": ("fast", "schnell"),
    "carefully": ("carefully", "vorsichtig"),
    "attentively": ("attentively", "aufmerksam"),
    "thoroughly": ("thoroughly", "gründlich"),
    "hard": ("hard", "hart"),
    "patiently": ("patiently", "geduldig"),
    "much": ("a lot", "viel"),
    "everywhere": ("everywhere", "überall"),
}

_DAYS = """
Monday Tuesday Wednesday Thursday Friday Saturday Sunday
Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag
January March April May June July August October December
Januar März April Mai Juni Juli August Oktober Dezember
"""
_ROWS = [row.split() for row in _DAYS.strip().splitlines()]
DAYS = tuple(zip(_ROWS[0], _ROWS[1], strict=True))
MONTHS = tuple(zip(_ROWS[2], _ROWS[3], strict=True))
SEASONS = (("spring", "Frühling"), ("summer", "Sommer"), ("autumn", "Herbst"), ("winter", "Winter"))
PARTS = (("morning", "Morgen"), ("afternoon", "Nachmittag"), ("evening", "Abend"))
# plural in English; dative plural in German
SPANS = (("days", "Tagen"), ("weeks", "Wochen"), ("months", "Monaten"), ("years", "Jahren"))

OFTEN: tuple[Pair, ...] = (("often", "oft"), ("always", "immer"), ("sometimes", "manchmal"))
OFTEN += (("never", "nie"), ("rarely", "selten"))
EVER: tuple[Pair, ...] = (("already", "schon"), ("never", "noch nie"), ("often", "oft"))
YESTERDAY: tuple[Pair, ...] = (
    ("yesterday", "gestern"),
    ("last week", "letzte Woche"),
    ("last year", "letztes Jahr"),
    ("yesterday evening", "gestern Abend"),
)
TOMORROW: tuple[Pair, ...] = (
    ("tomorrow", "morgen"),
    ("next week", "nächste Woche"),
    ("next year", "nächstes Jahr"),
    ("soon", "bald"),
)
TODAY: Pair = ("today", "heute")
HOME_AT: Pair = ("at home", "zu Hause")
HOME_TO: Pair = ("home", "nach Hause")

# a place's English preposition; German where (dative); German whither with its case
PLACES: dict[Noun, tuple[str, str, str, int]] = {
    NOUNS[name.replace("_", " ")]: (english, where, whither, 2 if whither == "zu" else 1)
    for name, english, where, whither in (
        line.split()
        for line in """
        house in in zu
        castle in in zu
        church in in in
        school at in in
        hospital in in in
        station at an zu
        airport at an zu
        museum in in in
        library in in in
        theatre in in in
        cinema in in in
        restaurant in in in
        hotel in in in
        bakery in in zu
        shop in in in
        factory in in in
        market at auf auf
        office in in in
        garden in in in
        park in in in
        forest in in in
        lake at an an
        beach on an an
        city in in in
        village in in in
        kitchen in in in
        living_room in in in
        bedroom in in in
        cellar in in in
    """.strip().splitlines()
    )
}
GOALS = tuple(PLACES)
DRIVEN = tuple(noun for noun in PLACES if not noun.kinds & {"room", "home"})
WORKPLACES = nouns("'factory' 'office' 'hospital' 'school' 'bakery' 'restaurant' 'hotel' 'shop'")
DWELLINGS = nouns("settlement 'house' 'hotel' 'castle'")
SEATS = nouns("seat")
TOPS = nouns("top")
HOLDERS = nouns("'bag' 'box' 'cupboard' 'suitcase'")
