"use strict";
// The attention page. What it shows is computed here, from what lies in the page: nothing is fetched, nothing is sent.
// Plain JavaScript and canvas: the maps are the whole of the page, and no charting library draws those.
// Text of tokens reaches the page through textContent alone, so nothing in it can become markup.

const $ = (id) => document.getElementById(id);
const D = JSON.parse($("data").textContent);
// Of the equation's numbers: as many digits as the stored q and k still tell.
const DIGITS = D.bits === 32 ? 4 : 2;
const WEIGHT_DIGITS = D.bits === 32 ? 4 : 3;
// What the reader chose: the open view, the head (of HEADS), the token that looks and the token looked at.
const state = {view: "", head: 0, query: 0, key: null, words: false, source: "head", kept: false};

// An element; attributes that begin with "on" are listeners. Text goes in as text: nothing in it can become markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// The same for a drawing (SVG).
function drawn(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const token = (label) => make("bdi", {class: "tok"}, label);
const minus = (text) => text.replace("-", "−");
const fixed = (value, digits = DIGITS) => (value === -Infinity ? "−∞" : minus(value.toFixed(digits)));
// A run may have diverged.
const known = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "not a number");
const percent = (weight) => `${(100 * weight).toFixed(1)} %`;
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
// In running text, a label must not turn its neighbours around.
const isolated = (label) => `\u2068${label}\u2069`;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
