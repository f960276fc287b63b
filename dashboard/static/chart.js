// Line chart: lines over ordered columns as SVG, with intervals, a cursor for mouse and keyboard, and zoom.
import { fill, h } from "./dom.js";

const HEIGHT = 220;
const LEFT = 70;
const BOTTOM = 22;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
export const MAX_LINES = 8;

/**
 * `lines`: [{name, points: [{at, value, low, high, text}]}]; `at` is an index of `columns`, a list of labels.
 * `onMove(at)` follows the cursor; `onZoom(first, last)` the columns that are shown.
 */
export class LineChart {
  constructor(root, { title, unit, columns, lines, onMove = () => {}, onZoom = () => {} }) {
    Object.assign(this, { title, unit, columns, lines, onMove, onZoom });
    this.first = 0;
    this.last = columns.length - 1;
    this.at = this.last;
    this.svg = h("svg", { svg: true, class: "lines", tabindex: "0", role: "img", "aria-label": `${title} (${unit})`, "aria-describedby": "chart-keys" });
    this.reading = h("p", { class: "mono dim chart-reading", role: "status" });
    fill(root, h("h3", {}, title, h("span", { class: "dim" }, ` ${unit}`)), this.svg, this.reading);
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("pointerdown", (event) => { this.from = this.column(event); });
    this.svg.addEventListener("pointermove", (event) => this.move(this.column(event)));
    this.svg.addEventListener("pointerup", (event) => {
      const to = this.column(event);
      if (this.from !== undefined && this.from !== to) this.zoom(Math.min(this.from, to), Math.max(this.from, to));
      this.from = undefined;
    });
    this.svg.addEventListener("dblclick", () => this.zoom(0, this.columns.length - 1));
    new ResizeObserver(() => { if (this.svg.clientWidth !== this.width) this.draw(); }).observe(this.svg);
    this.draw();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const quarter = Math.max(Math.floor((this.last - this.first) / 4), 1);
    const actions = {
      ArrowLeft: () => this.move(this.at - 1),
      ArrowRight: () => this.move(this.at + 1),
      Home: () => this.move(this.first),
      End: () => this.move(this.last),
      "+": () => this.zoom(this.at - quarter, this.at + quarter),
      "-": () => this.zoom(this.first - quarter * 2, this.last + quarter * 2),
      "0": () => this.zoom(0, this.columns.length - 1),
    };
    if (!actions[event.key]) return;
    actions[event.key]();
    event.preventDefault();
  }

  zoom(first, last) {
    this.show(Math.max(first, 0), Math.min(last, this.columns.length - 1));
    this.onZoom(this.first, this.last);
  }

  show(first, last) {
    [this.first, this.last] = [first, last];
    this.at = Math.min(Math.max(this.at, first), last);
    this.draw();
  }

  move(at) {
    this.at = Math.min(Math.max(at, this.first), this.last);
    this.mark();
    this.onMove(this.at);
  }

  column(event) {
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / Math.max(box.width - LEFT - 8, 1);
    return Math.min(Math.max(Math.round(this.first + share * (this.last - this.first)), this.first), this.last);
  }

  x(at) {
    return this.last === this.first ? (LEFT + this.width - 8) / 2 : LEFT + ((at - this.first) / (this.last - this.first)) * (this.width - LEFT - 8);
  }

  draw() {
    this.width = Math.max(this.svg.clientWidth, 200);
    const shown = this.lines.map((line) => ({ ...line, points: line.points.filter(({ at }) => at >= this.first && at <= this.last) }));
    const all = shown.flatMap(({ points }) => points);
    let [low, high] = [Math.min(...all.map((p) => p.low)), Math.max(...all.map((p) => p.high))];
    if (!all.length) [low, high] = [0, 1];
    if (low === high) [low, high] = [low * 0.9, high * 1.1];
    const y = (value) => 6 + (1 - (value - low) / (high - low)) * (HEIGHT - BOTTOM - 12);
    const part = (tag, attributes, ...children) => h(tag, { svg: true, ...attributes }, ...children);
    const ticks = niceTicks(low, high).map((value) => [
      part("line", { class: "grid-line", x1: LEFT, x2: this.width - 8, y1: y(value), y2: y(value) }),
      part("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value.toLocaleString("en", { maximumSignificantDigits: 6 })),
    ]);
    const every = Math.max(Math.ceil((this.last - this.first + 1) / Math.max(Math.floor((this.width - LEFT) / 130), 1)), 1);
    const names = [];
    for (let at = this.first; at <= this.last; at += every) {
      const anchor = at === this.first ? "start" : at === this.last ? "end" : "middle";
      names.push(part("text", { x: this.x(at), y: HEIGHT - 4, "text-anchor": anchor }, this.columns[at].slice(0, 12)));
    }
    const drawn = shown.map(({ name, points }, i) => [
      part("path", { class: `band line-${i}`, d: points.length > 1 ? `M${[...points.map((p) => `${this.x(p.at)},${y(p.high)}`), ...[...points].reverse().map((p) => `${this.x(p.at)},${y(p.low)}`)].join("L")}Z` : "" }),
      part("polyline", { class: `line-${i}`, "stroke-dasharray": DASHES[i % DASHES.length], points: points.map((p) => `${this.x(p.at)},${y(p.value)}`).join(" ") }),
      points.map((p) => part("circle", { class: `line-${i}`, cx: this.x(p.at), cy: y(p.value), r: 3 }, part("title", {}, `${name}: ${p.text} at ${this.columns[p.at]}`))),
    ]);
    this.cursor = part("line", { class: "cursor", y1: 0, y2: HEIGHT - BOTTOM });
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    fill(this.svg, ticks, names, drawn, this.cursor);
    this.mark();
  }

  mark() {
    this.cursor.setAttribute("x1", this.x(this.at));
    this.cursor.setAttribute("x2", this.x(this.at));
    const values = this.lines.map((line) => [line.name, line.points.find((p) => p.at === this.at)]).filter(([, point]) => point);
    fill(this.reading, `${this.columns[this.at] ?? ""} · `, values.map(([name, { text }]) => `${name}: ${text}`).join(" · ") || "no result");
  }
}

/** A legend of line names, by colour and dash. */
export function legend(names) {
  return h("ul", { class: "legend" }, names.map((name, i) => h("li", {}, h("svg", { svg: true, class: "key", viewBox: "0 0 28 8", "aria-hidden": "true" }, h("polyline", { svg: true, class: `line-${i}`, "stroke-dasharray": DASHES[i % DASHES.length], points: "0,4 28,4" })), name)));
}

/** Three to six round numbers within [low, high]. */
function niceTicks(low, high) {
  const raw = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found;
}
