"""What a text that does not decode may be encoded in, by how well each reading looks like language.

Whether charset-normalizer earns its place was tried on 51 sentences in their usual encodings that
the tables below were not made for: it had the right one first 33 times and among three 43 times,
the tables 47 and 50 times (48 and 51 since they know Italian), Johab among them.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field

SAMPLE_BYTES = 1 << 16
SCORED_CHARACTERS = 1000
LEAST_SCORE = 0.2  # of a reading that is worth naming
NEAR = 0.3  # and no further than this behind the best


@dataclass(frozen=True)
class Reading:
    """One way to read the bytes."""

    encoding: str
    """as --encoding takes it"""
    shown: str
    """the text around the bad byte, read so"""


# The characters that a language uses most. In text read wrongly they turn up by chance alone.
SIMPLIFIED = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所"
    "然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与"
    "长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己"
    "制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系"
    "气题活尔更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区保至队形社"
    "便空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南品住告类求据程北边死张该交规万取拉"
    "格望觉术领共确传师观清今切院让识候带导争运"
)
TRADITIONAL = (
    "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發後作裡裏用道行"
    "所然家種事成方多經麼去法學如都同現當沒動面起看定天分還進好小部其些主樣理心她本前開但因只從想實日軍者意無力它"
    "與長把機十民第公此已工使情明性知全三又關點正業外將兩高間由問很最重並物手應戰向頭文體政美相見被利什二等產或新"
    "己制身果加西斯月話合回特代內信表化老給世位次度門任常先海通教兒原東聲提立及比員解水名真論處走義各入幾口認條平"
    "系氣題活爾更別打女變四神總何電數安少報才結反受目太量再感建務做接必場件計管期市直德資命山金指克許統區保至隊形"
    "社便空決治展馬科司五基眼書非則聽白卻界達光放強即像難且權思王象完設式色路記南品住告類求據程北邊死張該交規萬取"
    "拉格望覺術領共確傳師觀清今切院讓識候帶導爭運云曰"
)
KANJI = (
    "日一国人年大十二本中長出三時行見月後前生五間上東四今金九入学高円子外八六下来気小七山話女北午百書先名川千水半男"
    "西電校語土木聞食車何南万毎白天母火右読友左休父雨私彼言事思自分手方家心者合場物当的地体化会会社新作用理同対明動"
    "部問力度性意主通文発記目関表定現全実戦多立不回民連世決"
)
KANA = "".join(map(chr, range(0x3041, 0x3094))) + "".join(map(chr, range(0x30A1, 0x30F7))) + "ー"
HANGUL = (
    "이다는에의을가고하지을를은로기도사한어아나그리자서인있해대들었수것과라시일니스정부만"
    "제여장게보주으구상요전원까면으동내성모거중세했할없국때신소오비마우조무안위연화된러합"
    "공음적관개경생용민미년문운법계저와된며물학선유현간양네더말방두노당트바였려말되관습등"
    "실명재회금난분심예외차파하늘직군남단진람레터결각강교속식복업치든야김울"
)
CJK_MARKS = "、。,.:;!?「」『』()《》〈〉“”‘’—…・·〜～　【】％"
WESTERN = "éèàâêîôûçëïüöäßñáíóúãõåæøœìòùÉÈÀÂÊÎÔÛÇÜÖÄÑÁÍÓÚÅÆØŒ"
WESTERN_RARE = "ÿÌÒÙýÝðÐþÞÃÕËÏŸšžŠŽ"
CENTRAL = "ąćęłńóśźżáčďéěíňřšťúůýžőűöüäăâîşţôĺľŕßđĄĆĘŁŃÓŚŹŻÁČĎÉĚÍŇŘŠŤÚŮÝŽŐŰÖÜÄĂÂÎŞŢĐ"
TURKISH = "çğıöşüâîÇĞİÖŞÜ"
BALTIC = "āčēģīķļņšūžąęėįųõäöüĀČĒĢĪĶĻŅŠŪŽĄĘĖĮŲÕÄÖÜ"
# The scripts without ASCII letters in their words, by falling frequency.
CYRILLIC = "оеаинтсрвлкмдпуяыьгзбчйхжшюіцщэфёїєўґъ"
GREEK = "αοιετσνηυρκπλμςίάέόωήύγδθχφβξώζψϊϋΐΰ"
HEBREW = "יוהלאתרבשמנכםחדעקפןטגסזךץף"
ARABIC = "اليمنتربدوعهفسكحقةجشأصطخىإضذءزثغئظآؤًٌَُِّْ،؛؟پچژگک"
THAI = "านรอกเงมยลวดทสตะปบคหแจพชขใไโผซธณศษถฟภญฉฐฎฏฑฒฬฮฌฆฤ่้ัิีืุู์็ำๆ"

FINAL = "ςםןךףץ"  # at the end of a word alone
OPENING = "“‘«„‚¿¡‹"
CLOSING = "”’»…›"
SIGNS = "–—°£€©®§·\u00a0"


@dataclass(frozen=True)
class Profile:
    """What is plausible in a group of encodings."""

    encodings: tuple[tuple[str, ...], ...]
    """Families: the first of a family that reads the bytes stands for it, as the rest extend it."""
    letters: str
    """That its languages use much."""
    level: tuple[str, int, int] = ("", 0, 0)
    """An encoding, and the first bytes of a character in it that mean a common one."""
    mixes: bool = False
    """Whether words hold ASCII letters too, as in Latin script."""
    rare: str = ""
    worth: dict[str, float] = field(init=False)
    """Of each of the letters: the more frequent, the more."""

    def __post_init__(self):
        worth = dict.fromkeys(self.letters, 1.0)
        if not (self.mixes or self.level[0]):
            for rank, letter in enumerate(self.letters):
                worth[letter] = 1 - 0.8 * rank / len(self.letters)
                worth.setdefault(letter.upper(), 0.5)
        object.__setattr__(self, "worth", worth)


PROFILES = (
    Profile((("gbk", "gb18030"),), SIMPLIFIED, ("gb2312", 0xB0, 0xD7)),
    Profile((("big5", "cp950", "big5hkscs"),), TRADITIONAL, ("big5", 0xA4, 0xC6)),
    Profile(
        (("shift_jis", "cp932", "shift_jisx0213"), ("euc_jp", "euc_jisx0213")),
        KANA + KANJI,
        ("euc_jp", 0xB0, 0xCF),
    ),
    Profile((("euc_kr", "cp949"), ("johab",)), HANGUL, ("euc_kr", 0xB0, 0xC8)),
    Profile((("cp1252",), ("mac_roman",), ("cp850",)), WESTERN, mixes=True, rare=WESTERN_RARE),
    Profile((("cp437",),), WESTERN, mixes=True, rare=WESTERN_RARE),
    Profile((("cp1250",), ("iso8859-2",), ("cp852",), ("mac_latin2",)), CENTRAL, mixes=True),
    Profile((("cp1254",), ("mac_turkish",), ("cp857",)), TURKISH, mixes=True),
    Profile((("cp1257",), ("iso8859-13",), ("cp775",)), BALTIC, mixes=True),
    Profile(
        (
            *(("cp1251",), ("koi8-r",), ("koi8-u",), ("cp866",), ("mac_cyrillic",)),
            ("iso8859-5",),
        ),
        CYRILLIC,
    ),
    Profile((("cp1253",), ("iso8859-7",), ("mac_greek",), ("cp737",)), GREEK),
    Profile((("cp1255",), ("iso8859-8",), ("cp862",)), HEBREW),
    Profile((("cp1256",), ("iso8859-6",), ("cp864",)), ARABIC),
    Profile((("cp874",),), THAI),
)
UNUSUAL = frozenset(
    (
        *("cp437", "cp737", "cp775", "cp850", "cp852", "cp857", "cp862", "cp864"),
        *("mac_greek", "mac_latin2", "mac_turkish"),
    )
)
WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
EVERY_LETTER = frozenset(CJK_MARKS).union(*(profile.worth for profile in PROFILES))


def likely_encodings(sample: bytes, at: int, offset: int = 0) -> list[Reading]:
    """Up to three encodings that read `sample` as language, the likeliest first.

    `at`: where in the sample the byte stands that did not decode; `offset`: of the sample in its
    file, which tells how UTF-16 is aligned. No more than `SAMPLE_BYTES` are looked at by the
    caller.
    """
    scored: list[tuple[float, str, str]] = []
    for encoding, text, score in _readings(sample, offset):
        if score > LEAST_SCORE - 0.5 and all(text != other for _, _, other in scored):
            scored.append((score, encoding, text))
    scored.sort(key=lambda entry: -entry[0])
    if scored and scored[0][0] > LEAST_SCORE:  # else the best of a bad lot, which may be it
        least = max(LEAST_SCORE, scored[0][0] - NEAR)
        scored = [entry for entry in scored if entry[0] > least]
    return [Reading(encoding, _shown(sample, at, encoding)) for _, encoding, _ in scored[:3]]


def is_utf8(sample: bytes, beyond_ascii: bool = False) -> bool:
    """Whether a sample that may end inside a character is UTF-8, and more than ASCII if asked."""
    text = _decode(sample, "utf-8")
    return text is not None and not (beyond_ascii and text.isascii())


def damaged_utf8(sample: bytes) -> int:
    """How many places of a sample are not UTF-8, if most of what is not ASCII in it is; else 0."""
    text = sample.decode("utf-8", "replace")
    n_bad = text.count("\ufffd")
    n_good = sum(not character.isascii() for character in text) - n_bad
    return n_bad if n_good >= 4 * n_bad else 0


def _readings(sample: bytes, offset: int) -> Iterator[tuple[str, str, float]]:
    """(encoding, text, score) of every encoding that reads the sample without an error."""
    for encoding in WIDE:
        width = int(encoding[4:6]) // 8
        text = _decode(sample[-offset % width :], encoding)
        if text and len(text) > 3 and (score := _wide_score(text)) > 0.5:
            yield encoding, text, score
    whole = _from_a_boundary(sample) if offset else sample
    for profile in PROFILES:
        for family in profile.encodings:
            for encoding in family:
                text = _decode(whole, encoding)
                if text is not None:
                    handicap = 0.25 if encoding in UNUSUAL else 0
                    yield encoding, text, _score(text, profile) - handicap
                    break


def _from_a_boundary(sample: bytes) -> bytes:
    """A sample from where a character surely begins: no encoding of several bytes a character ends
    one in a newline or a space.
    """
    for place in range(min(len(sample), 4096)):
        if sample[place] in b"\n ":
            return sample[place + 1 :]
    return sample


def _decode(sample: bytes, encoding: str) -> str | None:
    """The text of a sample, which may end inside a character; None if it does not decode."""
    try:
        return codecs.getincrementaldecoder(encoding)("strict").decode(sample, False)
    except UnicodeError:
        return None


def _shown(sample: bytes, at: int, encoding: str) -> str:
    """A few characters around a place, on one line."""
    start = max(0, at - 24)
    while start > 0 and sample[start - 1] not in b"\n ":
        start -= 1
    if encoding in WIDE:
        start = max(0, at - 24) // 4 * 4
    text = sample[start : at + 60].decode(encoding, "ignore")
    before = sample[start:at].decode(encoding, "ignore")
    first = max(0, len(before) - 12)
    words = text[first : first + 28].split()
    return " ".join("".join(filter(str.isprintable, word)) for word in words)


def _wide_score(text: str) -> float:
    """From -1 to 1: how much of what looks like UTF-16 or UTF-32 is common."""
    sample = text[:SCORED_CHARACTERS]
    total = 0.0
    for character in sample:
        if character in EVERY_LETTER or " " <= character <= "~" or character in "\r\n\t":
            total += 1
        elif _is_common(character, ("gb2312", 0xB0, 0xD7)):
            total += 0.2
        elif "\uac00" <= character <= "\ud7a3":
            total += 0.5
        else:
            total -= 1
    return total / len(sample)


def _score(text: str, profile: Profile) -> float:
    """From -2 to 1: how plausible the characters beyond ASCII are, on average."""
    total = 0.0
    n = 0
    padded = f" {text} "
    for place in range(1, len(padded) - 1):
        character = padded[place]
        if not character.isascii():
            total += _value(character, padded[place - 1], padded[place + 1], profile)
            n += 1
            if n == SCORED_CHARACTERS:
                break
        elif character < " " and character not in "\n\r\t\f":
            total -= 2
            n += 1
    return total / max(n, 1)


def _value(character: str, before: str, after: str, profile: Profile) -> float:
    """How plausible one character is between its neighbours."""
    touching = [other for other in (before, after) if other.isascii() and other.isalpha()]
    if profile.level[0]:
        return _value_in_east_asia(character, len(touching), profile)
    if character in profile.worth:
        if profile.mixes:
            return _value_in_latin(character, before, after)
        if touching:
            return -1
        return _value_of_case(character, before, after) * profile.worth[character]
    return _value_of_sign(character, before, after, profile)


def _value_in_east_asia(character: str, n_touching: int, profile: Profile) -> float:
    if n_touching:  # é and a letter behind it, taken for one character
        return 0.2 - 0.6 * n_touching
    if character in profile.worth:
        return 1
    if character in CJK_MARKS:
        return 0.4
    if _is_common(character, profile.level):
        return 0.3
    if "\uac00" <= character <= "\ud7a3":
        return 0.1
    return -0.5 if character.isalpha() else -1


def _is_common(character: str, level: tuple[str, int, int]) -> bool:
    encoding, first, last = level
    try:
        lead = character.encode(encoding)[0]
    except UnicodeEncodeError:
        return False
    return first <= lead <= last


def _value_in_latin(character: str, before: str, after: str) -> float:
    """An accented letter stands among plain ones, and a capital at the beginning of a word."""
    if not before.isascii() and before.isalpha() and not after.isascii() and after.isalpha():
        return -0.5
    if (character.isupper() and before.islower()) or (character.islower() and after.isupper()):
        return -1
    if character in "ìòù" and after.isalpha():
        return -0.5  # at the end of Italian words alone
    if not (before.isalpha() or after.isalpha()):
        return 0.5 if character in "àÀéóúíà" else 0
    return 1


def _value_of_case(character: str, before: str, after: str) -> float:
    """A letter of a script that has no ASCII letters beside it."""
    if character.isupper() and before.islower():
        return -1
    if character in FINAL and after.isalpha():
        return -1
    if character.islower() and before.isupper() and after.isupper():
        return -0.5
    if character.isupper() and after.isupper():
        return 0.3
    return 1


def _value_of_sign(character: str, before: str, after: str, profile: Profile) -> float:
    """Of what is no usual letter of the profile's languages."""
    in_word = before.isalpha() and after.isalpha()
    if character == "’" and in_word:
        return 1
    if character in profile.rare:
        return -0.2 if not (character.isupper() and before.islower()) else -1
    if character in OPENING:
        return 1 if not before.isalnum() and not after.isspace() else -1
    if character in CLOSING:
        return 1 if not before.isspace() and not after.isalnum() else -1
    if character in SIGNS and not in_word:
        return 0.6
    if character.isprintable() and character.isalpha():
        return -0.5
    return -1 if character.isprintable() else -2
