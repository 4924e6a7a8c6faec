// Head: scores and weights of one head as large maps.

let scoresView, weightsView;
function headViews() {
  const move = (query, key, byKey) => {
    if (!state.kept || byKey) chooseUnit(query, key, byKey);
  };
  const keep = (query, key) => {
    state.kept = !(state.kept && unitOf(state.query) === query);
    chooseUnit(query, key, false);
  };
  scoresView = new MapView($("scores-map"), "Scores", {onmove: move, onkeep: keep});
  weightsView = new MapView($("weights-map"), "Weights", {onmove: move, onkeep: keep, strip: true});
  scoresView.twin = weightsView;
  weightsView.twin = scoresView;
  const zoom = (factor) => () => {
    for (const view of [scoresView, weightsView]) {
      view.zoom = Math.min(16, Math.max(1, view.zoom * factor));
      view.layout();
    }
    for (const view of [scoresView, weightsView]) view.mark(view.query, view.key, true);
  };
  $("zoom-in").onclick = zoom(1.6);
  $("zoom-out").onclick = zoom(1 / 1.6);
  $("head").addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      state.kept = false;
      headMark(false);
    }
  });
  for (const element of document.querySelectorAll(".d-head")) element.textContent = D.dHead;
}

function headShow() {
  const h = HEADS[state.head];
  const n = unitCount();
  const labels = Array.from({length: n}, (_, i) => labelOf(i));
  const matrix = state.words ? merged(weights(h)) : weights(h);
  const forbidden = (t, s) => !unitAllowed(t, s);
  document.querySelector(".maps").classList.toggle("merged", state.words);
  $("scores-map").hidden = $("scores-legend").hidden = state.words;
  $("no-scores").hidden = !state.words;
  if (!state.words) {
    h.scores = scores(h);
    let low = Infinity;
    let high = -Infinity;
    for (const x of h.scores)
      if (x > -Infinity) {
        low = Math.min(low, x);
        high = Math.max(high, x);
      }
    const span = high - low || 1;
    scoresView.set(h.scores, n, labels, forbidden, (x) => Math.round((255 * (x - low)) / span));
    ramp(
      $("scores-legend"),
      [
        [0, fixed(low, 1)],
        [1, fixed(high, 1)],
      ],
      (x) => x,
    );
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
  const query = unitOf(state.query);
  const key = state.key === null ? null : unitOf(state.key);
  for (const view of [scoresView, weightsView]) if (view.matrix) view.mark(query, key, say);
  const n = unitCount();
  const row = weightsView.matrix.subarray(query * n, query * n + n);
  const bits = weightsView.entropies[query];
  const looks = $("looks");
  const units = state.words ? "words" : "tokens";
  looks.replaceChildren(
    make("h2", {}, token(labelOf(query)), ` (${state.words ? "word" : "token"} ${query}) looks at`),
    bars(row, query),
    make(
      "p",
      {class: "note"},
      `Entropy ${bits.toFixed(2)} bits: as spread out as an even look at ${(2 ** bits).toFixed(1)} ${units}.`,
    ),
  );
  let said = `${isolated(labelOf(query))} at ${query} looks most at ${strongest(row, query, 3)
    .map((s) => `${isolated(labelOf(s))} ${percent(row[s])}`)
    .join(", ")}.`;
  if (key !== null) {
    const line = make(
      "p",
      {class: "cell"},
      token(labelOf(query)),
      ` (${query}) → `,
      token(labelOf(key)),
      ` (${key}): `,
    );
    if (!unitAllowed(query, key)) line.append("forbidden; score −∞, weight 0");
    else
      line.append(
        state.words ? "" : `score ${fixed(HEADS[state.head].scores[query * n + key], 3)}, `,
        make("b", {}, `weight ${percent(row[key])}`),
      );
    looks.prepend(line);
    const weight = unitAllowed(query, key) ? percent(row[key]) : "forbidden";
    said = `${isolated(labelOf(query))} at ${query} to ${isolated(labelOf(key))} at ${key}: ${weight}. ` + said;
  }
  if (state.kept)
    looks.append(make("p", {class: "note"}, "Kept: click the row again, or press Escape, to let go."));
  if (say) $("live").textContent = said;
}

function strongest(row, query, count) {
  const open = Array.from(row, (_, s) => s).filter((s) => unitAllowed(query, s));
  return open.sort((a, b) => row[b] - row[a]).slice(0, count);
}

function bars(row, query, count = 8) {
  const list = make("div", {class: "bars"});
  const first = strongest(row, query, count);
  let rest = 1;
  for (const s of first) {
    rest -= row[s];
    const bar = make("i");
    const back = query - s;
    bar.style.width = `${100 * row[s]}%`;
    const where = back === 0 ? "itself" : back > 0 ? `${back} back` : `${-back} ahead`;
    list.append(
      make("span", {}, token(labelOf(s)), make("span", {class: "where"}, ` ${where}`)),
      bar,
      make("span", {}, percent(row[s])),
    );
  }
  const open = Array.from(row, (_, s) => s).filter((s) => unitAllowed(query, s)).length;
  if (open > first.length)
    list.append(
      make("span", {class: "where"}, plural(open - first.length, "other")),
      make("span"),
      make("span", {class: "where"}, percent(Math.max(0, rest))),
    );
  return list;
}

function profileShow(h) {
  const w = weights(h);
  const n = shown.n;
  const far = Math.min(n, 40);
  const profile = [];
  for (let d = 0; d < far; d++) {
    let sum = 0;
    for (let t = d; t < n; t++) sum += w[t * n + t - d];
    profile.push(sum / (n - d));
  }
  const svg = $("profile");
  const top = Math.max(0.02, ...profile);
  const step = 600 / far;
  svg.replaceChildren(
    drawn("line", {x1: 34, x2: 634, y1: 96, y2: 96, class: "axis"}),
    drawn("text", {x: 28, y: 14, "text-anchor": "end"}, `${Math.round(100 * top)} %`),
    drawn("text", {x: 28, y: 99, "text-anchor": "end"}, "0"),
  );
  profile.forEach((value, d) => {
    const bar = drawn("rect", {
      x: 34 + d * step,
      y: 96 - (86 * value) / top,
      width: Math.max(1, step - 2),
      height: (86 * value) / top,
    });
    bar.append(drawn("title", {}, `${d} back: ${percent(value)}`));
    svg.append(bar);
    if (d % 5 === 0)
      svg.append(
        drawn("text", {x: 34 + (d + 0.5) * step - 1, y: 111, "text-anchor": "middle"}, d === 0 ? "itself" : d),
      );
  });
}
