// Typing: the text is the reader's. Every key has the model read on, and all views follow.

function typingControls() {
  if (!MODEL) return;
  $("typing").hidden = $("type-into").hidden = false;
  const box = $("typed");
  box.addEventListener("input", () => readText(box.value));
  box.addEventListener("keyup", followCaret);
  box.addEventListener("click", followCaret);
  const examples = [["This run’s text", textOfIds(D.model.ids)]];
  for (const text of D.model.examples ?? []) examples.push([firstWords(text), text]);
  examples.unshift(["Empty", ""]);
  const button = ([name, text]) =>
    make("button", {type: "button", onclick: () => startFrom(text)}, make("bdi", {}, name));
  $("examples").append(...examples.map(button));
  $("reader").addEventListener("keydown", typeIntoReader);
}

// How a text begins, on one line.
function firstWords(text) {
  const line = Array.from(text.trim().replace(/\s+/g, " "));
  return line.slice(0, 24).join("") + (line.length > 24 ? "…" : "");
}

function startFrom(text) {
  $("typed").value = text;
  $("typed").setSelectionRange(text.length, text.length);
  $("typed").scrollTop = $("typed").scrollHeight;
  readText(text);
}

// Show what the model makes of a text. The latest text wins.
async function readText(typed) {
  writing(false);
  const {ids, unknown} = TOKENIZER.encode(typed);
  const all = ids.length ? ids : D.model.start;
  const from = all.length - withinContext(all, MODEL.config.context_length).length;
  if (!(await reread({all, from, typed, begun: ids.length ? 0 : all.length, unknown, drawn: []}))) return;
  state.query = shown.n - 1;
  state.key = null;
  state.kept = false;
  chooseAtCaret();
  redraw();
}

// The token at the caret is the one that looks.
function followCaret() {
  const before = state.query;
  chooseAtCaret();
  if (state.query !== before) redraw();
}

function chooseAtCaret() {
  const {selectionStart, value} = $("typed");
  if (value === wholeText()) state.query = Math.max(0, tokenBefore(selectionStart));
}

// The number, among the tokens read, of the one that the typed text before `offset` ends with; -1 where none is read.
function tokenBefore(offset) {
  const text = wholeText();
  let known = "";
  let at = 0;
  for (const [start, end] of shown.unknown) {
    if (start >= offset) break;
    known += text.slice(at, start);
    at = end;
  }
  if (at < offset) known += text.slice(at, offset);
  let left = new TextEncoder().encode(known).length;
  let t = shown.begun;
  while (t < shown.all.length && left > 0) left -= pieceOf(shown.all[t++]).length;
  return Math.max(-1, t - 1 - shown.from);
}

// Where a token of the text read ends in the typed text.
function offsetBehind(t) {
  const known = textOfIds(shown.all.slice(shown.begun, shown.from + t + 1)).length;
  let at = known;
  for (const [start, end] of shown.unknown) {
    if (start > at) break;
    at += end - start;
  }
  return Math.min(at, $("typed").value.length);
}

// A key pressed while a token is chosen goes into the text behind that token.
function typeIntoReader(event) {
  const edits = event.key.length === 1 || ["Backspace", "Delete", "Enter"].includes(event.key);
  if (!edits || event.ctrlKey || event.metaKey || event.altKey) return;
  const at = offsetBehind(state.query);
  $("typed").setSelectionRange(at, at);
  $("typed").focus();  // the key itself arrives there
}

// ---------- what is said of the text ----------

// What stands before the context, and, for each token of the text read, what was left out behind it (number -1: before
// the first).
function textAround() {
  const leftOut = new Map();
  for (const [start, end] of shown.unknown) {
    const t = tokenBefore(start);
    leftOut.set(t, (leftOut.get(t) ?? "") + shown.typed.slice(start, end));
  }
  const first = Math.max(0, shown.from - 1000);
  const before = withLabels(textOfIds(shown.all.slice(first, shown.from)));
  return {before: first ? `…${before}` : before, leftOut};
}

function typingShow() {
  if (!MODEL) return;
  const text = wholeText();
  const box = $("typed");
  if (document.activeElement !== box && box.value !== text) {
    box.value = text;
    box.scrollTop = box.scrollHeight;
  }
  const loss = Number.isFinite(shown.loss) ? `${shown.loss.toFixed(3)} nats a token` : "none yet: it takes two tokens";
  $("text-loss").replaceChildren("Loss of this text: ", make("b", {}, loss));
  $("typing-notes").replaceChildren(...typingNotes().map((note) => make("span", {}, ...note)));
}

function typingNotes() {
  const notes = [];
  if (shown.unknown.length) notes.push(["Left out: ", ...unknownCharacters(), unknownWhy()]);
  if (shown.from) {
    const keep = Math.max(1, Math.floor(MODEL.config.context_length / 2));
    notes.push([
      `The text has ${shown.all.length} tokens, and the model reads ${MODEL.config.context_length} at once. When ` +
        `they were exceeded it forgot all but the last ${keep}, as in sample.py, and went on from there: now it ` +
        `reads the last ${shown.n}. What it no longer sees is pale.`,
    ]);
  }
  if (shown.begun && !shown.drawn.length) {
    notes.push(["Nothing to read: the model begins with ", token(shown.tokens[0][0]), ", as sample.py does."]);
  }
  return notes;
}

function unknownCharacters() {
  const counts = new Map();
  for (const [start, end] of shown.unknown)
    for (const character of shown.typed.slice(start, end)) counts.set(character, (counts.get(character) ?? 0) + 1);
  const told = [];
  for (const [character, count] of Array.from(counts).slice(0, 12))
    told.push(token(labelOfText(character)), count > 1 ? ` (${count} times) ` : " ");
  if (counts.size > 12) told.push(`and ${counts.size - 12} more `);
  return told;
}

function unknownWhy() {
  if (D.model.tokenizer.kind === "char")
    return "– the text this model learned from has none of these, so it has no tokens for them.";
  return "– half of a pair of code units, which is no character.";
}
