"""Encodings named for text that does not decode: languages in their usual encodings, long and
short.
"""

import pytest
from reading import read, write

from data import documents as documents_module
from data.encodings import damaged_utf8, likely_encodings
from errors import UserError

SENTENCES = {
    "traditional": ("春眠不覺曉,處處聞啼鳥。夜來風雨聲,花落知多少。", ["big5"]),
    "simplified": ("他说,这是一个很好的主意。明天我们一起去北京吧!", ["gbk", "gb18030"]),
    "japanese": ("国境の長いトンネルを抜けると雪国であった。", ["shift_jis", "euc_jp"]),
    "korean": ("안녕하세요. 저는 한국어를 공부하는 학생입니다.", ["euc_kr", "johab"]),
    "french": ("Il était une fois, à l’orée du bois, une fée très âgée.", ["mac_roman", "cp1252"]),
    "german": ("Zürich, Köln und Düsseldorf sind schöne Städte.", ["mac_roman", "cp850"]),
    "english": ("“I can’t believe it’s over,” he said.", ["mac_roman", "cp1252"]),
    "italian": ("Perché no? La città è più bella di così.", ["cp1252", "mac_roman"]),
    "russian": (
        "Мой дядя самых честных правил, когда не в шутку занемог.",
        ["cp1251", "koi8-r", "cp866", "iso8859-5", "mac_cyrillic"],
    ),
    "polish": ("Zażółć gęślą jaźń. Pójdź, kińże tę chmurność.", ["cp1250", "iso8859-2"]),
    "greek": ("Σε γνωρίζω από την κόψη του σπαθιού την τρομερή", ["cp1253", "iso8859-7"]),
    "hebrew": (
        "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. כולם חוננו בתבונה ובמצפון.",
        ["cp1255"],
    ),
    "arabic": ("السلام عليكم ورحمة الله وبركاته.", ["cp1256"]),
    "thai": ("สวัสดีครับ วันนี้อากาศดีมาก", ["cp874"]),
}
CASES = [(text, encoding) for text, encodings in SENTENCES.values() for encoding in encodings]


def first_bad(raw):
    with pytest.raises(UnicodeDecodeError) as caught:
        raw.decode()
    return caught.value.start


@pytest.mark.parametrize(("text", "encoding"), CASES)
@pytest.mark.parametrize("times", [1, 40])
def test_the_right_encoding_comes_first(text, encoding, times):
    raw = f"{text}\n".encode(encoding) * times
    found = likely_encodings(raw, first_bad(raw))
    assert len(found) <= 3
    assert raw.decode(found[0].encoding) == raw.decode(encoding)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("language", ["english", "russian", "simplified", "korean"])
@pytest.mark.parametrize("offset", [0, 1 << 20])
def test_wide_encodings_without_a_mark(encoding, language, offset):
    raw = f"{SENTENCES[language][0]}\n".encode(encoding) * 9
    assert likely_encodings(raw, 9, offset)[0].encoding == encoding


def test_a_sample_may_begin_and_end_inside_characters():
    raw = "明天我们一起去北京吧".encode("gbk") * 50
    sample = raw[1:] + b"\n" + raw[:-1]
    assert likely_encodings(sample, 0, 1001)[0].encoding == "gbk"


def test_the_text_is_shown_as_each_encoding_reads_it():
    raw = b"It was late. " * 40 + "“Don’t,” he said.".encode("cp1252")
    (reading, *_) = likely_encodings(raw, first_bad(raw))
    assert "“Don’t,” he" in reading.shown
    assert len(reading.shown) < 40


def test_noise_is_never_more_than_three_guesses():
    for raw in (b"\xff\xfe\xfd" * 9, bytes(range(128, 256)) * 4, b"\x80", b"\0\xff" * 9):
        assert len(likely_encodings(raw, 0)) <= 3


def test_utf8_with_a_pasted_byte_is_told_from_another_encoding():
    good = "déjà vu, naïve élève ".encode()
    assert damaged_utf8(good * 3 + b"caf\xe9 " + good) == 1
    assert damaged_utf8("déjà vu ".encode("latin-1") * 9) == 0


# --- in messages ---


@pytest.mark.parametrize("n_before", [3, 300_000])
@pytest.mark.parametrize(("text", "encoding"), CASES[::3])
def test_the_message_names_it_wherever_it_is(n_before, text, encoding, tmp_path):
    before = b"plain words\n" * (n_before // 12) + b"x" * (n_before % 12)
    path = write(tmp_path / "a.txt", before + f"\n{text}\n".encode(encoding) * 30)
    bad = first_bad(path.read_bytes())
    with pytest.raises(UserError, match=rf"at offset {bad:,} .*\nit may be --encoding ") as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 2
    named = str(caught.value).split("--encoding ")[1].split(" ")[0]
    assert text in read(path, encoding=named)[0][0]


@pytest.mark.parametrize("chunk_bytes", [4, 1 << 18])
def test_the_line_is_told(chunk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", chunk_bytes)
    path = write(tmp_path / "a.txt", b"one\ntwo\n\r\nfour caf\xe9 \n")
    with pytest.raises(UserError, match="byte 0xe9 at offset 18 in line 4 "):
        read(path)


def test_utf16_without_a_mark_is_named(tmp_path):
    for encoding in ("utf-16-le", "utf-16-be"):
        path = write(tmp_path / "a.txt", "Hello there, all of you.\n".encode(encoding) * 9)
        with pytest.raises(UserError, match=rf"NUL byte at offset .*\n.*--encoding {encoding} "):
            read(path)


def test_damage_in_utf8_is_told_as_damage(tmp_path):
    path = write(tmp_path / "a.txt", "élève ".encode() * 30 + b"\xe9 ")
    with pytest.raises(UserError, match=r"\nthe rest around it is utf-8, so 1 place.*iconv -c"):
        read(path)


def test_utf8_read_as_something_else_is_said_or_refused(tmp_path):
    path = write(tmp_path / "a.txt", "élève ".encode() * 9)
    events = read(path, encoding="latin-1")[1]
    assert events["of these, utf-8 by their content (is --encoding latin-1 right?)"] == 1
    for encoding in ("ascii", "utf-16"):
        with pytest.raises(UserError, match=f"is not {encoding}: .*\nit reads as utf-8: leave"):
            read(path, encoding=encoding)
    plain = write(tmp_path / "b.txt", b"plain words")
    assert read(plain, encoding="latin-1")[1] == {"files read as latin-1": 1}
