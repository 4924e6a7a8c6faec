"use strict";
// Attention, as model/attention.py has it, for one query at a time:
//
//     Attention(Q, K, V) = softmax(Q K^T / sqrt(d_head)) V
//
// Arrays are flat. q holds (T, H, K): the query of token t in head h begins at (t * n_head + h) * d_head. k and v hold
// (T, G, K), G heads of keys and values, each for n_head / G heads of queries.

// Turn n scores into weights, in place: exp(x_i) / sum_j exp(x_j). The row's maximum is taken off first, which changes
// nothing in the quotient and keeps every exponential between 0 and 1.
function softmax(scores, n = scores.length) {
  let maximum = -Infinity, total = 0;
  for (let s = 0; s < n; s++) if (scores[s] > maximum) maximum = scores[s];
  for (let s = 0; s < n; s++) {
    scores[s] = Math.exp(scores[s] - maximum);
    total += scores[s];
  }
  for (let s = 0; s < n; s++) scores[s] /= total;
  return scores;
}

// [first, end): the keys, of n in all, that the query at position t may look at. It sees those before it and itself,
// or, where it is let look ahead, all; and with a window those nearer than the window alone.
function mayLook({config}, changes, t, n) {
  const end = changes.lookAhead ? n : t + 1;
  if (!config.window) return [0, end];
  return [Math.max(0, t - config.window + 1), Math.min(end, t + config.window)];
}

// Scores of the query at position t against the keys [first, end) in one head, written to scores[0 ...]: q k /
// sqrt(d_head). The product of two vectors of independent entries of variance 1 has variance d_head; the division
// brings it back to 1.
function attentionScores({config}, {q, k}, changes, head, t, first, end, scores) {
  const {d_head, n_head, n_key_head} = config;
  const query = (t * n_head + head) * d_head;
  const keyHead = Math.floor(head / (n_head / n_key_head));
  const root = changes.unscaled ? 1 : Math.sqrt(d_head);
  for (let s = first; s < end; s++) {
    const key = (s * n_key_head + keyHead) * d_head;
    let sum = 0;
    for (let i = 0; i < d_head; i++) sum += q[query + i] * k[key + i];
    scores[s - first] = sum / root;
  }
}

// The sum of the values of the tokens [first, end), each times its weight, written to out[start ...].
function weightedSum({config}, {v}, head, first, end, weights, out, start) {
  const {d_head, n_head, n_key_head} = config;
  const keyHead = Math.floor(head / (n_head / n_key_head));
  for (let i = 0; i < d_head; i++) {
    let sum = 0;
    for (let s = first, at = (first * n_key_head + keyHead) * d_head + i; s < end; s++, at += n_key_head * d_head) {
      sum += weights[s - first] * v[at];
    }
    out[start + i] = sum;
  }
}

// One query in one head: its weights go to `weights`, what it takes of the values to out[start ...]. A head that is
// switched off puts out zeros (Michel et al. 2019, "Are Sixteen Heads Really Better than One?").
function explicitAttention(model, rows, changes, layer, head, t, n, weights, out, start) {
  if (changes.heads.includes(`${layer}.${head}`)) {
    out.fill(0, start, start + model.config.d_head);
    return;
  }
  const [first, end] = mayLook(model, changes, t, n);
  attentionScores(model, rows, changes, head, t, first, end, weights);
  softmax(weights, end - first);
  weightedSum(model, rows, head, first, end, weights, out, start);
}

// ---------- what a reading shows of its heads ----------

// The scores of token t's query against all n keys, -Infinity where it may not look: a row of scores_BHTS.
function headScores(model, reading, layer, head, t) {
  const scores = new Float32Array(reading.n).fill(-Infinity);
  const [first, end] = mayLook(model, reading.changes, t, reading.n);
  attentionScores(model, reading.layers[layer], reading.changes, head, t, first, end, scores.subarray(first));
  return scores;
}

// The weights that token t's query gives to all n tokens, 0 where it may not look: a row of weights_BHTS.
function headWeights(model, reading, layer, head, t) {
  const weights = new Float32Array(reading.n);
  const [first, end] = mayLook(model, reading.changes, t, reading.n);
  const seen = weights.subarray(first, end);
  attentionScores(model, reading.layers[layer], reading.changes, head, t, first, end, seen);
  softmax(seen);
  return weights;
}

// What the head puts out for token t, before the projection: out_BHTK at (head, t), d_head numbers.
function headMix(model, reading, layer, head, t) {
  const out = new Float32Array(model.config.d_head);
  const weights = new Float32Array(reading.n);
  explicitAttention(model, reading.layers[layer], reading.changes, layer, head, t, reading.n, weights, out, 0);
  return out;
}
