"use strict";
// How the next token is chosen, as model/generate.py does it. Probabilities are float64 from here on.

// The tokens that the model reads of a text: all of them, or, of a text that has outgrown the context, the last
// context_length // 2, from position 0. The same rule as in `generate`, and for the same reason: that is what the next
// token is conditioned on.
function withinContext(ids, contextLength) {
  return ids.length > contextLength ? ids.slice(-Math.max(1, Math.floor(contextLength / 2))) : ids;
}

// What the next token is drawn from, given one row of logits:
//   raw    probabilities as the model says them: at temperature 1, none left out
//   kept   those that are drawn from. They sum to 1 before top-k and top-p take their share away.
//   order  token ids, the most likely first
// `temperature` divides the logits, and at 0 the most likely token is all that is kept. `topK` keeps the k most likely
// (0: all). `topP` keeps the fewest most likely whose probabilities reach p, at least one ("nucleus", Holtzman et al.
// 2020).
function nextDistribution(logits, {temperature = 1, topK = 0, topP = 1} = {}) {
  if (!logits.every(Number.isFinite)) throw new RangeError("the model's logits are not finite");
  const size = logits.length;
  const highest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const raw = softmax(Float64Array.from(logits, (logit) => logit - highest));
  const order = Array.from(raw.keys()).sort((a, b) => logits[b] - logits[a] || a - b);
  const kept = new Float64Array(size);
  if (temperature === 0) {
    kept[order[0]] = 1;
    return {raw, kept, order};
  }
  const scaled = softmax(Float64Array.from(logits, (logit) => (logit - highest) / temperature));
  if (topK === 0 && topP === 1) return {raw, kept: scaled, order};
  const likeliest = order.slice(0, Math.min(topK || size, size));
  const total = likeliest.reduce((sum, id) => sum + scaled[id], 0);
  let before = 0;  // the probability of all that are likelier
  likeliest.forEach((id, i) => {
    if (i === 0 || before < topP * total) kept[id] = scaled[id];
    before += scaled[id];
  });
  return {raw, kept, order};
}

// The token drawn with a uniform number u in [0, 1): the first, by id, at which the running sum of the probabilities
// kept passes u times their sum. `sums` are the running sums.
function draw(kept, u) {
  const sums = new Float64Array(kept.length);
  let sum = 0;
  kept.forEach((probability, id) => {
    sum += probability;
    sums[id] = sum;
  });
  const id = sums.findIndex((running) => running > u * sum);
  return {id: Math.max(0, id), sums};
}

// The uniform number in [0, 1) of a step of writing: a function of seed and step alone, so that going back one step and
// on again draws the same. PyTorch's generator is not rebuilt here: sample.py draws other numbers from the same seed.
function uniform(seed, step) {
  const high = mixed(mixed(seed + 0x9e3779b9) ^ step) >>> 5;
  const low = mixed(mixed(seed + 0x3c6ef372) ^ step) >>> 6;
  return (high * 2 ** 26 + low) / 2 ** 53;
}

// A 32-bit number whose every bit depends on every bit of x: the end of MurmurHash3 (Appleby 2011).
function mixed(x) {
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (x ^ (x >>> 16)) >>> 0;
}
