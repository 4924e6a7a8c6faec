// One token's way through the model, step by step, for the Flow view. A reading keeps what attention and MLP start
// from and what they write; the steps between are computed here again, for one token, by the same functions of gpt.js
// and attention.js.

const rowOf = (array, t, width) => array.subarray(t * width, (t + 1) * width);

// The Euclidean length of a vector.
function lengthOf(vector) {
  let squares = 0;
  for (const x of vector) squares += x * x;
  return Math.sqrt(squares);
}

// `count` outputs, from `first` on, of a linear layer for one vector x.
function outputsOf({weights}, name, x, first, count) {
  const weight = weights[`${name}.weight`];
  const bias = weights[`${name}.bias`];
  const y = new Float32Array(count);
  for (let o = 0; o < count; o++) {
    y[o] = product(x, 0, weight, first + o, x.length);
    if (bias) y[o] += bias[first + o];
  }
  return y;
}

// What a norm divides by: the root of the mean square (RMSNorm), or of the variance (LayerNorm, which takes the mean
// off first).
function normParts({config}, x) {
  let sum = 0;
  let squares = 0;
  for (const value of x) sum += value;
  const mean = config.norm === "rmsnorm" ? 0 : sum / x.length;
  for (const value of x) squares += (value - mean) ** 2;
  return {mean, root: Math.sqrt(squares / x.length + config.norm_eps)};
}

// How the stream of token t begins: the token's vector, what its pair and its position add, and their sum, x_BTD
// before block 0.
function streamBegins(model, reading, t) {
  const {config, vocabSize, weights} = model;
  const d = config.d_model;
  const id = reading.ids[t];
  const embedded = rowOf(weights["embed.weight"], id, d);
  let pair = null;
  if (config.bigrams) {
    const before = t > 0 ? reading.ids[t - 1] : 0;
    const number = (before * vocabSize + id) % config.bigrams;
    pair = {before, number, vector: rowOf(weights["bigrams.weight"], number, d)};
  }
  const position = new Float32Array(d);
  if (!reading.changes.noPositions) addPosition(model, position, 0, t);
  return {id, embedded, pair, position, x: rowOf(reading.x_embed, t, d)};
}

// The stream of token t before block `layer`.
function streamBefore(model, reading, layer, t) {
  return rowOf(layer === 0 ? reading.x_embed : reading.layers[layer - 1].x_after, t, model.config.d_model);
}

// A query or key on its way: as projected, then normed, then turned by its position, each null where the model does
// no such thing.
function projectedParts(model, reading, layer, part, head, t, normedX) {
  const {config, weights} = model;
  const name = `blocks.${layer}.attention.${part}`;
  const projected = outputsOf(model, name, normedX, head * config.d_head, config.d_head);
  let normedPart = null;
  let turned = null;
  if (config.qk_norm && part !== "value") {
    normedPart = new Float32Array(config.d_head);
    rmsNorm(projected, 0, config.d_head, weights[`${name}_norm.weight`], config.norm_eps, normedPart);
  }
  const turn = part === "value" || reading.changes.noPositions ? null : rotation(model, t);
  if (turn) {
    turned = (normedPart ?? projected).slice();
    rotate(turned, 0, config.d_head, turn);
  }
  return {projected, normed: normedPart, turned, final: turned ?? normedPart ?? projected};
}

// Attention of one head for token t: what it starts from, query, key and value, each key's product, score and weight,
// the mix of the values, the outputs of all heads, what is written to the stream, and the stream after.
function attentionParts(model, reading, layer, head, t) {
  const {config} = model;
  const {d_model, d_head, n_head, n_key_head} = config;
  const rows = reading.layers[layer];
  const x = streamBefore(model, reading, layer, t);
  const normedX = normed(model, `blocks.${layer}.attention_norm`, x, 1);
  const keyHead = Math.floor(head / (n_head / n_key_head));
  const part = (name, ofHead) => projectedParts(model, reading, layer, name, ofHead, t, normedX);
  const [first, end] = mayLook(model, reading.changes, t, reading.n);
  const scores = headScores(model, reading, layer, head, t);
  const weights = headWeights(model, reading, layer, head, t);
  const keys = [];
  for (let s = first; s < end; s++) {
    const dot = product(rows.q, t * n_head + head, rows.k, s * n_key_head + keyHead, d_head);
    keys.push({s, dot, score: scores[s], weight: weights[s], value: rowOf(rows.v, s * n_key_head + keyHead, d_head)});
  }
  const mixes = Array.from({length: n_head}, (_, other) => headMix(model, reading, layer, other, t));
  return {
    x,
    norm: normParts(model, x),
    normed: normedX,
    keyHead,
    query: part("query", head),
    key: part("key", keyHead),
    value: part("value", keyHead),
    keys,
    weights,
    mixes,
    mix: mixes[head],
    written: rowOf(rows.written_attention, t, d_model),
    after: rowOf(rows.x_after_attention, t, d_model),
  };
}

// The MLP for token t: what it starts from, its wide layer before and after the non-linearity, what it writes, and
// the stream after.
function mlpParts(model, reading, layer, t) {
  const {config} = model;
  const {d_model, d_mlp} = config;
  const rows = reading.layers[layer];
  const name = `blocks.${layer}.mlp`;
  const x = rowOf(rows.x_after_attention, t, d_model);
  const normedX = normed(model, `blocks.${layer}.mlp_norm`, x, 1);
  const up = outputsOf(model, `${name}.up`, normedX, 0, d_mlp);
  const gate = config.mlp === "swiglu" ? outputsOf(model, `${name}.gate`, normedX, 0, d_mlp) : null;
  const hidden = up.map((value, i) => (gate ? value * ACTIVATIONS.silu(gate[i]) : ACTIVATIONS[config.mlp](value)));
  return {
    x,
    norm: normParts(model, x),
    normed: normedX,
    up,
    gate,
    hidden,
    written: rowOf(rows.written_mlp, t, d_model),
    after: rowOf(rows.x_after, t, d_model),
  };
}

// How it ends: the last norm, a logit for each token of the vocabulary, and probabilities; `order` is of ids, the
// likeliest first.
function endParts(model, reading, t) {
  const {config, vocabSize} = model;
  const x = streamBefore(model, reading, config.n_layer, t);
  const logits = rowOf(reading.logits, t, vocabSize);
  return {
    x,
    norm: normParts(model, x),
    features: rowOf(reading.features, t, config.d_model),
    logits,
    ...chances(logits),
  };
}

// Probabilities of a row of logits, and ids from the likeliest on.
function chances(logits) {
  const probabilities = softmax(Float64Array.from(logits));
  const order = Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a] || a - b);
  return {probabilities, order};
}

// Where in the order a token stands, from 1: one more than the number of likelier tokens.
function rankOf(logits, id) {
  let likelier = 0;
  for (const logit of logits) if (logit > logits[id]) likelier++;
  return likelier + 1;
}
