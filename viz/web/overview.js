// Overview: every head's map, and the roles.

const roleAbout = Object.fromEntries(D.roles.names.map((name, i) => [name, D.roles.about[i]]));
function roleSentence(h) {
  const i = D.roles.names.indexOf(h.called);
  if (i < 0) return "mixed: no one role fits";
  const targets = roleAbout[h.called].replace(/ \(.*/, "").replace(/, where.*/, "");
  const uniform = `uniform attention: ${percent(shown.uniform[i])}`;
  return `${h.called}: ${percent(h.roles[i])} of its weight goes to ${targets} (${uniform})`;
}

function overviewControls() {
  const count = (role) => HEADS.filter((h) => h.called === role).length;
  $("filter").append(make("option", {value: ""}, `all ${plural(HEADS.length, "head")}`));
  for (const role of [...D.roles.names, "mixed"]) {
    if (count(role)) $("filter").append(make("option", {value: role}, `${role} (${count(role)})`));
  }
  $("sort").append(make("option", {value: ""}, "layer by layer"));
  D.roles.names.forEach((role, i) => {
    if (shown.uniform[i] !== null) $("sort").append(make("option", {value: i}, `most ${role} first`));
  });
  $("sort").append(make("option", {value: "entropy"}, "narrowest look first"));
  $("filter").onchange = $("sort").onchange = overviewGrid;
  // there is room beside the grid
  if (D.heads.length <= 6) {
    document.querySelector(".with-roles").classList.add("few");
    $("meanings").open = window.innerWidth > 1180;
  }
  $("threshold").textContent = percent(D.roles.threshold).replace(".0", "");
  for (const role of D.roles.names)
    $("definitions").append(make("dt", {}, role), make("dd", {}, `looks at ${roleAbout[role]}`));
  const head = make(
    "tr",
    {},
    make("th", {}, "head"),
    make("th", {class: "left"}, "called"),
    ...D.roles.names.map((name) => make("th", {}, name)),
    make("th", {}, "entropy"),
  );
  const uniform = make(
    "tr",
    {class: "rest"},
    make("td", {}, "uniform"),
    make("td"),
    ...shown.uniform.map((x) => make("td", {}, x === null ? "–" : percent(x))),
    make("td"),
  );
  const rows = HEADS.map((h) =>
    make(
      "tr",
      {},
      make("td", {}, h.name),
      make("td", {class: "left"}, h.called),
      ...h.roles.map((x, i) => {
        const cell = make("td", {}, x === null ? "–" : percent(x));
        if (h.called === D.roles.names[i]) cell.style.fontWeight = 700;
        return cell;
      }),
      make("td", {}, `${h.entropy.toFixed(2)} bits`),
    ),
  );
  $("roles").append(make("thead", {}, head), make("tbody", {}, uniform, ...rows));
}

function columns(grid, inOrder) {
  const narrow = grid.clientWidth < 560 || !inOrder;
  grid.style.gridTemplateColumns = narrow
    ? `repeat(auto-fill, minmax(${grid.clientWidth < 560 ? 84 : 130}px, 1fr))`
    : `repeat(${D.heads.length}, minmax(0, ${D.heads.length > 6 ? "1fr" : "210px"}))`;
}

let pending = [];
function overviewGrid() {
  const role = $("filter").value;
  const sort = $("sort").value;
  const chosen = HEADS.filter((h) => !role || h.called === role);
  if (sort) chosen.sort((a, b) => (sort === "entropy" ? a.entropy - b.entropy : b.roles[sort] - a.roles[sort]));
  columns($("grid"), !role && !sort);
  $("grid").replaceChildren(
    ...chosen.map((h) => {
      const i = sort && sort !== "entropy" ? Number(sort) : D.roles.names.indexOf(h.called);
      const told =
        sort === "entropy"
          ? `${h.entropy.toFixed(1)} bits`
          : i >= 0
            ? `${D.roles.names[i]} ${Math.round(100 * h.roles[i])} %`
            : "mixed";
      h.canvas = make("canvas", {"aria-hidden": "true"});
      const tell = () =>
        $("hovered").replaceChildren(
          make("b", {}, `Layer ${h.layer}, head ${h.head}`),
          ` · ${roleSentence(h)} · mean entropy ${h.entropy.toFixed(2)} bits, `,
          `an even look at ${(2 ** h.entropy).toFixed(1)} tokens`,
        );
      return make(
        "button",
        {
          type: "button",
          "data-head": h.name,
          "aria-label": `Layer ${h.layer}, head ${h.head}, ${told}`,
          onclick: () => {
            state.head = HEADS.indexOf(h);
            go("head");
          },
          onpointerenter: tell,
          onfocus: tell,
        },
        h.canvas,
        make("span", {}, h.name),
        make("span", {class: h.called === "mixed" && !sort ? "role" : "role called"}, told),
      );
    }),
  );
  $("hovered").textContent = "Point at a map to read what its head does.";
  pending = [...chosen];
  drawPending();
}

// in slices, so that the page answers while it draws
function drawPending() {
  const until = performance.now() + 12;
  while (pending.length && performance.now() < until) {
    const h = pending.shift();
    thumbnail(h.canvas, weights(h), shown.n, (t, s) => !allowed(t, s));
  }
  document.documentElement.dataset.drawn = pending.length ? "no" : "yes";
  if (pending.length) setTimeout(drawPending);
}
