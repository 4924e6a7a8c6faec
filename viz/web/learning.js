// Learning: the maps while the model was learning, and how its loss fell.

const L = D.learning;
let snapshots = null;
let moment = 0;
let playing = 0;
let bigView = null;
async function loadSnapshots() {
  const inflate = (bytes) =>
    new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  snapshots = await Promise.all(
    L.steps.map(async (_, i) => new Uint8Array(await inflate(decode(`snapshot-${i}`)))),
  );
}

// from the lower triangle, row by row
function snapshotMatrix(at, index) {
  const n = L.tokens.length;
  const size = (n * (n + 1)) / 2;
  const bytes = snapshots[at].subarray(index * size, (index + 1) * size);
  const matrix = new Float32Array(n * n);
  for (let t = 0, i = 0; t < n; t++) for (let s = 0; s <= t; s++) matrix[t * n + s] = bytes[i++] / 255;
  return matrix;
}

const learned = L ? L.called[0].flatMap((row, layer) => row.map((_, head) => ({layer, head}))) : [];
let watched = 0;

function learningControls() {
  $("play").onclick = () => play(!playing);
  $("moment").oninput = () => {
    moment = Number($("moment").value);
    play(false);
    momentShow();
  };
}

async function learningShow() {
  if (!L || typeof DecompressionStream === "undefined") {
    $("learning-body").hidden = true;
    $("learning-lead").textContent = L
      ? "This browser is too old to unpack the maps."
      : "This run kept no maps of its training, or there was no room for them. train.py writes them at its " +
        "evaluations, into attention/ in the run’s folder.";
    return;
  }
  if (!snapshots) {
    await loadSnapshots();
    moment = L.steps.length - 1;
    $("moment").max = moment;
    $("moment").value = moment;
    bigView = new MapView($("big-map"), "Map while learning", {
      onmove: (query, key) => {
        bigView.mark(query, key);
        bigTitle();
      },
    });
    $("snapshots").append(
      ...learned.map((h, i) =>
        make(
          "button",
          {
            type: "button",
            "data-head": `L${h.layer} H${h.head}`,
            onclick: () => {
              watched = i;
              momentShow();
            },
          },
          (h.canvas = make("canvas", {"aria-hidden": "true"})),
          make("span", {}, `L${h.layer} H${h.head}`),
          (h.role = make("span", {class: "role"})),
        ),
      ),
    );
    const never = Object.keys(L.forming).filter((role) => !L.forming[role]);
    if (never.length) $("formed").append(make("li", {}, `Not reached in this run: ${never.join(", ")}`));
    for (const [role, found] of Object.entries(L.forming)) {
      if (found)
        $("formed").prepend(
          make("li", {}, `First ${role} head: L${found[1]} H${found[2]}, at step ${found[0].toLocaleString("en")}`),
        );
    }
  }
  const heads = L.called[0][0].length;
  const grid = $("snapshots");
  grid.style.gridTemplateColumns =
    heads * 60 > grid.clientWidth ? "repeat(auto-fill, minmax(64px, 1fr))" : `repeat(${heads}, minmax(0, 1fr))`;
  momentShow();
}

function momentShow() {
  const n = L.tokens.length;
  const forbidden = (t, s) => !allowedInTraining(t, s);
  learned.forEach((h, i) => {
    const called = L.called[moment][h.layer][h.head];
    thumbnail(h.canvas, snapshotMatrix(moment, i), n, forbidden);
    h.role.textContent = called;
    h.role.classList.toggle("called", called !== "mixed");
    h.canvas.parentElement.setAttribute("aria-label", `Layer ${h.layer}, head ${h.head}: ${called}`);
    h.canvas.parentElement.setAttribute("aria-current", i === watched);
  });
  bigView.set(
    snapshotMatrix(moment, watched),
    n,
    L.tokens.map(([label]) => label),
    forbidden,
    shade,
  );
  bigTitle();
  const step = L.steps[moment].toLocaleString("en");
  const at = nearest(
    L.curve.map(([s]) => s),
    L.steps[moment],
  );
  $("moment-label").textContent = `step ${step}`;
  $("moment").value = moment;
  $("moment").setAttribute("aria-valuetext", `step ${step}`);
  const end = Math.max(L.steps.at(-1), ...L.curve.map(([s]) => s));
  const values = L.curve.flatMap(([, a, b]) => [a, b]).filter(Number.isFinite);
  chart(
    $("loss"),
    [
      {name: "training", color: "--s6", points: L.curve.map(([s, a]) => [s, a])},
      {name: "validation", color: "--s1", points: L.curve.map(([s, , b]) => [s, b])},
    ],
    end,
    values.length ? [Math.min(...values), Math.max(...values)] : [0, 1],
    at === null ? "" : `validation ${known(L.curve[at][2], 3)}, training ${known(L.curve[at][1], 3)} nats`,
  );
  seriesLegend($("loss-legend"), [
    {name: "training split", color: "--s6"},
    {name: "validation split", color: "--s1"},
  ]);
  const series = D.roles.names.map((name, r) => {
    const base = L.uniform[r];
    return {
      name,
      color: `--s${r}`,
      points:
        base === null
          ? []
          : L.steps.map((s, i) => [s, Math.max(...L.scores[i].flat().map((x) => (x[r] - base) / (1 - base)))]),
    };
  });
  chart($("forming"), series, end, [0, 1], "", D.roles.threshold);
  seriesLegend($("forming-legend"), series);
}

function seriesLegend(legend, series) {
  legend.replaceChildren(
    ...series.map(({name, color}) => {
      const line = make("i");
      line.style.background = `var(${color})`;
      return make("span", {}, line, name);
    }),
  );
}

function bigTitle() {
  const h = learned[watched];
  const {query, key, matrix, n} = bigView;
  const cell =
    query === null || key === null
      ? []
      : [
          ": ",
          token(L.tokens[query][0]),
          " → ",
          token(L.tokens[key][0]),
          !allowedInTraining(query, key) ? " forbidden" : ` ${Math.round(100 * matrix[query * n + key])} %`,
        ];
  $("big-title").replaceChildren(`Layer ${h.layer}, head ${h.head}`, ...cell);
}

function nearest(steps, step) {
  let best = null;
  steps.forEach((s, i) => {
    if (best === null || Math.abs(s - step) < Math.abs(steps[best] - step)) best = i;
  });
  return best;
}

function chart(svg, series, end, [low, high], told, limit) {
  const left = 40;
  const right = 450;
  const top = 14;
  const bottom = 164;
  const span = high - low || 1;
  const x = (step) => left + ((right - left) * step) / (end || 1);
  const y = (v) => bottom - ((bottom - top) * (Math.min(high, Math.max(low, v)) - low)) / span;
  svg.replaceChildren(drawn("path", {class: "axis", d: `M${left},${top}V${bottom}H${right}`}));
  for (const v of [low, (low + high) / 2, high])
    svg.append(
      drawn(
        "text",
        {x: left - 6, y: y(v) + 4, "text-anchor": "end"},
        v.toFixed(high - low > 20 ? 0 : high - low > 1 ? 1 : 2),
      ),
    );
  for (const s of [0, end / 2, end])
    svg.append(
      drawn(
        "text",
        {x: x(s), y: bottom + 16, "text-anchor": s ? (s === end ? "end" : "middle") : "start"},
        Math.round(s).toLocaleString("en"),
      ),
    );
  if (limit !== undefined)
    svg.append(drawn("line", {class: "limit", x1: left, x2: right, y1: y(limit), y2: y(limit)}));
  for (const {name, color, points} of series) {
    const line = drawn("polyline", {
      class: "series",
      points: points
        .filter(([, v]) => Number.isFinite(v))
        .map(([s, v]) => `${x(s)},${y(v)}`)
        .join(" "),
    });
    line.style.stroke = `var(${color})`;
    line.append(drawn("title", {}, name));
    svg.append(line);
  }
  const now = x(L.steps[moment]);
  svg.append(
    drawn("line", {class: "now", x1: now, x2: now, y1: top - 4, y2: bottom}),
    drawn("text", {x: right, y: top - 3, "text-anchor": "end"}, told),
  );
  svg.setAttribute("aria-label", `${svg.id} over training; now step ${L.steps[moment]}${told ? `, ${told}` : ""}`);
  svg.onclick = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((((event.clientX - box.left) / box.width) * 460 - left) / (right - left)) * end;
    moment = nearest(L.steps, at);
    momentShow();
  };
}

function play(on) {
  clearInterval(playing);
  playing = 0;
  $("play").textContent = on ? "Pause" : "Play";
  if (!on) return;
  if (moment === L.steps.length - 1) {
    moment = 0;
    momentShow();
  }
  playing = setInterval(() => {
    moment++;
    momentShow();
    if (moment >= L.steps.length - 1) play(false);
  }, 450);
}
