// Tokens as a reader sees them, as viz/labels.py has it: a printable label for each, and which of them make up a word.

const SIGNS = {" ": "␣", "\n": "↵", "\t": "⇥"};
// Characters that can't be seen, or that rearrange their neighbours (Unicode categories).
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cn}\p{Co}\p{Zl}\p{Zp}\p{Zs}]/u;
const hex = (number, digits) => number.toString(16).toUpperCase().padStart(digits, "0");

// A token's bytes as parts: whole characters, and runs of bytes that are none (as numbers).
function charactersOf(bytes) {
  const decoder = new TextDecoder("utf-8", {fatal: true, ignoreBOM: true});
  const parts = [];
  for (let at = 0; at < bytes.length; ) {
    const first = bytes[at];
    const length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    try {
      if (at + length > bytes.length) throw new TypeError("cut off");
      parts.push(decoder.decode(bytes.subarray(at, at + length)));
      at += length;
    } catch {
      if (Array.isArray(parts.at(-1))) parts.at(-1).push(first);
      else parts.push([first]);
      at++;
    }
  }
  return parts;
}

// Spaces, newlines and tabs become signs; bytes that are no whole character are given in hex; a character that can't be
// seen, or would rearrange its neighbours, is given by its code point.
function label(bytes) {
  const text = [];
  for (const part of charactersOf(bytes)) {
    if (Array.isArray(part)) text.push(`⟨${part.map((byte) => hex(byte, 2)).join(" ")}⟩`);
    else if (SIGNS[part]) text.push(SIGNS[part]);
    else if (UNSEEN.test(part)) text.push(`⟨U+${hex(part.codePointAt(0), 4)}⟩`);
    else if (/\p{M}/u.test(part) && !text.length) text.push("◌" + part);  // an accent needs something to stand on
    else text.push(part);
  }
  return text.join("") || "⟨empty⟩";
}

// [label, text as it reads]; no text where it is no more than the label or can't be shown plainly.
function labelAndText(bytes) {
  const name = label(bytes);
  const plain = textOfBytes(bytes);
  const signs = plain.replace(/[ \n\t]/g, (sign) => SIGNS[sign]);
  return name === signs && signs !== plain ? [name, plain] : [name];
}
const textOfBytes = (bytes) => new TextDecoder("utf-8", {ignoreBOM: true}).decode(bytes);

function joined(pieces) {
  const bytes = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    bytes.set(piece, at);
    at += piece.length;
  }
  return bytes;
}

// The number, from 0, of each token's word: a run of letters and digits, or of signs, and the white space before.
// Newlines stand apart; a token that is half a character goes with what stands before it.
function wordIndex(pieces) {
  let index = -1;
  let before = "";
  return pieces.map((piece) => {
    const text = Array.from(textOfBytes(piece));
    const first = text.length ? kindOf(text[0]) : before;
    const opens = first === "newline" || before === "newline" || (before !== "space" && first !== before);
    if (!before || (opens && text[0] !== "\ufffd")) index++;
    if (text.length) before = kindOf(text.at(-1));
    return index;
  });
}

// Whether a character is a newline, other space, part of a word, or a sign.
function kindOf(character) {
  if (character === "\n") return "newline";
  if (/[\p{White_Space}\x1c-\x1f]/u.test(character)) return "space";
  return /[\p{L}\p{N}\p{M}'\u2019_\ufffd]/u.test(character) ? "word" : "sign";
}

// Text as it reads, with labels in place of what can't be seen or would rearrange its neighbours.
function withLabels(text) {
  const seen = (character) => character in SIGNS || !UNSEEN.test(character);
  return Array.from(text, (character) => (seen(character) ? character : labelOfText(character))).join("");
}

// The label of text that is no token. A half of a pair of code units has none of its own.
function labelOfText(text) {
  const half = /^[\ud800-\udfff]$/.test(text);
  return half ? `⟨U+${hex(text.charCodeAt(0), 4)}⟩` : label(new TextEncoder().encode(text));
}
