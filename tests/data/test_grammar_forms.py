"""The forms of the embedded corpus, word for word against tables written by hand."""

import pytest

from writehead.data.grammar import english, german
from writehead.data.grammar.frames import FRAMES, OTHERS
from writehead.data.grammar.modifiers import ADJECTIVES
from writehead.data.grammar.nouns import NOUNS
from writehead.data.grammar.numbers import english_number, german_number
from writehead.data.grammar.tree import HE, THEY, WE, Clause, I, Name, Phrase
from writehead.errors import DataError


def the(noun: str, **rest) -> Phrase:
    return Phrase(NOUNS[noun], "the", **rest)


def a(noun: str, **rest) -> Phrase:
    return Phrase(NOUNS[noun], "a", **rest)


def adjective(word: str):
    return (ADJECTIVES[word],)


OLD = adjective("old")


def spoken(value) -> str:
    return value if type(value) is str else ""


# nominative, accusative, dative, genitive
DECLENSIONS = [
    (the("man"), "der Mann|den Mann|dem Mann|des Mannes"),
    (the("woman"), "die Frau|die Frau|der Frau|der Frau"),
    (the("child"), "das Kind|das Kind|dem Kind|des Kindes"),
    (the("child", plural=True), "die Kinder|die Kinder|den Kindern|der Kinder"),
    (the("boy"), "der Junge|den Jungen|dem Jungen|des Jungen"),
    (the("student"), "der Student|den Studenten|dem Studenten|des Studenten"),
    (the("neighbour"), "der Nachbar|den Nachbarn|dem Nachbarn|des Nachbarn"),
    (the("bear"), "der Bär|den Bären|dem Bären|des Bären"),
    (the("car", plural=True), "die Autos|die Autos|den Autos|der Autos"),
    (the("garden", plural=True), "die Gärten|die Gärten|den Gärten|der Gärten"),
    (a("dog"), "ein Hund|einen Hund|einem Hund|eines Hundes"),
    (a("cat"), "eine Katze|eine Katze|einer Katze|einer Katze"),
    (a("horse"), "ein Pferd|ein Pferd|einem Pferd|eines Pferdes"),
    (a("horse", plural=True), "Pferde|Pferde|Pferden|Pferde"),
    (Phrase(NOUNS["book"], "this"), "dieses Buch|dieses Buch|diesem Buch|dieses Buches"),
    (Phrase(NOUNS["guest"], "every"), "jeder Gast|jeden Gast|jedem Gast|jedes Gastes"),
    (
        Phrase(NOUNS["friend"], "our", plural=True),
        "unsere Freunde|unsere Freunde|unseren Freunden|unserer Freunde",
    ),
    (
        Phrase(NOUNS["sister"], "her"),
        "ihre Schwester|ihre Schwester|ihrer Schwester|ihrer Schwester",
    ),
    # adjectives: weak, mixed, strong
    (
        the("coat", adjectives=adjective("red")),
        "der rote Mantel|den roten Mantel|dem roten Mantel|des roten Mantels",
    ),
    (
        the("bag", adjectives=adjective("red")),
        "die rote Tasche|die rote Tasche|der roten Tasche|der roten Tasche",
    ),
    (
        the("dress", adjectives=adjective("red")),
        "das rote Kleid|das rote Kleid|dem roten Kleid|des roten Kleides",
    ),
    (
        the("dress", plural=True, adjectives=adjective("red")),
        "die roten Kleider|die roten Kleider|den roten Kleidern|der roten Kleider",
    ),
    (
        a("coat", adjectives=adjective("red")),
        "ein roter Mantel|einen roten Mantel|einem roten Mantel|eines roten Mantels",
    ),
    (
        a("bag", adjectives=adjective("red")),
        "eine rote Tasche|eine rote Tasche|einer roten Tasche|einer roten Tasche",
    ),
    (
        a("dress", adjectives=adjective("red")),
        "ein rotes Kleid|ein rotes Kleid|einem roten Kleid|eines roten Kleides",
    ),
    (
        a("dress", plural=True, adjectives=adjective("red")),
        "rote Kleider|rote Kleider|roten Kleidern|roter Kleider",
    ),
    (
        Phrase(NOUNS["juice"], adjectives=adjective("cold")),
        "kalter Saft|kalten Saft|kaltem Saft|kalten Saftes",
    ),
    (
        Phrase(NOUNS["milk"], adjectives=adjective("cold")),
        "kalte Milch|kalte Milch|kalter Milch|kalter Milch",
    ),
    (
        Phrase(NOUNS["water"], adjectives=adjective("cold")),
        "kaltes Wasser|kaltes Wasser|kaltem Wasser|kalten Wassers",
    ),
    (
        Phrase(NOUNS["girl"], "many", plural=True, adjectives=adjective("young")),
        "viele junge Mädchen|viele junge Mädchen|vielen jungen Mädchen|vieler junger Mädchen",
    ),
    (
        Phrase(NOUNS["girl"], "all", plural=True, adjectives=adjective("young")),
        "alle jungen Mädchen|alle jungen Mädchen|allen jungen Mädchen|aller jungen Mädchen",
    ),
    (
        Phrase(NOUNS["car"], plural=True, count=3, adjectives=adjective("expensive")),
        "drei teure Autos|drei teure Autos|drei teuren Autos|drei teurer Autos",
    ),
    (
        the("forest", adjectives=adjective("dark")),
        "der dunkle Wald|den dunklen Wald|dem dunklen Wald|des dunklen Waldes",
    ),
    (
        the("tower", adjectives=adjective("old"), degree=2),
        "der älteste Turm|den ältesten Turm|dem ältesten Turm|des ältesten Turmes",
    ),
    (
        Phrase(NOUNS["house"], "'s", owner=the("teacher"), adjectives=adjective("old")),
        "das alte Haus des Lehrers|das alte Haus des Lehrers|"
        "dem alten Haus des Lehrers|des alten Hauses des Lehrers",
    ),
    (
        Phrase(
            NOUNS["house"], "'s", owner=Phrase(Name("Anna", "she")), adjectives=adjective("old")
        ),
        "Annas altes Haus|Annas altes Haus|Annas altem Haus|Annas alten Hauses",
    ),
]


@pytest.mark.parametrize(
    ("phrase", "forms"), DECLENSIONS, ids=lambda x: x if type(x) is str else ""
)
def test_a_german_phrase_is_declined_as_in_the_book(phrase, forms):
    assert "|".join(german.noun_phrase(phrase, case) for case in range(4)) == forms


def test_an_english_phrase_has_its_article_and_its_plural():
    for phrase, words in [
        (a("apple"), "an apple"),
        (a("umbrella", adjectives=adjective("new")), "a new umbrella"),
        (a("king", adjectives=adjective("old")), "an old king"),
        (a("knife", plural=True), "knives"),
        (Phrase(NOUNS["mouse"], "this", plural=True), "these mice"),
        (Phrase(NOUNS["story"], plural=True, count=21), "twenty-one stories"),
        (the("hotel", adjectives=adjective("beautiful"), degree=2), "the most beautiful hotel"),
        (Phrase(NOUNS["coat"], "'s", owner=the("boy")), "the boy's coat"),
    ]:
        assert english.noun_phrase(phrase) == words


PLURALS = """
Mann Männer, Junge Jungen, Lehrer Lehrer, Arzt Ärzte, Bauer Bauern, Gast Gäste, Vater Väter,
Sohn Söhne, Frau Frauen, Mutter Mütter, Tochter Töchter, Königin Königinnen, Kind Kinder,
Mädchen Mädchen, Hund Hunde, Kuh Kühe, Vogel Vögel, Maus Mäuse, Apfel Äpfel, Ei Eier,
Wurst Würste, Auto Autos, Fahrrad Fahrräder, Bus Busse, Zug Züge, Haus Häuser, Schloss Schlösser,
Bahnhof Bahnhöfe, Museum Museen, Bibliothek Bibliotheken, Kino Kinos, Büro Büros, Wald Wälder,
See Seen, Stadt Städte, Dorf Dörfer, Tisch Tische, Stuhl Stühle, Bett Betten, Buch Bücher,
Brief Briefe, Gedicht Gedichte, Glas Gläser, Messer Messer, Gabel Gabeln, Bild Bilder, Ball Bälle,
Fenster Fenster, Mantel Mäntel, Hut Hüte, Hemd Hemden, Lied Lieder, Baum Bäume
"""


def test_plurals_are_those_of_a_dictionary():
    ours = {noun.singular[0]: noun.plural[0] for noun in NOUNS.values() if noun.plural}
    for entry in PLURALS.replace("\n", " ").split(","):
        singular, plural = entry.split()
        assert ours[singular] == plural


# every verb: ich, er, wir in the present; er, wir in the preterite; perfect; with zu
CONJUGATIONS = """
schlafen: schlafe schläft schlafen schlief schliefen hat geschlafen, zu schlafen
lachen: lache lacht lachen lachte lachten hat gelacht, zu lachen
weinen: weine weint weinen weinte weinten hat geweint, zu weinen
lächeln: lächle lächelt lächeln lächelte lächelten hat gelächelt, zu lächeln
arbeiten: arbeite arbeitet arbeiten arbeitete arbeiteten hat gearbeitet, zu arbeiten
singen: singe singt singen sang sangen hat gesungen, zu singen
tanzen: tanze tanzt tanzen tanzte tanzten hat getanzt, zu tanzen
schwimmen: schwimme schwimmt schwimmen schwamm schwammen ist geschwommen, zu schwimmen
träumen: träume träumt träumen träumte träumten hat geträumt, zu träumen
aufstehen: stehe steht stehen stand standen ist aufgestanden, aufzustehen
einschlafen: schlafe schläft schlafen schlief schliefen ist eingeschlafen, einzuschlafen
aufwachen: wache wacht wachen wachte wachten ist aufgewacht, aufzuwachen
fernsehen: sehe sieht sehen sah sahen hat ferngesehen, fernzusehen
spazieren gehen: gehe geht gehen ging gingen ist spazieren gegangen, spazieren zu gehen
zurückkommen: komme kommt kommen kam kamen ist zurückgekommen, zurückzukommen
ankommen: komme kommt kommen kam kamen ist angekommen, anzukommen
abfahren: fahre fährt fahren fuhr fuhren ist abgefahren, abzufahren
bellen: belle bellt bellen bellte bellten hat gebellt, zu bellen
beeilen: beeile beeilt beeilen beeilte beeilten hat beeilt, zu beeilen
ausruhen: ruhe ruht ruhen ruhte ruhten hat ausgeruht, auszuruhen
lesen: lese liest lesen las lasen hat gelesen, zu lesen
schreiben: schreibe schreibt schreiben schrieb schrieben hat geschrieben, zu schreiben
kaufen: kaufe kauft kaufen kaufte kauften hat gekauft, zu kaufen
verkaufen: verkaufe verkauft verkaufen verkaufte verkauften hat verkauft, zu verkaufen
sehen: sehe sieht sehen sah sahen hat gesehen, zu sehen
hören: höre hört hören hörte hörten hat gehört, zu hören
suchen: suche sucht suchen suchte suchten hat gesucht, zu suchen
finden: finde findet finden fand fanden hat gefunden, zu finden
essen: esse isst essen aß aßen hat gegessen, zu essen
trinken: trinke trinkt trinken trank tranken hat getrunken, zu trinken
kochen: koche kocht kochen kochte kochten hat gekocht, zu kochen
backen: backe backt backen backte backten hat gebacken, zu backen
lieben: liebe liebt lieben liebte liebten hat geliebt, zu lieben
besuchen: besuche besucht besuchen besuchte besuchten hat besucht, zu besuchen
treffen: treffe trifft treffen traf trafen hat getroffen, zu treffen
öffnen: öffne öffnet öffnen öffnete öffneten hat geöffnet, zu öffnen
schließen: schließe schließt schließen schloss schlossen hat geschlossen, zu schließen
putzen: putze putzt putzen putzte putzten hat geputzt, zu putzen
waschen: wasche wäscht waschen wusch wuschen hat gewaschen, zu waschen
reparieren: repariere repariert reparieren reparierte reparierten hat repariert, zu reparieren
malen: male malt malen malte malten hat gemalt, zu malen
tragen: trage trägt tragen trug trugen hat getragen, zu tragen
brauchen: brauche braucht brauchen brauchte brauchten hat gebraucht, zu brauchen
kennen: kenne kennt kennen kannte kannten hat gekannt, zu kennen
verstehen: verstehe versteht verstehen verstand verstanden hat verstanden, zu verstehen
vergessen: vergesse vergisst vergessen vergaß vergaßen hat vergessen, zu vergessen
verlieren: verliere verliert verlieren verlor verloren hat verloren, zu verlieren
einladen: lade lädt laden lud luden hat eingeladen, einzuladen
anrufen: rufe ruft rufen rief riefen hat angerufen, anzurufen
abholen: hole holt holen holte holten hat abgeholt, abzuholen
aufräumen: räume räumt räumen räumte räumten hat aufgeräumt, aufzuräumen
einschalten: schalte schaltet schalten schaltete schalteten hat eingeschaltet, einzuschalten
ausschalten: schalte schaltet schalten schaltete schalteten hat ausgeschaltet, auszuschalten
anziehen: ziehe zieht ziehen zog zogen hat angezogen, anzuziehen
ausziehen: ziehe zieht ziehen zog zogen hat ausgezogen, auszuziehen
zurückbringen: bringe bringt bringen brachte brachten hat zurückgebracht, zurückzubringen
füttern: füttere füttert füttern fütterte fütterten hat gefüttert, zu füttern
begrüßen: begrüße begrüßt begrüßen begrüßte begrüßten hat begrüßt, zu begrüßen
loben: lobe lobt loben lobte lobten hat gelobt, zu loben
beobachten: beobachte beobachtet beobachten beobachtete beobachteten hat beobachtet, zu beobachten
bestellen: bestelle bestellt bestellen bestellte bestellten hat bestellt, zu bestellen
haben: habe hat haben hatte hatten hat gehabt, zu haben
helfen: helfe hilft helfen half halfen hat geholfen, zu helfen
danken: danke dankt danken dankte dankten hat gedankt, zu danken
folgen: folge folgt folgen folgte folgten ist gefolgt, zu folgen
antworten: antworte antwortet antworten antwortete antworteten hat geantwortet, zu antworten
vertrauen: vertraue vertraut vertrauen vertraute vertrauten hat vertraut, zu vertrauen
zuhören: höre hört hören hörte hörten hat zugehört, zuzuhören
gehören: gehöre gehört gehören gehörte gehörten hat gehört, zu gehören
geben: gebe gibt geben gab gaben hat gegeben, zu geben
zeigen: zeige zeigt zeigen zeigte zeigten hat gezeigt, zu zeigen
schicken: schicke schickt schicken schickte schickten hat geschickt, zu schicken
bringen: bringe bringt bringen brachte brachten hat gebracht, zu bringen
leihen: leihe leiht leihen lieh liehen hat geliehen, zu leihen
erzählen: erzähle erzählt erzählen erzählte erzählten hat erzählt, zu erzählen
vorlesen: lese liest lesen las lasen hat vorgelesen, vorzulesen
empfehlen: empfehle empfiehlt empfehlen empfahl empfahlen hat empfohlen, zu empfehlen
erklären: erkläre erklärt erklären erklärte erklärten hat erklärt, zu erklären
zurückgeben: gebe gibt geben gab gaben hat zurückgegeben, zurückzugeben
warten: warte wartet warten wartete warteten hat gewartet, zu warten
denken: denke denkt denken dachte dachten hat gedacht, zu denken
sprechen: spreche spricht sprechen sprach sprachen hat gesprochen, zu sprechen
plaudern: plaudere plaudert plaudern plauderte plauderten hat geplaudert, zu plaudern
spielen: spiele spielt spielen spielte spielten hat gespielt, zu spielen
freuen: freue freut freuen freute freuten hat gefreut, zu freuen
erinnern: erinnere erinnert erinnern erinnerte erinnerten hat erinnert, zu erinnern
kümmern: kümmere kümmert kümmern kümmerte kümmerten hat gekümmert, zu kümmern
wohnen: wohne wohnt wohnen wohnte wohnten hat gewohnt, zu wohnen
bleiben: bleibe bleibt bleiben blieb blieben ist geblieben, zu bleiben
sitzen: sitze sitzt sitzen saß saßen hat gesessen, zu sitzen
liegen: liege liegt liegen lag lagen hat gelegen, zu liegen
stehen: stehe steht stehen stand standen hat gestanden, zu stehen
gehen: gehe geht gehen ging gingen ist gegangen, zu gehen
fahren: fahre fährt fahren fuhr fuhren ist gefahren, zu fahren
laufen: laufe läuft laufen lief liefen ist gelaufen, zu laufen
reisen: reise reist reisen reiste reisten ist gereist, zu reisen
fliegen: fliege fliegt fliegen flog flogen ist geflogen, zu fliegen
kommen: komme kommt kommen kam kamen ist gekommen, zu kommen
legen: lege legt legen legte legten hat gelegt, zu legen
stellen: stelle stellt stellen stellte stellten hat gestellt, zu stellen
sein: bin ist sind war waren ist gewesen, zu sein
werden: werde wird werden wurde wurden ist geworden, zu werden
gefallen: gefalle gefällt gefallen gefiel gefielen hat gefallen, zu gefallen
kosten: koste kostet kosten kostete kosteten hat gekostet, zu kosten
regnen: regne regnet regnen regnete regneten hat geregnet, zu regnen
schneien: schneie schneit schneien schneite schneiten hat geschneit, zu schneien
scheinen: scheine scheint scheinen schien schienen hat geschienen, zu scheinen
wissen: weiß weiß wissen wusste wussten hat gewusst, zu wissen
glauben: glaube glaubt glauben glaubte glaubten hat geglaubt, zu glauben
hoffen: hoffe hofft hoffen hoffte hofften hat gehofft, zu hoffen
sagen: sage sagt sagen sagte sagten hat gesagt, zu sagen
fragen: frage fragt fragen fragte fragten hat gefragt, zu fragen
versuchen: versuche versucht versuchen versuchte versuchten hat versucht, zu versuchen
beginnen: beginne beginnt beginnen begann begannen hat begonnen, zu beginnen
planen: plane plant planen plante planten hat geplant, zu planen
versprechen: verspreche verspricht versprechen versprach versprachen hat versprochen, zu versprechen
"""


def test_every_german_verb_is_conjugated_as_in_the_book():
    book = dict(line.split(": ") for line in CONJUGATIONS.strip().splitlines())
    said = set()
    for frame in (*FRAMES, *OTHERS):
        verb = frame.german
        ours = []
        for who, tense in [
            (Phrase(I), "present"), (Phrase(HE), "present"), (Phrase(WE, plural=True), "present"),
            (Phrase(HE), "past"), (Phrase(WE, plural=True), "past"),
        ]:  # fmt: skip
            ours.append(german._verb(Clause(frame, who, tense), who)[0])
        ours += german._verb(Clause(frame, Phrase(HE), "perfect"), Phrase(HE))
        assert f"{' '.join(ours)}, {verb.to}" == book[verb.joined], verb.joined
        said.add(verb.joined)
    assert said == set(book)


ENGLISH_VERBS = """
cry cries cried cried crying; smile smiles smiled smiled smiling; swim swims swam swum swimming
get gets got got getting; go goes went gone going; wash washes washed washed washing
read reads read read reading; write writes wrote written writing; buy buys bought bought buying
lie lies lay lain lying; sit sits sat sat sitting; run runs ran run running
put puts put put putting; travel travels travelled travelled travelling
carry carries carried carried carrying; forget forgets forgot forgotten forgetting
have has had had having; be is was been being; play plays played played playing
plan plans planned planned planning; chat chats chatted chatted chatting
see sees saw seen seeing; fly flies flew flown flying; open opens opened opened opening
visit visits visited visited visiting; answer answers answered answered answering
"""


def test_english_verbs_have_their_forms():
    ours = {frame.english.base: frame.english for frame in (*FRAMES, *OTHERS)}
    for entry in ENGLISH_VERBS.strip().replace("\n", ";").split(";"):
        base, *forms = entry.split()
        verb = ours[base]
        assert [verb.third, verb.past, verb.participle, verb.ing] == forms


NUMBERS = [
    (0, "zero", "null"),
    (1, "one", "eins"),
    (7, "seven", "sieben"),
    (12, "twelve", "zwölf"),
    (16, "sixteen", "sechzehn"),
    (17, "seventeen", "siebzehn"),
    (21, "twenty-one", "einundzwanzig"),
    (30, "thirty", "dreißig"),
    (67, "sixty-seven", "siebenundsechzig"),
    (76, "seventy-six", "sechsundsiebzig"),
    (100, "one hundred", "einhundert"),
    (101, "one hundred and one", "einhunderteins"),
    (365, "three hundred and sixty-five", "dreihundertfünfundsechzig"),
    (999, "nine hundred and ninety-nine", "neunhundertneunundneunzig"),
    (1000, "one thousand", "eintausend"),
    (1001, "one thousand and one", "eintausendeins"),
    (2300, "two thousand three hundred", "zweitausenddreihundert"),
    (21000, "twenty-one thousand", "einundzwanzigtausend"),
    (101000, "one hundred and one thousand", "einhunderteintausend"),
    (
        999_999,
        "nine hundred and ninety-nine thousand nine hundred and ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
]


@pytest.mark.parametrize(("n", "in_english", "in_german"), NUMBERS)
def test_numbers_are_spelt_out(n, in_english, in_german):
    assert (english_number(n), german_number(n)) == (in_english, in_german)


def test_numbers_differ_and_have_an_end():
    assert len({german_number(n) for n in range(0, 1_000_000, 97)}) == len(range(0, 1_000_000, 97))
    for n in (-1, 1_000_000):
        with pytest.raises(DataError, match="from 0 to 999999"):
            german_number(n)


CONTRACTIONS = [
    ("in", the("garden"), 2, "im Garten"),
    ("in", the("garden"), 1, "in den Garten"),
    ("in", the("hotel"), 1, "ins Hotel"),
    ("in", the("school"), 2, "in der Schule"),
    ("an", the("station"), 2, "am Bahnhof"),
    ("zu", the("station"), 2, "zum Bahnhof"),
    ("zu", the("bakery"), 2, "zur Bäckerei"),
    ("von", the("king"), 2, "vom König"),
    ("bei", the("doctor"), 2, "beim Arzt"),
    ("auf", the("shelf"), 1, "auf das Regal"),
    ("in", a("garden"), 2, "in einem Garten"),
    ("in", Phrase(NOUNS["house"], "this"), 2, "in diesem Haus"),
    ("in", the("hotel", adjectives=adjective("big"), degree=2), 2, "im größten Hotel"),
    ("mit", Phrase(THEY, plural=True), 2, "mit ihnen"),
]


@pytest.mark.parametrize(("word", "phrase", "case", "expected"), CONTRACTIONS)
def test_prepositions_and_articles_contract(word, phrase, case, expected):
    assert german.prepositional(word, phrase, case) == expected
