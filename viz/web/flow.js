// The Flow view: one token's way from its id to the probabilities of the next, the boxes of flow_boxes.js along the
// stream, layer by layer.

// ---------- layers ----------

// Attention and MLP of one layer leave the stream, and come back to it at the box below.
function layerBoxes(layer, head, t) {
  const {changes} = shown.reading;
  const parts = attentionParts(MODEL, shown.reading, layer, head, t);
  const inner = mlpParts(MODEL, shown.reading, layer, t);
  const [attentionOut, attentionSum] = writtenBox("attention", parts, changes.attentions.includes(layer));
  const [mlpOut, mlpSum] = writtenBox("mlp", inner, changes.mlps.includes(layer));
  return [
    make(
      "div",
      {class: "branch attends"},
      make("h3", {}, `Attention, head ${head}`, make("span", {}, "tokens exchange what they know")),
      normBox(parts, "attentionNorm"),
      projectionBox(t, head, parts),
      weightsBox(t, head, parts),
      mixBox(layer, head, parts),
      headsBox(layer, head, parts),
      attentionOut,
    ),
    attentionSum,
    make(
      "div",
      {class: "branch thinks"},
      make("h3", {}, "MLP", make("span", {}, "each token by itself")),
      normBox(inner, "mlpNorm"),
      mlpBox(inner),
      mlpOut,
    ),
    mlpSum,
  ];
}

function layerFold(layer, head, t) {
  const {d_model} = MODEL.config;
  const rows = shown.reading.layers[layer];
  const [attended, thought] = [rows.written_attention, rows.written_mlp].map((written) =>
    lengthOf(rowOf(written, t, d_model)),
  );
  const open = flow.open.has(layer),
    button = make(
      "button",
      {
        type: "button",
        id: `flow-layer-${layer}`,
        class: "fold",
        "aria-expanded": open,
        "aria-controls": `flow-inside-${layer}`,
        onclick: () => {
          if (!flow.open.delete(layer)) flow.open.add(layer);
          flowDraw(`flow-layer-${layer}`);
        },
      },
      make("span", {class: "sign", "aria-hidden": "true"}, open ? "▾" : "▸"),
      make("b", {}, `Layer ${layer}`),
      make(
        "span",
        {class: "told"},
        ` attention wrote ${shorter(attended)}, the MLP ${shorter(thought)}; stream ` +
          `${shorter(lengthOf(rowOf(rows.x_after, t, d_model)))}. `,
      ),
      ...wouldSay(layer, t),
    );
  const inside = make(
    "div",
    {id: `flow-inside-${layer}`, class: "inside"},
    ...(open ? layerBoxes(layer, head, t) : []),
  );
  inside.hidden = !open;
  return make("div", {class: "layer"}, button, inside);
}

// What the stream after a layer would say if the model ended there, where that costs little.
function wouldSay(layer, t) {
  const {config, vocabSize} = MODEL;
  if (vocabSize * config.d_model * config.n_layer > 3e7) return [];
  const {probabilities, order} = chances(lens(MODEL, shown.reading, layer, t));
  return [
    make(
      "span",
      {class: "told says"},
      "After it the stream says ",
      token(tokenLabel(order[0])),
      ` ${percent(probabilities[order[0]])}`,
    ),
  ];
}

// ---------- the view ----------

function flowShow() {
  if (flow.lastHead !== state.head) {
    flow.lastHead = state.head;
    flowChosen(HEADS[state.head].layer, HEADS[state.head].head);
  }
  const words = state.words;
  state.words = false;  // the flow knows tokens
  flow.text.fill();
  flowDraw();
  state.words = words;
}

function flowChosen(layer, head) {
  flow.layer = layer;
  flow.head = head;
  flow.open.add(layer);
}

function flowControls() {
  if (!MODEL) return;
  for (let layer = 0; layer < MODEL.config.n_layer; layer++) {
    for (let head = 0; head < MODEL.config.n_head; head++) {
      $("flow-head").append(make("option", {value: `${layer}.${head}`}, `L${layer} H${head}`));
    }
  }
  $("flow-head").onchange = () => {
    const [layer, head] = $("flow-head").value.split(".").map(Number);
    flowHead(layer, head);
    $(`flow-layer-${layer}`).scrollIntoView();
  };
  flow.text = new Reader($("flow-text"), "The text; choose the token whose way is shown", (t, chosen) => {
    if (chosen) flowToken(t);
  });
  $("flow-back").onclick = () => flowToken(Math.max(0, state.query - 1));
  $("flow-on").onclick = () => flowToken(Math.min(shown.reading.n - 1, state.query + 1));
  $("flow-numbers").onchange = () => {
    flow.numbers = $("flow-numbers").value;
    flowDraw();
  };
  $("flow-fold").onclick = () => {
    const all = Array.from({length: MODEL.config.n_layer}, (_, layer) => layer);
    flow.open = new Set(flow.open.size === all.length ? [] : all);
    flowDraw();
  };
}

function flowToken(t) {
  state.query = t;
  flowDraw();
  const {probabilities, order} = endParts(MODEL, shown.reading, t);
  $("live").textContent =
    `Token ${t}, ${isolated(labelAt(t))}: the model says ${isolated(tokenLabel(order[0]))} comes next, ` +
    `${percent(probabilities[order[0]])}`;
}

function flowHead(layer, head) {
  const shownHead = HEADS.findIndex((h) => h.layer === layer && h.head === head);  // a page may show some heads only
  flowChosen(layer, head);
  if (shownHead >= 0) {
    state.head = shownHead;
    flow.lastHead = shownHead;
  }
  flowDraw();
}

function flowDraw(focus = null) {
  const t = Math.min(state.query, shown.reading.n - 1);
  const {head} = flow;
  const {n_layer} = MODEL.config;
  flow.text.show(t, null);
  revealToken(flow.text, t);
  $("flow-token").replaceChildren(token(labelAt(t)), ` token ${t} of ${shown.reading.n}`);
  $("flow-head").value = `${flow.layer}.${head}`;
  $("flow-back").disabled = t === 0;
  $("flow-on").disabled = t === shown.reading.n - 1;
  $("flow-fold").textContent = flow.open.size === n_layer ? "Fold all layers" : "Open all layers";
  $("flow-way").replaceChildren(
    ...beginningBoxes(t),
    ...Array.from({length: n_layer}, (_, layer) => layerFold(layer, head, t)),
    ...endBoxes(t),
  );
  flowLetters();
  if (focus) $(focus).focus();
}

// Scroll a reader, and nothing else, so that a token is seen.
function revealToken({root, spans}, t) {
  const [outside, inside] = [root, spans[t]].map((element) => element.getBoundingClientRect());
  if (inside.top < outside.top || inside.bottom > outside.bottom) {
    root.scrollTop += inside.top - outside.top - root.clientHeight / 2;
  }
}

function flowLetters() {
  const size = sizes();
  const grouped = MODEL.config.n_key_head !== MODEL.config.n_head;
  const list = make("dl");
  for (const [letter, about] of Object.entries(LETTERS)) {
    if (letter !== "G" || grouped)
      list.append(
        make("dt", {}, letter),
        make("dd", {}, make("b", {}, size[letter].toLocaleString("en")), ` ${about}`),
      );
  }
  const swatch = (kind) => make("i", {class: `swatch ${kind}`});
  $("flow-letters").replaceChildren(
    make("h2", {}, "Shapes"),
    make(
      "p",
      {class: "note"},
      "The letters behind a tensor’s name, in the page as in the code, say what its directions are:",
    ),
    list,
    make("h2", {}, "Colours"),
    make(
      "p",
      {class: "note"},
      "A strip is a vector, a cell a number: ",
      swatch("below"),
      " below 0, ",
      swatch("above"),
      " above; the stronger, the farther from 0 within that vector.",
    ),
    make(
      "p",
      {class: "note"},
      swatch("stream"),
      " the stream ",
      swatch("attends"),
      " attention ",
      swatch("thinks"),
      " MLP",
    ),
  );
}
