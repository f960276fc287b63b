// Shared by all pages: Lit templates of data (never of markup), JSON requests, and small elements.
import { copy } from "./copy.js";
import { html, nothing, render, svg } from "./vendor/lit-html.js";

/** Fetch JSON from the server; throws an Error with the server's message. */
export async function api(path, options) {
  const response = await fetch(path, { credentials: "same-origin", ...options }).catch(() => {
    throw new Error("The server does not respond. Is tapscope web still running? After a restart, open the link that it prints.");
  });
  if (response.status === 401) location.assign("/login");
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error || `the server responded with ${response.status}`);
  return body;
}

/** Send a JSON body. */
export function post(path, body) {
  return api(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

/** Guard against outdated responses: `const isLatest = ask()`; later `isLatest()` is false if `ask` was called again. */
export function questions() {
  let last = null;
  return () => {
    const mine = (last = {});
    return () => last === mine;
  };
}

/** Container element for a widget, which templates embed. */
export function box(className = "") {
  const element = document.createElement("div");
  element.className = className;
  return element;
}

/** Definition list of [{label, text}]; the class `short` keeps two columns on a phone. */
export function facts(list, className = "") {
  return html`<dl class=${`facts ${className}`}>${list.map(({ label, text }) => html`<dt>${label}</dt><dd>${text}</dd>`)}</dl>`;
}

/** Content with a button that copies its text. */
export function copyable(content) {
  return html`<span class="copyable"><span class="mono">${content}</span> <button type="button" class="copy no-print" @click=${({ currentTarget: at }) => copy(at, at.previousElementSibling)}>Copy</button></span>`;
}

/** Strip of bars with heights from 0 to 1; null marks a non-finite value. */
export function strip(cells, label) {
  const bar = ({ share, text }, i) => share === 0 ? nothing : svg`<rect class=${share === null ? "nonfinite" : nothing} x=${i} y=${1 - (share ?? 1)} width="0.95" height=${share ?? 1}><title>${text}</title></rect>`;
  return html`<svg class="strip" viewBox=${`0 0 ${Math.max(cells.length, 1)} 1`} preserveAspectRatio="none" role="img" aria-label=${label}>${cells.map(bar)}</svg>`;
}

/** Table; a column name with the prefix `<` is left-aligned, like cells with the class `left`. */
export function table(head, rows, id = nothing) {
  const column = (name) => html`<th scope="col" class=${name.startsWith("<") ? "left" : nothing}>${name.replace("<", "")}</th>`;
  return html`<table id=${id}><thead><tr>${head.map(column)}</tr></thead><tbody>${rows}</tbody></table>`;
}

/** Count of shown list items with a button for more; nothing if all are shown. */
export function more(shown, total, noun, load) {
  const text = (number) => number.toLocaleString("en");
  return shown >= total ? nothing : html`<p class="more" role="status">${text(shown)} of ${text(total)} ${noun} <button type="button" @click=${load}>Show more</button></p>`;
}

/** Scrolling region that can be focused by keyboard. */
export function region(label, content) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>${content}</div>`;
}

/** Select element; `options` are [value, text] pairs. */
export function select(label, options, chosen, onChange, name = nothing) {
  return html`<select name=${name} aria-label=${label} @change=${(event) => onChange(event.target.value)}>${options.map(([value, text]) => html`<option value=${value} ?selected=${value === chosen}>${text}</option>`)}</select>`;
}

/** A button. */
export function button(text, act, label = nothing) {
  return html`<button type="button" aria-label=${label} @click=${act}>${text}</button>`;
}

/** Legend entries of an error heat map. */
export const ERROR_LEGEND = [["none", "not compared"], ["equal", "equal"], ["close", "within the floor"], ["1", "≤ 10 ×"], ["2", "≤ 100 ×"], ["3", "≤ 1,000 ×"], ["4", "≤ 10⁴ ×"], ["5", "≤ 10⁵ ×"], ["6", "≤ 10⁶ ×"], ["7", "≤ 10⁷ ×"], ["8", "≤ 10⁸ ×"], ["9", "> 10⁸ ×"], ["nan", "not finite"], ["shape", "not comparable"]];

/** Legend of colors; `list` has [color name, text] pairs. */
export function colours(list) {
  return html`<ul class="legend">${list.map(([name, text]) => html`<li><i class=${`swatch-${name}`}></i>${text}</li>`)}</ul>`;
}

/** Whether a key event is for an input field or the browser. */
export function isForField(event) {
  return event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
}

export { html, nothing, render, svg };
