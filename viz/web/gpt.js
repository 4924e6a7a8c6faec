"use strict";
// The decoder-only transformer, as model/gpt.py has it: embeddings, a stack of blocks, a prediction for the next token
// at every position.
//
// Pure functions of a model, token ids and what was read before; no page in them. Arrays are flat Float32Arrays, row by
// row: x_BTD of one text is n * d_model numbers, and token t's begin at t * d_model. Sums run in float64, as
// JavaScript's numbers are.
//
// Each number is summed in an order that doesn't depend on how many positions are read at once, so a text read key by
// key gives, bit for bit, what it gives read whole.

// What can be changed of a model that reads: heads, attentions and MLPs switched off (heads as "layer.head", the others
// by their layer), no mask, no division by sqrt(d_head), no positions.
const NO_CHANGES = {heads: [], attentions: [], mlps: [], lookAhead: false, unscaled: false, noPositions: false};

// A model from what the page tells of it ({config, vocabSize, ...}) and its weights by their names in the state_dict.
function makeModel(told, weights) {
  const config = {...told.config};
  config.d_head = config.d_model / config.n_head;
  config.n_key_head = config.n_kv_head || config.n_head;
  config.d_mlp = weights["blocks.0.mlp.up.weight"].length / config.d_model;
  if (config.tie_embeddings) weights = {...weights, "unembed.weight": weights["embed.weight"]};
  return {config, vocabSize: told.vocabSize, weights};
}

// ---------- linear layers ----------

const TILE = 32;  // positions and outputs computed between two pauses: some 200,000 products at a width of 192

// y = x W^T + b for n rows of x. Pauses after each tile, so that a page can go on living meanwhile.
function* linear(model, name, x, n, y) {
  const weight = model.weights[`${name}.weight`];
  const bias = model.weights[`${name}.bias`] || null;
  const dIn = x.length / n;
  const dOut = y.length / n;
  for (let o = 0; o < dOut; o += TILE) {
    for (let t = 0; t < n; t += TILE) {
      linearTile(x, t, Math.min(t + TILE, n), weight, o, Math.min(o + TILE, dOut), bias, dIn, dOut, y);
      yield;
    }
  }
}

// The rows [t, tEnd) and outputs [o, oEnd) of a linear layer. Four positions and two outputs are computed at once, as
// each number fetched then serves several products. Whichever loop computes a sum, it adds x_i w_i in the order of i.
function linearTile(x, t, tEnd, weight, o, oEnd, bias, dIn, dOut, y) {
  for (; t + 4 <= tEnd; t += 4) {
    let out = o;
    for (; out + 2 <= oEnd; out += 2) fourByTwo(x, t, weight, out, dIn, dOut, y);
    for (; out < oEnd; out++) for (let i = 0; i < 4; i++) y[(t + i) * dOut + out] = product(x, t + i, weight, out, dIn);
    if (bias) for (let i = 0; i < 4; i++) addBias(bias, o, oEnd, (t + i) * dOut, y);
  }
  for (; t < tEnd; t++) {
    let out = o;
    for (; out + 4 <= oEnd; out += 4) oneByFour(x, t, weight, out, dIn, dOut, y);
    for (; out < oEnd; out++) y[t * dOut + out] = product(x, t, weight, out, dIn);
    if (bias) addBias(bias, o, oEnd, t * dOut, y);
  }
}

function product(x, t, weight, out, dIn) {
  let sum = 0;
  for (let i = 0, a = t * dIn, b = out * dIn; i < dIn; i++) sum += x[a + i] * weight[b + i];
  return sum;
}

function oneByFour(x, t, weight, out, dIn, dOut, y) {
  let s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  let a = t * dIn, w0 = out * dIn, w1 = w0 + dIn, w2 = w1 + dIn, w3 = w2 + dIn;
  for (const end = a + dIn; a < end; a++) {
    const u = x[a];
    s0 += u * weight[w0++];
    s1 += u * weight[w1++];
    s2 += u * weight[w2++];
    s3 += u * weight[w3++];
  }
  const at = t * dOut + out;
  y[at] = s0;
  y[at + 1] = s1;
  y[at + 2] = s2;
  y[at + 3] = s3;
}

function fourByTwo(x, t, weight, out, dIn, dOut, y) {
  let s00 = 0, s01 = 0, s10 = 0, s11 = 0, s20 = 0, s21 = 0, s30 = 0, s31 = 0;
  let a0 = t * dIn, a1 = a0 + dIn, a2 = a1 + dIn, a3 = a2 + dIn, w0 = out * dIn, w1 = w0 + dIn;
  for (const end = a0 + dIn; a0 < end;) {
    const u = weight[w0++];
    const v = weight[w1++];
    const x0 = x[a0++];
    const x1 = x[a1++];
    const x2 = x[a2++];
    const x3 = x[a3++];
    s00 += x0 * u;
    s01 += x0 * v;
    s10 += x1 * u;
    s11 += x1 * v;
    s20 += x2 * u;
    s21 += x2 * v;
    s30 += x3 * u;
    s31 += x3 * v;
  }
  let at = t * dOut + out;
  y[at] = s00;
  y[at + 1] = s01;
  at += dOut;
  y[at] = s10;
  y[at + 1] = s11;
  at += dOut;
  y[at] = s20;
  y[at + 1] = s21;
  at += dOut;
  y[at] = s30;
  y[at + 1] = s31;
}

// Biases come after the sum: rounded to float32 in between, as every y is.
function addBias(bias, o, oEnd, start, y) {
  for (let out = o; out < oEnd; out++) y[start + out] += bias[out];
}

// ---------- norms and the MLP's non-linearity ----------

// RMSNorm (Zhang and Sennrich 2019) of the `width` numbers of x from `start`, written to y at the same place.
function rmsNorm(x, start, width, weight, eps, y) {
  let squares = 0;
  for (let i = start; i < start + width; i++) squares += x[i] * x[i];
  const scale = 1 / Math.sqrt(squares / width + eps);
  for (let i = 0; i < width; i++) y[start + i] = x[start + i] * scale * weight[i];
}

// LayerNorm (Ba et al. 2016), likewise; it also centres and shifts.
function layerNorm(x, start, width, weight, bias, eps, y) {
  let sum = 0, squares = 0;
  for (let i = start; i < start + width; i++) sum += x[i];
  const mean = sum / width;
  for (let i = start; i < start + width; i++) squares += (x[i] - mean) ** 2;
  const scale = 1 / Math.sqrt(squares / width + eps);
  for (let i = 0; i < width; i++) y[start + i] = (x[start + i] - mean) * scale * weight[i] + (bias ? bias[i] : 0);
}

// The norm of that name over all n rows of the stream.
function normed({config, weights}, name, x_BTD, n) {
  const d = config.d_model;
  const weight = weights[`${name}.weight`];
  const bias = weights[`${name}.bias`];
  const y_BTD = new Float32Array(n * d);
  for (let start = 0; start < n * d; start += d) {
    if (config.norm === "rmsnorm") rmsNorm(x_BTD, start, d, weight, config.norm_eps, y_BTD);
    else layerNorm(x_BTD, start, d, weight, bias, config.norm_eps, y_BTD);
  }
  return y_BTD;
}

// The error function, which Math lacks: erf x = 2/sqrt(pi) exp(-x^2) sum_k 2^k x^(2k+1) / (1 3 5 ... (2k+1)). All terms
// have one sign, so nothing cancels. Beyond 6 it is 1 to the last digit of a float64.
function erf(x) {
  if (Math.abs(x) > 6) return Math.sign(x);
  let term = x, sum = x;
  for (let k = 1; Math.abs(term) > 1e-17 * Math.abs(sum); k++) {
    term *= 2 * x * x / (2 * k + 1);
    sum += term;
  }
  return 2 / Math.sqrt(Math.PI) * Math.exp(-x * x) * sum;
}

const silu = (x) => x / (1 + Math.exp(-x));
const ACTIVATIONS = {
  gelu: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x))),
  gelu_exact: (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  relu2: (x) => x > 0 ? x * x : 0,
  silu,
  swiglu: (x, gate) => silu(gate) * x,
};

// What each token does by itself, in a wider space: project(gelu(up x)), or with swiglu project(silu(gate x) * up x).
function* mlp(model, name, x_BTD, n, written) {
  const {mlp: kind, d_mlp} = model.config;
  const h_BTF = new Float32Array(n * d_mlp);
  yield* linear(model, `${name}.up`, x_BTD, n, h_BTF);
  const gate_BTF = kind === "swiglu" ? new Float32Array(n * d_mlp) : h_BTF;
  if (kind === "swiglu") yield* linear(model, `${name}.gate`, x_BTD, n, gate_BTF);
  const activation = ACTIVATIONS[kind];
  for (let start = 0; start < n * d_mlp; start += d_mlp) {
    for (let i = start; i < start + d_mlp; i++) h_BTF[i] = activation(h_BTF[i], gate_BTF[i]);
    yield;
  }
  yield* linear(model, `${name}.project`, h_BTF, n, written);
}

// ---------- the blocks ----------

// Each pair (token before, token) has a number, and pairs share vectors by its remainder (model/bigrams.py).
function addBigram({config, weights, vocabSize}, x, start, before, token) {
  const d = config.d_model;
  const pair = (before * vocabSize + token) % config.bigrams;
  for (let i = 0; i < d; i++) x[start + i] += weights["bigrams.weight"][pair * d + i];
}

// x_BTD before the first block, for the tokens from `from` on: embedding, bigram, position.
function embed(model, ids, changes, from, x_BTD) {
  const {config, weights} = model;
  const d = config.d_model;
  for (let t = from; t < ids.length; t++) {
    for (let i = 0; i < d; i++) x_BTD[t * d + i] = weights["embed.weight"][ids[t] * d + i];
    if (config.bigrams) addBigram(model, x_BTD, t * d, t > 0 ? ids[t - 1] : 0, ids[t]);
    if (!changes.noPositions) addPosition(model, x_BTD, t * d, t);
  }
}

// Queries, keys and values of the tokens from `from` on, as they will meet: normed and rotated where the model does so.
function* projections(model, layer, normed_BTD, rows, from, n, changes) {
  const {config, weights} = model;
  const name = `blocks.${layer}.attention`;
  const d = config.d_head;
  const parts = [
    ["query", rows.q, config.n_head],
    ["key", rows.k, config.n_key_head],
    ["value", rows.v, config.n_key_head],
  ];
  for (const [part, whole, nHead] of parts) {
    const fresh = whole.subarray(from * nHead * d);
    yield* linear(model, `${name}.${part}`, normed_BTD, n - from, fresh);
    if (part === "value") continue;
    const weight = config.qk_norm ? weights[`${name}.${part}_norm.weight`] : null;
    for (let t = from; t < n; t++) {
      const turn = changes.noPositions ? null : rotation(model, t);
      for (let head = 0; head < nHead; head++) {
        const start = ((t - from) * nHead + head) * d;
        if (weight) rmsNorm(fresh, start, d, weight, config.norm_eps, fresh);
        if (turn) rotate(fresh, start, d, turn);
      }
    }
    yield;
  }
}

// Multi-head self-attention: what it writes to the stream for the tokens from `from` on.
function* attention(model, layer, normed_BTD, rows, from, n, changes) {
  const {n_head, d_head} = model.config;
  const mix = new Float32Array(normed_BTD.length);
  const weights = new Float32Array(n);
  yield* projections(model, layer, normed_BTD, rows, from, n, changes);
  if (changes.attentions.includes(layer)) return;  // it writes nothing
  for (let t = from; t < n; t++) {
    for (let head = 0; head < n_head; head++) {
      explicitAttention(model, rows, changes, layer, head, t, n, weights, mix, ((t - from) * n_head + head) * d_head);
    }
    yield;
  }
  const written = rows.written_attention.subarray(from * n_head * d_head);
  yield* linear(model, `blocks.${layer}.attention.project`, mix, n - from, written);
}

// Attention, then MLP, each on a normed copy and added to the stream that runs past them. Fills `rows` from token
// `from` on.
function* block(model, layer, x_BTD, rows, from, n, changes) {
  const d = model.config.d_model;
  const name = `blocks.${layer}`;
  const first = from * d;
  const normed_BTD = normed(model, `${name}.attention_norm`, x_BTD.subarray(first), n - from);
  yield* attention(model, layer, normed_BTD, rows, from, n, changes);
  for (let i = first; i < n * d; i++) rows.x_after_attention[i] = x_BTD[i] + rows.written_attention[i];
  yield;
  if (!changes.mlps.includes(layer)) {
    const again_BTD = normed(model, `${name}.mlp_norm`, rows.x_after_attention.subarray(first), n - from);
    yield* mlp(model, `${name}.mlp`, again_BTD, n - from, rows.written_mlp.subarray(first));
  }
  for (let i = first; i < n * d; i++) rows.x_after[i] = rows.x_after_attention[i] + rows.written_mlp[i];
  yield;
}

// ---------- reading a text ----------

// For each layer, how many tokens of an earlier reading stand in it as they would be computed now: keys and values of a
// token depend on the tokens before it alone, so the longest common beginning does. A layer keeps nothing once it or
// one below is changed.
function rowsKept({config}, ids, changes, before) {
  const kept = new Array(config.n_layer).fill(0);
  const everywhere = ["lookAhead", "unscaled", "noPositions"];
  if (!before || changes.lookAhead || everywhere.some((name) => changes[name] !== before.changes[name])) {
    return {embedded: 0, layers: kept};
  }
  let common = 0;
  while (common < Math.min(ids.length, before.n) && ids[common] === before.ids[common]) common++;
  for (let layer = 0; layer < config.n_layer; layer++) {
    if (changesOf(changes, layer) !== changesOf(before.changes, layer)) break;
    kept[layer] = common;
  }
  return {embedded: common, layers: kept};
}

// What is switched off in a layer, as a text to compare.
function changesOf({heads, attentions, mlps}, layer) {
  const own = heads.filter((name) => name.startsWith(`${layer}.`)).sort();
  return [attentions.includes(layer), mlps.includes(layer), ...own].join();
}

// ArrayBuffer -> how many of its numbers are in use, of arrays that may grow.
const inUse = new WeakMap();

// Room for n rows, of which the first `kept` are those of an earlier array. Where that ends with them, the new one
// grows behind it in the same memory, lest each key copy all that was read; where it doesn't, or another has grown
// there already, they are copied.
function continued(earlier, kept, n, width, contextLength) {
  const size = n * width;
  if (earlier && kept * width === inUse.get(earlier.buffer) && 4 * size <= earlier.buffer.byteLength) {
    inUse.set(earlier.buffer, size);
    return new Float32Array(earlier.buffer, 0, size);
  }
  const most = kept ? Math.max(n, Math.min(2 * n, contextLength)) : n;  // who reads on may do so again
  const room = new Float32Array(most * width);
  const rows = room.subarray(0, size);
  if (kept) rows.set(earlier.subarray(0, kept * width));
  inUse.set(room.buffer, size);
  return rows;
}

// Read a text of token ids, at most context_length of them: a generator that pauses every millisecond or so, and
// returns the reading,
//   {ids, n, changes, x_embed, layers, features, logits, losses},
// in each layer q, k, v as they met, what attention and MLP wrote to the stream, and the stream behind each; losses are
// those of every token but the first. `before`, an earlier reading, saves computing again what both have in common. It
// isn't changed.
function* reading(model, ids, changes = NO_CHANGES, before = null) {
  const {config, vocabSize} = model;
  const n = ids.length;
  const d = config.d_model;
  const dKeys = config.n_key_head * config.d_head;
  const kept = rowsKept(model, ids, changes, before);
  const grown = (earlier, from, nRow, width) => continued(earlier, from, nRow, width, config.context_length);
  const x_embed = grown(before?.x_embed, kept.embedded, n, d);
  embed(model, ids, changes, kept.embedded, x_embed);
  const layers = [];
  let x_BTD = x_embed;
  for (let layer = 0; layer < config.n_layer; layer++) {
    const from = kept.layers[layer];
    const old = before?.layers[layer];
    const rows = {};
    for (const name of ["q", "k", "v", "written_attention", "written_mlp", "x_after_attention", "x_after"]) {
      rows[name] = grown(old?.[name], from, n, name === "k" || name === "v" ? dKeys : d);
    }
    if (from < n) yield* block(model, layer, x_BTD, rows, from, n, changes);
    layers.push(rows);
    x_BTD = rows.x_after;
  }
  const from = kept.layers[config.n_layer - 1];
  const features = grown(before?.features, from, n, d);
  const logits = grown(before?.logits, from, n, vocabSize);
  if (from < n) {
    features.set(normed(model, "norm", x_BTD.subarray(from * d), n - from), from * d);
    yield* linear(model, "unembed", features.subarray(from * d), n - from, logits.subarray(from * vocabSize));
  }
  const firstLoss = Math.max(0, from - 1);
  const losses = grown(before?.losses, firstLoss, Math.max(0, n - 1), 1);
  for (let t = firstLoss; t + 1 < n; t++) {
    losses[t] = crossEntropy(logits, t * vocabSize, vocabSize, ids[t + 1]);
    yield;
  }
  return {ids: Array.from(ids), n, changes, x_embed, layers, features, logits, losses};
}

// The same at once.
function read(model, ids, changes = NO_CHANGES, before = null) {
  const steps = reading(model, ids, changes, before);
  for (;;) {
    const step = steps.next();
    if (step.done) return step.value;
  }
}

// The same in slices of some milliseconds, between which the page draws and answers. A promise of the reading, or of
// null where `stopped` said, between two slices, that it is no longer wanted.
async function readSliced(model, ids, changes = NO_CHANGES, before = null, wish = {}) {
  const {milliseconds = 8, stopped = () => false} = wish;
  const steps = reading(model, ids, changes, before);
  for (;;) {
    const end = performance.now() + milliseconds;
    do {
      const step = steps.next();
      if (step.done) return step.value;
    } while (performance.now() < end);
    await nextTurn();
    if (stopped()) return null;
  }
}

// After whatever else the page has to do now. A timer would wait for 4 ms at least.
function nextTurn() {
  return new Promise((resolve) => {
    const {port1, port2} = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

// ---------- what a reading says ----------

// -ln of the probability that logits[start ... start + size) give to a token: cross-entropy, in nats.
function crossEntropy(logits, start, size, token) {
  let maximum = -Infinity, total = 0;
  for (let i = start; i < start + size; i++) if (logits[i] > maximum) maximum = logits[i];
  for (let i = start; i < start + size; i++) total += Math.exp(logits[i] - maximum);
  return Math.log(total) + maximum - logits[start + token];
}

// {mean, each}: the loss of every token but the first, and their mean (NaN where there is none), in nats.
function lossOf({losses}) {
  return {mean: losses.reduce((sum, loss) => sum + loss, 0) / losses.length, each: losses};
}

// Logits of the stream behind a layer (-1: the embedding), sent through the last norm and the unembedding as if no
// block came after (nostalgebraist 2020, "interpreting GPT: the logit lens").
function lens(model, reading, layer, t) {
  const d = model.config.d_model;
  const x = layer < 0 ? reading.x_embed : reading.layers[layer].x_after;
  const logits = new Float32Array(model.vocabSize);
  const features = normed(model, "norm", x.subarray(t * d, (t + 1) * d), 1);
  for (const _ of linear(model, "unembed", features, 1, logits)) { /* to the end */ }
  return logits;
}
