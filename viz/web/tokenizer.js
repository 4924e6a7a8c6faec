"use strict";
// Text to token ids and back, as data/tokenizer.py does it: characters, bytes, and byte-pair encoding.
//
// Every kind gives the ids that Python gives. What has none is left out, and the caller is told where it stood:
// characters that a character model doesn't know, and halves of surrogate pairs, which are no characters (Python
// refuses such a text as a whole).

const SEPARATOR_TEXT = "<|endoftext|>";  // how the id that stands between two documents is printed

// A tokenizer from the description that a checkpoint holds (`spec()` in Python):
//   encode(text)  {ids, unknown}; unknown: [[start, end], ...] in units of the JavaScript text, start <= i < end
//   piece(id)     the bytes (UTF-8) that the id stands for, which may be half a character
function makeTokenizer(spec) {
  const {pieces, encodeKnown, knows} = KINDS[spec.kind](spec);
  if (spec.separator !== false) pieces.push(new TextEncoder().encode(SEPARATOR_TEXT));  // a BPE always has one
  const encode = (text) => {
    const {kept, unknown} = leaveOut(text, knows);
    return {ids: encodeKnown(kept), unknown};
  };
  return {encode, piece: (id) => pieces[id], vocabSize: pieces.length};
}

const KINDS = {char: charKind, byte: byteKind, bpe: bpeKind, gpt2: bpeKind};

const isHalf = (character) => character >= "\ud800" && character <= "\udfff" && character.length === 1;

// The text without what has no ids, and where that stood.
function leaveOut(text, knows) {
  let kept = "", at = 0;
  const unknown = [];
  for (const character of text) {  // by code points
    const end = at + character.length;
    if (knows(character)) kept += character;
    else if (unknown.length && unknown.at(-1)[1] === at) unknown.at(-1)[1] = end;
    else unknown.push([at, end]);
    at = end;
  }
  return {kept, unknown};
}

// One id per distinct character of a corpus, in code point order.
function charKind({symbols}) {
  const characters = Array.from(symbols);
  const idOf = new Map(characters.map((character, id) => [character, id]));
  return {
    pieces: characters.map((character) => new TextEncoder().encode(character)),
    knows: (character) => idOf.has(character),
    encodeKnown: (text) => Array.from(text, (character) => idOf.get(character)),
  };
}

// The 256 bytes of UTF-8.
function byteKind() {
  return {
    pieces: Array.from({length: 256}, (_, byte) => Uint8Array.of(byte)),
    knows: (character) => !isHalf(character),
    encodeKnown: (text) => Array.from(new TextEncoder().encode(text)),
  };
}

// ---------- byte-pair encoding (Sennrich et al. 2016), over bytes as in GPT-2 ----------

// Bytes are held as a string of characters below 256, so that a Map finds them: `tokens` of the description are base64,
// and `atob` makes such strings.
function bpeKind({pattern, tokens}) {
  const byteStrings = tokens.split(" ").map(atob);
  const ranks = new Map(byteStrings.map((token, rank) => [token, rank]));
  const cuts = new RegExp(translated(pattern), "gu");
  const bytesOf = (token) => Uint8Array.from(token, (character) => character.charCodeAt(0));
  return {
    pieces: byteStrings.map(bytesOf),
    knows: (character) => !isHalf(character),
    encodeKnown: (text) => (text.match(cuts) ?? []).flatMap((word) => mergePairs(byteString(word), ranks)),
  };
}

function byteString(word) {
  let text = "";
  for (const byte of new TextEncoder().encode(word)) text += String.fromCharCode(byte);
  return text;
}

// The pattern that cuts text before any pair is merged, in JavaScript's way of writing regular expressions.
// data/patterns.py has those that are used; three things in them are written otherwise here.
function translated(pattern) {
  return pattern
    // Possessive repeats (`++`, `?+`) give nothing back. In these patterns nothing that a plain repeat gave back could
    // match what comes next: no letter follows \p{L}+, and only white space could be given back before `$`.
    .replace(/([+*?])\+/g, "$1")
    // White space as Unicode has it. JavaScript's \s counts U+FEFF and doesn't count U+0085.
    .replace(/\\s/g, "\\p{White_Space}")
    .replace(/\\S/g, "\\P{White_Space}")
    // Either case of each letter; older browsers don't know (?i:...).
    .replace(/\(\?i:([^)]*)\)/g, (_, inner) => `(?:${inner.replace(/\[\w+\]|\w/g, bothCases)})`);
}

// A class of letters, or one letter, as a class with both cases of each. A long s is a lower case of S too, as far as
// case goes in Unicode.
function bothCases(letters) {
  const each = letters.replace(/\w/g, (letter) => letter + letter.toUpperCase() + (letter === "s" ? "\u017f" : ""));
  return each.startsWith("[") ? each : `[${each}]`;
}

// The ids of one piece of text: as long as two neighbours together are a token, those of the lowest rank are merged, of
// several the leftmost. `ranks` has the id of every token, which is its rank.
function mergePairs(piece, ranks) {
  if (ranks.has(piece)) return [ranks.get(piece)];
  const n = piece.length;
  const ends = new Int32Array(n);
  const before = new Int32Array(n);
  const heap = [];
  // A part begins at byte `start`, ends before byte ends[start], and the part left of it begins at before[start].
  const rankOf = (start) => ends[start] < n ? ranks.get(piece.slice(start, ends[ends[start]])) : undefined;
  const offer = (start) => {
    const rank = rankOf(start);
    if (rank !== undefined) heapPush(heap, rank * PLACES + start);
  };
  for (let i = 0; i < n; i++) {
    ends[i] = i + 1;
    before[i] = i - 1;
  }
  for (let i = 0; i < n; i++) offer(i);
  while (heap.length) {
    const lowest = heapPop(heap);
    const start = lowest % PLACES;
    if (ends[start] === 0) continue;  // merged into the part left of it
    if (rankOf(start) !== Math.floor(lowest / PLACES)) continue;  // it or its neighbour has grown since
    const middle = ends[start];
    ends[start] = ends[middle];
    ends[middle] = 0;
    if (ends[start] < n) before[ends[start]] = start;
    offer(start);
    if (before[start] >= 0) offer(before[start]);
  }
  const ids = [];
  for (let start = 0; start < n; start = ends[start]) ids.push(ranks.get(piece.slice(start, ends[start])));
  return ids;
}

// What waits to be merged is a heap of numbers, the lowest first: rank * PLACES + place.
const PLACES = 2 ** 26;

function heapPush(heap, number) {
  let i = heap.length;
  while (i > 0 && heap[(i - 1) >> 1] > number) {
    heap[i] = heap[(i - 1) >> 1];
    i = (i - 1) >> 1;
  }
  heap[i] = number;
}

function heapPop(heap) {
  const lowest = heap[0];
  const number = heap.pop();
  let i = 0;
  for (let child = 1; child < heap.length; child = 2 * i + 1) {
    if (child + 1 < heap.length && heap[child + 1] < heap[child]) child++;
    if (heap[child] >= number) break;
    heap[i] = heap[child];
    i = child;
  }
  if (heap.length) heap[i] = number;
  return lowest;
}
