"""The models that a server has loaded, found by name or by language pair."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from writehead.engine import Engine
from writehead.errors import ConfigError, nearest, shown
from writehead.model import TranslationModel
from writehead.serving.errors import ApiError

Codes = dict[str, str | None]  # arguments of `Engine.translate`
PAIR = re.compile(r"([a-z]{2,3})[-_]([a-z]{2,3})")
AUTO = "auto"  # a source language that the client does not know
# the English name, and the code that NLLB and others use
NAMES = {
    "af": ("Afrikaans", "afr"),
    "am": ("Amharic", "amh"),
    "ar": ("Arabic", "arb"),
    "as": ("Assamese", "asm"),
    "az": ("Azerbaijani", "azj"),
    "ba": ("Bashkir", "bak"),
    "be": ("Belarusian", "bel"),
    "bg": ("Bulgarian", "bul"),
    "bn": ("Bengali", "ben"),
    "bs": ("Bosnian", "bos"),
    "ca": ("Catalan", "cat"),
    "cs": ("Czech", "ces"),
    "cy": ("Welsh", "cym"),
    "da": ("Danish", "dan"),
    "de": ("German", "deu"),
    "dz": ("Dzongkha", "dzo"),
    "el": ("Greek", "ell"),
    "en": ("English", "eng"),
    "eo": ("Esperanto", "epo"),
    "es": ("Spanish", "spa"),
    "et": ("Estonian", "est"),
    "eu": ("Basque", "eus"),
    "fa": ("Persian", "pes"),
    "fi": ("Finnish", "fin"),
    "fo": ("Faroese", "fao"),
    "fr": ("French", "fra"),
    "ga": ("Irish", "gle"),
    "gd": ("Scottish Gaelic", "gla"),
    "gl": ("Galician", "glg"),
    "gu": ("Gujarati", "guj"),
    "ha": ("Hausa", "hau"),
    "he": ("Hebrew", "heb"),
    "hi": ("Hindi", "hin"),
    "hr": ("Croatian", "hrv"),
    "ht": ("Haitian Creole", "hat"),
    "hu": ("Hungarian", "hun"),
    "hy": ("Armenian", "hye"),
    "id": ("Indonesian", "ind"),
    "ig": ("Igbo", "ibo"),
    "is": ("Icelandic", "isl"),
    "it": ("Italian", "ita"),
    "ja": ("Japanese", "jpn"),
    "jv": ("Javanese", "jav"),
    "ka": ("Georgian", "kat"),
    "kk": ("Kazakh", "kaz"),
    "km": ("Khmer", "khm"),
    "kn": ("Kannada", "kan"),
    "ko": ("Korean", "kor"),
    "ky": ("Kyrgyz", "kir"),
    "lb": ("Luxembourgish", "ltz"),
    "lg": ("Ganda", "lug"),
    "ln": ("Lingala", "lin"),
    "lo": ("Lao", "lao"),
    "lt": ("Lithuanian", "lit"),
    "lv": ("Latvian", "lvs"),
    "mg": ("Malagasy", "plt"),
    "mk": ("Macedonian", "mkd"),
    "ml": ("Malayalam", "mal"),
    "mn": ("Mongolian", "khk"),
    "mr": ("Marathi", "mar"),
    "ms": ("Malay", "zsm"),
    "mt": ("Maltese", "mlt"),
    "my": ("Burmese", "mya"),
    "ne": ("Nepali", "npi"),
    "nl": ("Dutch", "nld"),
    "nn": ("Norwegian Nynorsk", "nno"),
    "no": ("Norwegian", "nob"),
    "oc": ("Occitan", "oci"),
    "om": ("Oromo", "gaz"),
    "or": ("Odia", "ory"),
    "pa": ("Punjabi", "pan"),
    "pl": ("Polish", "pol"),
    "ps": ("Pashto", "pbt"),
    "pt": ("Portuguese", "por"),
    "qu": ("Quechua", "quy"),
    "ro": ("Romanian", "ron"),
    "ru": ("Russian", "rus"),
    "rw": ("Kinyarwanda", "kin"),
    "sa": ("Sanskrit", "san"),
    "si": ("Sinhala", "sin"),
    "sk": ("Slovak", "slk"),
    "sl": ("Slovenian", "slv"),
    "sn": ("Shona", "sna"),
    "so": ("Somali", "som"),
    "sq": ("Albanian", "als"),
    "sr": ("Serbian", "srp"),
    "st": ("Southern Sotho", "sot"),
    "sv": ("Swedish", "swe"),
    "sw": ("Swahili", "swh"),
    "ta": ("Tamil", "tam"),
    "te": ("Telugu", "tel"),
    "tg": ("Tajik", "tgk"),
    "th": ("Thai", "tha"),
    "tk": ("Turkmen", "tuk"),
    "tl": ("Tagalog", "tgl"),
    "tr": ("Turkish", "tur"),
    "tt": ("Tatar", "tat"),
    "ug": ("Uyghur", "uig"),
    "uk": ("Ukrainian", "ukr"),
    "ur": ("Urdu", "urd"),
    "uz": ("Uzbek", "uzn"),
    "vi": ("Vietnamese", "vie"),
    "xh": ("Xhosa", "xho"),
    "yo": ("Yoruba", "yor"),
    "zh": ("Chinese", "zho"),
    "zu": ("Zulu", "zul"),
}
# the codes of ISO 639-1 without a name here
OTHER_CODES = (
    "aa ab ae ak an av ay bh bi bm bo br ce ch co cr cu cv dv ee ff fj fy gn gv ho hz ia ie ii ik "
    "io iu kg ki kj kl kr ks ku kv kw la li lu mh mi na nb nd ng nr nv ny oj os pi rm rn sc sd se "
    "sg sh sm ss su ti tn to ts tw ty ve vo wa wo yi za"
)


@dataclass(frozen=True, eq=False)
class Served:
    """A model with the name that clients use, and its source and target language, if known."""

    name: str
    engine: Engine
    languages: tuple[str, str] | None = None

    def codes(self, source: str | None, target: str | None) -> "Codes | None":
        """Returns how the engine calls two languages; None if the model does not have both.

        A region, as in en-GB, is ignored. None and auto leave the choice to the model.
        """
        asked = [None if one in (None, "", AUTO) else one for one in (source, target)]
        known = self.code_lists
        if not self.translates:
            return None
        if not known[1]:
            pairs = zip(asked, self.languages or (None, None), strict=True)
            return {} if all(want is None or _base(want) == own for want, own in pairs) else None
        found: list[str | None] = []
        for want, codes in zip(asked, known, strict=True):
            code = find_code(want, codes) if want and codes else None
            if want and codes and code is None:
                return None
            found.append(code)
        return {"source_lang": found[0], "target_lang": found[1]}

    @property
    def code_lists(self) -> tuple[Collection[str], Collection[str]]:
        """The codes of the source and target languages of a model of several languages."""
        tokenizer = self.engine.tokenizer
        return tokenizer.source_languages.keys(), tokenizer.target_languages.keys()

    def language_lists(self) -> tuple[list[str], list[str]]:
        """Returns the codes of the source and target languages, with two letters if possible."""
        if self.languages is not None:
            return [self.languages[0]], [self.languages[1]]
        short = {long: code for code, (_, long) in NAMES.items()}
        sources, targets = (
            sorted({short.get(_base(code), code) for code in codes}) for codes in self.code_lists
        )
        return sources, targets

    @property
    def translates(self) -> bool:
        """Whether this is a translation model; otherwise, it is a language model."""
        return isinstance(self.engine.model, TranslationModel)


def parse_pair(text: str) -> tuple[str, str]:
    """Returns the two languages of a pair such as en-de."""
    match = PAIR.fullmatch(text.lower())
    if match is None:
        raise ConfigError(f"{shown(text)} is not a language pair such as en-de")
    for code in match.groups():  # a code of three letters may be any of ISO 639-3
        if len(code) == 2 and code not in NAMES and code not in OTHER_CODES.split():
            raise ConfigError(f"there is no language {shown(code)} in {shown(text)}")
    return match[1], match[2]


def pair_of(name: str) -> tuple[str, str] | None:
    """Returns the language pair at the end of a model's name, as in opus-mt-en-de, if any."""
    match = re.search(rf"(?:^|[^a-z]){PAIR.pattern}$", name.lower())
    return (match[1], match[2]) if match else None


class Models:
    """All models of a server; the first is the default."""

    def __init__(self, models: Sequence[Served]) -> None:
        if not models:
            raise ConfigError("a server needs at least one model")
        self.by_name: dict[str, Served] = {}
        for one in models:
            if one.name in self.by_name:
                raise ConfigError(f"two models are named {shown(one.name)}; choose other names")
            self.by_name[one.name] = one

    def __iter__(self) -> Iterator[Served]:
        return iter(self.by_name.values())

    def named(self, name: str) -> Served:
        """Returns a model by name."""
        if name not in self.by_name:
            hint = nearest(name, self.by_name)
            raise ApiError(404, f"the model {shown(name)} does not exist; {hint}")
        return self.by_name[name]

    def translator(
        self, name: str | None = None, source: str | None = None, target: str | None = None
    ) -> tuple[Served, Codes]:
        """Returns a translation model by name or languages, and the codes of the languages.

        The default is the first translation model.
        """
        models = [*self] if name is None else [self.named(name)]
        if name is not None and not models[0].translates:
            raise ApiError(422, f"{shown(name)} is a language model; it cannot translate")
        for one in models:
            codes = one.codes(source, target)
            if codes is not None:
                return one, codes
        known = ", ".join(sorted({"-".join(one.languages) for one in models if one.languages}))
        wanted = f"{source or AUTO} to {target or AUTO}"
        hint = f"choose from {known}" if known else "see the list of languages"
        raise ApiError(404, f"no model translates {shown(wanted)}; {hint}")

    def sources(self, target: str | None, name: str | None = None) -> list[str]:
        """Returns the languages that the named model, or any model, translates to `target`."""
        models = [*self] if name is None else [self.named(name)]
        found = {
            source: None
            for one in models
            if one.translates
            for source in one.language_lists()[0]
            if one.codes(source, target) is not None
        }
        return [*found]

    def writer(self, name: str) -> Served:
        """Returns a language model by name."""
        found = self.named(name)
        if found.translates:
            raise ApiError(422, f"{shown(name)} is a translation model; use /v1/translate")
        return found

    def languages(self) -> list[dict[str, object]]:
        """Returns all source languages and their targets, as LibreTranslate lists them."""
        targets: dict[str, set[str]] = {}
        for one in self:
            sources, own = one.language_lists()
            for source in sources:
                targets.setdefault(source, set()).update(code for code in own if code != source)
            for target in own:
                targets.setdefault(target, set())
        return [
            {"code": code, "name": language_name(code), "targets": sorted(targets[code])}
            for code in sorted(targets)
        ]


def language_name(code: str) -> str:
    """Returns the English name of a language, or its code."""
    return NAMES[code][0] if code in NAMES else code


def find_code(wanted: str, known: Collection[str]) -> str | None:
    """Returns the code of a language among those of a model: exactly, or without its region."""
    if wanted in known:
        return wanted
    base = _base(wanted)
    same = {base, NAMES[base][1]} if base in NAMES else {base}
    return next((code for code in sorted(known) if _base(code) in same), None)


def _base(code: str) -> str:
    return re.split("[-_]", code.lower())[0]
