// The frame: tabs, head picker, theme, and what happens when another text is shown.

// Name -> {tab: its name on the tab, show: draws it when it is opened and whenever another reading is shown, bar: which
// of the bar's controls it has ("head", "source", "words"), living: whether it needs the model in the page}.
// Each view's HTML is a file of its name, in which a <section role="tabpanel"> has its name as id; the files' order is
// that of the tabs.
const VIEWS = {
  flow: {tab: "Flow", show: flowShow, bar: [], living: true},
  overview: {tab: "Overview", show: overviewGrid, bar: []},
  head: {tab: "Head", show: headShow, bar: ["head", "words"]},
  write: {tab: "Write", show: writeShow, bar: [], living: true},
  text: {tab: "Text", show: textShow, bar: ["head", "source", "words"]},
  equation: {tab: "Equation", show: equationShow, bar: ["head"]},
  what_if: {tab: "What if", show: whatIfShow, bar: [], living: true},
  lens: {tab: "Lens", show: lensShow, bar: [], living: true},
  learning: {tab: "Learning", show: learningShow, bar: []},
};
const viewNames = Array.from(document.querySelectorAll("main > section"), (section) => section.id).filter(
  (name) => MODEL || !VIEWS[name].living,
);

// Open a view.
function go(name, focus = false) {
  if (state.view === "learning" && name !== "learning") play(false);
  if (state.view === "write" && name !== "write") writing(false);
  state.view = name;
  document.documentElement.dataset.view = name;
  for (const other of viewNames) {
    const tab = $(`tab-${other}`);
    tab.setAttribute("aria-selected", other === name);
    tab.tabIndex = other === name ? 0 : -1;
    $(other).hidden = other !== name;
  }
  const tab = $(`tab-${name}`);
  $("tabs").scrollLeft = tab.offsetLeft - ($("tabs").clientWidth - tab.offsetWidth) / 2;  // they scroll on narrow screens
  if (focus) tab.focus();
  redraw();
}

// Draw the open view, and what all views have in common.
function redraw() {
  const {show, bar} = VIEWS[state.view];
  $("bar").hidden = !bar.includes("head");
  $("source-label").hidden = !bar.includes("source");
  $("words-label").hidden = !bar.includes("words") || wordStart.length === shown.n;
  nameHeads();
  $("pick").value = state.head;
  $("about").textContent = roleSentence(HEADS[state.head]);
  $("facts").textContent = facts().join(" · ");
  showBanner();
  typingShow();
  show();
}

// What stands under the title.
function facts() {
  const kept = [];
  if (D.bits === 16) {
    const most = (100 * D.error).toFixed(3);
    kept.push(`kept in 16 bits: weights within ${most} percentage points of the model’s`);
  }
  return [...D.facts, plural(shown.n, "token"), ...kept];
}

// Heads in the picker, each with the role it has on this text.
function nameHeads() {
  const names = HEADS.map((h) => (h.called === "mixed" ? h.name : `${h.name} · ${h.called}`));
  const options = Array.from($("pick").options);
  if (options.length === names.length && options.every((option, i) => option.textContent === names[i])) return;
  $("pick").replaceChildren(...names.map((name, i) => make("option", {value: i}, name)));
}

function makeTabs() {
  for (const name of viewNames) {
    const attributes = {role: "tab", id: `tab-${name}`, "aria-controls": name, type: "button"};
    const tab = make("button", attributes, VIEWS[name].tab);
    tab.onclick = () => go(name);
    tab.onkeydown = (event) => {
      const at = viewNames.indexOf(name);
      const to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: viewNames.length - 1}[event.key];
      if (to === undefined) return;
      event.preventDefault();
      go(viewNames[(to + viewNames.length) % viewNames.length], true);
    };
    $("tabs").append(tab);
  }
}

function barControls() {
  if (!D.whole) {
    $("source").querySelector('[value="rollout"]').remove();  // it needs every layer
    $("source").querySelector('[value="layer"]').textContent = "the mean of its layer’s shown heads";
  }
  const choose = (head) => {
    state.head = (head + HEADS.length) % HEADS.length;
    redraw();
  };
  $("previous").onclick = () => choose(state.head - 1);
  $("next").onclick = () => choose(state.head + 1);
  $("pick").onchange = () => choose(Number($("pick").value));
  $("source").onchange = () => {
    state.source = $("source").value;
    redraw();
  };
  $("words").onchange = () => {
    state.words = $("words").checked;
    state.key = null;
    redraw();
  };
}

async function start() {
  $("theme").onclick = () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    legends();
    redraw();
  };
  setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  legends();
  makeTabs();
  barControls();
  overviewControls();
  headViews();
  textControls();
  equationControls();
  flowControls();
  whatIfControls();
  lensControls();
  learningControls();
  typingControls();
  writeControls();
  if (MODEL) await reread(firstText());
  state.query = shown.n - 1;
  go(HEADS.length === 1 ? "head" : MODEL ? "text" : "overview");
}

start();
