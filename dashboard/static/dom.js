// Small helpers: elements from data (never from markup), and JSON from the server.

/** An element with attributes, listeners (`onclick`) and children; strings become text. */
export function h(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "polyline", "title", "path", "line", "circle", "text"].includes(tag) && attributes.svg;
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "svg" || value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...shown(children));
  return element;
}

function shown(children) {
  return children.flat(4).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...shown(children));
}

/** JSON of the server; throws an Error with its sentence. */
export async function api(path, options) {
  const response = await fetch(path, { credentials: "same-origin", ...options });
  if (response.status === 401) location.assign("/login");
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error || `the server responded with ${response.status}`);
  return body;
}

/** A definition list of [{label, text}]. */
export function facts(list) {
  return h("dl", { class: "facts" }, list.map(({ label, text }) => [h("dt", {}, label), h("dd", {}, text)]));
}

/** A strip of bars from shares in 0 to 1; null is not finite. */
export function strip(cells, label) {
  const root = h("svg", { svg: true, class: "strip", viewBox: `0 0 ${Math.max(cells.length, 1)} 1`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  cells.forEach(({ share, text }, i) => {
    if (share === 0) return;
    const tall = share === null ? 1 : share;
    root.append(h("rect", { svg: true, class: share === null ? "nonfinite" : null, x: i, y: 1 - tall, width: 0.95, height: tall }, h("title", { svg: true }, text)));
  });
  return root;
}

/** A table; `head` and rows are lists of cells. */
export function table(head, rows, attributes = {}) {
  const left = (i) => rows[0]?.children?.[i]?.classList.contains("left");
  return h("table", attributes, h("thead", {}, h("tr", {}, head.map((text, i) => h("th", { scope: "col", class: left(i) ? "left" : null }, text)))), h("tbody", {}, rows));
}

/** How many of a list are shown, and a button for more; nothing where all are. */
export function more(shown, total, noun, load) {
  if (shown >= total) return null;
  const text = (number) => number.toLocaleString("en");
  return h("p", { class: "more", role: "status" }, `${text(shown)} of ${text(total)} ${noun} `, h("button", { type: "button", onclick: load }, "Show more"));
}

/** A scrolling region that the keyboard reaches. */
export function region(label, ...children) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);
}
