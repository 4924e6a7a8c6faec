// What a head does on the text shown, measured as viz/roles.py does: how much of its weight falls where a named role
// would put it. Induction alone is measured by Python, on random tokens said twice: it is no matter of this text.

// {role: (t, s) => whether a head of that role would look from token t at token s}.
function roleTargets(ids, pieces) {
  const marks = pieces.map(isMark);
  return {
    previous: (t, s) => s === t - 1,
    first: (t, s) => s === 0,
    self: (t, s) => s === t,
    same: (t, s) => s < t && ids[s] === ids[t],
    punctuation: (t, s) => marks[s],
    local: (t, s) => s <= t && t - s < 8,
  };
}

// Whether a token is nothing but punctuation, symbols and newlines (spaces aside).
function isMark(piece) {
  const text = textOfBytes(piece).replaceAll(" ", "");
  return text !== "" && /^([\p{P}\p{S}]|\n)+$/u.test(text) && !text.includes("\ufffd");
}

// The queries that count for a role, as (t, keys it should look at): those that have a target and may also look
// elsewhere, as the others say nothing about the head. And what uniform attention would score: null where none counts.
function queriesOf(target, n) {
  const rows = [];
  let uniform = 0;
  for (let t = 0; t < n; t++) {
    const keys = [];
    let open = 0;
    for (let s = 0; s < n; s++) {
      if (!allowed(t, s)) continue;
      open++;
      if (target(t, s)) keys.push(s);
    }
    if (!keys.length || keys.length === open) continue;
    rows.push([t, keys]);
    uniform += keys.length / open;
  }
  return {rows, uniform: rows.length ? uniform / rows.length : null};
}

// Role scores, entropy and name of every head of HEADS, on what is shown. Between heads the page goes on; where another
// text is shown meanwhile, nothing is changed, and false comes back.
async function measureRoles() {
  const {n, ids, pieces, reading} = shown;
  const targets = roleTargets(ids, pieces);
  const queries = D.roles.names.map((name) => targets[name] && queriesOf(targets[name], n));
  const uniform = queries.map((found, i) => (found ? found.uniform : D.roles.uniform[i]));
  const measured = [];
  for (const h of HEADS) {
    const matrix = weights(h);
    const roles = queries.map((found, i) => (found ? targetWeight(matrix, n, found.rows) : h.measured[i]));
    measured.push({roles, entropy: meanEntropy(matrix, n), called: nameRole(roles, uniform)});
    await nextTurn();
    if (shown.reading !== reading) return false;
  }
  shown.uniform = uniform;
  HEADS.forEach((h, i) => Object.assign(h, measured[i]));
  return true;
}

// Roles are measured when no key has come for a moment: they are no part of what must follow at once.
let rolesTimer = 0;
function measureSoon() {
  clearTimeout(rolesTimer);
  document.documentElement.dataset.roles = "old";
  rolesTimer = setTimeout(async () => {
    if (!(await measureRoles())) return;
    document.documentElement.dataset.roles = "measured";
    nameHeads();
    if (state.view === "overview") overviewRoles();
  }, 150);
}

function targetWeight(matrix, n, rows) {
  let sum = 0;
  for (const [t, keys] of rows) for (const s of keys) sum += matrix[t * n + s];
  return rows.length ? sum / rows.length : null;
}

function meanEntropy(matrix, n) {
  let sum = 0;
  for (let t = 0; t < n; t++) sum += entropy(matrix.subarray(t * n, t * n + n));
  return sum / n;
}

// The role a head is farthest in, on the way from uniform attention (0) to a perfect head (1), from the threshold up;
// "local" if no narrower fits; else "mixed".
function nameRole(scores, uniform) {
  const share = scores.map((x, i) => (x === null || uniform[i] === null ? 0 : (x - uniform[i]) / (1 - uniform[i])));
  const narrow = share.slice(0, -1);
  const most = Math.max(...narrow);
  if (most >= D.roles.threshold) return D.roles.names[narrow.indexOf(most)];
  return share.at(-1) >= D.roles.threshold ? "local" : "mixed";
}
