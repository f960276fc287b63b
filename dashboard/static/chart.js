// Line chart by uPlot: lines over an ordered axis with intervals, a cursor for mouse and keyboard, and zoom.
import { box, html, render } from "./ui.js";
import { onTheme } from "./theme.js";
import { default as uPlot } from "./vendor/uplot.js";

const HEIGHT = 220;
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]];
const FONT = "11px system-ui, sans-serif";
export const MAX_LINES = 8;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const SCALES = {
  bytes: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]],
  seconds: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
  share: [[0.01, "%"]],
};

/** Format the ticks of the value axis, in the unit of `kind`, with enough digits to distinguish adjacent ticks. */
function ticks(values, step, kind) {
  const most = Math.max(...values.map(Math.abs));
  const [scale, unit] = SCALES[kind]?.find(([least]) => most >= least) ?? SCALES[kind]?.at(-1) ?? [1, ""];
  const places = Math.floor(Math.log10(step / scale));
  if (!unit && most && (most < 1e-3 || most >= 1e7)) return values.map((value) => value.toExponential(Math.max(Math.floor(Math.log10(most)) - places, 1)));
  const isWhole = Number.isInteger(Math.round((1e3 * step) / scale / 10 ** places) / 1e3);  // false for a step of 2.5
  const digits = Math.min(Math.max(-places + (isWhole ? 0 : 1), 0), 8);
  return values.map((value) => `${(value / scale).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })}${unit && ` ${unit}`}`);
}

/** Range of the value axis, wide enough that differences by rounding stay small. */
function range(plot, low, high) {
  if (low === null) return [0, 1];
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return high - low < 1e-3 * most ? [low - 0.1 * most, high + 0.1 * most] : uPlot.rangeNum(low, high, 0.1, true);
}

/**
 * Line chart; `show({ at, places, lines })` draws it. `at` are ascending x values, `places(x)` is their axis label.
 * A line is {name, values, texts, low, high} with arrays parallel to `at`; null is a gap, undefined a missing value.
 * `place(i)` names point i in the text below the chart. `onZoom(first, last)` receives the visible indices.
 */
export class LineChart {
  constructor({ title, unit = "", kind = "", heading = "h3", note = "", place = (name) => name, onZoom = () => {} }) {
    Object.assign(this, { title, unit, kind, note, place, onZoom, first: 0, last: -1, cursor: -1 });
    this.element = box();
    this.canvas = box("chart");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.reading = document.createElement("p");
    this.reading.className = "mono dim chart-reading";
    this.reading.setAttribute("role", "status");
    this.heading = heading;
    this.#head();
    new ResizeObserver(() => this.#fit()).observe(this.canvas);
    onTheme(() => this.plot?.redraw());
  }

  #head() {
    const unit = this.unit ? html`<span class="dim"> ${this.unit}</span>` : "";
    const title = this.heading === "h2" ? html`<h2>${this.title}${unit}</h2>` : html`<h3>${this.title}${unit}</h3>`;
    render(html`${title}${this.canvas}${this.reading}${this.note ? html`<p class="dim mono chart-note">${this.note}</p>` : ""}`, this.element);
  }

  show({ at, places, lines, note = this.note }) {
    const isWhole = this.first === 0 && this.last === (this.at?.length ?? 0) - 1;
    const isEnd = !this.at || this.cursor === this.at.length - 1;
    const names = lines.map(({ name }) => name).join("\0");
    const isSame = this.plot && names === this.names;
    Object.assign(this, { at, places, lines, names, note });
    if (isWhole || this.last >= at.length) [this.first, this.last] = [0, at.length - 1];
    if (isEnd || this.cursor >= at.length) this.cursor = at.length - 1;
    this.#head();
    if (isSame) this.plot.setData(this.#data(), false);
    else {
      this.plot?.destroy();
      this.plot = null;
    }
    this.#fit();
    this.zoom(this.first, this.last, { isOwn: false });
  }

  #data() {
    return [this.at, ...this.lines.flatMap(({ values, low, high }) => (low ? [values, high, low] : [values]))];
  }

  #fit() {
    const width = this.canvas.clientWidth;
    if (!width || !this.at) return;
    if (!this.plot) this.#create(width);
    else if (width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  /** Half of the width of the last axis label, in pixels: it extends past its point. */
  #halfOfLastName() {
    return Math.max(12, 3.5 * String(this.places(this.at[this.last]) ?? "").length);
  }

  #create(width) {
    const series = [{}];
    const bands = [];
    this.lines.forEach(({ low }, i) => {
      const stroke = () => colour(`--line-${i}`);
      series.push({ stroke, width: 1.5, dash: DASHES[i % DASHES.length], points: { size: 5, width: 1, fill: stroke } });
      if (!low) return;
      const edge = { stroke: "transparent", width: 0, points: { show: false } };
      series.push(edge, edge);
      bands.push({ series: [series.length - 2, series.length - 1], fill: () => `${colour(`--line-${i}`)}26` });
    });
    const axis = { stroke: () => colour("--dim"), font: FONT, ticks: { show: false } };
    const grid = { stroke: () => colour("--line"), width: 1 };
    this.plot = new uPlot({
      width, height: HEIGHT, series, bands, legend: { show: false }, padding: [8, () => this.#halfOfLastName(), 0, 0],
      scales: { x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: 110, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6, 1e7, 1e8], values: (plot, found) => found.map((value) => this.places(value) ?? "") },
        { ...axis, grid, size: (plot, texts) => 14 + 7 * Math.max(...(texts ?? [""]).map((text) => text.length)), values: (plot, found, i, space, step) => ticks(found, step, this.kind) },
      ],
      cursor: {
        y: false, points: { size: 7 }, drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => this.zoom(0, this.at.length - 1) },
      },
      hooks: {
        ready: [(plot) => plot.over.addEventListener("mousemove", ({ clientX }) => this.#read(plot.posToIdx(clientX - plot.over.getBoundingClientRect().left)))],
        setSelect: [(plot) => {
          const { left, width: wide } = plot.select;
          if (!wide) return;
          const [from, to] = [plot.posToIdx(left), plot.posToIdx(left + wide)];
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (to > from) this.zoom(from, to);
        }],
      },
    }, this.#data(), this.canvas);
    this.zoom(this.first, this.last, { isOwn: false });
  }

  /** Show a range of indices. `isOwn`: the user zoomed this chart, so the others are notified. */
  zoom(first, last, { isOwn = true } = {}) {
    [this.first, this.last] = [Math.max(first, 0), Math.min(last, this.at.length - 1)];
    const { at, plot } = this;
    if (!at.length) return;
    plot?.batch(() => plot.setScale("x", { min: at[this.first], max: at[this.last] }));  // immediately, because the cursor needs the new scale
    const names = `${this.place(this.first)} to ${this.place(this.last)}`;
    this.canvas.setAttribute("aria-label", `${this.title}${this.unit ? ` (${this.unit})` : ""}, ${names}: arrow keys move, + and - zoom, 0 shows all`);
    this.move(this.cursor);
    if (isOwn) this.onZoom(this.first, this.last);
  }

  move(index) {
    this.#read(Math.min(Math.max(index, this.first), this.last));
    if (this.plot) this.plot.setCursor({ left: this.plot.valToPos(this.at[this.cursor], "x"), top: 8 }, false);
  }

  #read(index) {
    this.cursor = index;
    const found = this.lines.filter(({ texts }) => texts[index] !== undefined);
    const values = found.map(({ name, texts }) => (name ? `${name}: ${texts[index]}` : texts[index])).join(" · ");
    this.reading.textContent = this.at.length ? `${this.place(index)} · ${values || "no result"}` : "";
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const quarter = Math.max(Math.floor((this.last - this.first) / 4), 1);
    const actions = {
      ArrowLeft: () => this.move(this.cursor - 1),
      ArrowRight: () => this.move(this.cursor + 1),
      Home: () => this.move(this.first),
      End: () => this.move(this.last),
      "+": () => this.zoom(this.cursor - quarter, this.cursor + quarter),
      "-": () => this.zoom(this.first - quarter * 2, this.last + quarter * 2),
      "0": () => this.zoom(0, this.at.length - 1),
    };
    if (!actions[event.key]) return;
    actions[event.key]();
    event.preventDefault();
  }
}

/** Legend of line names, by color and dash. */
export function legend(names) {
  const key = (i) => html`<svg class="key" viewBox="0 0 28 8" aria-hidden="true"><line class=${`line-${i}`} x1="0" y1="4" x2="28" y2="4" stroke-dasharray=${DASHES[i % DASHES.length].join(" ")}></line></svg>`;
  return html`<ul class="legend">${names.map((name, i) => html`<li>${key(i)}${name}</li>`)}</ul>`;
}
