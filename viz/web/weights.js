"use strict";
// The model's weights as they travel in the page: one block of bytes, written as base64. viz/living.py writes it.
//
// A matrix is held as whole numbers of a few bits, and a float32 scale for each of its rows: weight = scale * whole
// number. Vectors (biases, norms) are few, and are held as float32.

// The bytes that a text of base64 stands for.
function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// {name: Float32Array} by the names of PyTorch's state_dict. `tensors` says what lies where in the block: {name, shape,
// bits, offset}; offsets count bytes.
function readWeights(tensors, bytes) {
  const weights = {};
  for (const {name, shape, bits, offset} of tensors) {
    const size = shape.reduce((product, width) => product * width, 1);
    if (bits === 32) weights[name] = new Float32Array(bytes.buffer, bytes.byteOffset + offset, size);
    else weights[name] = readMatrix(shape[0], size / shape[0], bits, bytes, offset);
  }
  return weights;
}

// A matrix of `bits` (16 at most) a weight: first the rows' scales, then the whole numbers, which follow each other
// without a gap, the lowest bit first. A negative number has its highest bit set.
function readMatrix(nRow, width, bits, bytes, offset) {
  const weights = new Float32Array(nRow * width);
  const scales = new Float32Array(bytes.buffer, bytes.byteOffset + offset, nRow);
  const unused = 32 - bits;
  let at = offset + scales.byteLength, held = 0, nHeld = 0;  // bits that are read and not used yet, and how many
  for (let row = 0, i = 0; row < nRow; row++) {
    const scale = scales[row];
    for (const end = i + width; i < end; i++) {
      while (nHeld < bits) {
        held |= bytes[at++] << nHeld;
        nHeld += 8;
      }
      weights[i] = scale * (held << unused >> unused);  // there and back: the sign is carried down
      held >>>= bits;
      nHeld -= bits;
    }
  }
  return weights;
}
