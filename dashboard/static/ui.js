// What all pages share: Lit templates from data (never from markup), JSON from the server, and the theme.
import { copy } from "./copy.js";
import { html, nothing, render, svg } from "./vendor/lit-html.js";

/** JSON of the server; throws an Error with its sentence. */
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

/** Questions of one kind: each `const isLatest = ask()` says later whether no other one has been asked since. */
export function questions() {
  let last = null;
  return () => {
    const mine = (last = {});
    return () => last === mine;
  };
}

/** An element that a widget draws into, and that templates embed. */
export function box(className = "") {
  const element = document.createElement("div");
  element.className = className;
  return element;
}

/** A definition list of [{label, text}]; the class `short` keeps two columns on a phone. */
export function facts(list, className = "") {
  return html`<dl class=${`facts ${className}`}>${list.map(({ label, text }) => html`<dt>${label}</dt><dd>${text}</dd>`)}</dl>`;
}

/** Something with a button that copies its string. */
export function copyable(content) {
  return html`<span class="copyable"><span class="mono">${content}</span> <button type="button" class="copy no-print" @click=${({ currentTarget: at }) => copy(at, at.previousElementSibling)}>Copy</button></span>`;
}

/** A strip of bars from shares in 0 to 1; null is not finite. */
export function strip(cells, label) {
  const bar = ({ share, text }, i) => share === 0 ? nothing : svg`<rect class=${share === null ? "nonfinite" : nothing} x=${i} y=${1 - (share ?? 1)} width="0.95" height=${share ?? 1}><title>${text}</title></rect>`;
  return html`<svg class="strip" viewBox=${`0 0 ${Math.max(cells.length, 1)} 1`} preserveAspectRatio="none" role="img" aria-label=${label}>${cells.map(bar)}</svg>`;
}

/** A table; names of columns with `<` in front are aligned to the left, as their cells with the class `left` are. */
export function table(head, rows, id = nothing) {
  const column = (name) => html`<th scope="col" class=${name.startsWith("<") ? "left" : nothing}>${name.replace("<", "")}</th>`;
  return html`<table id=${id}><thead><tr>${head.map(column)}</tr></thead><tbody>${rows}</tbody></table>`;
}

/** How many of a list are shown, and a button for more; nothing where all are. */
export function more(shown, total, noun, load) {
  const text = (number) => number.toLocaleString("en");
  return shown >= total ? nothing : html`<p class="more" role="status">${text(shown)} of ${text(total)} ${noun} <button type="button" @click=${load}>Show more</button></p>`;
}

/** A scrolling region that the keyboard reaches. */
export function region(label, content) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>${content}</div>`;
}

/** A selection; `options` are [value, text]. */
export function select(label, options, chosen, onChange, name = nothing) {
  return html`<select name=${name} aria-label=${label} @change=${(event) => onChange(event.target.value)}>${options.map(([value, text]) => html`<option value=${value} ?selected=${value === chosen}>${text}</option>`)}</select>`;
}

/** A button. */
export function button(text, act, label = nothing) {
  return html`<button type="button" aria-label=${label} @click=${act}>${text}</button>`;
}

/** The colours of a heat map of errors. */
export const ERROR_LEGEND = [["none", "not compared"], ["equal", "equal"], ["close", "within the floor"], ["1", "≤ 10 ×"], ["2", "≤ 100 ×"], ["3", "≤ 1,000 ×"], ["4", "≤ 10⁴ ×"], ["5", "≤ 10⁵ ×"], ["6", "≤ 10⁶ ×"], ["7", "≤ 10⁷ ×"], ["8", "≤ 10⁸ ×"], ["9", "> 10⁸ ×"], ["nan", "not finite"], ["shape", "not comparable"]];

/** A legend of colours: [name of the colour, text]. */
export function colours(list) {
  return html`<ul class="legend">${list.map(([name, text]) => html`<li><i class=${`swatch-${name}`}></i>${text}</li>`)}</ul>`;
}

/** Whether a key event is meant for a field or the browser. */
export function isForField(event) {
  return event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
}

export { html, nothing, render, svg };
