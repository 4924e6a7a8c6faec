// The Lens view: the stream after each layer, read as if the model ended there (nostalgebraist 2020), and how much
// each attention and MLP wrote to it.

const lensed = new WeakMap();  // reading -> what is known of its lens so far
const lensView = {layer: null, cells: null, filling: 0};

// A table for each layer from -1, the embedding, and each token: the likeliest next token and its probability, and
// rank and probability of the token that came (0 for the last token, after which nothing came).
function lensTable(reading) {
  if (!lensed.has(reading)) {
    const size = (MODEL.config.n_layer + 1) * reading.n;
    const ranks = new Int32Array(size);
    const likeliest = new Int32Array(size);
    lensed.set(reading, {
      ranks,
      likeliest,
      probabilities: new Float64Array(size),
      highest: new Float64Array(size),
      known: new Uint8Array(size),  // whether a cell is filled
    });
  }
  return lensed.get(reading);
}

const lensLogits = (reading, layer, t) =>
  layer === MODEL.config.n_layer - 1 ? rowOf(reading.logits, t, MODEL.vocabSize) : lens(MODEL, reading, layer, t);

// Fill the table's cell of a layer and a token, if that wasn't done yet; its index.
function measureLens(reading, layer, t) {
  const table = lensTable(reading);
  const at = (layer + 1) * reading.n + t;
  if (table.known[at]) return at;
  const logits = lensLogits(reading, layer, t);
  let top = 0;
  for (let id = 1; id < logits.length; id++) if (logits[id] > logits[top]) top = id;
  table.likeliest[at] = top;
  table.highest[at] = Math.exp(-crossEntropy(logits, 0, logits.length, top));
  if (t + 1 < reading.n) {
    const came = reading.ids[t + 1];
    table.ranks[at] = rankOf(logits, came);
    table.probabilities[at] = Math.exp(-crossEntropy(logits, 0, logits.length, came));
  }
  table.known[at] = 1;
  return at;
}

const layerName = (layer) => (layer < 0 ? "embedding" : `layer ${layer}`);

function lensControls() {
  if (!MODEL) return;
  lensView.layer = MODEL.config.n_layer - 1;
  $("lens-cells").onchange = lensShow;
  $("lens-whose").onchange = () => lensWritten(state.query);
  $("lens-table").addEventListener("click", (event) => {
    const cell = event.target.closest("tbody td");
    if (cell) lensPick(Number(cell.dataset.layer), Number(cell.dataset.t), true);
  });
  $("lens-table").addEventListener("keydown", lensPressed);
}

function lensShow() {
  const {reading} = shown;
  const {n_layer} = MODEL.config;
  const tokens = Array.from({length: reading.n}, (_, t) => t);
  const corner = (text) => make("th", {class: "corner", scope: "row"}, text);
  const rows = Array.from({length: n_layer + 1}, (_, i) => i - 1).map((layer) =>
    make(
      "tr",
      {},
      make("th", {scope: "row"}, layerName(layer)),
      ...tokens.map((t) =>
        make("td", {role: "gridcell", tabindex: -1, "data-layer": layer, "data-t": t, "aria-selected": "false"}, "…"),
      ),
    ),
  );
  $("lens-table").replaceChildren(
    make("thead", {}, make("tr", {}, corner("token"), ...tokens.map((t) => make("th", {scope: "col"}, labelAt(t))))),
    make("tbody", {}, ...rows),
    make(
      "tfoot",
      {},
      make(
        "tr",
        {},
        corner("came next"),
        ...tokens.map((t) => make("td", {}, t + 1 < reading.n ? labelAt(t + 1) : "?")),
      ),
    ),
  );
  lensView.cells = rows.map((row) => Array.from(row.querySelectorAll("td")));
  ramp(
    $("lens-legend"),
    [
      [0, "0"],
      [0.1, "10"],
      [0.3, "30"],
      [1, "100 %"],
    ],
    Math.sqrt,
  );
  $("lens-legend").lastChild.remove();
  $("lens-legend").prepend(make("span", {}, "probability of what came"));
  lensFill(reading, ++lensView.filling);
  lensPick(lensView.layer, state.query, false);
}

// Cells from number `from` on, token by token, in slices, so that the page answers meanwhile.
function lensFill(reading, filling, from = 0) {
  if (filling !== lensView.filling || state.view !== "lens") return;
  const table = lensTable(reading);
  const perToken = MODEL.config.n_layer + 1;
  const until = performance.now() + 12;
  let i = from;
  for (; i < reading.n * perToken && performance.now() < until; i++) {
    const t = Math.floor(i / perToken);
    const layer = (i % perToken) - 1;
    measureLens(reading, layer, t);
    lensCell(reading, table, layer, t);
  }
  const done = i === reading.n * perToken;
  document.documentElement.dataset.drawn = done ? "yes" : "no";
  if (!done) setTimeout(() => lensFill(reading, filling, i));
  else if (!$("lens-table").contains(document.activeElement)) lensCentre();  // columns are as wide as their cells now
}

function lensCell(reading, table, layer, t) {
  const cell = lensView.cells[layer + 1][t];
  const at = (layer + 1) * reading.n + t;
  const came = t + 1 < reading.n ? reading.ids[t + 1] : null;
  const guess = tokenLabel(table.likeliest[at]);
  const probability = table.probabilities[at];
  cell.textContent = {
    guess,
    probability: came === null ? "" : (100 * probability).toFixed(probability < 0.0995 ? 1 : 0),
    rank: came === null ? "" : table.ranks[at],
  }[$("lens-cells").value];
  const told =
    came === null
      ? "nothing came yet"
      : `${isolated(tokenLabel(came))} came, ${percent(probability)}, rank ${table.ranks[at]}`;
  cell.setAttribute(
    "aria-label",
    `${layerName(layer)}, token ${t} ${isolated(labelAt(t))}: says ${isolated(guess)} ` +
      `${percent(table.highest[at])}; ${told}`,
  );
  cell.title = `says ${isolated(guess)} ${percent(table.highest[at])}; ${told}`;
  cell.className = came === null ? "open" : table.likeliest[at] === came ? "right" : "";
  if (came === null) return;
  const level = shade(probability);
  cell.style.background = paletteCss[level];
  cell.style.color = paletteDark[level] ? "#fff" : "#111";
}

function lensPressed(event) {
  const last = shown.reading.n - 1;
  let {layer} = lensView;
  let t = state.query;
  if (event.key === "ArrowLeft") t--;
  else if (event.key === "ArrowRight") t++;
  else if (event.key === "ArrowUp") layer--;
  else if (event.key === "ArrowDown") layer++;
  else if (event.key === "Home") t = 0;
  else if (event.key === "End") t = last;
  else return;
  event.preventDefault();
  lensPick(Math.min(MODEL.config.n_layer - 1, Math.max(-1, layer)), Math.min(last, Math.max(0, t)), true);
}

function lensPick(layer, t, focus) {
  for (const cell of document.querySelectorAll('#lens-table td[aria-selected="true"]')) {
    cell.setAttribute("aria-selected", "false");
    cell.tabIndex = -1;
  }
  const cell = lensView.cells[layer + 1][t];
  cell.setAttribute("aria-selected", "true");
  cell.tabIndex = 0;
  lensView.layer = layer;
  state.query = t;
  for (const name of ["thead th", "tfoot td"])
    document
      .querySelectorAll(`#lens-table ${name}`)
      .forEach((one, i) => one.classList.toggle("query", i === t + (name === "thead th" ? 1 : 0)));
  if (focus) cell.focus();
  else lensCentre();
  lensGuesses(layer, t);
  lensGrowth(t);
  lensWritten(t);
}

function lensCentre() {
  const cell = lensView.cells[lensView.layer + 1][state.query];
  $("lens-scroll").scrollLeft = Math.max(0, cell.offsetLeft - $("lens-scroll").clientWidth / 2);
}

function lensGuesses(layer, t) {
  const {reading} = shown;
  const logits = lensLogits(reading, layer, t);
  const {probabilities, order} = chances(logits);
  const came = t + 1 < reading.n ? reading.ids[t + 1] : null;
  const listed = order.slice(0, 8);
  if (came !== null && !listed.includes(came)) listed.push(came);
  $("lens-title").replaceChildren(
    layer < 0 ? "The embedding of " : `After layer ${layer}, at `,
    token(labelAt(t)),
    ` (${t})`,
  );
  const list = make("div", {class: "bars"});
  for (const id of listed) {
    const bar = make("i");
    bar.style.width = `${100 * probabilities[id]}%`;
    list.append(
      make(
        "span",
        {class: id === came ? "came" : ""},
        token(tokenLabel(id)),
        make("span", {class: "where"}, id === came ? ` came, rank ${rankOf(logits, id)}` : ""),
      ),
      make("span", {"data-id": id}, percent(probabilities[id])),
      bar,
    );
  }
  $("lens-guesses").replaceChildren(list);
}

function lensGrowth(t) {
  const {reading} = shown;
  if (t + 1 >= reading.n) {
    $("lens-growth").replaceChildren(make("p", {class: "note"}, "After the last token nothing came yet."));
    return;
  }
  const came = reading.ids[t + 1];
  const list = make("div", {class: "bars growth"});
  for (let layer = -1; layer < MODEL.config.n_layer; layer++) {
    const at = measureLens(reading, layer, t);
    const probability = lensTable(reading).probabilities[at];
    const bar = make("i");
    bar.style.width = `${100 * probability}%`;
    list.append(
      make("span", {}, layerName(layer)),
      make("span", {}, percent(probability), make("span", {class: "where"}, ` rank ${lensTable(reading).ranks[at]}`)),
      bar,
    );
  }
  $("lens-growth").replaceChildren(
    make("p", {class: "note"}, token(tokenLabel(came)), " came after ", token(labelAt(t))),
    list,
  );
}

// Lengths of what attention and MLP of each layer wrote for a token, and of the stream after; and their means over
// the text.
function writtenLengths(reading, layer, t) {
  const {d_model} = MODEL.config;
  const rows = reading.layers[layer];
  return ["written_attention", "written_mlp", "x_after"].map((name) => lengthOf(rowOf(rows[name], t, d_model)));
}

function lensWritten(t) {
  const {reading} = shown;
  const {d_model, n_layer} = MODEL.config;
  const mean = $("lens-whose").value === "text";
  const number = (x) => make("td", {class: "number"}, fixed(x, 2));
  const body = make("tbody");
  const share = (part, whole, kind) => {
    const bar = make("i", {class: `share ${kind}`});
    bar.style.width = `${Math.min(100, (100 * part) / (whole || 1))}%`;
    return make("td", {class: "bar-cell"}, bar);
  };
  const embedded = mean ? lensMeans(reading).embedded : lengthOf(rowOf(reading.x_embed, t, d_model));
  body.append(
    make(
      "tr",
      {},
      make("th", {scope: "row"}, "embedding"),
      make("td"),
      make("td"),
      make("td"),
      make("td"),
      number(embedded),
    ),
  );
  for (let layer = 0; layer < n_layer; layer++) {
    const [attended, thought, after] = mean ? lensMeans(reading).layers[layer] : writtenLengths(reading, layer, t);
    body.append(
      make(
        "tr",
        {class: layer === lensView.layer ? "chosen" : ""},
        make("th", {scope: "row"}, layerName(layer)),
        number(attended),
        share(attended, after, "attends"),
        number(thought),
        share(thought, after, "thinks"),
        number(after),
      ),
    );
  }
  const head = make(
    "tr",
    {},
    ...["", "attention", "", "MLP", "", "stream"].map((text) => make("th", {scope: "col"}, text)),
  );
  $("lens-written").replaceChildren(make("table", {class: "lengths"}, make("thead", {}, head), body));
}

function lensMeans(reading) {
  const table = lensTable(reading);
  const {d_model} = MODEL.config;
  const tokens = Array.from({length: reading.n}, (_, t) => t);
  const mean = (of) => tokens.reduce((sum, t) => sum + of(t), 0) / reading.n;
  table.means ??= {
    embedded: mean((t) => lengthOf(rowOf(reading.x_embed, t, d_model))),
    layers: reading.layers.map((_, layer) => [0, 1, 2].map((i) => mean((t) => writtenLengths(reading, layer, t)[i]))),
  };
  return table.means;
}
