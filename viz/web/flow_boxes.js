// The boxes of the Flow view. Each shows numbers of flow_numbers.js, names the tensor as the code does, and says which
// line of code makes it, and where that line stands.

// What computes each step: [file, function, its line]. tests/test_page_views.py looks each of them up.
const SOURCES = {
  encode: ["data/tokenizer.py", "Tokenizer.encode", "def encode(self, text: str)"],
  embed: ["model/gpt.py", "GPT.features", "x_BTD = self.embed(tokens_BT)"],
  pair: [
    "model/bigrams.py",
    "BigramEmbedding.forward",
    "pairs_BT = (before_BT * self.vocab_size + tokens_BT) % self.num_embeddings",
  ],
  learned: ["model/positions.py", "LearnedPositions.add", "return x_BTD + self.table(positions)"],
  sinusoidal: [
    "model/positions.py",
    "SinusoidalPositions.add",
    "return x_BTD + 0.02 * math.sqrt(2) * sinusoid(positions, self.config.d_model)",
  ],
  rotary: [
    "model/positions.py",
    "RotaryPositions.rotation",
    "angles = _angles(positions, self.config.d_head, self.config.rope_base)[:, None]",
  ],
  none: ["model/positions.py", "Positions.add", "return x_BTD"],
  attentionNorm: ["model/gpt.py", "Block.forward", "self.attention_norm(x_BTD)"],
  projections: [
    "model/attention.py",
    "CausalSelfAttention.projections",
    "projected = (project(x_BTD) for project in (self.query, self.key, self.value))",
  ],
  queryNorm: ["model/attention.py", "CausalSelfAttention.forward", "q_BHTK = self.query_norm(widen(q_BHTK))"],
  keyNorm: ["model/attention.py", "CausalSelfAttention.forward", "k_BGTK = self.key_norm(widen(k_BGTK))"],
  rotate: ["model/positions.py", "rotate", "torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)"],
  scores: [
    "model/attention.py",
    "attention_scores",
    "scores_BHTS = widen(q_BHTK) @ widen(k_BHSK).mT / math.sqrt(q_BHTK.shape[-1])",
  ],
  weights: ["model/attention.py", "attention_weights", "return softmax(attention_scores(q_BHTK, k_BHSK, mask))"],
  mix: [
    "model/attention.py",
    "explicit_attention",
    "return F.dropout(weights_BHTS, dropout).to(v_BHSK.dtype) @ v_BHSK",
  ],
  heads: [
    "model/attention.py",
    "CausalSelfAttention.forward",
    "out_BTD = out_BHTK.transpose(1, 2).reshape(x_BTD.shape)",
  ],
  attentionProject: ["model/attention.py", "CausalSelfAttention.forward", "self.project(out_BTD)"],
  attentionAdd: [
    "model/gpt.py",
    "Block.forward",
    "x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), mask, rotation, remember)",
  ],
  mlpNorm: ["model/gpt.py", "Block.forward", "self.mlp_norm(x_BTD)"],
  up: ["model/gpt.py", "MLP.forward", "h_BTF = self.up(x_BTD)"],
  gelu: ["model/gpt.py", "MLP.forward", 'h_BTF = F.gelu(h_BTF, approximate="tanh")'],
  gelu_exact: ["model/gpt.py", "MLP.forward", "h_BTF = F.gelu(h_BTF)"],
  relu2: ["model/gpt.py", "MLP.forward", "h_BTF = F.relu(h_BTF).square()"],
  swiglu: ["model/gpt.py", "MLP.forward", "h_BTF = F.silu(self.gate(x_BTD)) * h_BTF"],
  mlpProject: ["model/gpt.py", "MLP.forward", "self.project(h_BTF)"],
  mlpAdd: ["model/gpt.py", "Block.forward", "return x_BTD + self.mlp(self.mlp_norm(x_BTD))"],
  norm: ["model/gpt.py", "GPT.features", "return self.norm(x_BTD)"],
  unembed: ["model/gpt.py", "GPT.forward", "return self.unembed(self.features(tokens_BT, mask, cache))"],
  softmax: ["model/generate.py", "next_distribution", "probabilities_BV = softmax(scaled)"],
  loss: ["training/loss.py", "cross_entropy", "F.cross_entropy(logits, targets_BT.flatten(), reduction=reduction)"],
};
const LETTERS = {
  B: "texts read at once",
  T: "tokens, as those that look",
  S: "tokens, as those looked at",
  D: "width of the stream",
  H: "heads of queries",
  G: "heads of keys and values",
  K: "width of a head",
  F: "width inside the MLP",
  V: "tokens in the vocabulary",
};
const flow = {numbers: "few", open: new Set(), text: null, layer: 0, head: 0, lastHead: null};
const FEW = {few: 6, more: 24, all: 4096};
const flowDigits = () => (flow.numbers === "all" ? 4 : 2);

// ---------- what every box is made of ----------

function sizes() {
  const {config, vocabSize} = MODEL;
  return {
    B: 1,
    T: shown.reading.n,
    S: shown.reading.n,
    D: config.d_model,
    H: config.n_head,
    G: config.n_key_head,
    K: config.d_head,
    F: config.d_mlp,
    V: vocabSize,
  };
}

// A tensor's name as the code writes it, and how many numbers it holds in each direction: x_BTD 1 × 38 × 192.
function shapeTag(name) {
  const size = sizes();
  const letters = [...name.slice(name.lastIndexOf("_") + 1)];
  const about = letters.map((letter) => `${letter} ${size[letter]}: ${LETTERS[letter]}`).join("; ");
  return make(
    "span",
    {class: "shape", title: about},
    make("b", {}, name),
    ` ${letters.map((letter) => size[letter]).join(" × ")}`,
  );
}

function sourceLine(name) {
  const [file, where, line] = SOURCES[name];
  return make(
    "p",
    {class: "source", "data-source": name},
    make("code", {}, line),
    make("span", {}, `${file} · ${where}`),
  );
}

// A box: its title, the tensors it makes, what happens in words, the numbers, and the code.
function box(kind, title, shapes, words, content, sources) {
  const head = make(
    "div",
    {class: "box-head"},
    make("h4", {}, ...[title].flat()),
    make("span", {class: "shapes"}, ...shapes.map(shapeTag)),
  );
  return make(
    "div",
    {class: `box ${kind}`},
    head,
    make("p", {class: "words"}, ...[words].flat()),
    ...[content].flat(),
    ...sources.map(sourceLine),
  );
}

const shorter = (x) => fixed(x, flowDigits());

// A vector as a strip of colours and as numbers. `most`, if given, is the value of the strongest colour.
function vectorLine(name, vector, most, few = FEW[flow.numbers]) {
  const count = Math.min(vector.length, few);
  const rest = vector.length - count;
  const numbers = Array.from(vector.subarray(0, count), shorter).join(", ");
  return make(
    "div",
    {class: "vector-line", "data-vector": name},
    make("b", {class: "vector-name"}, name),
    make(
      "div",
      {},
      strip(vector, most),
      make("span", {class: "vector"}, `[${numbers}${rest ? ", …" : ""}]`),
      make("span", {class: "more"}, `${rest ? `${rest} more; ` : ""}length ${shorter(lengthOf(vector))}`),
    ),
  );
}

const largestOf = (vector) => vector.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
function strip(vector, most = largestOf(vector)) {
  const nRow = Math.min(6, Math.ceil(vector.length / 200));
  const width = Math.ceil(vector.length / nRow);
  const canvas = make("canvas", {class: "strip", width, height: nRow, "aria-hidden": "true"});
  const context = canvas.getContext("2d");
  const below = style("--s0");
  const above = style("--s1");
  vector.forEach((x, i) => {
    context.globalAlpha = Math.min(1, Math.abs(x) / (most || 1)) ** 0.7;
    context.fillStyle = x < 0 ? below : above;
    context.fillRect(i % width, Math.floor(i / width), 1, 1);
  });
  canvas.style.height = `${nRow === 1 ? 14 : 9 * nRow}px`;
  return canvas;
}

const labelAt = (t) => tokenLabel(shown.reading.ids[t]);

// ---------- the boxes, from top to bottom ----------

function beginningBoxes(t) {
  const {config, vocabSize} = MODEL;
  const parts = streamBegins(MODEL, shown.reading, t);
  const me = token(labelAt(t));
  const boxes = [
    box(
      "on-stream",
      "The token",
      ["tokens_BT"],
      ["The text is cut into tokens, and each is a number. Token ", `${t} is `, me, ": "],
      make(
        "p",
        {class: "big-number", id: "flow-id"},
        `id ${parts.id}`,
        make("small", {}, ` of ${vocabSize.toLocaleString("en")} in the vocabulary`),
      ),
      ["encode"],
    ),
    box(
      "on-stream",
      "Embedding",
      ["x_BTD"],
      `Row ${parts.id} of a learned table: ${config.d_model} numbers that stand for this token, wherever it stands.`,
      vectorLine("embedding", parts.embedded),
      ["embed"],
    ),
  ];
  if (parts.pair) {
    const {before, number, vector} = parts.pair;
    boxes.push(
      box(
        "on-stream adds",
        "+ the pair with the token before",
        ["pairs_BT"],
        [
          "Tokens ",
          token(tokenLabel(before)),
          " and ",
          token(labelAt(t)),
          t ? "" : " (nothing stands before the first token; id 0 is taken)",
          ` share vector ${number}: (${before} × ${vocabSize} + ${parts.id}) mod ${config.bigrams} = ${number}. ` +
            `It is added.`,
        ],
        vectorLine("pair", vector),
        ["pair"],
      ),
    );
  }
  boxes.push(positionBox(t, parts));
  if (parts.pair || ["learned", "sinusoidal"].includes(config.positions)) {
    boxes.push(
      box(
        "on-stream",
        "The stream, before layer 0",
        ["x_BTD"],
        "The sum of these: what the first layer reads.",
        vectorLine("x", parts.x),
        [],
      ),
    );
  }
  return boxes;
}

function positionBox(t, parts) {
  const kind = MODEL.config.positions;
  const added = kind === "learned" || kind === "sinusoidal";
  const words = {
    learned:
      `Row ${t} of a second learned table is added. Without it, attention could not tell one order of the ` +
      `tokens from another.`,
    sinusoidal:
      `Sines and cosines of position ${t}, slow and fast ones, are added, at the size of the embeddings ` +
      `(× 0.02 √2). Nothing is learned here.`,
    rotary:
      `Nothing is added. Each layer turns its queries and keys by an angle that grows with the position, ` +
      `here ${t}: see “query, key, value” below.`,
    none:
      "Nothing is added: this model is not told where a token stands. That no token looks ahead still leaks " +
      "some order.",
  }[kind];
  if (shown.reading.changes.noPositions && kind !== "none") {
    return box(
      "on-stream changed-box",
      "Position",
      [],
      "Left out: you switched positions off. Nothing tells the model where this token stands.",
      [],
      [kind],
    );
  }
  return box(
    added ? "on-stream adds" : "on-stream",
    added ? `+ position ${t}` : `Position ${t}`,
    added ? ["x_BTD"] : [],
    words,
    added ? vectorLine("position", parts.position) : [],
    [kind],
  );
}

function normBox(parts, source) {
  const {norm, normed: result} = parts;
  const root = fixed(norm.root, 3);
  const words =
    MODEL.config.norm === "rmsnorm"
      ? `RMSNorm: a copy of the stream, each number divided by ${root}, the root of their mean square, times a ` +
        `learned factor. So every layer reads numbers of one size.`
      : `LayerNorm: of a copy of the stream, the mean ${fixed(norm.mean, 3)} is taken off, what is left is ` +
        `divided by ${root}, its standard deviation, and scaled and shifted by learned numbers.`;
  return box("", "Norm", ["x_BTD"], words, vectorLine("normed", result), [source]);
}

function projectionBox(t, head, parts) {
  const {config} = MODEL;
  const grouped = config.n_key_head !== config.n_head;
  const each = config.n_head / config.n_key_head;
  const sources = ["projections"];
  const lines = [];
  const few = {few: 4, more: 12, all: Infinity}[flow.numbers];  // three stand side by side
  for (const [letter, part] of [
    ["q", parts.query],
    ["k", parts.key],
    ["v", parts.value],
  ]) {
    const turned = part.turned !== null;
    const was = part.normed !== null || turned;
    const column = make(
      "div",
      {class: "part"},
      vectorLine(was ? `${letter} projected` : letter, part.projected, undefined, few),
    );
    if (part.normed) column.append(vectorLine(turned ? `${letter} normed` : letter, part.normed, undefined, few));
    if (turned) column.append(vectorLine(letter, part.turned, undefined, few));
    lines.push(column);
  }
  const words = [
    "Three learned matrices make of it a ",
    make("b", {}, "query"),
    " (what this token looks for), a ",
    make("b", {}, "key"),
    " (what it offers to those that look) and a ",
    make("b", {}, "value"),
    ` (what it hands over): ${config.d_head} numbers each in head ${head}.`,
  ];
  if (grouped)
    words.push(` Key and value are those of group ${parts.keyHead}, which ${each} heads of queries share.`);
  if (config.qk_norm) {
    words.push(" Query and key are then normed (RMSNorm), each head’s by itself.");
    sources.push("queryNorm", "keyNorm");
  }
  if (parts.query.turned) {
    words.push(
      ` Last, query and key are turned by position ${t}: pairs of numbers half a head apart, as hands of clocks ` +
        `of different speeds.`,
    );
    sources.push("rotate");
  }
  if (shown.reading.changes.noPositions && config.positions === "rotary")
    words.push(" They are not turned by the position: you switched positions off.");
  const keys = grouped ? ["q_BHTK", "k_BGTK", "v_BGTK"] : ["q_BHTK", "k_BHSK", "v_BHSK"];
  return box("", "Query, key, value", keys, words, make("div", {class: "parts"}, ...lines), sources);
}

function weightsBox(t, head, parts) {
  const {config} = MODEL;
  const {changes, n} = shown.reading;
  const root = changes.unscaled ? 1 : Math.sqrt(config.d_head);
  const most = {few: 5, more: 12, all: Infinity}[flow.numbers];
  const largest = [...parts.keys].sort((a, b) => b.weight - a.weight).slice(0, most);
  const listed = flow.numbers === "all" ? parts.keys : largest;
  const others = parts.keys.length - listed.length;
  const cell = (text) => make("td", {class: "number"}, text);
  const rows = listed.map((key) => {
    const bar = make("i", {class: "share"});
    bar.style.width = `${Math.round(110 * key.weight)}px`;
    return make(
      "tr",
      {"data-key": key.s, class: key === largest[0] ? "most" : ""},
      make(
        "td",
        {class: "left"},
        token(labelAt(key.s)),
        make("span", {class: "where"}, key.s === t ? " itself" : ` at ${key.s}`),
      ),
      cell(shorter(key.dot)),
      cell(shorter(key.score)),
      cell(percent(key.weight)),
      make("td", {class: "left bar-cell"}, bar),
    );
  });
  if (others) {
    const rest = 1 - listed.reduce((sum, key) => sum + key.weight, 0);
    rows.push(
      make(
        "tr",
        {class: "rest"},
        make("td", {class: "left"}, plural(others, "other key")),
        cell(""),
        cell(""),
        cell(percent(Math.max(0, rest))),
        cell(""),
      ),
    );
  }
  const heading = make(
    "tr",
    {},
    ...[
      ["key", "left"],
      ["q · k", ""],
      [changes.unscaled ? "not divided" : `÷ √${config.d_head}`, ""],
      ["weight", ""],
      ["", "left"],
    ].map(([text, kind]) => make("th", {scope: "col", class: kind}, text)),
  );
  const table = make("table", {class: "keys"}, make("thead", {}, heading), make("tbody", {}, ...rows));
  const near = config.window ? `at most ${plural(config.window - 1, "token")} away (a window)` : "";
  const sees = changes.lookAhead
    ? `all tokens, even those after it: you let it look ahead${near ? `; but ${near}` : ""}`
    : near
      ? `itself and those before it, ${near}`
      : "itself and all before it, none after";
  const words = [
    `The query is multiplied with the key of each token it may look at: ${sees}. `,
    changes.unscaled
      ? "The products are not divided: you left 1/√d_head out. "
      : `Divided by √${config.d_head} = ${fixed(root, 2)}, these are the scores. `,
    "The softmax turns them into weights: positive, and 100 % in all.",
  ];
  return box(
    "",
    "Scores, then weights",
    ["scores_BHTS", "weights_BHTS"],
    words,
    [weightedText(parts.weights, t, n), make("div", {class: "wide"}, table)],
    ["scores", "weights"],
  );
}

// The text, each token coloured by its weight; what this token may not see is pale.
function weightedText(row, t, n) {
  const text = make("p", {
    class: "weighted",
    role: "img",
    "aria-label": "The text, each token coloured by its weight",
  });
  for (let s = 0; s < n; s++) {
    const label = labelAt(s);
    const span = make("span", {title: `${s}: ${percent(row[s])}`}, label === "␣" ? " " : label);
    const level = row[s] >= 0.002 ? shade(row[s]) : 0;
    if (level) {
      span.style.background = paletteCss[level];
      span.style.color = paletteDark[level] ? "#fff" : "#111";
    }
    if (s > t && !shown.reading.changes.lookAhead) span.className = "later";
    if (s === t) span.className = "query";
    text.append(span);
  }
  return text;
}

function mixBox(layer, head, parts) {
  const off = shown.reading.changes.heads.includes(`${layer}.${head}`);
  const words = off
    ? "This head is switched off: it puts out zeros."
    : "The values of those tokens, each times its weight, added up: what this head brings here.";
  const heaviest = [...parts.keys].sort((a, b) => b.weight - a.weight).slice(0, 2);
  const strongest = Math.max(largestOf(parts.mix), ...heaviest.map((key) => largestOf(key.value)));
  const lines = off
    ? []
    : heaviest.map((key) =>
        make(
          "div",
          {class: "times"},
          make("span", {class: "factor"}, `${percent(key.weight)} × `, token(labelAt(key.s))),
          vectorLine("v", key.value, strongest),
        ),
      );
  if (!off && parts.keys.length > 2)
    lines.push(
      make("p", {class: "note"}, `+ ${plural(parts.keys.length - 2, "more value")}, each times its weight =`),
    );
  return box(off ? "changed-box" : "", "Mix", ["out_BHTK"], words, [...lines, vectorLine("mix", parts.mix)], ["mix"]);
}

function headsBox(layer, head, parts) {
  const {config} = MODEL;
  const strongest = Math.max(...parts.mixes.map(largestOf));
  const buttons = parts.mixes.map((mix, other) => {
    const off = shown.reading.changes.heads.includes(`${layer}.${other}`);
    return make(
      "button",
      {
        type: "button",
        id: `flow-head-${layer}-${other}`,
        "aria-pressed": other === head,
        "aria-label":
          `Show head ${other} of layer ${layer}; it puts out a vector of length ` + `${shorter(lengthOf(mix))}`,
        onclick: () => {
          flowHead(layer, other);
          $(`flow-head-${layer}-${other}`).focus();
        },
      },
      make("span", {}, `H${other}${off ? " off" : ""}`),
      strip(mix, strongest),
      make("span", {class: "where"}, shorter(lengthOf(mix))),
    );
  });
  return box(
    "",
    `All ${plural(config.n_head, "head")}, side by side`,
    ["out_BTD"],
    [
      "Each head did the same with matrices of its own. Their outputs stand side by side, ",
      `${config.n_head} × ${config.d_head} = ${config.d_model} numbers. Choose a head to see its numbers above.`,
    ],
    make("div", {class: "flow-heads"}, ...buttons),
    ["heads"],
  );
}

function writtenBox(kind, parts, off) {
  const attends = kind === "attention";
  const before = lengthOf(parts.x);
  const wrote = lengthOf(parts.written);
  const words = off
    ? "Switched off: nothing is written to the stream."
    : attends
      ? "One more matrix mixes the heads into what attention writes to the stream."
      : "A second matrix brings it back to the width of the stream: what the MLP writes.";
  const out = box(
    off ? "changed-box" : "",
    "Projection",
    [attends ? "out_BTD" : "x_BTD"],
    words,
    vectorLine("written", parts.written),
    [attends ? "attentionProject" : "mlpProject"],
  );
  const sum = box(
    "on-stream adds sum",
    `+ what ${attends ? "attention" : "the MLP"} wrote`,
    ["x_BTD"],
    `Added to the stream, not put in its place: length ${shorter(before)}, and ${shorter(wrote)} written, make ` +
      `${shorter(lengthOf(parts.after))}.`,
    vectorLine("x", parts.after),
    [attends ? "attentionAdd" : "mlpAdd"],
  );
  return [out, sum];
}

function mlpBox(parts) {
  const {config} = MODEL;
  const above = parts.hidden.filter((x) => Math.abs(x) > 0.01).length;
  const words = {
    gelu:
      "A matrix widens it; GELU (its tanh form) lets positive numbers through and holds negative ones back " +
      "near 0.",
    gelu_exact:
      "A matrix widens it; GELU, x Φ(x), lets positive numbers through and holds negative ones back near 0.",
    relu2: "A matrix widens it; negative numbers become 0, positive ones are squared.",
    swiglu: "Two matrices widen it, up and gate; SiLU of the gate says how much of each number passes.",
  }[config.mlp];
  const lines = [
    vectorLine("up", parts.up),
    ...(parts.gate ? [vectorLine("gate", parts.gate)] : []),
    vectorLine("h", parts.hidden),
  ];
  return box(
    "",
    `MLP: ${config.d_model} → ${config.d_mlp} numbers`,
    ["h_BTF"],
    `${words} Here ${above} of ${config.d_mlp} end farther than 0.01 from 0.`,
    lines,
    ["up", config.mlp],
  );
}

function endBoxes(t) {
  const {config, vocabSize} = MODEL;
  const {ids, n} = shown.reading;
  const parts = endParts(MODEL, shown.reading, t);
  const next = t + 1 < n ? ids[t + 1] : null;
  const count = {few: 6, more: 15, all: 40}[flow.numbers];
  const listed = parts.order.slice(0, Math.min(count, vocabSize));
  if (next !== null && !listed.includes(next)) listed[listed.length - 1] = next;
  const list = make("div", {class: "bars chances"});
  for (const id of listed) {
    const bar = make("i");
    const came = id === next;
    bar.style.width = `${100 * parts.probabilities[id]}%`;
    list.append(
      make(
        "span",
        {class: came ? "came" : ""},
        token(tokenLabel(id)),
        make("span", {class: "where"}, came ? " came" : ""),
      ),
      make("span", {class: "number"}, shorter(parts.logits[id])),
      make("span", {class: "chance", "data-id": id}, percent(parts.probabilities[id])),
      bar,
    );
  }
  const last = normBox({norm: parts.norm, normed: parts.features}, "norm");
  last.querySelector("h4").textContent = "Last norm";
  last.querySelector(".shape").replaceWith(shapeTag("features_BTD"));
  last.classList.add("on-stream");
  const logits = box(
    "on-stream",
    "Logits",
    ["logits_BTV"],
    `The vector is compared with ${vocabSize.toLocaleString("en")} others, one for each token of the ` +
      `vocabulary${config.tie_embeddings ? " (the embedding table again: it is tied)" : ""}. Each product is a ` +
      `logit.`,
    vectorLine("logits", parts.logits),
    ["unembed"],
  );
  const words = [
    "The softmax makes probabilities of the logits: what the model says comes after ",
    token(labelAt(t)),
    ". Token, logit, probability:",
  ];
  const end =
    next === null
      ? make("p", {class: "outcome"}, "This is the last token: what comes next is open.")
      : make(
          "p",
          {class: "outcome", id: "flow-outcome"},
          "What came was ",
          token(tokenLabel(next)),
          `: ${percent(parts.probabilities[next])}, place ${rankOf(parts.logits, next)}. Loss −ln ` +
            `${fixed(parts.probabilities[next], 4)} = `,
          make("b", {}, `${fixed(-Math.log(parts.probabilities[next]), 3)} nats`),
          ".",
        );
  return [
    last,
    logits,
    box(
      "on-stream last",
      "Probability of the next token",
      ["probabilities_BV"],
      words,
      [list, end],
      ["softmax", ...(next === null ? [] : ["loss"])],
    ),
  ];
}
