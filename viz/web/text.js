// Text: what each token looks at, and what the model expected to come.

// Running text whose tokens (or words) can be pointed at and walked with the arrow keys. `onpick` gets the unit.
class Reader {
  constructor(root, name, onpick) {
    Object.assign(this, {root, onpick, spans: []});
    root.tabIndex = 0;
    root.setAttribute("role", "listbox");
    root.setAttribute("aria-label", name);
    const pick = (event) => {
      const unit = event.target.dataset?.unit;
      if (unit !== undefined) onpick(Number(unit), event.type === "click");
    };
    root.addEventListener("pointerover", (event) => {
      // Where the mouse did not move, the text was filled in under it.
      const moved = event.screenX !== this.x || event.screenY !== this.y;
      this.x = event.screenX;
      this.y = event.screenY;
      if (event.pointerType === "mouse" && moved) pick(event);
    });
    root.addEventListener("click", pick);
    root.addEventListener("keydown", (event) => {
      const step = {ArrowLeft: -1, ArrowUp: -10, ArrowRight: 1, ArrowDown: 10, Home: -Infinity, End: Infinity}[
        event.key
      ];
      if (!step) return;
      event.preventDefault();
      onpick(Math.min(this.spans.length - 1, Math.max(0, this.current + step)), true);
    });
  }
  fill() {
    const {before, leftOut} = textAround();
    this.root.replaceChildren();
    if (before) this.root.append(make("span", {class: "outside", "aria-hidden": "true"}, before));
    this.markLeftOut(leftOut.get(-1));
    this.spans = Array.from({length: unitCount()}, (_, unit) => {
      const text = textOf(unit);
      const label = labelOf(unit);
      const span = make("span", {
        "data-unit": unit,
        role: "option",
        id: `${this.root.id}-${unit}`,
        "aria-label": label,
      });
      if (text.startsWith("\n") && !text.trim()) span.append(label.replaceAll("␣", " "));
      else span.append(text);
      if ((text === label && (/^␣?⟨/.test(label) || label === "↵")) || text.startsWith("\n"))
        span.classList.add("sign");
      this.root.append(span);
      if (text.includes("\n")) this.root.append(make("br"));
      for (let t = firstToken(unit); t <= lastToken(unit); t++) this.markLeftOut(leftOut.get(t));
      return span;
    });
  }

  // What the tokenizer doesn't know stands where it was typed, struck out.
  markLeftOut(text) {
    if (!text) return;
    for (const character of text) this.root.append(make("del", {"aria-hidden": "true"}, labelOfText(character)));
  }

  show(unit, row) {
    this.current = unit;
    this.spans.forEach((span, s) => {
      const open = row && unitAllowed(unit, s) && row[s] >= 0.002;
      const level = open ? shade(row[s]) : 0;
      span.style.background = level ? paletteCss[level] : "";
      span.style.color = level ? (paletteDark[level] ? "#fff" : "#111") : "";
      span.classList.toggle("later", causal() && s > unit);
      span.classList.toggle("query", s === unit);
      span.setAttribute("aria-selected", s === unit);
    });
    this.root.setAttribute("aria-activedescendant", `${this.root.id}-${unit}`);
  }
}

let reader;

function textControls() {
  reader = new Reader($("reader"), "The text; choose a token", textMark);
}

function textShow() {
  reader.fill();
  const h = HEADS[state.head];
  $("source-about").textContent = {
    head: `Weights of layer ${h.layer}, head ${h.head}.`,
    layer: `The mean of ${D.whole ? "all" : "the shown"} heads of layer ${h.layer}.`,
    rollout:
      "Attention rollout follows all layers down to the input: each layer’s mean weights, mixed half and half with " +
      "the token itself, for the stream that runs past attention, and multiplied (Abnar & Zuidema 2020).",
  }[state.source];
  textMark(unitOf(state.query), false);
}

function textMark(unit, say) {
  state.query = lastToken(unit);
  const row = sourceRow(unit);
  const t = state.query;
  reader.show(unit, row);
  $("text-looks").replaceChildren(make("h2", {}, token(labelOf(unit)), " looks at"), bars(row, unit));
  const block = $("predicted");
  block.replaceChildren();
  const expected = shown.predicted(t);
  if (expected) {
    const after = state.words ? [" after ", token(labelOf(unit))] : [" after it"];
    const list = make("div", {class: "bars"});
    for (const [label, p] of expected) {
      const bar = make("i");
      bar.style.width = `${100 * p}%`;
      list.append(token(label), bar, make("span", {}, percent(p)));
    }
    block.append(make("h2", {}, "What the model expected", ...after), list);
    if (t + 1 < shown.n) {
      block.append(
        make(
          "p",
          {class: "note loss"},
          "What came: ",
          token(shown.tokens[t + 1][0]),
          `, held ${Number.isFinite(shown.losses[t]) ? percent(Math.exp(-shown.losses[t])) : "–"} likely. `,
          make("b", {}, `Loss ${known(shown.losses[t], 3)} nats`),
          " (−ln of that probability).",
        ),
      );
    }
  }
  if (say)
    $("live").textContent = `${isolated(labelOf(unit))} looks most at ${strongest(row, unit, 3)
      .map((s) => `${isolated(labelOf(s))} ${percent(row[s])}`)
      .join(", ")}`;
}
