// All values of a tensor, or of both sides of a finding: a cursor over tiles that the server reads on demand.
import { api, fill, h, more, strip } from "./dom.js";
import { HeatMap } from "./heatmap.js";

const ROWS = 24;
const COLUMNS = 12;

/** Draw the values below `base` (an address of the server's tables) into `root`; begins at [row, column]. */
export class ValueTable {
  constructor(root, base, words = "", { start = null, pair = false, onMove = () => {} } = {}) {
    Object.assign(this, { base, words, pair, onMove, row: 0, column: 0, side: pair ? "difference" : "target", threshold: null });
    this.grid = h("div", { class: "scroll grid", tabindex: "0", role: "application", "aria-label": "Values: arrow keys move the cursor, n finds the next value that is not finite, f the largest" });
    this.reading = h("p", { class: "mono", "aria-live": "polite" });
    this.message = h("p", { role: "status", class: "dim" });
    this.summary = h("div");
    const place = h("input", { "aria-label": "row, column", placeholder: "row, column", size: 12 });
    const above = h("input", { "aria-label": `next ${pair ? "|Δ|" : "|x|"} above`, placeholder: "1e-3", size: 8 });
    const button = (text, act, label = text) => h("button", { type: "button", "aria-label": label, onclick: () => this.#try(act) }, text);
    const form = (...children) => h("form", { class: "controls" }, children);
    const go = form(place, h("button", { type: "submit" }, "Go"));
    go.addEventListener("submit", (event) => { event.preventDefault(); this.#try(() => this.place(place.value)); });
    const next = form(above, h("button", { type: "submit" }, "Next above"));
    next.addEventListener("submit", (event) => { event.preventDefault(); this.threshold = above.value; this.#try(() => this.find(1, above.value)); });
    const sides = pair ? h("select", { "aria-label": "side", onchange: (event) => { this.side = event.target.value; this.#draw(); } }, ["difference", "target", "baseline"].map((name) => h("option", { value: name }, name))) : null;
    fill(root, h("div", { class: "controls" }, go, button("Next NaN", () => this.find(1)), button("Previous NaN", () => this.find(-1)), next, button("Largest", () => this.largest()), sides),
      this.message, this.grid, this.reading, this.summary);
    this.grid.addEventListener("keydown", (event) => this.#key(event));
    this.ready = (async () => {
      await this.#try(() => (start ? this.go(...start) : pair ? this.largest() : this.go(0, 0)));
      await this.#try(() => this.#overview());
    })();
  }

  #address(path, words = {}) {
    const all = new URLSearchParams(this.words);
    for (const [name, value] of Object.entries(words)) all.set(name, value);
    return `${this.base}${path}?${all}`;
  }

  async #try(act) {
    this.message.textContent = "";
    try {
      await act();
    } catch (error) {
      this.message.textContent = error.message;
    }
  }

  async go(row, column) {
    const inside = this.tile && row >= this.tile.first_row && row < this.tile.first_row + this.tile.target.length && column >= this.tile.first_column && column < this.tile.first_column + this.tile.target[0].length;
    if (!inside) this.tile = await api(this.#address("/tile", { row: Math.max(row - ROWS / 2, 0), column: Math.max(column - COLUMNS / 2, 0), rows: ROWS, columns: COLUMNS }));
    this.row = Math.min(Math.max(row, 0), Math.max(this.tile.num_rows - 1, 0));
    this.column = Math.min(Math.max(column, 0), Math.max(this.tile.num_columns - 1, 0));
    this.#draw();
    const asked = (this.asked = {});
    const at = await api(this.#address("/cell", { row: this.row, column: this.column }));
    if (asked !== this.asked) return;
    const values = this.pair ? `baseline ${at.baseline} · target ${at.target} · Δ ${at.difference}${at.ulps === "-" ? "" : ` · ${at.ulps} ULP`}` : at.target;
    this.reading.textContent = `${at.index || `row ${at.row}, column ${at.column}`} · ${at.label} · ${values}`;
    this.onMove(at);
  }

  async place(text) {
    await this.go(...(await api(this.#address("/place", { index: text }))));
  }

  async find(direction, above = null) {
    const words = { row: this.row, column: this.column, direction };
    if (above !== null && above !== "") words.more_than = above;
    const found = await api(this.#address("/find", words));
    if (found) await this.go(...found);
    else this.message.textContent = `None ${direction > 0 ? "after" : "before"} this value.`;
  }

  async #map(root, what) {
    const grid = await api(this.#address("/map"));
    const map = new HeatMap(root, { label: `${what} of the whole tensor`, what, onSelect: (row, column) => this.#try(async () => {
      const [left, right] = grid.columns[column];
      const [top, bottom] = grid.spans[row];
      await this.go(...(await api(this.#address("/largest", { row: top, column: left, last_row: bottom, last_column: right }))));
      this.grid.focus();
    }) });
    map.show(grid);
  }

  async largest() {
    await this.go(...(await api(this.#address("/largest"))));
  }

  #draw() {
    const { first_row: top, first_column: left, num_rows, num_columns, labels, shares } = this.tile;
    const lines = this.tile[this.side];
    const head = h("tr", {}, h("th", { scope: "col" }, "row"), (lines[0] || []).map((_, i) => h("th", { scope: "col" }, left + i)));
    const body = lines.map((values, r) => h("tr", {}, h("th", { scope: "row" }, labels[r]), values.map((text, c) => {
      const here = top + r === this.row && left + c === this.column;
      const cell = h("td", { class: here ? "here" : null, "aria-current": here ? "true" : null, onclick: () => this.#try(() => this.go(top + r, left + c)) }, text);
      const share = shares[r][c] === null ? 1 : this.pair ? shares[r][c] : 0;
      if (share && !here) cell.style.background = `rgba(var(--delta), ${(0.35 * share).toFixed(2)})`;
      return cell;
    })));
    fill(this.grid, h("p", { class: "dim" }, `rows from ${top} of ${num_rows.toLocaleString("en")}, columns from ${left} of ${num_columns.toLocaleString("en")}`), h("table", { class: "tile" }, h("thead", {}, head), h("tbody", {}, body)));
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { row, column } = this;
    const last = [this.tile.num_rows - 1, this.tile.num_columns - 1];
    const to = { ArrowUp: [row - 1, column], k: [row - 1, column], ArrowDown: [row + 1, column], j: [row + 1, column], ArrowLeft: [row, column - 1], h: [row, column - 1], ArrowRight: [row, column + 1], l: [row, column + 1],
      PageUp: [row - ROWS, column], PageDown: [row + ROWS, column], Home: [row, 0], End: [row, last[1]], g: [0, column], G: [last[0], column] }[event.key];
    const acts = { n: () => this.find(1), N: () => this.find(-1), b: () => this.find(1, this.threshold || "0"), B: () => this.find(-1, this.threshold || "0"), f: () => this.largest() };
    if (to) this.#try(() => this.go(Math.min(Math.max(to[0], 0), last[0]), Math.min(Math.max(to[1], 0), last[1])));
    else if (acts[event.key]) this.#try(acts[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  async #overview() {
    const found = await api(this.#address(""));
    const names = this.pair ? ["baseline", "target"] : ["target"];
    const metrics = this.pair
      ? `max |Δ| ${found.max_abs.text} · rel l2 ${found.rel_l2.text} · cosine ${found.cosine.text}${found.ulp_dtype ? ` · ULP of ${found.ulp_dtype}: ${found.ulp_median.text} median, ${found.ulp_p99.text} p99, ${found.ulp_max.text} max` : ""} · equal ${found.equal.text}`
      : `max |x| ${found.max_abs.text} · rms ${found.rms.text}`;
    const tokens = h("div");
    const whole = h("div", { class: "heat" });
    const order = async (name, known = []) => {
      const part = await api(this.#address("/tokens", { order: name, offset: known.length }));
      const rows = [...known, ...part.rows];
      const cells = rows.map((each) => ({ share: each.share, text: `${each.label}: ${each.error.text}` }));
      fill(tokens, strip(cells, `${rows.length} rows by ${name}`), h("p", { class: "dim mono" }, rows.slice(0, 8).map((each) => `${each.label}: ${each.error.text}`).join("  ·  ")),
        more(rows.length, part.num_rows, "rows", () => this.#try(() => order(name, rows))));
    };
    fill(this.summary, h("p", { class: "mono" }, metrics + (found.num_nonfinite ? ` · ${found.num_nonfinite.toLocaleString("en")} not finite` : "")),
      h("h3", {}, `${found.what} of the whole tensor`), whole,
      names.map((name) => bars(`Values${this.pair ? `, ${name}` : ""}`, found.values, name)),
      [...names, ...(this.pair ? ["difference"] : [])].map((name) => bars(`Magnitudes by powers of two, ${name === "difference" ? "|Δ|" : name}`, found.magnitudes, name)),
      h("h3", {}, `${found.what} by channel`), strip(found.channels, `${found.what} by channel`),
      h("h3", {}, `${found.what} by row`), strip(found.rows, `${found.what} by row`),
      h("h3", {}, "Tokens"), h("div", { class: "controls" }, ["position", "error"].map((name) => h("button", { type: "button", onclick: () => this.#try(() => order(name)) }, `by ${name}`))), tokens);
    await order("position");
    await this.#map(whole, found.what);
  }
}

/** A histogram of one side; all sides share bins and scale. */
function bars(text, bins, side) {
  if (!bins.length) return null;
  const most = Math.log1p(Math.max(...bins.flatMap((bin) => [bin.baseline, bin.target, bin.difference])));
  return [h("h3", {}, text), strip(bins.map((bin) => ({ share: Math.log1p(bin[side]) / most, text: bin.text })), text),
    h("p", { class: "dim mono" }, `${bins[0].low.toExponential(2)} … ${bins.at(-1).high.toExponential(2)}, heights on a log scale`)];
}
