"use strict";
// The attention page. Queries, keys and values lie in the page; scores, weights and all that is shown are computed from them here.
// Plain JavaScript and canvas: the maps are the whole of the page, and no charting library draws those; none is embedded.
// Text of tokens reaches the page through textContent alone, so nothing in it can become markup.

const $ = (id) => document.getElementById(id);
const D = JSON.parse($("data").textContent);
const N = D.tokens.length;
const HEADS = D.layers.flatMap((layer, i) => D.heads.map((head, j) => ({
  layer, head, name: `L${layer} H${head}`, called: D.roles.called[i][j], roles: D.roles.scores[i][j], entropy: D.roles.entropy[i][j],
})));
const DIGITS = D.bits === 32 ? 4 : 2;  // of the equation's numbers: as many as the stored q and k still tell
const WEIGHT_DIGITS = D.bits === 32 ? 4 : 3;
const ROOMY = HEADS.length * N * N * 4 < 2e8;  // whether the weights of all heads may be kept in memory
const state = {view: "overview", head: 0, query: N - 1, key: null, words: false, source: "head", kept: false};

// ---------- small helpers ----------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
function drawn(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
const token = (label) => make("bdi", {class: "tok"}, label);
const minus = (text) => text.replace("-", "−");
const fixed = (value, digits = DIGITS) => value === -Infinity ? "−∞" : minus(value.toFixed(digits));
const known = (value, digits) => value === null ? "not a number" : value.toFixed(digits);  // a run may have diverged
const percent = (weight) => `${(100 * weight).toFixed(1)} %`;
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const isolated = (label) => `\u2068${label}\u2069`;  // in running text, a label must not turn its neighbours around
const allowed = (t, s) => (!D.causal || s <= t) && (!D.window || Math.abs(t - s) < D.window);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---------- the attention, computed from what the model's heads were given ----------

function decode(id) {
  const text = $(id).textContent;
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}
function arrays(h) {
  if (!h.q) {
    const bytes = decode(`head-${h.layer}-${h.head}`), names = D.values ? ["q", "k", "v"] : ["q", "k"], size = N * D.dHead;
    const scales = D.bits === 16 ? new Float32Array(bytes.buffer, 0, names.length * D.dHead) : null;  // one a channel
    names.forEach((name, part) => {
      if (!scales) { h[name] = new Float32Array(bytes.buffer, 4 * part * size, size); return; }
      const whole = new Int16Array(bytes.buffer, scales.byteLength + 2 * part * size, size), unpacked = h[name] = new Float32Array(size);
      for (let i = 0, first = part * D.dHead; i < size; i++) unpacked[i] = whole[i] * scales[first + i % D.dHead];
    });
  }
  return h;
}
function dot(h, t, s) {
  let sum = 0;
  for (let i = 0, a = t * D.dHead, b = s * D.dHead; i < D.dHead; i++) sum += h.q[a + i] * h.k[b + i];
  return sum;
}
function scores(h) {
  arrays(h);
  const matrix = new Float32Array(N * N).fill(-Infinity), root = Math.sqrt(D.dHead), {q, k} = h, d = D.dHead;
  for (let t = 0; t < N; t++) {
    for (let s = 0; s < N; s++) {
      if (!allowed(t, s)) continue;
      let sum = 0;
      for (let i = 0, a = t * d, b = s * d; i < d; i++) sum += q[a + i] * k[b + i];
      matrix[t * N + s] = sum / root;
    }
  }
  return matrix;
}
function weights(h) {
  if (!h.weights) {
    const matrix = scores(h);
    for (let t = 0; t < N; t++) {
      const row = matrix.subarray(t * N, t * N + N);
      let most = -Infinity, sum = 0;
      for (const x of row) if (x > most) most = x;
      for (let s = 0; s < N; s++) sum += row[s] = Math.exp(row[s] - most);
      for (let s = 0; s < N; s++) row[s] /= sum;
    }
    if (!ROOMY && h !== HEADS[state.head]) return matrix;
    if (!ROOMY) for (const other of HEADS) other.weights = null;
    h.weights = matrix;
  }
  return h.weights;
}
const means = new Map();
function layerMean(layer) {
  if (!means.has(layer)) {
    const heads = HEADS.filter((h) => h.layer === layer), mean = new Float32Array(N * N);
    for (const h of heads) { const w = weights(h); for (let i = 0; i < mean.length; i++) mean[i] += w[i] / heads.length; }
    means.set(layer, mean);
  }
  return means.get(layer);
}
function rollout(t) {  // row t of A_last ... A_0 with A = W/2 + I/2, W a layer's mean (Abnar and Zuidema 2020, section 3)
  let row = new Float64Array(N);
  row[t] = 1;
  for (const layer of [...D.layers].reverse()) {
    const mean = layerMean(layer), through = new Float64Array(N);
    for (let j = 0; j < N; j++) {
      if (!row[j]) continue;
      through[j] += row[j] / 2;
      for (let s = 0; s < N; s++) through[s] += row[j] * mean[j * N + s] / 2;
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
const wordStart = [], wordEnd = [];
D.words.forEach((word, t) => { wordStart[word] ??= t; wordEnd[word] = t + 1; });
const W = wordStart.length;
function addUp(row) {  // a row of weights over tokens, over words
  const sums = new Float64Array(W);
  for (let s = 0; s < N; s++) sums[D.words[s]] += row[s];
  return sums;
}
function merged(matrix) {  // weights to a word add up, those from a word are averaged over its tokens
  const result = new Float32Array(W * W);
  for (let t = 0; t < N; t++) {
    const word = D.words[t], share = 1 / (wordEnd[word] - wordStart[word]);
    for (let s = 0; s <= N - 1; s++) result[word * W + D.words[s]] += matrix[t * N + s] * share;
  }
  return result;
}
// A unit is a token, or a word where words are merged.
const unitCount = () => state.words ? W : N;
const unitOf = (t) => state.words ? D.words[t] : t;
const firstToken = (unit) => state.words ? wordStart[unit] : unit;
const lastToken = (unit) => state.words ? wordEnd[unit] - 1 : unit;
const labelOf = (unit) => (state.words ? D.wordTokens : D.tokens)[unit][0];
const textOf = (unit) => { const [label, plain] = (state.words ? D.wordTokens : D.tokens)[unit]; return plain ?? label; };
const unitAllowed = (t, s) => state.words ? allowed(lastToken(t), firstToken(s)) : allowed(t, s);
function sourceRow(unit) {  // the weights from a unit by the Text view's source
  const byToken = (t) => {
    if (state.source === "rollout") return rollout(t);
    const matrix = state.source === "layer" ? layerMean(HEADS[state.head].layer) : weights(HEADS[state.head]);
    return matrix.subarray(t * N, t * N + N);
  };
  if (!state.words) return byToken(unit);
  const row = new Float64Array(N), count = wordEnd[unit] - wordStart[unit];
  for (let t = wordStart[unit]; t < wordEnd[unit]; t++) byToken(t).forEach((w, s) => { row[s] += w / count; });
  return addUp(row);
}

// ---------- colour ----------

let palette = new Uint32Array(256), paletteCss = [], paletteDark = [];
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const hex = D.scale[theme];
  for (let i = 0; i < 256; i++) {
    const [r, g, b] = [0, 2, 4].map((at) => parseInt(hex.substr(6 * i + at, 2), 16));
    palette[i] = (255 << 24) | (b << 16) | (g << 8) | r;
    paletteCss[i] = `rgb(${r} ${g} ${b})`;
    paletteDark[i] = 0.299 * r + 0.587 * g + 0.114 * b < 140;
  }
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
}
const shade = (weight) => Math.round(255 * Math.sqrt(Math.min(1, Math.max(0, weight))));  // the root, so that small weights are seen
function hatch(context, x, y, width, height, step = 6) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.fillStyle = style("--forbidden");
  context.fillRect(x, y, width, height);
  context.strokeStyle = style("--hatch");
  context.lineWidth = 1.2;
  context.beginPath();
  for (let d = -height; d < width; d += step) { context.moveTo(x + d, y + height); context.lineTo(x + d + height, y); }
  context.stroke();
  context.restore();
}
// An n x n picture of a matrix, forbidden cells transparent; cells are pooled by their maximum, so that no thin stripe gets lost.
function picture(matrix, n, forbidden, index, most = Infinity) {
  const pool = Math.max(1, Math.ceil(n / most)), size = Math.ceil(n / pool);
  const image = new ImageData(size, size), pixels = new Uint32Array(image.data.buffer);
  for (let y = 0; y < size; y++) {
    for (let x = 0; x < size; x++) {
      let value = -Infinity, open = false;
      for (let t = y * pool; t < Math.min(n, (y + 1) * pool); t++) {
        for (let s = x * pool; s < Math.min(n, (x + 1) * pool); s++) {
          if (!forbidden(t, s)) { open = true; if (matrix[t * n + s] > value) value = matrix[t * n + s]; }
        }
      }
      if (open) pixels[y * size + x] = palette[index(value)];
    }
  }
  const canvas = make("canvas", {width: size, height: size});
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
function thumbnail(canvas, matrix, n, forbidden) {
  const side = 2 * 96;
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  hatch(context, 0, 0, side, side, 9);
  context.imageSmoothingEnabled = false;
  context.drawImage(picture(matrix, n, forbidden, shade, 96), 0, 0, side, side);
}
function legends() {
  for (const legend of document.querySelectorAll("[data-legend]")) ramp(legend, [[0, "0"], [.01, "1"], [.1, "10"], [.3, "30"], [1, "100 %"]], Math.sqrt);
}
function ramp(legend, ticks, place) {
  const strip = make("canvas", {width: 256, height: 1}), context = strip.getContext("2d");
  for (let i = 0; i < 256; i++) { context.fillStyle = paletteCss[i]; context.fillRect(i, 0, 1, 1); }
  const labels = ticks.map(([value, text]) => { const mark = make("span", {}, text); mark.style.left = `${100 * place(value)}%`; return mark; });
  const forbidden = make("span", {}, make("i", {class: "hatched"}), D.causal ? "forbidden: a token can’t look ahead" : "forbidden");
  legend.replaceChildren(make("div", {class: "ramp"}, strip, ...labels), forbidden);
}

// ---------- a large map: canvas, token labels on both axes, scrolling, zoom, pointer and keyboard ----------

class MapView {
  constructor(root, name, {onmove, onkeep, strip = false}) {
    Object.assign(this, {root, name, onmove, onkeep, strip, zoom: 1, query: null, key: null});
    root.className = "map";
    root.tabIndex = 0;
    root.setAttribute("role", "application");
    root.setAttribute("aria-label", `${name}: arrow up and down choose the token that looks, left and right the token looked at`);
    this.canvas = make("canvas");
    this.room = make("div");
    this.room.append(this.canvas);
    root.append(this.room);
    root.addEventListener("scroll", () => { this.draw(); this.twin?.follow(this); });
    this.canvas.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") this.point(event, onmove); });
    this.canvas.addEventListener("click", (event) => this.point(event, onkeep ?? onmove));
    root.addEventListener("keydown", (event) => this.pressed(event));
    new ResizeObserver(() => { if (root.clientWidth && root.clientWidth !== this.lastWidth) { this.lastWidth = root.clientWidth; this.layout(); } }).observe(root);
  }
  set(matrix, n, labels, forbidden, index) {
    Object.assign(this, {matrix, n, labels, forbidden, index});
    this.image = picture(matrix, n, forbidden, index);
    const longest = Math.max(...labels.map((label) => [...label].length));
    this.longest = Math.round(Math.min(96, Math.max(34, 9 * longest + 10)));
    this.rotated = longest > 1;
    this.layout();
  }
  layout() {
    if (!this.matrix || !this.root.clientWidth) return;
    this.right = this.strip ? 54 : 6;
    const width = this.root.clientWidth;
    // Where cells are too small for labels, one is shown at a time, and less room is kept for it.
    const labelled = !this.rotated || (width - this.longest - this.right) / this.n >= 7.2, narrow = labelled ? this.longest : Math.min(66, this.longest);
    const fit = (width - narrow - this.right) / this.n;
    this.gutter = this.zoom > 1 ? this.longest : narrow;
    this.top = this.rotated ? this.gutter : 38;
    const tallest = Math.max(260, window.innerHeight * 0.74);
    this.cell = Math.min(34, fit) * this.zoom;
    const inner = this.cell * this.n, height = Math.min(this.top + inner + 6, Math.max(width * 1.02, 240), this.zoom > 1 ? tallest : 1e9);
    this.width = width;
    this.height = height;
    this.room.style.width = `${Math.max(width, this.gutter + inner + this.right)}px`;
    this.room.style.height = `${Math.max(height, this.top + inner + 6)}px`;
    this.root.style.height = `${height + 2}px`;
    this.draw();
  }
  follow(other) {
    if (Math.abs(this.root.scrollTop - other.root.scrollTop) > 1) this.root.scrollTop = other.root.scrollTop;
    if (Math.abs(this.root.scrollLeft - other.root.scrollLeft) > 1) this.root.scrollLeft = other.root.scrollLeft;
  }
  reveal() {  // scroll so that the chosen cell is in view
    const keep = (position, cell, span, gutter) => {
      const at = this.cell * cell, room = span - gutter - this.cell;
      return at < position ? at : at > position + room ? at - room : position;
    };
    this.root.scrollTop = keep(this.root.scrollTop, this.query, this.height, this.top + 6);
    if (this.key !== null) this.root.scrollLeft = keep(this.root.scrollLeft, this.key, this.width, this.gutter + this.right);
  }
  mark(query, key, reveal = false) {
    this.query = query;
    this.key = key;
    if (reveal) this.reveal();
    this.draw();
  }
  point(event, tell) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left - this.gutter + this.root.scrollLeft, y = event.clientY - box.top - this.top + this.root.scrollTop;
    const query = Math.floor(y / this.cell), key = Math.floor(x / this.cell);
    if (query < 0 || query >= this.n) return;
    tell(query, key >= 0 && key < this.n && event.clientX - box.left < this.width - this.right ? key : null, false);
  }
  pressed(event) {
    let query = this.query ?? this.n - 1, key = this.key;
    if (event.key === "ArrowUp") query--;
    else if (event.key === "ArrowDown") query++;
    else if (event.key === "ArrowLeft") key = (key ?? query) - 1;
    else if (event.key === "ArrowRight") key = (key ?? query) + 1;
    else if (event.key === "Home") query = 0;
    else if (event.key === "End") query = this.n - 1;
    else return;
    event.preventDefault();
    const clamp = (x) => Math.min(this.n - 1, Math.max(0, x));
    this.onmove(clamp(query), key === null ? null : clamp(key), true);
  }
  draw() {
    if (!this.matrix || !this.width) return;
    const dpr = window.devicePixelRatio || 1, {canvas, width, height, gutter, top, cell, n} = this;
    canvas.width = Math.round(width * dpr);
    canvas.height = Math.round(height * dpr);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d"), left = this.root.scrollLeft, above = this.root.scrollTop;
    context.scale(dpr, dpr);
    const mapWidth = Math.min(cell * n - left, width - gutter - this.right), mapHeight = Math.min(cell * n - above, height - top - 4);
    context.save();
    context.beginPath();
    context.rect(gutter, top, mapWidth, mapHeight);
    context.clip();
    hatch(context, gutter, top, mapWidth, mapHeight, 7);
    context.imageSmoothingEnabled = cell < 1 / dpr;
    context.drawImage(this.image, left / cell, above / cell, mapWidth / cell, mapHeight / cell, gutter, top, mapWidth, mapHeight);
    const line = (x, y, w, h) => context.strokeRect(gutter - left + x * cell, top - above + y * cell, w * cell, h * cell);
    context.strokeStyle = style("--accent");
    context.lineWidth = cell > 6 ? 2 : 1.2;
    if (this.query !== null) line(0, this.query, n, 1);
    if (this.key !== null) line(this.key, 0, 1, n);
    context.restore();
    context.textBaseline = "middle";
    const family = style("--mono"), steps = this.rotated ? 1 : Math.min(3, Math.ceil(9 / cell));  // narrow labels stand in up to 3 lanes
    const size = Math.min(14, Math.max(8.5, cell * 0.86));
    const [first, last] = [Math.floor(above / cell), Math.min(n, Math.ceil((above + height - top) / cell))];
    const [start, end] = [Math.floor(left / cell), Math.min(n, Math.ceil((left + width - gutter) / cell))];
    const every = cell * steps >= 7.2 ? 1 : [10, 20, 50, 100, 200].find((step) => step * cell >= 30);
    const name = (i) => every === 1 ? this.labels[i] : String(i);
    const write = (text, x, y, turned, box) => {
      context.save();
      context.translate(x, y);
      if (turned) context.rotate(-Math.PI / 2);
      if (box) {
        const w = context.measureText(text).width;
        const from = context.textAlign === "right" ? -w : context.textAlign === "center" ? -w / 2 : 0;
        context.fillStyle = style("--accent-soft");
        context.fillRect(from - 3, -9, w + 6, 18);
      }
      context.fillStyle = style(box ? "--ink" : "--quiet");
      context.fillText(text, 0, 0);
      context.restore();
    };
    const cut = (text) => { const all = [...text]; const most = Math.floor((gutter - 10) / 8.4); return all.length > most ? all.slice(0, most - 1).join("") + "…" : text; };
    const row = (i, box) => {
      const y = top - above + (i + .5) * cell;
      context.textAlign = "right";
      if (y > top - 2 && y < height) write(cut(box ? this.labels[i] : name(i)), gutter - 5 - (box || every > 1 ? 0 : i % steps * 9), y, false, box);
    };
    const column = (i, box) => {
      const x = gutter - left + (i + .5) * cell, turned = this.rotated && (box || every === 1);
      context.textAlign = turned ? "left" : "center";
      if (x > gutter - 2 && x < width - this.right + 4) write(cut(box ? this.labels[i] : name(i)), x, turned ? top - 5 : top - 10 - (box || every > 1 ? 0 : i % steps * 10), turned, box);
    };
    context.font = `${every === 1 ? size : 10.5}px ${family}`;
    for (let i = Math.ceil(first / every) * every; i < last; i += every) row(i);
    for (let i = Math.ceil(start / every) * every; i < end; i += every) column(i);
    context.font = `600 ${Math.max(12, size)}px ${family}`;
    if (this.query !== null) row(this.query, true);
    if (this.key !== null) column(this.key, true);
    if (this.strip) {  // entropy of each row, as a bar
      const x = width - this.right + 8, room = this.right - 14, full = Math.log2(Math.max(2, n));
      for (let t = first; t < last; t++) {
        const y = top - above + t * cell;
        if (y < top - cell / 2) continue;
        context.fillStyle = style(t === this.query ? "--accent" : "--s0");
        context.fillRect(x, y + cell * .1, Math.max(.5, room * this.entropies[t] / full), Math.max(.8, cell * .8));
      }
      context.fillStyle = style("--quiet");
      context.font = "10.5px system-ui, sans-serif";
      context.textAlign = "left";
      context.fillText("entropy", x, top - 10);
    }
  }
}

// ---------- overview ----------

const roleAbout = Object.fromEntries(D.roles.names.map((name, i) => [name, D.roles.about[i]]));
function roleSentence(h) {
  const i = D.roles.names.indexOf(h.called);
  if (i < 0) return "mixed: no one role fits";
  return `${h.called}: ${percent(h.roles[i])} of its weight goes to ${roleAbout[h.called].replace(/ \(.*/, "").replace(/, where.*/, "")} (uniform attention: ${percent(D.roles.uniform[i])})`;
}
function overviewControls() {
  const count = (role) => HEADS.filter((h) => h.called === role).length;
  $("filter").append(make("option", {value: ""}, `all ${plural(HEADS.length, "head")}`));
  for (const role of [...D.roles.names, "mixed"]) {
    if (count(role)) $("filter").append(make("option", {value: role}, `${role} (${count(role)})`));
  }
  $("sort").append(make("option", {value: ""}, "layer by layer"));
  D.roles.names.forEach((role, i) => { if (D.roles.uniform[i] !== null) $("sort").append(make("option", {value: i}, `most ${role} first`)); });
  $("sort").append(make("option", {value: "entropy"}, "narrowest look first"));
  $("filter").onchange = $("sort").onchange = overviewGrid;
  if (D.heads.length <= 6) {  // there is room beside the grid
    document.querySelector(".with-roles").classList.add("few");
    $("meanings").open = window.innerWidth > 1180;
  }
  $("threshold").textContent = percent(D.roles.threshold).replace(".0", "");
  for (const role of D.roles.names) $("definitions").append(make("dt", {}, role), make("dd", {}, `looks at ${roleAbout[role]}`));
  const head = make("tr", {}, make("th", {}, "head"), make("th", {class: "left"}, "called"), ...D.roles.names.map((name) => make("th", {}, name)), make("th", {}, "entropy"));
  const uniform = make("tr", {class: "rest"}, make("td", {}, "uniform"), make("td"), ...D.roles.uniform.map((x) => make("td", {}, x === null ? "–" : percent(x))), make("td"));
  const rows = HEADS.map((h) => make("tr", {}, make("td", {}, h.name), make("td", {class: "left"}, h.called),
    ...h.roles.map((x, i) => { const cell = make("td", {}, x === null ? "–" : percent(x)); if (h.called === D.roles.names[i]) cell.style.fontWeight = 700; return cell; }), make("td", {}, `${h.entropy.toFixed(2)} bits`)));
  $("roles").append(make("thead", {}, head), make("tbody", {}, uniform, ...rows));
}
function columns(grid, inOrder) {
  const narrow = grid.clientWidth < 560 || !inOrder;
  grid.style.gridTemplateColumns = narrow ? `repeat(auto-fill, minmax(${grid.clientWidth < 560 ? 84 : 130}px, 1fr))`
    : `repeat(${D.heads.length}, minmax(0, ${D.heads.length > 6 ? "1fr" : "210px"}))`;
}
let pending = [];
function overviewGrid() {
  const role = $("filter").value, sort = $("sort").value;
  const shown = HEADS.filter((h) => !role || h.called === role);
  if (sort) shown.sort((a, b) => sort === "entropy" ? a.entropy - b.entropy : b.roles[sort] - a.roles[sort]);
  columns($("grid"), !role && !sort);
  $("grid").replaceChildren(...shown.map((h) => {
    const i = sort && sort !== "entropy" ? Number(sort) : D.roles.names.indexOf(h.called);
    const told = sort === "entropy" ? `${h.entropy.toFixed(1)} bits` : i >= 0 ? `${D.roles.names[i]} ${Math.round(100 * h.roles[i])} %` : "mixed";
    h.canvas = make("canvas", {"aria-hidden": "true"});
    const tell = () => $("hovered").replaceChildren(make("b", {}, `Layer ${h.layer}, head ${h.head}`), ` · ${roleSentence(h)} · mean entropy ${h.entropy.toFixed(2)} bits, an even look at ${(2 ** h.entropy).toFixed(1)} tokens`);
    return make("button", {type: "button", "data-head": h.name, "aria-label": `Layer ${h.layer}, head ${h.head}, ${told}`,
      onclick: () => { state.head = HEADS.indexOf(h); go("head"); }, onpointerenter: tell, onfocus: tell},
      h.canvas, make("span", {}, h.name), make("span", {class: h.called === "mixed" && !sort ? "role" : "role called"}, told));
  }));
  $("hovered").textContent = "Point at a map to read what its head does.";
  pending = [...shown];
  drawPending();
}
function drawPending() {  // in slices, so that the page answers while it draws
  const until = performance.now() + 12;
  while (pending.length && performance.now() < until) {
    const h = pending.shift();
    thumbnail(h.canvas, weights(h), N, (t, s) => !allowed(t, s));
  }
  document.documentElement.dataset.drawn = pending.length ? "no" : "yes";
  if (pending.length) setTimeout(drawPending);
}

// ---------- head ----------

let scoresView, weightsView;
function headViews() {
  const move = (query, key, byKey) => { if (!state.kept || byKey) chooseUnit(query, key, byKey); };
  const keep = (query, key) => { state.kept = !(state.kept && unitOf(state.query) === query); chooseUnit(query, key, false); };
  scoresView = new MapView($("scores-map"), "Scores", {onmove: move, onkeep: keep});
  weightsView = new MapView($("weights-map"), "Weights", {onmove: move, onkeep: keep, strip: true});
  scoresView.twin = weightsView;
  weightsView.twin = scoresView;
  const zoom = (factor) => () => {
    for (const view of [scoresView, weightsView]) { view.zoom = Math.min(16, Math.max(1, view.zoom * factor)); view.layout(); }
    for (const view of [scoresView, weightsView]) view.mark(view.query, view.key, true);
  };
  $("zoom-in").onclick = zoom(1.6);
  $("zoom-out").onclick = zoom(1 / 1.6);
  $("head").addEventListener("keydown", (event) => { if (event.key === "Escape") { state.kept = false; headMark(false); } });
  for (const element of document.querySelectorAll(".d-head")) element.textContent = D.dHead;
}
function headShow() {
  const h = HEADS[state.head], n = unitCount(), labels = Array.from({length: n}, (_, i) => labelOf(i));
  const matrix = state.words ? merged(weights(h)) : weights(h), forbidden = (t, s) => !unitAllowed(t, s);
  document.querySelector(".maps").classList.toggle("merged", state.words);
  $("scores-map").hidden = $("scores-legend").hidden = state.words;
  $("no-scores").hidden = !state.words;
  if (!state.words) {
    h.scores = scores(h);
    let low = Infinity, high = -Infinity;
    for (const x of h.scores) if (x > -Infinity) { low = Math.min(low, x); high = Math.max(high, x); }
    const span = high - low || 1;
    scoresView.set(h.scores, n, labels, forbidden, (x) => Math.round(255 * (x - low) / span));
    ramp($("scores-legend"), [[0, fixed(low, 1)], [1, fixed(high, 1)]], (x) => x);
  }
  for (const other of HEADS) if (other !== h) other.scores = null;  // of one head at a time
  weightsView.entropies = Array.from({length: n}, (_, t) => entropy(matrix.subarray(t * n, t * n + n)));
  weightsView.set(matrix, n, labels, forbidden, shade);
  profileShow(h);
  headMark(false);
}
function chooseUnit(unit, key, say) {
  state.query = lastToken(unit);
  state.key = key === null ? null : lastToken(key);
  headMark(say);
}
function headMark(say) {
  const query = unitOf(state.query), key = state.key === null ? null : unitOf(state.key);
  for (const view of [scoresView, weightsView]) if (view.matrix) view.mark(query, key, say);
  const n = unitCount(), row = weightsView.matrix.subarray(query * n, query * n + n);
  const bits = weightsView.entropies[query];
  const looks = $("looks");
  looks.replaceChildren(make("h2", {}, token(labelOf(query)), ` (${state.words ? "word" : "token"} ${query}) looks at`), bars(row, query),
    make("p", {class: "note"}, `Entropy ${bits.toFixed(2)} bits: as spread out as an even look at ${(2 ** bits).toFixed(1)} ${state.words ? "words" : "tokens"}.`));
  let said = `${isolated(labelOf(query))} at ${query} looks most at ${strongest(row, query, 3).map((s) => `${isolated(labelOf(s))} ${percent(row[s])}`).join(", ")}.`;
  if (key !== null) {
    const line = make("p", {class: "cell"}, token(labelOf(query)), ` (${query}) → `, token(labelOf(key)), ` (${key}): `);
    if (!unitAllowed(query, key)) line.append("forbidden; score −∞, weight 0");
    else line.append(state.words ? "" : `score ${fixed(HEADS[state.head].scores[query * n + key], 3)}, `, make("b", {}, `weight ${percent(row[key])}`));
    looks.prepend(line);
    said = `${isolated(labelOf(query))} at ${query} to ${isolated(labelOf(key))} at ${key}: ${unitAllowed(query, key) ? percent(row[key]) : "forbidden"}. ` + said;
  }
  if (state.kept) looks.append(make("p", {class: "note"}, "Kept: click the row again, or press Escape, to let go."));
  if (say) $("live").textContent = said;
}
function strongest(row, query, count) {
  const open = Array.from(row, (_, s) => s).filter((s) => unitAllowed(query, s));
  return open.sort((a, b) => row[b] - row[a]).slice(0, count);
}
function bars(row, query, count = 8) {
  const list = make("div", {class: "bars"}), first = strongest(row, query, count);
  let rest = 1;
  for (const s of first) {
    rest -= row[s];
    const bar = make("i"), back = query - s;
    bar.style.width = `${100 * row[s]}%`;
    const where = back === 0 ? "itself" : back > 0 ? `${back} back` : `${-back} ahead`;
    list.append(make("span", {}, token(labelOf(s)), make("span", {class: "where"}, ` ${where}`)), bar, make("span", {}, percent(row[s])));
  }
  const open = Array.from(row, (_, s) => s).filter((s) => unitAllowed(query, s)).length;
  if (open > first.length) list.append(make("span", {class: "where"}, plural(open - first.length, "other")), make("span"), make("span", {class: "where"}, percent(Math.max(0, rest))));
  return list;
}
function profileShow(h) {
  const w = weights(h), far = Math.min(N, 40), profile = [];
  for (let d = 0; d < far; d++) {
    let sum = 0;
    for (let t = d; t < N; t++) sum += w[t * N + t - d];
    profile.push(sum / (N - d));
  }
  const svg = $("profile"), top = Math.max(.02, ...profile), step = 600 / far;
  svg.replaceChildren(drawn("line", {x1: 34, x2: 634, y1: 96, y2: 96, class: "axis"}), drawn("text", {x: 28, y: 14, "text-anchor": "end"}, `${Math.round(100 * top)} %`),
    drawn("text", {x: 28, y: 99, "text-anchor": "end"}, "0"));
  profile.forEach((value, d) => {
    const bar = drawn("rect", {x: 34 + d * step, y: 96 - 86 * value / top, width: Math.max(1, step - 2), height: 86 * value / top});
    bar.append(drawn("title", {}, `${d} back: ${percent(value)}`));
    svg.append(bar);
    if (d % 5 === 0) svg.append(drawn("text", {x: 34 + (d + .5) * step - 1, y: 111, "text-anchor": "middle"}, d === 0 ? "itself" : d));
  });
}

// ---------- text ----------

// Running text whose tokens (or words) can be pointed at and walked with the arrow keys. `onpick` gets the unit.
class Reader {
  constructor(root, name, onpick) {
    Object.assign(this, {root, onpick, spans: []});
    root.tabIndex = 0;
    root.setAttribute("role", "listbox");
    root.setAttribute("aria-label", name);
    const pick = (event) => { const unit = event.target.dataset?.unit; if (unit !== undefined) onpick(Number(unit), event.type === "click"); };
    root.addEventListener("pointerover", (event) => { if (event.pointerType === "mouse") pick(event); });
    root.addEventListener("click", pick);
    root.addEventListener("keydown", (event) => {
      const step = {ArrowLeft: -1, ArrowUp: -10, ArrowRight: 1, ArrowDown: 10, Home: -Infinity, End: Infinity}[event.key];
      if (!step) return;
      event.preventDefault();
      onpick(Math.min(this.spans.length - 1, Math.max(0, this.current + step)), true);
    });
  }
  fill() {
    this.root.replaceChildren();
    this.spans = Array.from({length: unitCount()}, (_, unit) => {
      const text = textOf(unit), label = labelOf(unit);
      const span = make("span", {"data-unit": unit, role: "option", id: `${this.root.id}-${unit}`, "aria-label": label});
      if (text.startsWith("\n") && !text.trim()) span.append(label.replaceAll("␣", " "));
      else span.append(text);
      if (text === label && (/^␣?⟨/.test(label) || label === "↵") || text.startsWith("\n")) span.classList.add("sign");
      this.root.append(span);
      if (text.includes("\n")) this.root.append(make("br"));
      return span;
    });
  }
  show(unit, row) {
    this.current = unit;
    this.spans.forEach((span, s) => {
      const open = row && unitAllowed(unit, s) && row[s] >= .002, level = open ? shade(row[s]) : 0;
      span.style.background = level ? paletteCss[level] : "";
      span.style.color = level ? (paletteDark[level] ? "#fff" : "#111") : "";
      span.classList.toggle("later", D.causal && s > unit);
      span.classList.toggle("query", s === unit);
      span.setAttribute("aria-selected", s === unit);
    });
    this.root.setAttribute("aria-activedescendant", `${this.root.id}-${unit}`);
  }
}
let reader, chooser;
function textShow() {
  reader.fill();
  const h = HEADS[state.head];
  $("source-about").textContent = {
    head: `Weights of layer ${h.layer}, head ${h.head}.`,
    layer: `The mean of ${D.whole ? "all" : "the shown"} heads of layer ${h.layer}.`,
    rollout: "Attention rollout follows all layers down to the input: each layer’s mean weights, mixed half and half with the token itself, for the stream that runs past attention, and multiplied (Abnar & Zuidema 2020).",
  }[state.source];
  textMark(unitOf(state.query), false);
}
function textMark(unit, say) {
  state.query = lastToken(unit);
  const row = sourceRow(unit), t = state.query;
  reader.show(unit, row);
  $("text-looks").replaceChildren(make("h2", {}, token(labelOf(unit)), " looks at"), bars(row, unit));
  const block = $("predicted");
  block.replaceChildren();
  if (D.predictions.length) {
    const after = state.words ? [" after ", token(labelOf(unit))] : [" after it"];
    const list = make("div", {class: "bars"});
    for (const [label, p] of D.predictions[t]) {
      const bar = make("i");
      bar.style.width = `${100 * p}%`;
      list.append(token(label), bar, make("span", {}, percent(p)));
    }
    block.append(make("h2", {}, "What the model expected", ...after), list);
    if (t + 1 < N) {
      block.append(make("p", {class: "note loss"}, "What came: ", token(D.tokens[t + 1][0]), `, held ${D.losses[t] === null ? "–" : percent(Math.exp(-D.losses[t]))} likely. `,
        make("b", {}, `Loss ${known(D.losses[t], 3)} nats`), " (−ln of that probability)."));
    }
  }
  if (say) $("live").textContent = `${isolated(labelOf(unit))} looks most at ${strongest(row, unit, 3).map((s) => `${isolated(labelOf(s))} ${percent(row[s])}`).join(", ")}`;
}

// ---------- equation ----------

const expanded = {vectors: false, keys: false};
function equationShow() {
  const words = state.words;
  state.words = false;  // the equation knows tokens
  chooser.fill();
  equationMark(state.query, false);
  state.words = words;
}
function equationMark(t, say) {
  state.query = t;
  const h = arrays(HEADS[state.head]), root = Math.sqrt(D.dHead), d = D.dHead;
  const rows = [];
  for (let s = 0; s < N; s++) if (allowed(t, s)) { const product = dot(h, t, s); rows.push({s, product, score: product / root}); }
  const most = Math.max(...rows.map((r) => r.score));
  let sum = 0;
  for (const r of rows) sum += r.exp = Math.exp(r.score - most);
  const row = new Float64Array(N);
  for (const r of rows) row[r.s] = r.weight = r.exp / sum;
  chooser.show(t, row);
  const count = expanded.vectors ? d : Math.min(6, d), more = d > count ? ", …" : "";
  const numbers = (array, at) => `[${Array.from(array.subarray(at * d, at * d + count), (x) => fixed(x)).join(", ")}${more}]`;
  const largest = [...rows].sort((a, b) => b.weight - a.weight).slice(0, 10);
  const shown = expanded.keys ? rows : rows.filter((r) => largest.includes(r)), others = rows.filter((r) => !shown.includes(r));
  const total = (list, name) => list.reduce((a, r) => a + r[name], 0);
  const cell = (text, kind = "number") => make("td", {class: kind}, text);
  const about = (s) => make("td", {class: "left"}, `${s} `, token(D.tokens[s][0]));
  const share = (w) => { const bar = make("i", {class: "share"}); bar.style.width = `${90 * w}px`; return bar; };
  const table = make("table", {id: "computation"}, make("thead", {}, make("tr", {}, make("th", {}, "key"), make("th", {class: "left"}, "kₛ"), make("th", {}, "q · kₛ"),
    make("th", {}, `÷ √${d} = ${fixed(root, 3)}`), make("th", {}, "− max"), make("th", {}, "exp"), make("th", {}, "weight"), make("th", {class: "left"}, ""))));
  const body = make("tbody");
  for (const r of shown) {
    body.append(make("tr", {"data-key": r.s, class: r === largest[0] ? "most" : ""}, about(r.s), cell(numbers(h.k, r.s), "left vector"), cell(fixed(r.product)), cell(fixed(r.score)),
      cell(fixed(r.score - most)), cell(fixed(r.exp)), cell(fixed(r.weight, WEIGHT_DIGITS)), make("td", {class: "left"}, share(r.weight))));
  }
  if (others.length) {
    body.append(make("tr", {class: "rest"}, cell(plural(others.length, "other key"), "left"), cell(""), cell(""), cell(""), cell(""), cell(fixed(total(others, "exp"))), cell(fixed(total(others, "weight"), WEIGHT_DIGITS)), cell("")));
  }
  const ahead = N - rows.length;
  if (ahead) body.append(make("tr", {class: "rest"}, cell(plural(ahead, "forbidden key"), "left"), cell(""), cell(""), cell("−∞"), cell("−∞"), cell("0"), cell("0"), cell("")));
  body.append(make("tr", {class: "total"}, cell("", "left"), cell(""), cell(""), cell(`max ${fixed(most)}`), cell(""), cell(`sum ${fixed(sum)}`), cell(`sum ${fixed(total(rows, "weight"), WEIGHT_DIGITS)}`), cell("")));
  table.append(body);
  const toggle = (name, text) => make("button", {type: "button", id: `toggle-${name}`, onclick: () => { expanded[name] = !expanded[name]; equationMark(state.query, false); $(`toggle-${name}`).focus(); }}, text);
  const steps = [
    make("h2", {}, "1. The query of ", token(D.tokens[t][0]), ` (token ${t}): ${d} numbers`),
    make("p", {class: "vector", id: "query-vector"}, `q = ${numbers(h.q, t)}`),
    make("h2", {}, "2. Each key it may look at answers, and the softmax turns the answers into weights"),
    make("div", {class: "wide"}, table),
    make("p", {class: "bar"}, toggle("vectors", expanded.vectors ? `Show 6 of ${d} numbers` : `Show all ${d} numbers`), toggle("keys", expanded.keys ? "Show the 10 strongest keys" : `Show all ${rows.length} keys`)),
    make("p", {class: "note"}, `√${d} keeps the scores’ spread near 1, whatever the width of a head. Subtracting the maximum changes no weight, and keeps every exponential at most 1.`),
    make("h2", {}, "3. The values, mixed by those weights"),
  ];
  if (h.v) {
    const out = new Float32Array(d);
    for (let i = 0; i < d; i++) { let x = 0; for (const r of rows) x += r.weight * h.v[r.s * d + i]; out[i] = x; }
    const mix = make("tbody");
    for (const r of largest.slice(0, 4)) mix.append(make("tr", {}, cell(fixed(r.weight, WEIGHT_DIGITS)), cell("×", "left"), make("td", {class: "left"}, `v of ${r.s} `, token(D.tokens[r.s][0])), cell(numbers(h.v, r.s), "left vector")));
    if (rows.length > 4) mix.append(make("tr", {class: "rest"}, cell(fixed(total(rows, "weight") - total(largest.slice(0, 4), "weight"), WEIGHT_DIGITS)), cell("×", "left"), cell(plural(rows.length - 4, "other value"), "left"), cell("")));
    mix.append(make("tr", {class: "total"}, cell(""), cell("=", "left"), cell("output of this head", "left"), make("td", {class: "left vector", id: "output-vector"}, numbers(out, 0))));
    steps.push(make("div", {class: "wide"}, make("table", {id: "mixture"}, mix)), make("p", {class: "note"}, `The outputs of all heads of layer ${h.layer}, side by side, go through one more matrix and are added to what the model knew about this position.`));
  } else {
    steps.push(make("p", {class: "note"}, "The values were left out to keep this page small: make one of fewer layers (--layer), heads (--head) or tokens (--tokens) to have them."));
  }
  $("steps").replaceChildren(...steps);
  if (say) $("live").textContent = `${isolated(D.tokens[t][0])} at ${t}: largest weight ${fixed(largest[0].weight, WEIGHT_DIGITS)} on ${isolated(D.tokens[largest[0].s][0])} at ${largest[0].s}`;
}

// ---------- learning ----------

const L = D.learning;
let snapshots = null, moment = 0, playing = 0, bigView = null;
async function loadSnapshots() {
  const inflate = (bytes) => new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  snapshots = await Promise.all(L.steps.map(async (_, i) => new Uint8Array(await inflate(decode(`snapshot-${i}`)))));
}
function snapshotMatrix(at, index) {  // from the lower triangle, row by row
  const n = L.tokens.length, size = n * (n + 1) / 2, bytes = snapshots[at].subarray(index * size, (index + 1) * size);
  const matrix = new Float32Array(n * n);
  for (let t = 0, i = 0; t < n; t++) for (let s = 0; s <= t; s++) matrix[t * n + s] = bytes[i++] / 255;
  return matrix;
}
const learned = L ? L.called[0].flatMap((row, layer) => row.map((_, head) => ({layer, head}))) : [];
let watched = 0;
async function learningShow() {
  if (!L || typeof DecompressionStream === "undefined") {
    $("learning-body").hidden = true;
    $("learning-lead").textContent = L ? "This browser is too old to unpack the maps." : "This run kept no maps of its training, or there was no room for them. train.py writes them at its evaluations, into attention/ in the run’s folder.";
    return;
  }
  if (!snapshots) {
    await loadSnapshots();
    moment = L.steps.length - 1;
    $("moment").max = moment;
    $("moment").value = moment;
    bigView = new MapView($("big-map"), "Map while learning", {onmove: (query, key) => { bigView.mark(query, key); bigTitle(); }});
    $("snapshots").append(...learned.map((h, i) => make("button", {type: "button", "data-head": `L${h.layer} H${h.head}`, onclick: () => { watched = i; momentShow(); }},
      h.canvas = make("canvas", {"aria-hidden": "true"}), make("span", {}, `L${h.layer} H${h.head}`), h.role = make("span", {class: "role"}))));
    const never = Object.keys(L.forming).filter((role) => !L.forming[role]);
    if (never.length) $("formed").append(make("li", {}, `Not reached in this run: ${never.join(", ")}`));
    for (const [role, found] of Object.entries(L.forming)) {
      if (found) $("formed").prepend(make("li", {}, `First ${role} head: L${found[1]} H${found[2]}, at step ${found[0].toLocaleString("en")}`));
    }
  }
  const heads = L.called[0][0].length, grid = $("snapshots");
  grid.style.gridTemplateColumns = heads * 60 > grid.clientWidth ? "repeat(auto-fill, minmax(64px, 1fr))" : `repeat(${heads}, minmax(0, 1fr))`;
  momentShow();
}
function momentShow() {
  const n = L.tokens.length, forbidden = (t, s) => !allowed(t, s);
  learned.forEach((h, i) => {
    const called = L.called[moment][h.layer][h.head];
    thumbnail(h.canvas, snapshotMatrix(moment, i), n, forbidden);
    h.role.textContent = called;
    h.role.classList.toggle("called", called !== "mixed");
    h.canvas.parentElement.setAttribute("aria-label", `Layer ${h.layer}, head ${h.head}: ${called}`);
    h.canvas.parentElement.setAttribute("aria-current", i === watched);
  });
  bigView.set(snapshotMatrix(moment, watched), n, L.tokens.map(([label]) => label), forbidden, shade);
  bigTitle();
  const step = L.steps[moment].toLocaleString("en"), at = nearest(L.curve.map(([s]) => s), L.steps[moment]);
  $("moment-label").textContent = `step ${step}`;
  $("moment").value = moment;
  $("moment").setAttribute("aria-valuetext", `step ${step}`);
  const end = Math.max(L.steps.at(-1), ...L.curve.map(([s]) => s));
  const values = L.curve.flatMap(([, a, b]) => [a, b]).filter(Number.isFinite);
  chart($("loss"), [{name: "training", color: "--s6", points: L.curve.map(([s, a]) => [s, a])}, {name: "validation", color: "--s1", points: L.curve.map(([s, , b]) => [s, b])}],
    end, values.length ? [Math.min(...values), Math.max(...values)] : [0, 1], at === null ? "" : `validation ${known(L.curve[at][2], 3)}, training ${known(L.curve[at][1], 3)} nats`);
  seriesLegend($("loss-legend"), [{name: "training split", color: "--s6"}, {name: "validation split", color: "--s1"}]);
  const series = D.roles.names.map((name, r) => {
    const base = L.uniform[r];
    return {name, color: `--s${r}`, points: base === null ? [] : L.steps.map((s, i) => [s, Math.max(...L.scores[i].flat().map((x) => (x[r] - base) / (1 - base)))])};
  });
  chart($("forming"), series, end, [0, 1], "", D.roles.threshold);
  seriesLegend($("forming-legend"), series);
}
function seriesLegend(legend, series) {
  legend.replaceChildren(...series.map(({name, color}) => { const line = make("i"); line.style.background = `var(${color})`; return make("span", {}, line, name); }));
}
function bigTitle() {
  const h = learned[watched], {query, key, matrix, n} = bigView;
  const cell = query === null || key === null ? [] : [": ", token(L.tokens[query][0]), " → ", token(L.tokens[key][0]), !allowed(query, key) ? " forbidden" : ` ${Math.round(100 * matrix[query * n + key])} %`];
  $("big-title").replaceChildren(`Layer ${h.layer}, head ${h.head}`, ...cell);
}
function nearest(steps, step) {
  let best = null;
  steps.forEach((s, i) => { if (best === null || Math.abs(s - step) < Math.abs(steps[best] - step)) best = i; });
  return best;
}
function chart(svg, series, end, [low, high], told, limit) {
  const left = 40, right = 450, top = 14, bottom = 164, span = high - low || 1;
  const x = (step) => left + (right - left) * step / (end || 1), y = (v) => bottom - (bottom - top) * (Math.min(high, Math.max(low, v)) - low) / span;
  svg.replaceChildren(drawn("path", {class: "axis", d: `M${left},${top}V${bottom}H${right}`}));
  for (const v of [low, (low + high) / 2, high]) svg.append(drawn("text", {x: left - 6, y: y(v) + 4, "text-anchor": "end"}, v.toFixed(high - low > 20 ? 0 : high - low > 1 ? 1 : 2)));
  for (const s of [0, end / 2, end]) svg.append(drawn("text", {x: x(s), y: bottom + 16, "text-anchor": s ? (s === end ? "end" : "middle") : "start"}, Math.round(s).toLocaleString("en")));
  if (limit !== undefined) svg.append(drawn("line", {class: "limit", x1: left, x2: right, y1: y(limit), y2: y(limit)}));
  for (const {name, color, points} of series) {
    const line = drawn("polyline", {class: "series", points: points.filter(([, v]) => Number.isFinite(v)).map(([s, v]) => `${x(s)},${y(v)}`).join(" ")});
    line.style.stroke = `var(${color})`;
    line.append(drawn("title", {}, name));
    svg.append(line);
  }
  const now = x(L.steps[moment]);
  svg.append(drawn("line", {class: "now", x1: now, x2: now, y1: top - 4, y2: bottom}), drawn("text", {x: right, y: top - 3, "text-anchor": "end"}, told));
  svg.setAttribute("aria-label", `${svg.id} over training; now step ${L.steps[moment]}${told ? `, ${told}` : ""}`);
  svg.onclick = (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width * 460 - left) / (right - left) * end;
    moment = nearest(L.steps, at);
    momentShow();
  };
}
function play(on) {
  clearInterval(playing);
  playing = 0;
  $("play").textContent = on ? "Pause" : "Play";
  if (!on) return;
  if (moment === L.steps.length - 1) { moment = 0; momentShow(); }
  playing = setInterval(() => {
    moment++;
    momentShow();
    if (moment >= L.steps.length - 1) play(false);
  }, 450);
}

// ---------- the frame: tabs, head picker, theme ----------

const VIEWS = {overview: overviewGrid, head: headShow, text: textShow, equation: equationShow, learning: learningShow};
function go(view, focus = false) {
  if (state.view === "learning" && view !== "learning") play(false);
  state.view = view;
  for (const name of Object.keys(VIEWS)) {
    const tab = $(`tab-${name}`);
    tab.setAttribute("aria-selected", name === view);
    tab.tabIndex = name === view ? 0 : -1;
    $(name).hidden = name !== view;
  }
  if (focus) $(`tab-${view}`).focus();
  $("bar").hidden = view === "overview" || view === "learning";
  $("source-label").hidden = view !== "text";
  $("words-label").hidden = view === "equation" || W === N;
  $("pick").value = state.head;
  $("about").textContent = roleSentence(HEADS[state.head]);
  VIEWS[view]();
}
function start() {
  const kept = D.bits === 16 ? [`kept in 16 bits: weights within ${(100 * D.error).toFixed(3)} percentage points of the model’s`] : [];
  $("facts").textContent = [...D.facts, plural(N, "token"), ...kept].join(" · ");
  HEADS.forEach((h, i) => $("pick").append(make("option", {value: i}, h.called === "mixed" ? h.name : `${h.name} · ${h.called}`)));
  if (!D.whole) {
    $("source").querySelector('[value="rollout"]').remove();  // it needs every layer
    $("source").querySelector('[value="layer"]').textContent = "the mean of its layer’s shown heads";
  }
  const turn = (step) => () => { state.head = (state.head + step + HEADS.length) % HEADS.length; go(state.view); };
  $("previous").onclick = turn(-1);
  $("next").onclick = turn(1);
  $("pick").onchange = () => { state.head = Number($("pick").value); go(state.view); };
  $("source").onchange = () => { state.source = $("source").value; go("text"); };
  $("words").onchange = () => { state.words = $("words").checked; state.key = null; go(state.view); };
  const names = Object.keys(VIEWS);
  for (const name of names) {
    $(`tab-${name}`).onclick = () => go(name);
    $(`tab-${name}`).onkeydown = (event) => {
      const at = names.indexOf(name), to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1}[event.key];
      if (to !== undefined) { event.preventDefault(); go(names[(to + names.length) % names.length], true); }
    };
  }
  $("theme").onclick = () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); legends(); go(state.view); };
  $("play").onclick = () => play(!playing);
  $("moment").oninput = () => { moment = Number($("moment").value); play(false); momentShow(); };
  setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  legends();
  overviewControls();
  headViews();
  reader = new Reader($("reader"), "The text; choose a token", textMark);
  chooser = new Reader($("chooser"), "Choose the token that looks", (t, say) => { if (say) equationPick(t); });
  go(HEADS.length === 1 ? "head" : "overview");
}
function equationPick(t) {
  const words = state.words;
  state.words = false;
  equationMark(t, true);
  state.words = words;
}
start();
