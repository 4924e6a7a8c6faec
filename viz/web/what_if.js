// What if: parts of the model switched off, rules changed, and what that does to the loss and to each prediction.

// What can be changed besides parts. `about` says in one sentence what to see, and why.
const RULES = {
  lookAhead: {
    name: "Let it look ahead (mask off)",
    source: ["model/attention.py", "Mask.may_look"],
    about: () =>
      "Watch the maps fill above the diagonal: each token now sees the one it should guess, and yet the loss " +
      "mostly " +
      "rises, since in training that was forbidden and the model never learned what to do with it.",
  },
  unscaled: {
    name: "Leave out 1/√d_head",
    source: ["model/attention.py", "attention_scores"],
    about: () => {
      const root = Math.sqrt(MODEL.config.d_head).toFixed(1);
      return (
        `All scores are ${root} times as large: watch the maps thin out and the entropy fall, since the softmax of ` +
        "large scores gives nearly all weight to the largest, and in training would hardly pass on a gradient."
      );
    },
  },
  noPositions: {
    name: "Leave out positions",
    source: ["model/positions.py", ""],
    about: () => {
      const told = {
        learned: "The learned vectors are not added",
        sinusoidal: "The sines and cosines are not added",
        rotary: "Queries and keys are not turned",
      }[MODEL.config.positions];
      if (!told) return "This model is told no positions: there is nothing to leave out.";
      return (
        `${told}: watch the diagonals dissolve, since a head that looked one token back can’t tell which one ` +
        `that is.`
      );
    },
  },
};
const POSITION_KINDS = {
  learned: "LearnedPositions",
  sinusoidal: "SinusoidalPositions",
  rotary: "RotaryPositions",
  none: "Positions",
};

const isChanged = (changes) => JSON.stringify(changes) !== JSON.stringify(NO_CHANGES);

// The changes with one part of the model switched the other way. `kind`: "heads", "attentions" or "mlps".
function toggledPart(changes, kind, part) {
  const others = changes[kind].filter((other) => other !== part);
  const parts = others.length === changes[kind].length ? [...others, part] : others;
  const byNumber = (a, b) => String(a).localeCompare(String(b), "en", {numeric: true});
  return {...changes, [kind]: parts.sort(byNumber)};
}

// The changes in words.
function changesInWords({heads, attentions, mlps, lookAhead, unscaled, noPositions}) {
  const words = heads.map((name) => `head L${name.replace(".", " H")} off`);
  words.push(...attentions.map((layer) => `attention of layer ${layer} off`));
  words.push(...mlps.map((layer) => `MLP of layer ${layer} off`));
  if (lookAhead) words.push("looking ahead");
  if (unscaled) words.push("1/√d_head left out");
  if (noPositions) words.push("positions left out");
  return words;
}

const signed = (x, digits = 3) => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(digits)}`;
// Losses of the text: without changes and with them, {mean, each}, in nats.
const lossesCompared = () => ({before: lossOf(shown.plain), after: lossOf(shown.reading)});

function differenceMark(difference, digits = 3) {
  const kind = difference > 0.0005 ? "worse" : difference < -0.0005 ? "better" : "";
  return make("span", {class: kind}, signed(difference, digits));
}

// ---------- the banner of all views ----------

function showBanner() {
  const banner = $("changed");
  const changes = shown.changes;
  banner.hidden = !MODEL || !isChanged(changes);
  if (banner.hidden) return;
  const {before, after} = lossesCompared();
  const told = make("span", {}, make("b", {}, "The model is changed: "), changesInWords(changes).join(", "), ".");
  const loss = make("span", {class: "difference"});
  if (before.each.length) {
    loss.append(
      `Loss ${known(before.mean, 3)} → ${known(after.mean, 3)} (`,
      differenceMark(after.mean - before.mean),
      ")",
    );
  }
  banner.replaceChildren(told, loss, make("button", {type: "button", id: "undo", onclick: undoChanges}, "Undo all"));
}

async function undoChanges() {
  await changeModel(NO_CHANGES);
  $("live").textContent = "All changes undone";
  $(`tab-${state.view}`).focus();
}

// ---------- the grid of parts, and the rules ----------

const partButtons = new Map();  // "heads 1.2", "mlps 0" -> button
const aloneLosses = new WeakMap();  // a reading without changes -> Map: part -> loss without that part alone
let aloneRun = 0;  // number of the run of measurements that is going on
let aloneGoing = false;

function whatIfControls() {
  if (!MODEL) return;
  const {n_layer, n_head, positions} = MODEL.config;
  for (let layer = 0; layer < n_layer; layer++) {
    const heads = make("div", {class: "heads"});
    for (let head = 0; head < n_head; head++) heads.append(headSwitch(layer, head));
    const attention = partButton(
      "attentions",
      layer,
      `Layer ${layer}, all of its attention`,
      "attention",
      "part attends",
    );
    const mlp = partButton("mlps", layer, `Layer ${layer}, its MLP`, "MLP", "part thinks");
    const whole = make("div", {class: "whole"}, attention, mlp);
    $("parts").append(
      make("div", {class: `layer-parts${n_head > 6 ? " many" : ""}`}, make("h3", {}, `Layer ${layer}`), heads, whole),
    );
  }
  RULES.noPositions.source[1] = `${POSITION_KINDS[positions]}`;
  for (const [name, rule] of Object.entries(RULES)) $("rules").append(ruleSwitch(name, rule));
  $("rule-noPositions").disabled = positions === "none";
  $("measure").onclick = () => (aloneGoing ? stopMeasuring() : measureAlone());
  lostReader = new Reader($("lost-text"), "The text; choose a token to compare", (t, chosen) => {
    if (chosen) chooseLost(t);
  });
}

function headSwitch(layer, head) {
  const button = partButton("heads", `${layer}.${head}`, `Layer ${layer}, head ${head}`, `L${layer} H${head}`, "");
  button.prepend(make("canvas", {"aria-hidden": "true"}));
  return button;
}

// A switch: on while the part works.
function partButton(kind, part, name, title, look) {
  const attributes = {type: "button", role: "switch", class: look, "data-part": `${kind} ${part}`, "data-name": name};
  const button = make("button", attributes, make("span", {class: "title"}, title), make("span", {class: "told"}));
  button.onclick = () => changeModel(toggledPart(shown.changes, kind, part));
  partButtons.set(`${kind} ${part}`, button);
  return button;
}

function ruleSwitch(name, {name: title, source, about}) {
  const box = make("input", {type: "checkbox", id: `rule-${name}`, "aria-describedby": `about-${name}`});
  box.onchange = () => changeModel({...shown.changes, [name]: box.checked});
  const label = make("label", {for: `rule-${name}`}, make("b", {}, title), " ", make("code", {}, source.join(" · ")));
  return make("div", {class: "rule"}, box, make("div", {}, label, make("p", {id: `about-${name}`}, about())));
}

function whatIfShow() {
  const {changes} = shown;
  for (const name of Object.keys(RULES)) $(`rule-${name}`).checked = changes[name];
  for (const [part, button] of partButtons) {
    const [kind, which] = part.split(" ");
    const off = changes[kind].includes(kind === "heads" ? which : Number(which));
    const silent = kind === "heads" && changes.attentions.includes(Number(which.split(".")[0]));
    button.setAttribute("aria-checked", !off);
    button.classList.toggle("silent", silent);
    tellPart(part, button, off);
  }
  lostShow();
  drawParts(++drawing);
}

// What stands under a part: that it is off, what the loss is without it alone, or how far its map moved.
function tellPart(part, button, off, moved = null) {
  const alone = aloneLosses.get(shown.plain)?.get(part);
  const told = button.querySelector(".told");
  const difference = alone === undefined ? null : alone - lossOf(shown.plain).mean;
  if (off) told.replaceChildren(make("b", {}, "off"));
  else if (difference !== null) told.replaceChildren(make("span", {class: "costs"}, signed(difference)));
  else if (moved !== null && isChanged(shown.changes))
    told.replaceChildren(make("span", {class: "moved"}, `moved ${Math.round(100 * moved)} %`));
  else told.replaceChildren();
  const name = button.dataset.name;
  const effect = difference === null ? "" : `; without it alone the loss changes by ${signed(difference)}`;
  button.setAttribute("aria-label", `${name}${off ? ", off" : ""}${effect}`);
}

// ---------- maps, before and after ----------

let drawing = 0;
const matrices = new WeakMap();  // a reading -> its heads' weights, "layer.head" -> (n, n)

function matrixOf(reading, layer, head) {
  if (!matrices.has(reading)) matrices.set(reading, new Map());
  const known = matrices.get(reading);
  const name = `${layer}.${head}`;
  if (!known.has(name)) {
    const {n} = reading;
    const matrix = new Float32Array(n * n);
    for (let t = 0; t < n; t++) matrix.set(headWeights(MODEL, reading, layer, head, t), t * n);
    if (MODEL.config.n_layer * MODEL.config.n_head * n * n > 2e7) return matrix;  // too many to keep
    known.set(name, matrix);
  }
  return known.get(name);
}

// How far apart two maps are: the mean over tokens of the share of weight that lies elsewhere, 0 to 1.
function mapsApart(one, other, n) {
  let sum = 0;
  for (let i = 0; i < one.length; i++) sum += Math.abs(one[i] - other[i]);
  return sum / 2 / n;
}

// Maps of all heads, one after another, so that the page answers while they are drawn.
function drawParts(mine) {
  const {n_layer, n_head} = MODEL.config;
  const {reading, plain, n} = shown;
  const heads = Array.from({length: n_layer * n_head}, (_, i) => [Math.floor(i / n_head), i % n_head]);
  const bits = {before: 0, after: 0};
  const next = () => {
    if (mine !== drawing || state.view !== "what_if") return;
    const until = performance.now() + 12;
    while (heads.length && performance.now() < until) {
      const [layer, head] = heads.shift();
      const after = matrixOf(reading, layer, head);
      const before = reading === plain ? after : matrixOf(plain, layer, head);
      const button = partButtons.get(`heads ${layer}.${head}`);
      thumbnail(button.querySelector("canvas"), after, n, (t, s) => !allowed(t, s));
      tellPart(
        `heads ${layer}.${head}`,
        button,
        shown.changes.heads.includes(`${layer}.${head}`),
        mapsApart(before, after, n),
      );
      bits.before += entropy(before) / n / (n_layer * n_head);
      bits.after += entropy(after) / n / (n_layer * n_head);
    }
    document.documentElement.dataset.drawn = heads.length ? "no" : "yes";
    if (heads.length) setTimeout(next);
    else tellEntropy(bits);
  };
  next();
}

function tellEntropy({before, after}) {
  const now = isChanged(shown.changes) ? `${before.toFixed(2)} → ${after.toFixed(2)}` : before.toFixed(2);
  $("lost-entropy").textContent =
    `Mean entropy of all heads’ rows: ${now} bits. An even look at ${(2 ** after).toFixed(1)} tokens would have ` +
    `as much.`;
}

// ---------- each part alone ----------

async function measureAlone() {
  const mine = ++aloneRun;
  aloneGoing = true;
  const {plain, ids} = shown;
  if (!aloneLosses.has(plain)) aloneLosses.set(plain, new Map());
  const losses = aloneLosses.get(plain);
  $("measure").textContent = "Stop";
  const stopped = () => mine !== aloneRun || state.view !== "what_if" || shown.plain !== plain;
  let done = 0;
  for (const [part, button] of partButtons) {
    if (stopped()) break;
    $("measured").textContent = `${++done} of ${partButtons.size}`;
    if (losses.has(part)) continue;
    const [kind, which] = part.split(" ");
    const changes = toggledPart(NO_CHANGES, kind, kind === "heads" ? which : Number(which));
    const found = await readSliced(MODEL, ids, changes, plain, {milliseconds: 8, stopped});
    if (!found) break;
    losses.set(part, lossOf(found).mean);
    if (shown.plain === plain) tellPart(part, button, button.getAttribute("aria-checked") === "false");
  }
  if (mine === aloneRun) stopMeasuring();
}

function stopMeasuring() {
  aloneRun++;
  aloneGoing = false;
  $("measure").textContent = "Measure each one alone";
  const count = aloneLosses.get(shown.plain)?.size ?? 0;
  $("measured").textContent =
    `Under ${count === partButtons.size ? "each part" : `${count} of ${partButtons.size} parts`}: how the loss ` +
    `changes without it alone.`;
}

// ---------- what was lost ----------

let lostReader;

function lostShow() {
  const {before, after} = lossesCompared();
  const difference = after.mean - before.mean;
  const changed = isChanged(shown.changes);
  const panel = [make("h2", {}, "Loss of the text")];
  if (!before.each.length) panel.push(make("p", {}, "A single token leaves nothing to predict."));
  else if (!changed)
    panel.push(make("p", {class: "lost-loss"}, known(before.mean, 3), make("small", {}, " nats a token")));
  else {
    const now = make("span", {class: difference > 0 ? "worse" : "better"}, known(after.mean, 3));
    panel.push(
      make(
        "p",
        {class: "lost-loss"},
        make("small", {}, `${known(before.mean, 3)} → `),
        now,
        make("small", {}, " nats a token"),
      ),
    );
    const factor = Math.exp(Math.abs(difference));
    panel.push(
      make(
        "p",
        {id: "lost-difference"},
        differenceMark(difference, 4),
        `: on average each token is ${factor.toFixed(2)} times ${difference > 0 ? "less" : "more"} likely than ` +
          `before.`,
      ),
    );
    panel.push(make("ul", {}, ...changesInWords(shown.changes).map((words) => make("li", {}, words))));
  }
  panel.push(make("p", {class: "note", id: "lost-entropy"}));
  if (changed) panel.push(make("button", {type: "button", id: "lost-undo", onclick: undoChanges}, "Undo all"));
  else panel.push(make("p", {class: "note"}, "Nothing is changed."));
  $("lost").replaceChildren(...panel);
  lostColours(before.each, after.each);
  lostToken();
  lostMost(before.each, after.each);
  if (changed)
    $("live").textContent =
      `${changesInWords(shown.changes).join(", ")}. Loss ${known(before.mean, 3)} to ${known(after.mean, 3)}`;
}

// The text, each token but the first coloured by the change of its loss; 2 nats have the full colour.
function lostColours(before, after) {
  const words = state.words;
  state.words = false;
  lostReader.fill();
  lostReader.show(state.query, null);
  state.words = words;
  lostReader.spans.forEach((span, t) => {
    span.classList.remove("later");
    if (t === 0) return;
    const difference = after[t - 1] - before[t - 1];
    const strength = Math.round(85 * Math.min(1, Math.abs(difference) / 2) ** 0.7);
    if (strength)
      span.style.background = `color-mix(in srgb, var(--s${difference > 0 ? 1 : 0}) ${strength}%, transparent)`;
    span.title = `loss ${before[t - 1].toFixed(2)} → ${after[t - 1].toFixed(2)}`;
  });
}

function chooseLost(t) {
  state.query = t;
  lostReader.spans.forEach((span, s) => {
    span.classList.toggle("query", s === t);
    span.setAttribute("aria-selected", s === t);
  });
  lostReader.current = t;
  lostReader.root.setAttribute("aria-activedescendant", `lost-text-${t}`);
  lostToken();
  const {before, after} = lossesCompared();
  if (t > 0)
    $("live").textContent =
      `${isolated(shown.tokens[t][0])} at ${t}: loss ${before.each[t - 1].toFixed(3)} to ` +
      `${after.each[t - 1].toFixed(3)}`;
}

// What was expected at the chosen token, before and after: the bars of both readings.
function lostToken() {
  const came = state.query;
  const block = $("lost-token");
  if (came === 0) {
    block.replaceChildren(make("p", {class: "note"}, "Nothing stands before the first token: choose a later one."));
    return;
  }
  const row = (reading) => chances(rowOf(reading.logits, came - 1, MODEL.vocabSize));
  const before = row(shown.plain);
  const after = row(shown.reading);
  const listed = [...new Set([shown.ids[came], ...before.order.slice(0, 4), ...after.order.slice(0, 4)])];
  listed.sort((a, b) => after.probabilities[b] - after.probabilities[a]);
  const list = make("div", {class: "compared"});
  for (const id of listed) {
    const bars = make("span", {}, make("i", {class: "before"}), make("i", {class: "after"}));
    bars.firstChild.style.width = `${100 * before.probabilities[id]}%`;
    bars.lastChild.style.width = `${100 * after.probabilities[id]}%`;
    const name = make(
      "span",
      {},
      token(tokenLabel(id)),
      make("span", {class: "where"}, id === shown.ids[came] ? " came" : ""),
    );
    const numbers = make(
      "span",
      {class: "numbers", "data-id": id},
      `${percent(before.probabilities[id])} → ${percent(after.probabilities[id])}`,
    );
    list.append(name, bars, numbers);
  }
  block.replaceChildren(make("h2", {}, "Expected after ", token(labelAt(came - 1)), ` (${came - 1})`), list);
}

function lostMost(before, after) {
  const changed = Array.from(after, (loss, t) => ({t: t + 1, difference: loss - before[t]})).filter(
    ({difference}) => Math.abs(difference) > 0.005,
  );
  changed.sort((a, b) => Math.abs(b.difference) - Math.abs(a.difference));
  const list = make("div", {class: "most-changed"});
  for (const {t, difference} of changed.slice(0, 6)) {
    const context = shown.tokens
      .slice(Math.max(0, t - 8), t)
      .map(([label]) => label)
      .join("");
    list.append(
      make(
        "button",
        {type: "button", "data-t": t, onclick: () => chooseLost(t)},
        make("span", {class: "context"}, make("bdi", {class: "where"}, `…${context}`), token(labelAt(t))),
        make("span", {}, `${before[t - 1].toFixed(2)} → ${after[t - 1].toFixed(2)} `, differenceMark(difference, 2)),
      ),
    );
  }
  const title = make("h2", {}, "Where the loss changed most");
  $("lost-most").replaceChildren(...(changed.length ? [title, list] : []));
}
