// Write: the next token's distribution, and how one is drawn from it. sampling.js has the computation.

const CANDIDATES = 10;
let candidateRows = [];
let running = false;
let busy = false;  // a token is being read

function writeControls() {
  if (!MODEL) return;
  $("top-k").max = Math.min(MODEL.vocabSize, 100);
  for (const name of ["temperature", "top-k", "top-p", "seed"]) $(name).addEventListener("input", writeShow);
  $("write-one").onclick = () => writeOne();
  $("write-run").onclick = () => writing(!running);
  $("write-back").onclick = stepBack;
  $("new-seed").onclick = () => {
    $("seed").value = Math.floor(Math.random() * 2 ** 32);
    writeShow();
  };
  candidateRows = Array.from({length: Math.min(CANDIDATES, MODEL.vocabSize)}, candidateRow);
  $("candidates").append(...candidateRows.map(({item}) => item), otherRow.item);
}

function candidateRow() {
  const row = {label: make("bdi", {class: "tok"}), raw: make("i", {class: "raw"}), kept: make("i", {class: "kept"})};
  row.told = make("span", {class: "told"});
  const track = make("span", {class: "track", "aria-hidden": "true"}, row.raw, row.kept);
  row.button = make("button", {type: "button", onclick: () => write(row.id, null)}, row.label, track, row.told);
  row.item = make("li", {}, row.button);
  return row;
}

const otherRow = {item: make("li", {class: "others"})};

// The settings, by the names of `nextDistribution`.
const settings = () => ({
  temperature: Number($("temperature").value),
  topK: Number($("top-k").value),
  topP: Number($("top-p").value),
});
const seed = () => Math.min(2 ** 32 - 1, Math.max(0, Math.floor(Number($("seed").value) || 0)));

// What is drawn next: the distribution behind the text, the uniform number of this step, and where it falls.
function nextDraw() {
  const size = MODEL.vocabSize;
  const row = shown.reading.logits.subarray((shown.n - 1) * size);
  const distribution = nextDistribution(row, settings());
  const u = uniform(seed(), shown.drawn.length);
  const {id, sums} = draw(distribution.kept, u);
  return {...distribution, u, id, sums, total: sums[size - 1]};
}

function writeShow() {
  if (!shown.reading) return;
  settingsTold();
  writtenShow();
  let next;
  try {
    next = nextDraw();
  } catch (error) {
    $("draw-told").textContent = `There is nothing to draw from: ${error.message}.`;
    return;
  }
  candidatesShow(next);
  drawShow(next);
  $("write-back").disabled = !shown.drawn.length;
}

function settingsTold() {
  const {temperature, topK, topP} = settings();
  const told = {
    temperature: temperature === 0 ? "0: always the likeliest" : temperature.toFixed(2),
    "top-k": topK === 0 ? "all" : String(topK),
    "top-p": topP === 1 ? "1: all" : topP.toFixed(2),
  };
  for (const [name, text] of Object.entries(told)) {
    $(`${name}-told`).textContent = text;
    $(name).setAttribute("aria-valuetext", text);
  }
}

// What was written since the text was typed, each token with the probability it was drawn with.
function writtenShow() {
  const box = $("written");
  const last = shown.drawn.slice(-200);
  if (!last.length) box.replaceChildren(make("li", {class: "nothing"}, "Nothing is written yet."));
  else box.replaceChildren(...last.map(writtenToken));
  box.scrollLeft = box.scrollWidth;
}

function writtenToken({id, u, share}) {
  const how = u === null ? "not drawn: chosen" : `drawn with ${u.toFixed(4)}`;
  return make("li", {title: how}, token(tokenLabel(id)), make("span", {}, percent(share)));
}

// The likeliest tokens, by the model's own probabilities.
function candidatesShow({raw, kept, order, total}) {
  const width = (share) => `${100 * share}%`;
  candidateRows.forEach((row, i) => {
    const id = order[i];
    const share = kept[id] / total;
    const name = tokenLabel(id);
    row.id = id;
    row.label.textContent = name;
    row.raw.style.width = width(raw[id]);
    row.kept.style.width = width(share);
    row.told.textContent = share ? percent(share) : "left out";
    row.button.classList.toggle("out", !share);
    const told = `Write ${isolated(name)}: ${percent(share)}, by the model’s own ${percent(raw[id])}`;
    row.button.setAttribute("aria-label", told);
  });
  const rest = order.slice(candidateRows.length);
  const sum = (list) => rest.reduce((a, id) => a + list[id], 0);
  otherRow.item.hidden = !rest.length;
  const together = `${percent(sum(kept) / total)} together, ${percent(sum(raw))} by the model’s own`;
  otherRow.item.textContent = `${plural(rest.length, "other")}: ${together}`;
}

// The running sum of what is drawn from, token by token in the order of the vocabulary, and where the number falls.
function drawShow({kept, u, id, sums, total}) {
  const svg = $("the-draw");
  const width = Math.max(200, svg.clientWidth);
  svg.setAttribute("viewBox", `0 0 ${width} 64`);
  svg.replaceChildren();
  let nth = 0;
  kept.forEach((probability, other) => {
    if (!probability) return;
    const odd = nth++ % 2;
    const place = {x: (width * (sums[other] - probability)) / total, width: (width * probability) / total};
    svg.append(...shareShow(other, place, probability / total, other === id ? "hit" : odd ? "odd" : ""));
  });
  const marks = {start: [0, "0"], middle: [width / 2, "0.5"], end: [width, "1"]};
  for (const [anchor, [x, text]] of Object.entries(marks))
    svg.append(drawn("text", {x, y: 61, "text-anchor": anchor}, text));
  const name = token(tokenLabel(id));
  if (settings().temperature === 0) {
    $("draw-told").replaceChildren("At temperature 0 nothing is drawn: the likeliest, ", name, ", is taken.");
    return;
  }
  const x = width * u;
  const anchor = x < 30 ? "start" : x > width - 30 ? "end" : "middle";
  svg.append(
    drawn("line", {class: "now", x1: x, x2: x, y1: 12, y2: 50}),
    drawn("text", {class: "number", x, y: 9, "text-anchor": anchor}, u.toFixed(4)),
  );
  const [from, to] = [(sums[id] - kept[id]) / total, sums[id] / total].map((sum) => sum.toFixed(4));
  $("draw-told").replaceChildren(
    "The number of this step, uniform between 0 and 1, is ",
    make("b", {}, u.toFixed(4)),
    ". Added up in the order of the vocabulary, the probabilities pass it at ",
    name,
    `, whose share runs from ${from} to ${to}: that is the token drawn next.`,
  );
}

// One token's share of the running sum, named where there is room for it.
function shareShow(id, {x, width}, share, kind) {
  const part = drawn("rect", {class: `share ${kind}`, x, y: 16, width, height: 30});
  part.append(drawn("title", {}, `${isolated(tokenLabel(id))} ${percent(share)}`));
  const name = tokenLabel(id);
  if (Array.from(name).length * 10 + 4 > width) return [part];
  const attributes = {class: `name ${kind}`, x: x + width / 2, y: 36, "text-anchor": "middle"};
  return [part, drawn("text", attributes, isolated(name))];
}

// ---------- writing ----------

// Append a token; `u` is the number it was drawn with, null where it was chosen by hand. What outgrows the context is
// forgotten as in model/generate.py: all but the last context_length // 2 tokens. True where it was read.
async function write(id, u) {
  if (busy) return false;
  busy = true;
  const {kept, total} = nextDraw();
  const all = [...shown.all, id];
  const from = all.length - withinContext(all.slice(shown.from), MODEL.config.context_length).length;
  const entry = {id, u, share: kept[id] / total, from: shown.from};
  const done = await reread({all, from, drawn: [...shown.drawn, entry]});
  busy = false;
  if (!done) return false;
  state.query = shown.n - 1;
  state.key = null;
  redraw();
  $("live").textContent = running ? "" : `Written: ${isolated(tokenLabel(id))}`;
  return true;
}

async function writeOne() {
  const {id, u} = nextDraw();
  return write(id, settings().temperature === 0 ? null : u);
}

async function stepBack() {
  writing(false);
  if (busy || !shown.drawn.length) return;
  const {from} = shown.drawn.at(-1);
  if (!(await reread({all: shown.all.slice(0, -1), from, drawn: shown.drawn.slice(0, -1)}))) return;
  state.query = shown.n - 1;
  redraw();
}

// The id that stands between two documents, where the tokenizer has one: sample.py ends a text there.
const isEnd = (id) => D.model.tokenizer.separator !== false && id === TOKENIZER.vocabSize - 1;

// Write token after token, or stop that.
async function writing(on) {
  running = on;
  $("write-run").textContent = on ? "Pause" : "Run";
  while (running && state.view === "write") {
    if (!(await writeOne())) break;
    if (isEnd(shown.all.at(-1))) break;
    await new Promise((resolve) => setTimeout(resolve, 90));
  }
  if (!on) return;
  running = false;
  $("write-run").textContent = "Run";
}
