"use strict";
// Where a token stands: what model/positions.py does, with its names.
//
// Four ways to tell: a learned table, sines and cosines, rotation, or nothing. PyTorch computes angles in float32, so
// Math.fround rounds to float32 wherever it does.

// position / base^(2 i / width) for i = 0 ... width/2 - 1.
function angles(position, width, base = 10000) {
  const angle = new Float64Array(width / 2);
  const log = Math.fround(-Math.log(base));
  for (let i = 0; i < width / 2; i++) {
    const exponent = Math.fround(2 * i / width);
    const frequency = Math.fround(Math.exp(Math.fround(log * exponent)));
    angle[i] = Math.fround(position * frequency);
  }
  return angle;
}

// PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(same). Vaswani et al. 2017, section 3.5.
function sinusoid(position, dModel) {
  const encoding = new Float64Array(dModel);
  angles(position, dModel).forEach((angle, i) => {
    encoding[2 * i] = Math.sin(angle);
    encoding[2 * i + 1] = Math.cos(angle);
  });
  return encoding;
}

// Turn pair (x_i, x_(i + K/2)) of the head of width K that begins at `start`, in place. Su et al. 2021, "RoFormer".
function rotate(x, start, width, {cos, sin}) {
  const half = width / 2;
  for (let i = 0; i < half; i++) {
    const left = x[start + i];
    const right = x[start + half + i];
    x[start + i] = left * cos[i] - right * sin[i];
    x[start + half + i] = right * cos[i] + left * sin[i];
  }
}

// Add to the embedding of one token, which begins at `start` of x, what its position adds to it.
function addPosition({config, weights}, x, start, position) {
  const d = config.d_model;
  if (config.positions === "learned") {
    const table = weights["positions.table.weight"];
    for (let i = 0; i < d; i++) x[start + i] += table[position * d + i];
  } else if (config.positions === "sinusoidal") {
    const encoding = sinusoid(position, d);
    const scale = 0.02 * Math.sqrt(2);  // the embeddings' standard deviation is 0.02
    for (let i = 0; i < d; i++) x[start + i] += scale * encoding[i];
  }
}

// Cosines and sines for `rotate` at a position, or null where the model doesn't turn its queries and keys.
function rotation({config}, position) {
  if (config.positions !== "rotary") return null;
  const angle = angles(position, config.d_head, config.rope_base);
  return {cos: angle.map(Math.cos), sin: angle.map(Math.sin)};
}
