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
  $("filter").onchange = $("sort").onchange = overviewGrid;
  // There is room beside the grid.
  if (D.heads.length <= 6) {
    document.querySelector(".with-roles").classList.add("few");
    $("meanings").open = window.innerWidth > 1180;
  }
  $("threshold").textContent = percent(D.roles.threshold).replace(".0", "");
  for (const role of D.roles.names)
    $("definitions").append(make("dt", {}, role), make("dd", {}, `looks at ${roleAbout[role]}`));
}

// What there is to choose from, as the heads are called on the text shown.
function overviewChoices() {
  const count = (role) => HEADS.filter((h) => h.called === role).length;
  const called = [...D.roles.names, "mixed"].filter(count);
  fillSelect($("filter"), [
    ["", `all ${plural(HEADS.length, "head")}`],
    ...called.map((role) => [role, `${role} (${count(role)})`]),
  ]);
  const measured = D.roles.names.map((role, i) => [String(i), `most ${role} first`]);
  fillSelect($("sort"), [
    ["", "layer by layer"],
    ...measured.filter(([i]) => shown.uniform[i] !== null),
    ["entropy", "narrowest look first"],
  ]);
}

// The choices [value, text] of a menu; what was chosen stays so, if it is still there.
function fillSelect(select, choices) {
  const chosen = select.value;
  select.replaceChildren(...choices.map(([value, text]) => make("option", {value}, text)));
  select.value = choices.some(([value]) => value === chosen) ? chosen : "";
}

function rolesTable() {
  const cells = (tag, texts) => texts.map((text, i) => make(tag, i === 1 ? {class: "left"} : {}, text));
  const told = (scores) => scores.map((x) => (x === null ? "–" : percent(x)));
  const head = make("tr", {}, ...cells("th", ["head", "called", ...D.roles.names, "entropy"]));
  const uniform = make("tr", {class: "rest"}, ...cells("td", ["uniform", "", ...told(shown.uniform), ""]));
  const rows = HEADS.map((h) => {
    const row = cells("td", [h.name, h.called, ...told(h.roles), `${h.entropy.toFixed(2)} bits`]);
    const its = D.roles.names.indexOf(h.called);
    if (its >= 0) row[2 + its].style.fontWeight = 700;
    return make("tr", {}, ...row);
  });
  $("roles").replaceChildren(make("thead", {}, head), make("tbody", {}, uniform, ...rows));
}

function columns(grid, inOrder) {
  const narrow = grid.clientWidth < 560 || !inOrder;
  grid.style.gridTemplateColumns = narrow
    ? `repeat(auto-fill, minmax(${grid.clientWidth < 560 ? 84 : 130}px, 1fr))`
    : `repeat(${D.heads.length}, minmax(0, ${D.heads.length > 6 ? "1fr" : "210px"}))`;
}

let pending = [];
function overviewGrid() {
  overviewChoices();
  rolesTable();
  const role = $("filter").value;
  const sort = $("sort").value;
  const chosen = HEADS.filter((h) => !role || h.called === role);
  if (sort) chosen.sort((a, b) => (sort === "entropy" ? a.entropy - b.entropy : b.roles[sort] - a.roles[sort]));
  columns($("grid"), !role && !sort);
  // Buttons are made anew only where other heads stand there: a map that is looked at or in focus stays.
  const names = chosen.map((h) => h.name).join();
  if (names !== $("grid").dataset.heads) {
    $("grid").dataset.heads = names;
    $("grid").replaceChildren(...chosen.map(overviewButton));
    $("hovered").textContent = "Point at a map to read what its head does.";
  }
  rolesShow();
  pending = [...chosen];
  drawPending();
}

function overviewButton(h) {
  h.canvas = make("canvas", {"aria-hidden": "true"});
  h.caption = make("span");
  const tell = () =>
    $("hovered").replaceChildren(
      make("b", {}, `Layer ${h.layer}, head ${h.head}`),
      ` · ${roleSentence(h)} · mean entropy ${h.entropy.toFixed(2)} bits, `,
      `an even look at ${(2 ** h.entropy).toFixed(1)} tokens`,
    );
  const open = () => {
    state.head = HEADS.indexOf(h);
    go("head");
  };
  const attributes = {type: "button", "data-head": h.name, onclick: open, onpointerenter: tell, onfocus: tell};
  h.button = make("button", attributes, h.canvas, make("span", {}, h.name), h.caption);
  return h.button;
}

// What each head in the grid is called.
function rolesShow() {
  const sort = $("sort").value;
  for (const h of HEADS) {
    if (!h.button?.isConnected) continue;
    const told = roleTold(h, sort);
    h.caption.textContent = told;
    h.caption.className = h.called === "mixed" && !sort ? "role" : "role called";
    h.button.setAttribute("aria-label", `Layer ${h.layer}, head ${h.head}, ${told}`);
  }
}

function roleTold(h, sort) {
  if (sort === "entropy") return `${h.entropy.toFixed(1)} bits`;
  const i = sort ? Number(sort) : D.roles.names.indexOf(h.called);
  return i < 0 ? "mixed" : `${D.roles.names[i]} ${Math.round(100 * h.roles[i])} %`;
}

// In slices, so that the page answers while it draws.
function drawPending() {
  const until = performance.now() + 12;
  while (pending.length && performance.now() < until) {
    const h = pending.shift();
    thumbnail(h.canvas, weights(h), shown.n, (t, s) => !allowed(t, s));
  }
  document.documentElement.dataset.drawn = pending.length ? "no" : "yes";
  if (pending.length) setTimeout(drawPending);
}

// When roles were measured anew: what depends on them, without drawing the maps again.
function overviewRoles() {
  if ($("filter").value || $("sort").value) return overviewGrid();
  overviewChoices();
  rolesTable();
  rolesShow();
}
