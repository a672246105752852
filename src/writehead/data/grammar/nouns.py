"""Nouns and names: both languages' forms, the German gender, and what kind of thing each one is."""

from dataclasses import dataclass

CASES = ("nominative", "accusative", "dative", "genitive")
GENDERS = "mfn"


@dataclass(frozen=True, slots=True, eq=False)
class Noun:
    """A noun: English singular and plural, German forms by number and case."""

    english: str
    english_plural: str
    gender: str  # m, f or n
    singular: tuple[str, ...]  # by case
    plural: tuple[str, ...]  # by case; empty for what is not counted
    kinds: frozenset[str]

    @property
    def mass(self) -> bool:
        """Whether it has no plural and no indefinite article, as water has none."""
        return not self.plural

    @property
    def pronoun(self) -> str:
        """The English pronoun that stands for it without doubt, or nothing."""
        for kind, word in (("he", "he"), ("she", "she"), ("person", "")):
            if kind in self.kinds:
                return word
        return "it"


# gender, English (irregular plural after a slash), German nominative, [genitive,] plural: kinds
# A feminine noun has no genitive of its own. A masculine one whose genitive is its plural in -n
# is of the n-declension: der Junge, den Jungen.
TABLE = """
m man/men Mann Mannes Männer: person he adult partner
m boy Junge Jungen Jungen: person he child
m teacher Lehrer Lehrers Lehrer: person he adult job
m doctor Arzt Arztes Ärzte: person he adult job
m student Student Studenten Studenten: person he adult job
m baker Bäcker Bäckers Bäcker: person he adult job
m farmer Bauer Bauern Bauern: person he adult job
m neighbour Nachbar Nachbarn Nachbarn: person he adult own
m colleague Kollege Kollegen Kollegen: person he adult own
m policeman/policemen Polizist Polizisten Polizisten: person he adult job
m waiter Kellner Kellners Kellner: person he adult job
m painter Maler Malers Maler: person he adult job
m customer Kunde Kunden Kunden: person he adult
m tourist Tourist Touristen Touristen: person he adult
m guest Gast Gastes Gäste: person he adult own
m friend Freund Freundes Freunde: person he adult own
m father Vater Vaters Väter: person he adult family
m brother Bruder Bruders Brüder: person he family
m son Sohn Sohnes Söhne: person he family
m uncle Onkel Onkels Onkel: person he adult family
m grandfather Großvater Großvaters Großväter: person he adult family
m king König Königs Könige: person he adult noble
f woman/women Frau Frauen: person she adult partner
f mother Mutter Mütter: person she adult family
f sister Schwester Schwestern: person she family
f daughter Tochter Töchter: person she family
f aunt Tante Tanten: person she adult family
f grandmother Großmutter Großmütter: person she adult family
f queen Königin Königinnen: person she adult noble
f nurse Krankenschwester Krankenschwestern: person she adult job
f actress/actresses Schauspielerin Schauspielerinnen: person she adult job
f saleswoman/saleswomen Verkäuferin Verkäuferinnen: person she adult job
n child/children Kind Kindes Kinder: person child
n girl Mädchen Mädchens Mädchen: person child
m dog Hund Hundes Hunde: animal pet
f cat Katze Katzen: animal pet
n horse Pferd Pferdes Pferde: animal farm
f cow Kuh Kühe: animal farm
n pig Schwein Schweins Schweine: animal farm
f goat Ziege Ziegen: animal farm
m bird Vogel Vogels Vögel: animal flier
f duck Ente Enten: animal flier
f mouse/mice Maus Mäuse: animal
n rabbit Kaninchen Kaninchens Kaninchen: animal pet
m bear Bär Bären Bären: animal wild
m lion Löwe Löwen Löwen: animal wild
m elephant Elefant Elefanten Elefanten: animal wild
m apple Apfel Apfels Äpfel: food fruit
f pear Birne Birnen: food fruit
f banana Banane Bananen: food fruit
f orange Orange Orangen: food fruit
f cherry Kirsche Kirschen: food fruit
n egg Ei Eis Eier: food cooked
m cake Kuchen Kuchens Kuchen: food baked dish
f potato Kartoffel Kartoffeln: food cooked
f tomato Tomate Tomaten: food
f carrot Karotte Karotten: food cooked
f sausage Wurst Würste: food cooked
f soup Suppe Suppen: food cooked dish hot
f pizza Pizza Pizzas: food baked dish hot
n bread Brot Brotes -: food baked
m cheese Käse Käses -: food
n meat Fleisch Fleisches -: food cooked
m rice Reis Reises -: food cooked
f chocolate Schokolade -: food sweets
m honey Honig Honigs -: food sweets
n water Wasser Wassers -: drink
f milk Milch -: drink
m coffee Kaffee Kaffees -: drink brewed
m tea Tee Tees -: drink brewed
m juice Saft Saftes -: drink
m wine Wein Weins -: drink
n beer Bier Bieres -: drink
n car Auto Autos Autos: vehicle machine washable dear
n bicycle Fahrrad Fahrrads Fahrräder: vehicle machine washable dear
n motorbike Motorrad Motorrads Motorräder: vehicle machine washable dear
m bus/buses Bus Busses Busse: vehicle public
m train Zug Zuges Züge: vehicle public
f tram Straßenbahn Straßenbahnen: vehicle public
n ship Schiff Schiffes Schiffe: vehicle public
n house Haus Hauses Häuser: building home
n castle Schloss Schlosses Schlösser: building sight
f church/churches Kirche Kirchen: building sight
f bridge Brücke Brücken: building sight
m tower Turm Turmes Türme: building sight
f school Schule Schulen: building goal
n hospital Krankenhaus Krankenhauses Krankenhäuser: building goal
m station Bahnhof Bahnhofs Bahnhöfe: building goal
m airport Flughafen Flughafens Flughäfen: goal
n museum Museum Museums Museen: building goal sight
f library Bibliothek Bibliotheken: building goal sight
n theatre Theater Theaters Theater: building goal
n cinema Kino Kinos Kinos: goal
n restaurant Restaurant Restaurants Restaurants: goal eatery
n hotel Hotel Hotels Hotels: building goal eatery
f bakery Bäckerei Bäckereien: goal
n shop Geschäft Geschäfts Geschäfte: goal
f factory Fabrik Fabriken: building goal
m market Markt Marktes Märkte: goal
n office Büro Büros Büros: room goal
m garden Garten Gartens Gärten: outside home
m park Park Parks Parks: outside goal
m forest Wald Waldes Wälder: outside goal
m lake See Sees Seen: outside goal
m beach/beaches Strand Strandes Strände: outside goal
f city Stadt Städte: settlement sight
n village Dorf Dorfes Dörfer: settlement
f kitchen Küche Küchen: room
n living_room Wohnzimmer Wohnzimmers Wohnzimmer: room
n bedroom Schlafzimmer Schlafzimmers Schlafzimmer: room
m cellar Keller Kellers Keller: room
m table Tisch Tisches Tische: furniture top dear
m desk Schreibtisch Schreibtisches Schreibtische: furniture top dear
n shelf/shelves Regal Regals Regale: furniture top
m cupboard Schrank Schranks Schränke: furniture dear
m chair Stuhl Stuhls Stühle: furniture seat
n sofa Sofa Sofas Sofas: furniture seat dear
n bed Bett Bettes Betten: furniture
f lamp Lampe Lampen: thing device upright
n book Buch Buches Bücher: readable flat thing gift
m letter Brief Briefes Briefe: readable flat written mail
f newspaper Zeitung Zeitungen: readable flat
m novel Roman Romans Romane: readable flat written gift
n poem Gedicht Gedichts Gedichte: readable written
f story Geschichte Geschichten: readable written tale
n fairy_tale Märchen Märchens Märchen: readable tale
m report Bericht Berichts Berichte: readable written mail
m article Artikel Artikels Artikel: readable written
f message Nachricht Nachrichten: readable written mail
f postcard Postkarte Postkarten: readable flat written mail
m key Schlüssel Schlüssels Schlüssel: thing flat
f bag Tasche Taschen: thing luggage gift dear
m suitcase Koffer Koffers Koffer: thing luggage upright
f box/boxes Kiste Kisten: thing luggage upright
m umbrella Regenschirm Regenschirms Regenschirme: thing
f watch/watches Uhr Uhren: thing flat gift machine dear
n glass/glasses Glas Glases Gläser: thing upright dishes
f bottle Flasche Flaschen: thing upright
f cup Tasse Tassen: thing upright dishes
m plate Teller Tellers Teller: thing upright dishes
n knife/knives Messer Messers Messer: thing flat dishes
m spoon Löffel Löffels Löffel: thing flat dishes
f fork Gabel Gabeln: thing flat dishes
n picture Bild Bildes Bilder: thing painted gift hanging
f map Karte Karten: flat hanging
m ball Ball Balles Bälle: thing toy gift
f doll Puppe Puppen: thing toy gift
m ring Ring Ringes Ringe: thing flat gift dear
f flower Blume Blumen: thing gift painted
f camera Kamera Kameras: thing device machine gift dear
m computer Computer Computers Computer: thing device machine dear
n radio Radio Radios Radios: thing device machine
m television Fernseher Fernsehers Fernseher: device machine dear
n window Fenster Fensters Fenster: opening
f door Tür Türen: opening
f guitar Gitarre Gitarren: instrument dear
n piano Klavier Klaviers Klaviere: instrument dear
f violin Geige Geigen: instrument dear
m coat Mantel Mantels Mäntel: clothes gift hanging dear
n dress/dresses Kleid Kleides Kleider: clothes gift hanging dear
m hat Hut Hutes Hüte: clothes gift
n shirt Hemd Hemdes Hemden: clothes gift hanging
f jacket Jacke Jacken: clothes gift hanging
m sweater Pullover Pullovers Pullover: clothes gift
m scarf/scarves Schal Schals Schals: clothes gift
f language Sprache Sprachen: learned
n song Lied Liedes Lieder: sung
m tree Baum Baumes Bäume: painted outside
f sun Sonne -: sky
f time Zeit -: leisure
n money Geld Geldes -: leisure
"""

NAMES = (
    ("Anna", "she"),
    ("Maria", "she"),
    ("Julia", "she"),
    ("Clara", "she"),
    ("Peter", "he"),
    ("Paul", "he"),
    ("Daniel", "he"),
    ("Martin", "he"),
)
CITIES = (
    ("Berlin", "Berlin"),
    ("Hamburg", "Hamburg"),
    ("Vienna", "Wien"),
    ("Munich", "München"),
    ("Cologne", "Köln"),
    ("Rome", "Rom"),
    ("London", "London"),
    ("Italy", "Italien"),
    ("France", "Frankreich"),
    ("Germany", "Deutschland"),
)


def _plural(english: str) -> str:
    """The regular English plural."""
    if english.endswith("y") and english[-2] not in "aeiou":
        return english[:-1] + "ies"
    return english + ("es" if english.endswith(("s", "x", "ch", "sh", "ato")) else "s")


def _noun(line: str) -> Noun:
    """The noun of one line of the table."""
    forms, kinds = line.split(":")
    gender, english, nominative, *rest = forms.split()
    english, _, irregular = english.replace("_", " ").partition("/")
    genitive = nominative if len(rest) == 1 else rest[0]
    plural = rest[-1]
    weak = gender == "m" and genitive == plural and plural.endswith("n")
    oblique = genitive if weak else nominative
    dative_plural = plural if plural.endswith(("n", "s")) else plural + "n"
    return Noun(
        english,
        irregular or _plural(english),
        gender,
        (nominative, oblique, oblique, genitive),
        () if plural == "-" else (plural, plural, dative_plural, plural),
        frozenset(kinds.split()),
    )


NOUNS = {noun.english: noun for noun in map(_noun, TABLE.strip().splitlines())}


def nouns(kinds: str) -> tuple[Noun, ...]:
    """All nouns of any of these kinds; a word in quotation marks is one noun: "person 'car'"."""
    found = {}
    for kind in kinds.split():
        if kind.startswith("'"):
            chosen = [NOUNS[kind.strip("'").replace("_", " ")]]
        else:
            chosen = [noun for noun in NOUNS.values() if kind in noun.kinds]
        assert chosen, kind
        found.update({noun.english: noun for noun in chosen})
    return tuple(found.values())
