// Equation: the computation of one head for one token, with its numbers.

const expanded = {vectors: false, keys: false};
let chooser;

function equationControls() {
  chooser = new Reader($("chooser"), "Choose the token that looks", (t, say) => {
    if (say) equationPick(t);
  });
}

function equationShow() {
  const words = state.words;
  state.words = false;  // the equation knows tokens
  chooser.fill();
  equationMark(state.query, false);
  state.words = words;
}

function equationMark(t, say) {
  state.query = t;
  const h = arrays(HEADS[state.head]);
  const root = divisor();
  const d = D.dHead;
  const rows = [];
  for (let s = 0; s < shown.n; s++)
    if (allowed(t, s)) {
      const product = dot(h, t, s);
      rows.push({s, product, score: product / root});
    }
  const most = Math.max(...rows.map((r) => r.score));
  let sum = 0;
  for (const r of rows) sum += r.exp = Math.exp(r.score - most);
  const row = new Float64Array(shown.n);
  for (const r of rows) row[r.s] = r.weight = r.exp / sum;
  chooser.show(t, row);
  const count = expanded.vectors ? d : Math.min(6, d);
  const more = d > count ? ", …" : "";
  const numbers = (array, at) =>
    `[${Array.from(array.subarray(at * d, at * d + count), (x) => fixed(x)).join(", ")}${more}]`;
  const largest = [...rows].sort((a, b) => b.weight - a.weight).slice(0, 10);
  const listed = expanded.keys ? rows : rows.filter((r) => largest.includes(r));
  const others = rows.filter((r) => !listed.includes(r));
  const total = (list, name) => list.reduce((a, r) => a + r[name], 0);
  const cell = (text, kind = "number") => make("td", {class: kind}, text);
  const about = (s) => make("td", {class: "left"}, `${s} `, token(shown.tokens[s][0]));
  const share = (w) => {
    const bar = make("i", {class: "share"});
    bar.style.width = `${90 * w}px`;
    return bar;
  };
  const table = make(
    "table",
    {id: "computation"},
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        make("th", {}, "key"),
        make("th", {class: "left"}, "kₛ"),
        make("th", {}, "q · kₛ"),
        make("th", {}, shown.changes.unscaled ? "not divided" : `÷ √${d} = ${fixed(root, 3)}`),
        make("th", {}, "− max"),
        make("th", {}, "exp"),
        make("th", {}, "weight"),
        make("th", {class: "left"}, ""),
      ),
    ),
  );
  const body = make("tbody");
  for (const r of listed) {
    body.append(
      make(
        "tr",
        {"data-key": r.s, class: r === largest[0] ? "most" : ""},
        about(r.s),
        cell(numbers(h.k, r.s), "left vector"),
        cell(fixed(r.product)),
        cell(fixed(r.score)),
        cell(fixed(r.score - most)),
        cell(fixed(r.exp)),
        cell(fixed(r.weight, WEIGHT_DIGITS)),
        make("td", {class: "left"}, share(r.weight)),
      ),
    );
  }
  if (others.length) {
    body.append(
      make(
        "tr",
        {class: "rest"},
        cell(plural(others.length, "other key"), "left"),
        cell(""),
        cell(""),
        cell(""),
        cell(""),
        cell(fixed(total(others, "exp"))),
        cell(fixed(total(others, "weight"), WEIGHT_DIGITS)),
        cell(""),
      ),
    );
  }
  const ahead = shown.n - rows.length;
  if (ahead)
    body.append(
      make(
        "tr",
        {class: "rest"},
        cell(plural(ahead, "forbidden key"), "left"),
        cell(""),
        cell(""),
        cell("−∞"),
        cell("−∞"),
        cell("0"),
        cell("0"),
        cell(""),
      ),
    );
  body.append(
    make(
      "tr",
      {class: "total"},
      cell("", "left"),
      cell(""),
      cell(""),
      cell(`max ${fixed(most)}`),
      cell(""),
      cell(`sum ${fixed(sum)}`),
      cell(`sum ${fixed(total(rows, "weight"), WEIGHT_DIGITS)}`),
      cell(""),
    ),
  );
  table.append(body);
  const toggle = (name, text) =>
    make(
      "button",
      {
        type: "button",
        id: `toggle-${name}`,
        onclick: () => {
          expanded[name] = !expanded[name];
          equationMark(state.query, false);
          $(`toggle-${name}`).focus();
        },
      },
      text,
    );
  const steps = [
    make("h2", {}, "1. The query of ", token(shown.tokens[t][0]), ` (token ${t}): ${d} numbers`),
    make("p", {class: "vector", id: "query-vector"}, `q = ${numbers(h.q, t)}`),
    make("h2", {}, "2. Each key it may look at answers, and the softmax turns the answers into weights"),
    make("div", {class: "wide"}, table),
    make(
      "p",
      {class: "bar"},
      toggle("vectors", expanded.vectors ? `Show 6 of ${d} numbers` : `Show all ${d} numbers`),
      toggle("keys", expanded.keys ? "Show the 10 strongest keys" : `Show all ${rows.length} keys`),
    ),
    make(
      "p",
      {class: "note"},
      `√${d} keeps the scores’ spread near 1, whatever the width of a head. Subtracting the maximum changes no ` +
        "weight, and keeps every exponential at most 1.",
    ),
    make("h2", {}, "3. The values, mixed by those weights"),
  ];
  if (h.v) {
    const out = new Float32Array(d);
    for (let i = 0; i < d; i++) {
      let x = 0;
      for (const r of rows) x += r.weight * h.v[r.s * d + i];
      out[i] = x;
    }
    const mix = make("tbody");
    for (const r of largest.slice(0, 4))
      mix.append(
        make(
          "tr",
          {},
          cell(fixed(r.weight, WEIGHT_DIGITS)),
          cell("×", "left"),
          make("td", {class: "left"}, `v of ${r.s} `, token(shown.tokens[r.s][0])),
          cell(numbers(h.v, r.s), "left vector"),
        ),
      );
    if (rows.length > 4)
      mix.append(
        make(
          "tr",
          {class: "rest"},
          cell(fixed(total(rows, "weight") - total(largest.slice(0, 4), "weight"), WEIGHT_DIGITS)),
          cell("×", "left"),
          cell(plural(rows.length - 4, "other value"), "left"),
          cell(""),
        ),
      );
    mix.append(
      make(
        "tr",
        {class: "total"},
        cell(""),
        cell("=", "left"),
        cell("output of this head", "left"),
        make("td", {class: "left vector", id: "output-vector"}, numbers(out, 0)),
      ),
    );
    steps.push(
      make("div", {class: "wide"}, make("table", {id: "mixture"}, mix)),
      make(
        "p",
        {class: "note"},
        `The outputs of all heads of layer ${h.layer}, side by side, go through one more matrix and are added to ` +
          "what the model knew about this position.",
      ),
    );
  } else {
    steps.push(
      make(
        "p",
        {class: "note"},
        "The values were left out to keep this page small: make one of fewer layers (--layer), heads (--head) or " +
          "tokens (--tokens) to have them.",
      ),
    );
  }
  $("steps").replaceChildren(...steps);
  if (!say) return;
  const {s, weight} = largest[0];
  const [from, to] = [t, s].map((at) => `${isolated(shown.tokens[at][0])} at ${at}`);
  $("live").textContent = `${from}: largest weight ${fixed(weight, WEIGHT_DIGITS)} on ${to}`;
}

function equationPick(t) {
  const words = state.words;
  state.words = false;
  equationMark(t, true);
  state.words = words;
}
