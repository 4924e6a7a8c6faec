// What is shown: the tokens of a text, and what the model's heads made of them. A recorded page has one such reading.
// Where the page carries the model, a reading is computed anew whenever the text changes, or what of the model is
// switched off; all views then show it.

const MODEL = D.model && makeModel(D.model, readWeights(D.model.tensors, decode("weights")));
const TOKENIZER = D.model && makeTokenizer(D.model.tokenizer);
const HEADS = D.layers.flatMap((layer, i) =>
  D.heads.map((head, j) => ({
    layer,
    head,
    name: `L${layer} H${head}`,
    called: D.roles.called[i][j],
    roles: D.roles.scores[i][j],
    entropy: D.roles.entropy[i][j],
    measured: D.roles.scores[i][j],  // by Python, on the text the page was made with
  })),
);

const shown = {
  n: D.tokens.length,
  tokens: D.tokens,  // [label, text as it reads] of each token; no text where the label says it
  words: D.words,  // of each token, the number of its word
  wordTokens: D.wordTokens,
  losses: D.losses,  // of each token but the first, in nats
  loss: null,  // their mean
  uniform: D.roles.uniform,  // what a head that looks everywhere alike would score in each role
  // [label, probability] of the five tokens most expected behind token t, the likeliest first; null where unknown.
  predicted: (t) => D.predictions[t] ?? null,
  // Where the page carries the model:
  ids: [],  // read by the model: of `all`, which is the whole text, those from number `from` on
  all: [],
  from: 0,
  typed: "",  // the text that `all` begins with, as it was typed
  begun: 0,  // how many tokens stand in front of it, where the model began by itself
  unknown: [],  // [start, end] of what in it the tokenizer doesn't know
  drawn: [],  // what was written behind it since: [{id, ...}], see write.js
  pieces: [],  // bytes of each token
  changes: NO_CHANGES,  // what of the model is switched off
  reading: null,  // with these changes
  plain: null,  // without any
};

// Show another reading: `next` has those of the fields above that differ. What was computed from the last is let go,
// but for the rows of weights that both have in common.
shown.replace = (next) => {
  const same = commonRows(shown, next);
  for (const h of HEADS) {
    h.earlier = h.weights ? {matrix: h.weights, n: shown.n, rows: same} : h.earlier && {...h.earlier};
    if (h.earlier) h.earlier.rows = Math.min(h.earlier.rows, same);
    h.q = h.k = h.v = h.weights = h.scores = null;
  }
  means.clear();
  Object.assign(shown, next);
  state.query = Math.min(state.query, shown.n - 1);
  state.key = state.key === null ? null : Math.min(state.key, shown.n - 1);
  findWords();
};

function commonRows(before, next) {
  if (!D.causal || next.changes.lookAhead || JSON.stringify(before.changes) !== JSON.stringify(next.changes)) return 0;
  let rows = 0;
  while (rows < Math.min(before.ids.length, next.ids.length) && before.ids[rows] === next.ids[rows]) rows++;
  return rows;
}

// ---------- reading anew ----------

let latest = 0;

// Have the model read the tokens `all` from number `from` on, with `changes`, and show that, with what else `next` has
// of the fields of `shown`. Between slices of the work the page goes on; where another call comes meanwhile, this one
// ends without effect. True where its reading is shown.
async function reread(next) {
  const {all, from, changes} = {...shown, ...next};
  const mine = ++latest;
  const slices = {milliseconds: 8, stopped: () => mine !== latest};
  const ids = all.slice(from);
  document.documentElement.dataset.reading = "yes";
  const found = await readSliced(MODEL, ids, changes, shown.reading, slices);
  const changed = JSON.stringify(changes) !== JSON.stringify(NO_CHANGES);
  const plain = found && changed ? await readSliced(MODEL, ids, NO_CHANGES, shown.plain, slices) : found;
  if (!plain || mine !== latest) return false;
  shown.replace({...next, ...readingShown(all, from, changes, found, plain)});
  document.documentElement.dataset.reading = "no";
  measureSoon();
  return true;
}

// What of the model is switched off or left out, as NO_CHANGES has it; all views follow.
async function changeModel(changes) {
  if (await reread({changes})) redraw();
}

// The text that is read, as it stands in the box: what was typed and what was written behind it.
const wholeText = () => shown.typed + textOfIds(shown.drawn.map(({id}) => id));

// The text that the page was made with.
const firstText = () => ({all: D.model.ids, from: 0, typed: textOfIds(D.model.ids), begun: 0, unknown: [], drawn: []});

// No bytes for an id that the model has and the tokenizer doesn't.
const pieceOf = (id) => TOKENIZER.piece(id) ?? new Uint8Array(0);
const textsOfIds = new Map();
function tokenTexts(id) {
  if (!textsOfIds.has(id)) textsOfIds.set(id, labelAndText(pieceOf(id)));
  return textsOfIds.get(id);
}
const tokenLabel = (id) => tokenTexts(id)[0];
const textOfIds = (ids) => textOfBytes(joined(ids.map(pieceOf)));

function readingShown(all, from, changes, found, plain) {
  const {ids, n} = found;
  const pieces = ids.map(pieceOf);
  const words = wordIndex(pieces);
  const wordPieces = [];
  words.forEach((word, t) => (wordPieces[word] ??= []).push(pieces[t]));
  return {
    n,
    ids,
    all,
    from,
    pieces,
    words,
    tokens: ids.map(tokenTexts),
    wordTokens: wordPieces.map((part) => labelAndText(joined(part))),
    losses: lossOf(found).each,
    loss: lossOf(found).mean,
    predicted: (t) => mostExpected(found, t, 5),
    changes,
    reading: found,
    plain,
  };
}

// [label, probability] of the tokens a reading expects most behind token t.
function mostExpected({logits}, t, count) {
  const size = MODEL.vocabSize;
  const row = logits.slice(t * size, (t + 1) * size);
  const order = Array.from(row.keys()).sort((a, b) => row[b] - row[a] || a - b);
  const probabilities = softmax(Float64Array.from(row));
  return order.slice(0, count).map((id) => [tokenLabel(id), probabilities[id]]);
}

// ---------- the attention, computed from queries and keys ----------

const causal = () => D.causal && !shown.changes.lookAhead;
const inWindow = (t, s) => !D.window || Math.abs(t - s) < D.window;
const allowed = (t, s) => (!causal() || s <= t) && inWindow(t, s);
const allowedInTraining = (t, s) => (!D.causal || s <= t) && inWindow(t, s);
const divisor = () => (shown.changes.unscaled ? 1 : Math.sqrt(D.dHead));

function decode(id) {
  return fromBase64($(id).textContent);
}

// A head with its queries, keys and values, each (T, K).
function arrays(h) {
  if (h.q) return h;
  if (shown.reading) return arraysOfReading(h);
  const bytes = decode(`head-${h.layer}-${h.head}`);
  const names = D.values ? ["q", "k", "v"] : ["q", "k"];
  const size = shown.n * D.dHead;
  const scales = D.bits === 16 ? new Float32Array(bytes.buffer, 0, names.length * D.dHead) : null;  // one a channel
  names.forEach((name, part) => {
    if (!scales) {
      h[name] = new Float32Array(bytes.buffer, 4 * part * size, size);
      return;
    }
    const whole = new Int16Array(bytes.buffer, scales.byteLength + 2 * part * size, size);
    const unpacked = (h[name] = new Float32Array(size));
    for (let i = 0, first = part * D.dHead; i < size; i++) unpacked[i] = whole[i] * scales[first + (i % D.dHead)];
  });
  return h;
}

function arraysOfReading(h) {
  const {n_head, n_key_head, d_head} = MODEL.config;
  const rows = shown.reading.layers[h.layer];
  const keyHead = Math.floor((h.head * n_key_head) / n_head);
  const part = (array, nHead, head) => {
    const own = new Float32Array(shown.n * d_head);
    for (let t = 0; t < shown.n; t++) {
      const start = (t * nHead + head) * d_head;
      own.set(array.subarray(start, start + d_head), t * d_head);
    }
    return own;
  };
  h.q = part(rows.q, n_head, h.head);
  h.k = part(rows.k, n_key_head, keyHead);
  h.v = part(rows.v, n_key_head, keyHead);
  return h;
}

function dot(h, t, s) {
  let sum = 0;
  for (let i = 0, a = t * D.dHead, b = s * D.dHead; i < D.dHead; i++) sum += h.q[a + i] * h.k[b + i];
  return sum;
}

// Scores (T, T) of a head, -Infinity where forbidden.
function scores(h, first = 0) {
  const n = shown.n;
  const d = D.dHead;
  const matrix = new Float32Array(n * n).fill(-Infinity);
  const root = divisor();
  const {q, k} = arrays(h);
  for (let t = first; t < n; t++) {
    for (let s = 0; s < n; s++) {
      if (!allowed(t, s)) continue;
      let sum = 0;
      for (let i = 0, a = t * d, b = s * d; i < d; i++) sum += q[a + i] * k[b + i];
      matrix[t * n + s] = sum / root;
    }
  }
  return matrix;
}

// Whether the weights of all heads may be kept in memory.
const roomy = () => HEADS.length * shown.n ** 2 * 4 < 2e8;

// Weights (T, T) of a head. Rows that an earlier reading had the same are taken from it.
function weights(h) {
  if (h.weights) return h.weights;
  const n = shown.n;
  const kept = h.earlier ? h.earlier.rows : 0;
  const matrix = scores(h, kept);
  for (let t = 0; t < kept; t++) {
    const start = t * h.earlier.n;
    matrix.fill(0, t * n, t * n + n);
    matrix.set(h.earlier.matrix.subarray(start, start + Math.min(n, h.earlier.n)), t * n);
  }
  for (let t = kept; t < n; t++) softmax(matrix.subarray(t * n, t * n + n));
  h.earlier = null;
  if (!roomy() && h !== HEADS[state.head]) return matrix;
  if (!roomy()) for (const other of HEADS) other.weights = null;
  h.weights = matrix;
  return matrix;
}

const means = new Map();
function layerMean(layer) {
  const n = shown.n;
  if (!means.has(layer)) {
    const heads = HEADS.filter((h) => h.layer === layer);
    const mean = new Float32Array(n * n);
    for (const h of heads) {
      const w = weights(h);
      for (let i = 0; i < mean.length; i++) mean[i] += w[i] / heads.length;
    }
    means.set(layer, mean);
  }
  return means.get(layer);
}

// Row t of A_last ... A_0 with A = W/2 + I/2, W a layer's mean (Abnar and Zuidema 2020, section 3).
function rollout(t) {
  const n = shown.n;
  let row = new Float64Array(n);
  row[t] = 1;
  for (const layer of [...D.layers].reverse()) {
    const mean = layerMean(layer);
    const through = new Float64Array(n);
    for (let j = 0; j < n; j++) {
      if (!row[j]) continue;
      through[j] += row[j] / 2;
      for (let s = 0; s < n; s++) through[s] += (row[j] * mean[j * n + s]) / 2;
    }
    row = through;
  }
  return row;
}

function entropy(row) {
  let bits = 0;
  for (const w of row) if (w > 0) bits -= w * Math.log2(w);
  return bits;
}

// ---------- words ----------

// The first token of each word, and the one behind its last.
let wordStart = [];
let wordEnd = [];
function findWords() {
  wordStart = [];
  wordEnd = [];
  shown.words.forEach((word, t) => {
    wordStart[word] ??= t;
    wordEnd[word] = t + 1;
  });
}
findWords();

// A row of weights over tokens, over words.
function addUp(row) {
  const n = shown.n;
  const nWord = wordStart.length;
  const sums = new Float64Array(nWord);
  for (let s = 0; s < n; s++) sums[shown.words[s]] += row[s];
  return sums;
}

// Weights (T, T), over words: those to a word add up, those from a word are averaged over its tokens.
function merged(matrix) {
  const n = shown.n;
  const nWord = wordStart.length;
  const result = new Float32Array(nWord * nWord);
  for (let t = 0; t < n; t++) {
    const word = shown.words[t];
    const share = 1 / (wordEnd[word] - wordStart[word]);
    for (let s = 0; s < n; s++) result[word * nWord + shown.words[s]] += matrix[t * n + s] * share;
  }
  return result;
}

// A unit is a token, or a word where words are merged.
const unitCount = () => (state.words ? wordStart.length : shown.n);
const unitOf = (t) => (state.words ? shown.words[t] : t);
const firstToken = (unit) => (state.words ? wordStart[unit] : unit);
const lastToken = (unit) => (state.words ? wordEnd[unit] - 1 : unit);
const labelOf = (unit) => (state.words ? shown.wordTokens : shown.tokens)[unit][0];
const textOf = (unit) => {
  const [label, plain] = (state.words ? shown.wordTokens : shown.tokens)[unit];
  return plain ?? label;
};
const unitAllowed = (t, s) => (state.words ? allowed(lastToken(t), firstToken(s)) : allowed(t, s));

// The weights from a unit by the Text view's source.
function sourceRow(unit) {
  const n = shown.n;
  const byToken = (t) => {
    if (state.source === "rollout") return rollout(t);
    const matrix = state.source === "layer" ? layerMean(HEADS[state.head].layer) : weights(HEADS[state.head]);
    return matrix.subarray(t * n, t * n + n);
  };
  if (!state.words) return byToken(unit);
  const row = new Float64Array(n);
  const count = wordEnd[unit] - wordStart[unit];
  for (let t = wordStart[unit]; t < wordEnd[unit]; t++)
    byToken(t).forEach((w, s) => {
      row[s] += w / count;
    });
  return addUp(row);
}
