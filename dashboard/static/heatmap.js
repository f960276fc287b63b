// Heat map: rows × steps on one canvas, with a cursor for mouse and keyboard. Draws the grids of the view model.
import { onTheme } from "./theme.js";

const LABEL = [90, 340];
const MONO = 6.8;
const HEAD = 18;
const MAX_PIXELS = 16000;
const CLOSE = { "=": "equal", "~": "close", "%": "nan", "#": "shape", "·": "none", "∅": "none", "<": "none", ">": "none", "!": "5" };

const WORDS = { "%": "not finite", "#": "not comparable", "!": "differs", "=": "equal", "·": "nothing", "∅": "zero" };

/** Name of a glyph's color. */
export function colourOf(glyph) {
  return CLOSE[glyph] ?? glyph;
}

/** Label of a range of steps: `7`, or `7-12`. */
export function stepLabel([first, last]) {
  return first === last ? String(first) : `${first}-${last}`;
}

/** Label of a grid column: the name of a token, else a step or rank. */
function columnLabel(grid, i) {
  return grid.names?.[i] ?? stepLabel(grid.columns[i]);
}

/** Undo the abbreviation of a number: `5.8e4` -> `5.8e+04`, `5.8E4` -> `5.8e-04`, `.45` -> `0.45`. */
function long(text) {
  return text.replace(/^\./, "0.").replace(/[eE](\d+)$/, (found, digits) => `e${found[0] === "E" ? "-" : "+"}${digits.padStart(2, "0")}`);
}

/** Decode the run lengths of a packed row: `a*3 b` -> [a, a, a, b]. */
export function expand(cells) {
  const found = [];
  for (const packed of cells ? cells.split(" ") : []) {
    const word = packed.includes("*") ? `${long(packed.slice(0, packed.lastIndexOf("*")))}${packed.slice(packed.lastIndexOf("*"))}` : long(packed);
    const at = word.lastIndexOf("*");
    if (at < 0) found.push(word);
    else for (let i = Number(word.slice(at + 1)); i > 0; i--) found.push(word.slice(0, at));
  }
  return found;
}

/** Shorten a label at its start, because the end of a site names the module. */
function tail(text, room) {
  return text.length <= room ? text : `…${text.slice(text.length - room + 1)}`;
}

/** First column with the worst glyph of a row that is a cause; 0 for other rows. */
function worstColumn(row) {
  if (!row?.is_cause) return 0;
  const glyphs = [...row.glyphs];
  const rank = (glyph) => "123456789!#%".indexOf(glyph);
  const worst = Math.max(...glyphs.map(rank));
  return worst < 0 ? 0 : glyphs.findIndex((glyph) => rank(glyph) === worst);
}

/** Heat map in `root`; `show(grid)` draws a packed grid, `onSelect(row, column)` gets the chosen cell of `map.grid`.
 *
 * `finer(first, last)` returns a promise of a grid that merges fewer of the columns from `first` to `last`.
 */
export class HeatMap {
  constructor(root, { onSelect = () => {}, label = "heat map", what = "error ÷ floor", empty = "Nothing was compared.", finer = null, fail = () => {} } = {}) {
    Object.assign(this, { onSelect, empty, finer, fail, range: null });
    this.onBack = () => {};
    this.what = what;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", `${label}: arrow keys move the cursor, Enter selects the row, plus and minus zoom the columns`);
    this.reading = document.createElement("p");
    this.reading.className = "heat-reading mono";
    this.reading.setAttribute("aria-live", "polite");
    this.scroller = document.createElement("div");
    this.scroller.className = "scroll";
    this.scroller.tabIndex = -1;
    this.scroller.append(this.canvas);
    this.zoomed = document.createElement("span");
    this.zoomed.setAttribute("role", "status");
    const bar = document.createElement("p");
    bar.className = "controls dim no-print";
    this.buttons = [1, -1].map((direction) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = direction > 0 ? "Zoom in" : "Zoom out";
      button.addEventListener("click", () => this.zoom(direction));
      return button;
    });
    bar.append(...this.buttons, this.zoomed);
    root.replaceChildren(this.scroller, this.reading, bar);
    this.canvas.addEventListener("mousemove", (event) => this.#point(event));
    this.canvas.addEventListener("click", (event) => this.#point(event, true));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(root);
    onTheme(() => this.draw());
  }

  /** Show a grid with the cursor at `row` and `step`, by default at the worst cell of the first cause. The range of
   * columns is kept if the axis is the same. */
  show(grid, { row, step } = {}) {
    if (grid.axis !== this.whole?.axis) this.range = null;
    this.whole = grid;
    const at = row ?? Math.max(grid.rows.findIndex((each) => each.is_cause), 0);
    this.#cut(grid, at, step ?? grid.columns[worstColumn(grid.rows[at])]?.[0] ?? -Infinity);
    this.#reveal();
  }

  /** First step, rank or token of the column under the cursor. */
  get step() {
    return this.grid?.columns[this.column]?.[0];
  }

  /** Show half as many columns around the cursor (`direction` > 0), or twice as many. */
  zoom(direction) {
    if (!this.grid) return;
    const { columns } = direction > 0 ? this.grid : this.whole;
    const [first, stop] = direction > 0 ? [0, columns.length] : this.#within(columns);
    const num = direction > 0 ? Math.ceil((stop - first) / 2) : 2 * (stop - first);
    const centre = direction > 0 ? this.column : Math.floor((first + stop) / 2);
    this.#range(columns, centre - Math.floor(num / 2), num, direction > 0 ? this.source : this.whole, this.step);
  }

  #range(columns, start, num, source, step) {
    const first = Math.max(Math.min(start, columns.length - num), 0);
    const stop = Math.min(first + num, columns.length);
    if (!columns.length) return;
    this.range = columns === this.whole.columns && stop - first === columns.length ? null : [columns[first][0], columns[stop - 1][1]];
    this.#cut(source, this.row, step);
  }

  /** Half-open index range of the columns that are in the zoomed range. */
  #within(columns) {
    const [from, to] = this.range ?? [-Infinity, Infinity];
    const first = columns.findIndex((each) => each[1] >= from);
    const last = columns.findLastIndex((each) => each[0] <= to);
    return first < 0 || last < first ? [0, columns.length] : [first, last + 1];
  }

  /** Show the columns of `source` in the zoomed range; if some are merged, fetch and show finer ones. */
  #cut(source, row, step, isFinest = false) {
    const [first, stop] = this.#within(source.columns);
    const columns = source.columns.slice(first, stop);
    this.source = source;
    this.from = first;
    this.grid = { ...source, columns, names: source.names?.slice(first, stop) };
    this.row = Math.max(Math.min(row, source.rows.length - 1), 0);
    this.column = Math.max(columns.findIndex((each) => each[1] >= step), 0);
    this.draw();
    this.#read();
    const [asked, column] = [(this.asked = {}), this.column];
    if (!this.finer || !this.range || isFinest || columns.every(([a, b]) => a === b)) return;
    this.finer(...this.range).then((found) => {
      if (this.asked === asked) this.#cut(found, this.row, this.column === column ? step : this.step, true);
    }).catch(this.fail);
  }

  #colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    const found = { fg: of("--fg"), dim: of("--dim"), bad: of("--bad"), focus: of("--focus"), bg: of("--bg") };
    for (const [glyph, name] of Object.entries(CLOSE)) found[glyph] = of(`--cell-${name}`);
    for (let i = 1; i <= 9; i++) found[i] = of(`--cell-${i}`);
    return found;
  }

  draw() {
    if (!this.grid) return;
    const { columns, rows } = this.grid;
    const width = Math.max(this.scroller.clientWidth, 280);
    const wanted = Math.max(...rows.map((row) => row.label.length + 3), 0) * MONO;
    const label = Math.min(Math.max(LABEL[0], Math.min(wanted, LABEL[1])), width * 0.4);
    const most = rows.length > 200 ? 12 : 18;
    const tall = Math.max(Math.min(most, Math.floor((MAX_PIXELS - HEAD) / Math.max(rows.length, 1))), 1);
    const height = HEAD + tall * rows.length;
    const scale = Math.min(devicePixelRatio || 1, MAX_PIXELS / height);
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    this.geometry = { label, tall, wide: (width - label - 4) / Math.max(columns.length, 1) };
    const { wide } = this.geometry;
    const pen = this.canvas.getContext("2d");
    const colours = this.#colours();
    pen.scale(scale, scale);
    pen.fillStyle = colours.bg;
    pen.fillRect(0, 0, width, height);
    pen.textBaseline = "middle";
    pen.font = "11px ui-monospace, Menlo, Consolas, monospace";
    pen.fillStyle = colours.dim;
    let free = 0;
    columns.forEach((_, i) => {
      const text = columnLabel(this.grid, i);
      const x = label + i * wide;
      if (x < free || x + pen.measureText(text).width > width) return;
      pen.fillText(text, x, HEAD / 2);
      free = x + pen.measureText(text).width + 8;
    });
    const room = Math.floor(label / MONO) - 2;
    rows.forEach((row, r) => {
      const y = HEAD + r * tall;
      if (tall >= 8) {
        pen.fillStyle = row.is_cause ? colours.bad : colours.fg;
        pen.font = `${row.is_cause ? "bold " : ""}${Math.min(11, tall)}px ui-monospace, Menlo, Consolas, monospace`;
        pen.fillText(`${row.is_cause ? "▸" : " "}${tail(row.label, room)}`, 0, y + tall / 2);
      }
      [...row.glyphs].slice(this.from, this.from + columns.length).forEach((glyph, c) => {
        pen.fillStyle = colours[glyph] || colours.bg;
        pen.fillRect(label + c * wide, y, Math.max(wide - (wide > 4 ? 1 : 0), 0.5), Math.max(tall - (tall > 4 ? 1 : 0), 1));
      });
    });
    this.#mark(pen, colours);
  }

  #mark(pen, colours) {
    if (!this.grid.rows.length) return;
    const { label, tall, wide } = this.geometry;
    pen.strokeStyle = colours.focus;
    pen.lineWidth = 2;
    pen.strokeRect(label + this.column * wide, HEAD + this.row * tall, Math.max(wide, 2), Math.max(tall, 2));
  }

  #point(event, choose = false) {
    if (!this.grid || !this.grid.rows.length) return;
    const { label, tall, wide } = this.geometry;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - label) / wide);
    this.#go(Math.floor((event.clientY - box.top - HEAD) / tall), column, choose);
  }

  #key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], k: [-1, 0], j: [1, 0], h: [0, -1], l: [0, 1] };
    const ends = { Home: [this.row, 0], End: [this.row, Infinity], PageUp: [this.row - 20, this.column], PageDown: [this.row + 20, this.column] };
    const [, aside] = moves[event.key] ?? [];
    if (aside && this.range && !this.grid.columns[this.column + aside]) this.#pan(aside);
    else if (moves[event.key]) this.#go(this.row + moves[event.key][0], this.column + moves[event.key][1]);
    else if (ends[event.key]) this.#go(...ends[event.key]);
    else if (event.key === "Enter") this.onSelect(this.row, this.column);
    else if (event.key === "+" || event.key === "-") this.zoom(event.key === "+" ? 1 : -1);
    else if (event.key === "Backspace") this.onBack();
    else return;
    event.preventDefault();
  }

  /** Move the zoomed range past its first or last column. */
  #pan(direction) {
    const { columns } = this.whole;
    const [first, stop] = this.#within(columns);
    const beside = direction > 0 ? this.grid.columns.at(-1)[1] + 1 : this.grid.columns[0][0] - 1;
    this.#range(columns, first + direction * Math.max((stop - first) >> 1, 1), stop - first, this.whole, beside);
  }

  #go(row, column, choose = false) {
    const { rows, columns } = this.grid;
    this.row = Math.min(Math.max(row, 0), rows.length - 1);
    this.column = Math.min(Math.max(column, 0), Math.max(columns.length - 1, 0));
    this.draw();
    this.#read();
    this.#reveal();
    if (choose) this.onSelect(this.row, this.column);
  }

  /** Scroll the map, not the page, to the row under the cursor. */
  #reveal() {
    const y = HEAD + this.row * this.geometry.tall;
    const { scrollTop, clientHeight } = this.scroller;
    if (y < scrollTop || y + this.geometry.tall > scrollTop + clientHeight) this.scroller.scrollTop = y - clientHeight / 2;
  }

  #read() {
    const [all, shown] = [this.whole.columns, this.grid.columns];
    const joined = shown.some(([first, last]) => first !== last) ? ", neighbours joined by their maximum" : "";
    const ends = shown.length ? `${columnLabel(this.grid, 0)} to ${columnLabel(this.grid, shown.length - 1)}` : "";
    this.zoomed.textContent = this.range ? `${this.grid.axis || "column"}s ${ends}${joined}` : joined ? `all ${this.grid.axis || "column"}s${joined}` : "";
    this.buttons[0].disabled = shown.length < 2;
    this.buttons[1].disabled = !this.range || !all.length;
    const row = this.grid.rows[this.row];
    const column = this.grid.columns[this.column];
    if (!row || !column) {
      this.reading.textContent = this.empty;
      return;
    }
    const at = this.from + this.column;
    const text = expand(row.cells)[at] || "-";
    const glyph = [...row.glyphs][at];
    const cell = text === "-" ? WORDS[glyph] ?? glyph : `${this.what} ${text}${glyph === "%" ? ", not finite" : ""}`;
    this.reading.textContent = `${row.label} · ${this.grid.axis || "step"} ${columnLabel(this.grid, this.column)} · ${cell}`;
  }
}
