"""What verbs are said of: each use of a verb, the nouns that fit it, and what explains it."""

from writehead.data.grammar.nouns import nouns
from writehead.data.grammar.verbs import Frame, english_verb, german_verb


def _frame(
    english: str,
    german: str,
    subject: str = "person",
    *,
    acc: str = "",
    dat: str = "",
    to: bool = False,
    prep: str = "",
    about: str = "",
    place: str = "",
    how: str = "",
    mode: str = "",
    why: str = "",
    why_object: str = "",
) -> Frame:
    """A frame from words: kinds of nouns, and "for auf 1" for a preposition and its case.

    `mode` is some of stative, state, event (both are stative too) and single.
    """
    governed = None
    if prep:
        word, german_word, case = prep.split()
        governed = (word, german_word, int(case))
    return Frame(
        english_verb(english),
        german_verb(german),
        nouns(subject),
        nouns(acc),
        nouns(dat),
        to,
        governed,
        nouns(about),
        place,
        tuple(how.split()),
        mode != "" and mode != "single",
        "state" in mode,
        "event" in mode,
        "single" in mode,
        tuple(why.split()),
        tuple(why_object.split()),
    )


_WORN = "'coat' 'dress' 'shirt' 'jacket' 'sweater'"
_SEEN = "person animal vehicle building"
_GOODS = (
    "food drink clothes furniture 'car' 'bicycle' 'motorbike' 'book' 'camera' 'computer' 'bag' "
    "'ring' 'watch'"
)

FRAMES = (
    # deeds without an object
    _frame("sleep slept slept", "schlafen schläft schlief geschlafen", "person animal",
           place="in", how="well badly long", why="tired sick"),
    _frame("laugh", "lachen", how="loudly quietly happily", why="happy"),
    _frame("cry", "weinen", "child 'woman'", how="loudly quietly", why="sad tired hungry"),
    _frame("smile", "lächeln", why="happy"),
    _frame("work", "arbeiten", "adult", place="in", how="much hard slowly", why="poor"),
    _frame("sing sang sung", "singen singt sang gesungen", "person 'bird'", place="in",
           how="loudly quietly well badly", why="happy"),
    _frame("dance", "tanzen", place="in", how="well badly happily", why="happy"),
    _frame("swim swam swum", "schwimmen schwimmt schwamm geschwommen sein",
           "person 'dog' 'duck'", how="fast slowly"),
    _frame("dream", "träumen", "person 'dog'", mode="stative", why="tired"),
    _frame("get got got +up", "auf|stehen steht stand gestanden sein", how="slowly"),
    _frame("fall fell fallen +asleep", "ein|schlafen schläft schlief geschlafen sein",
           "person animal", place="in", why="tired sick", mode="stative"),
    _frame("wake woke woken +up", "auf|wachen sein", "person animal", mode="event",
           why="hungry thirsty"),
    _frame("watch +television", "fern|sehen sieht sah gesehen", why="lazy sick tired"),
    _frame("go went gone +for_a_walk", "spazieren_|gehen geht ging gegangen sein", place="in",
           why="happy sad"),
    _frame("come came come +back", "zurück|kommen kommt kam gekommen sein",
           "person 'train' 'bus' 'ship' 'cat' 'dog'", mode="stative"),
    _frame("arrive", "an|kommen kommt kam gekommen sein", "person public", mode="stative"),
    _frame("depart", "ab|fahren fährt fuhr gefahren sein", "public", mode="stative"),
    _frame("bark", "bellen bellt bellte gebellt", "'dog'", how="loudly", why="hungry wild"),
    _frame("hurry", "sich beeilen", why="hungry nervous"),
    _frame("rest", "sich aus|ruhen", "person", place="in", why="tired sick old"),
    # deeds done to something
    _frame("read read read", "lesen liest las gelesen", acc="readable", place="in",
           how="slowly attentively", why_object="interesting short new famous"),
    _frame("write wrote written", "schreiben schreibt schrieb geschrieben",
           "adult 'girl' 'boy'", acc="written", how="quickly slowly"),
    _frame("buy bought bought", "kaufen", "person", acc=_GOODS,
           why_object="cheap beautiful new fresh delicious red"),
    _frame("sell sold sold", "verkaufen", "adult", acc=_GOODS, why="poor",
           why_object="old expensive ugly"),
    _frame("see saw seen", "sehen sieht sah gesehen", "person pet", acc=_SEEN,
           mode="stative", place="in"),
    _frame("hear heard heard", "hören", "person pet",
           acc="animal child 'song' 'train' 'guitar' 'violin'", mode="stative"),
    _frame("look =for", "suchen",
           acc="child 'key' 'bag' 'umbrella' 'watch' 'ring' 'ball' pet clothes 'book'",
           place="in", how="everywhere", why="nervous"),
    _frame("find found found", "finden findet fand gefunden",
           acc="'key' 'bag' 'umbrella' 'watch' 'ring' 'ball' 'doll' 'money' pet 'letter' 'map'",
           place="in", mode="event"),
    _frame("eat ate eaten", "essen isst aß gegessen", acc="food", place="in",
           how="slowly quickly", why="hungry", why_object="delicious fresh sweet"),
    _frame("drink drank drunk", "trinken trinkt trank getrunken", acc="drink", place="in",
           how="slowly quickly", why="thirsty", why_object="delicious fresh"),
    _frame("cook", "kochen", "adult", acc="cooked", place="in", why="hungry",
           why_object="fresh cheap"),
    _frame("bake", "backen backt backte gebacken", "adult", acc="baked", why="hungry happy"),
    _frame("love", "lieben", acc="person animal", mode="state",
           why_object="beautiful friendly clever"),
    _frame("visit", "besuchen", acc="person 'museum' 'castle' 'church' settlement",
           why_object="sick friendly famous beautiful old"),
    _frame("meet met met", "treffen trifft traf getroffen", acc="person", place="in",
           mode="stative"),
    _frame("open", "öffnen", acc="opening luggage 'bottle' 'letter'",
           how="slowly carefully quickly", why="curious nervous"),
    _frame("close", "schließen schließt schloss geschlossen", acc="opening luggage",
           how="slowly carefully quietly", why="tired", mode="single"),
    _frame("clean", "putzen", acc="room 'window'", why_object="dirty", mode="single"),
    _frame("wash", "waschen wäscht wusch gewaschen", acc="clothes washable",
           how="thoroughly quickly", why_object="dirty", mode="single"),
    _frame("repair", "reparieren", "adult", acc="machine", how="quickly slowly",
           why_object="old broken", mode="single"),
    _frame("paint", "malen", acc="painted animal 'castle' 'church'", how="slowly",
           why_object="beautiful", mode="single"),
    _frame("carry", "tragen trägt trug getragen", acc="luggage 'chair' 'child' 'bicycle'",
           how="slowly carefully", why="strong friendly", mode="single"),
    _frame("need", "brauchen", acc="thing 'money' 'time' clothes vehicle 'doctor'", mode="state"),
    _frame("know knew known", "kennen kennt kannte gekannt", acc="person sight settlement",
           mode="state", why_object="famous"),
    _frame("understand understood understood", "verstehen versteht verstand verstanden",
           acc="person 'poem' 'report' 'article' 'letter' 'message' learned", mode="state",
           how="well", why="clever", why_object="short clever"),
    _frame("forget forgot forgotten", "vergessen vergisst vergaß vergessen",
           acc="'key' 'bag' 'umbrella' 'watch' 'coat' 'hat'", mode="event single",
           why="nervous tired old"),
    _frame("lose lost lost", "verlieren verliert verlor verloren",
           acc="'key' 'bag' 'umbrella' 'watch' 'ring' 'money' 'hat'", place="in",
           mode="event single"),
    _frame("invite", "ein|laden lädt lud geladen", acc="person", mode="stative",
           why_object="friendly famous rich"),
    _frame("call", "an|rufen ruft rief gerufen", "adult", acc="adult", why="sick sad lazy",
           why_object="sick sad", mode="single"),
    _frame("pick +up", "ab|holen", "adult", acc="child family 'guest' 'friend' 'colleague'",
           place="in", mode="stative", why_object="tired sick"),
    _frame("tidy", "auf|räumen", acc="room", how="quickly slowly", why_object="dirty",
           mode="single"),
    _frame("switch +on", "ein|schalten", acc="device", mode="stative single"),
    _frame("switch +off", "aus|schalten", acc="device", mode="stative single", why="tired",
           why_object="loud"),
    _frame("put put put +on", "an|ziehen zieht zog gezogen", acc=_WORN,
           how="quickly slowly", why_object="new beautiful warm", mode="single"),
    _frame("take took taken +off", "aus|ziehen zieht zog gezogen", acc=_WORN,
           how="quickly slowly", why_object="dirty old", mode="single"),
    _frame("bring brought brought +back", "zurück|bringen bringt brachte gebracht",
           acc="'book' 'key' 'bicycle' 'car' 'umbrella' 'ring' 'bag'", mode="stative single",
           why_object="old expensive broken"),
    _frame("feed fed fed", "füttern", acc="animal", why_object="hungry young"),
    _frame("greet", "begrüßen", acc="person", how="loudly happily", why="friendly polite",
           why_object="famous"),
    _frame("praise", "loben", "adult", acc="child job 'son' 'daughter'",
           why_object="clever polite brave"),
    _frame("watch", "beobachten", "person 'cat'", acc="animal child 'tourist' 'guest'",
           place="in", why="curious", why_object="young interesting"),
    _frame("order", "bestellen", acc="dish drink", why_object="delicious cheap",
           mode="single"),
    _frame("sing sang sung", "singen singt sang gesungen", acc="'song'", how="loudly quietly",
           why="happy", why_object="beautiful famous"),
    _frame("have had had", "haben hat hatte gehabt", "adult 'child'",
           acc="pet 'house' 'garden' 'car' 'bicycle' 'guitar' 'piano' 'computer'",
           mode="state single"),
    # deeds done to or for somebody
    _frame("help", "helfen hilft half geholfen", dat="person", place="in",
           why="friendly polite", why_object="old sick tired"),
    _frame("thank", "danken", dat="person", mode="stative", why="polite happy",
           why_object="friendly"),
    _frame("follow", "folgen sein", "person 'dog' 'cat'", dat="person animal",
           how="slowly quietly", why="curious", why_object="famous"),
    _frame("answer", "antworten", dat="person", how="quickly loudly quietly", mode="stative",
           why="polite"),
    _frame("trust", "vertrauen", dat="person", mode="state", why_object="clever friendly"),
    _frame("listen =to", "zu|hören", dat="person", how="attentively", why="polite curious",
           why_object="interesting clever"),
    _frame("belong =to", "gehören gehört gehörte gehört",
           "thing clothes 'house' 'car' 'bicycle' pet", dat="person", mode="state"),
    _frame("give gave given", "geben gibt gab gegeben", dat="person",
           acc="gift food 'money' 'key'", why="friendly rich", why_object=""),
    _frame("show showed shown", "zeigen", dat="person",
           acc="thing readable painted 'car' 'bicycle'"),
    _frame("send sent sent", "schicken", dat="person", acc="mail gift"),
    _frame("bring brought brought", "bringen bringt brachte gebracht", dat="person",
           acc="food drink thing clothes"),
    _frame("lend lent lent", "leihen leiht lieh geliehen", dat="adult",
           acc="'book' 'money' 'car' 'bicycle' 'umbrella' 'camera' 'guitar'",
           why="friendly rich", mode="single"),
    _frame("tell told told", "erzählen", dat="person", acc="tale", why="happy", mode="single"),
    _frame("read read read", "vor|lesen liest las gelesen", dat="child",
           acc="tale 'poem' 'letter' 'book'", mode="single"),
    _frame("recommend", "empfehlen empfiehlt empfahl empfohlen", dat="adult",
           acc="'book' 'novel' eatery dish 'museum'", to=True, mode="stative single"),
    _frame("explain", "erklären", "adult", dat="person",
           acc="'poem' 'report' 'article' 'map' learned", to=True, how="slowly", mode="single"),
    _frame("return", "zurück|geben gibt gab gegeben", dat="person",
           acc="'book' 'key' 'ring' 'money' 'camera' 'umbrella'", to=True, mode="stative single"),
    # deeds with a preposition of their own
    _frame("wait", "warten", prep="for auf 1", about="person public mail", place="in",
           how="long patiently", mode="single"),
    _frame("think thought thought", "denken denkt dachte gedacht", prep="of an 1",
           about="person pet", mode="state"),
    _frame("talk", "sprechen spricht sprach gesprochen", prep="about über 1",
           about="person readable settlement", how="long quietly loudly", mode="single"),
    _frame("chat", "plaudern", prep="with mit 2", about="person", place="in", how="long happily"),
    _frame("dream", "träumen", prep="of von 2",
           about="'car' 'house' 'horse' 'castle' 'king' 'queen' wild", mode="state"),
    _frame("laugh", "lachen", prep="about über 1", about="tale 'picture' 'letter' 'hat'",
           how="loudly"),
    _frame("play", "spielen", "child pet", prep="with mit 2", about="toy child pet", place="in",
           how="happily quietly"),
    _frame("look +forward", "sich freuen", prep="to auf 1",
           about="'guest' 'friend' mail dish family", mode="state"),
    _frame("remember", "sich erinnern", prep="- an 1", about="person tale settlement 'song'",
           mode="state", how="well"),
    _frame("take took taken +care", "sich kümmern", prep="of um 1",
           about="child animal family 'garden'", why="friendly", why_object="sick young old"),
    # where one is, where one goes, where one puts things
    _frame("live", "wohnen", "person", place="at", mode="state"),
    _frame("stay", "bleiben bleibt blieb geblieben sein", place="at", mode="stative",
           why="sick tired lazy"),
    _frame("sit sat sat", "sitzen sitzt saß gesessen", "person pet", place="at", why="tired"),
    _frame("lie lay lain", "liegen liegt lag gelegen", "flat", place="on", mode="state"),
    _frame("stand stood stood", "stehen steht stand gestanden", "upright", place="on",
           mode="state"),
    _frame("go went gone", "gehen geht ging gegangen sein", place="to"),
    _frame("drive drove driven", "fahren fährt fuhr gefahren sein", "adult", place="to",
           how="fast slowly"),
    _frame("run ran run", "laufen läuft lief gelaufen sein", "person pet", place="to", how="fast"),
    _frame("travel", "reisen sein", "adult", place="abroad", why="rich curious"),
    _frame("fly flew flown", "fliegen fliegt flog geflogen sein", "adult", place="abroad"),
    _frame("come came come", "kommen kommt kam gekommen sein", place="from", mode="state"),
    _frame("put put put", "legen", acc="flat clothes", place="put", how="carefully quickly",
           mode="single"),
    _frame("put put put", "stellen", acc="upright", place="put", how="carefully quickly"),
)  # fmt: skip

BE = _frame("be was been", "sein ist war gewesen sein")
HAVE = _frame("have had had", "haben hat hatte gehabt", mode="single")
BECOME = _frame("become became become", "werden wird wurde geworden sein")
PLEASE = _frame("like", "gefallen gefällt gefiel gefallen", mode="single")
COST = _frame("cost cost cost", "kosten", mode="single")
PLAY = _frame("play", "spielen", "person", how="well badly")
RAIN = _frame("rain", "regnen regnet regnete geregnet")
SNOW = _frame("snow", "schneien schneit schneite geschneit")
SHINE = _frame("shine shone shone", "scheinen scheint schien geschienen")
KNOW = _frame("know knew known", "wissen weiß wusste gewusst", mode="single")
BELIEVE = _frame("believe", "glauben", mode="single")
HOPE = _frame("hope", "hoffen", mode="single")
SAY = _frame("say said said", "sagen", mode="single")
THINK = _frame("think thought thought", "denken denkt dachte gedacht", mode="single")
ASK = _frame("ask", "fragen", mode="single")
TRY = _frame("try", "versuchen")
BEGIN = _frame("begin began begun", "beginnen beginnt begann begonnen", mode="single")
PLAN = _frame("plan", "planen")
PROMISE = _frame("promise", "versprechen verspricht versprach versprochen", mode="single")
FORGET = _frame("forget forgot forgotten", "vergessen vergisst vergaß vergessen", mode="single")
OTHERS = (
    BE, HAVE, BECOME, PLEASE, COST, PLAY, RAIN, SNOW, SHINE, KNOW, BELIEVE, HOPE, SAY, THINK, ASK,
    TRY, BEGIN, PLAN, PROMISE, FORGET,
)  # fmt: skip
