// All values of a tensor, or of both sides of a finding, with a cursor; tiles are fetched on demand.
import { HeatMap } from "./heatmap.js";
import { api, box, button, html, more, nothing, questions, render, select, strip } from "./ui.js";

const ROWS = 24;
const COLUMNS = 12;
const SIDES = ["difference", "target", "baseline"].map((name) => [name, name]);

/** Value table at `base` (URL of a server's table), drawn into `root`. The cursor starts at the index `place`, at `start`
 * ([row, column]), or at the largest difference of a pair, or the first non-finite value of a single run. */
export class ValueTable {
  constructor(root, base, words = "", { start = null, place = "", pair = false, onMove = () => {} } = {}) {
    Object.assign(this, { root, base, words, pair, onMove, row: 0, column: 0, side: pair ? "difference" : "target", threshold: null });
    Object.assign(this, { tile: null, message: "", reading: "", overview: null, tokens: null, whole: box("heat"), askMove: questions(), askSearch: questions(), askTokens: questions() });
    this.draw();
    (async () => {
      await this.#try(() => (place ? this.#begin(place) : start ? this.go(...start) : pair ? this.largest() : this.#firstNonfinite()));
      await this.#try(() => this.#overview());
    })();
  }

  #address(path, words = {}) {
    const all = new URLSearchParams(this.words);
    for (const [name, value] of Object.entries(words)) all.set(name, value);
    return `${this.base}${path}?${all}`;
  }

  async #try(act) {
    this.message = "";
    try {
      await act();
    } catch (error) {
      this.message = error.message;
    }
    this.draw();
  }

  async go(row, column) {
    const inside = this.tile && row >= this.tile.first_row && row < this.tile.first_row + this.tile.target.length && column >= this.tile.first_column && column < this.tile.first_column + this.tile.target[0].length;
    const isLatest = this.askMove();
    [this.row, this.column] = [row, column];  // start of the next move, if a key is pressed before the tile arrives
    if (!inside) {
      const tile = await api(this.#address("/tile", { row: Math.max(row - ROWS / 2, 0), column: Math.max(column - COLUMNS / 2, 0), rows: ROWS, columns: COLUMNS }));
      if (!isLatest()) return;
      this.tile = tile;
    }
    this.row = Math.min(Math.max(row, 0), Math.max(this.tile.num_rows - 1, 0));
    this.column = Math.min(Math.max(column, 0), Math.max(this.tile.num_columns - 1, 0));
    this.draw();
    this.#reveal();
    const at = await api(this.#address("/cell", { row: this.row, column: this.column }));
    if (!isLatest()) return;
    const values = this.pair ? `baseline ${at.baseline} · target ${at.target} · Δ ${at.difference}${at.ulps === "-" ? "" : ` · ${at.ulps} ULP`}` : at.target;
    this.reading = `${at.index || `row ${at.row}, column ${at.column}`} · ${at.label} · ${values}`;
    this.draw();
    this.onMove(at);
  }

  /** Scroll the tile, not the page, to the cursor. */
  #reveal() {
    const grid = this.root.querySelector(".grid");
    const here = grid.querySelector("td.here")?.getBoundingClientRect();
    if (!here) return;
    const around = grid.getBoundingClientRect();
    const labels = grid.querySelector("tbody th").offsetWidth;
    const names = grid.querySelector("thead").offsetHeight;
    grid.scrollLeft += Math.min(here.left - around.left - labels, 0) || Math.max(here.right - around.left - grid.clientWidth, 0);
    grid.scrollTop += Math.min(here.top - around.top - names, 0) || Math.max(here.bottom - around.top - grid.clientHeight, 0);
  }

  async place(text) {
    await this.#seek("/place", { index: text });
  }

  async find(direction, above = null) {
    const words = { row: this.row, column: this.column, direction };
    if (above !== null && above !== "") words.more_than = above;
    await this.#seek("/find", words, `None ${direction > 0 ? "after" : "before"} this value.`);
  }

  /** Start at an index from the address; at the first value if the index is invalid for this tensor. */
  async #begin(place) {
    try {
      await this.place(place);
    } catch (error) {
      await this.go(0, 0);
      throw error;
    }
  }

  async #firstNonfinite() {
    const { shares } = await api(this.#address("/tile", { row: 0, column: 0, rows: 1, columns: 1 }));
    const found = shares[0][0] === null ? null : await api(this.#address("/find", { row: 0, column: 0, direction: 1 }));
    await this.go(...(found ?? [0, 0]));
  }

  async largest() {
    await this.#seek("/largest");
  }

  /** Go to the result of a search, unless a newer search was started. */
  async #seek(path, words = {}, nothing = "") {
    const isLatest = this.askSearch();
    const found = await api(this.#address(path, words));
    if (!isLatest()) return;
    if (found) await this.go(...found);
    else this.message = nothing;
  }

  draw() {
    const what = this.pair ? "|Δ|" : "|x|";
    const field = (name) => this.root.querySelector(`[name=${name}]`).value;
    const submit = (act) => (event) => { event.preventDefault(); this.#try(act); };
    const above = () => { this.threshold = field("above"); return this.find(1, this.threshold); };
    const label = "Values: arrow keys move the cursor, n finds the next value that is not finite, f the largest";
    render(html`<div class="controls">
        <form class="controls" @submit=${submit(() => this.place(field("place")))}><input name="place" aria-label="row, column" placeholder="row, column" size="12"><button type="submit">Go</button></form>
        ${button("Next NaN", () => this.#try(() => this.find(1)))}${button("Previous NaN", () => this.#try(() => this.find(-1)))}
        <form class="controls" @submit=${submit(above)}><input name="above" aria-label=${`next ${what} above`} placeholder="1e-3" size="8"><button type="submit">Next above</button></form>
        ${button("Largest", () => this.#try(() => this.largest()))}
        ${this.pair ? select("side", SIDES, this.side, (side) => { this.side = side; this.draw(); }) : nothing}</div>
      <p role="status" class="dim">${this.message}</p>
      <div class="scroll grid" tabindex="0" role="application" aria-label=${label} @keydown=${(event) => this.#key(event)}>${this.tile ? this.#values() : nothing}</div>
      <p class="mono" aria-live="polite">${this.reading}</p>
      ${this.overview ? this.#summary() : nothing}`, this.root);
  }

  #values() {
    const { first_row: top, first_column: left, num_rows, num_columns, labels, shares } = this.tile;
    const lines = this.tile[this.side];
    const cell = (text, r, c) => {
      const here = top + r === this.row && left + c === this.column;
      const share = shares[r][c] === null ? 1 : this.pair ? shares[r][c] : 0;
      const style = share && !here ? `background: rgba(var(--delta), ${(0.35 * share).toFixed(2)})` : "";  // set as a property, because CSP blocks the attribute
      return html`<td class=${here ? "here" : nothing} aria-current=${here ? "true" : nothing} .style=${style} @click=${() => this.#try(() => this.go(top + r, left + c))}>${text}</td>`;
    };
    return html`<p class="dim">${span("rows", top, lines.length, num_rows)} · ${span("columns", left, lines[0]?.length ?? 0, num_columns)}</p>
      <table class="tile"><thead><tr><th scope="col">row</th>${(lines[0] ?? []).map((_, i) => html`<th scope="col">${left + i}</th>`)}</tr></thead>
      <tbody>${lines.map((values, r) => html`<tr><th scope="row">${labels[r]}</th>${values.map((text, c) => cell(text, r, c))}</tr>`)}</tbody></table>`;
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.tile) return;
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
    this.overview = await api(this.#address(""));
    await this.#order("position");
    const [grid, what] = [await api(this.#address("/map")), this.overview.what];
    const choose = async (row, column) => {
      const [left, right] = map.grid.columns[column];
      const [top, bottom] = grid.spans[row];
      await this.#seek("/largest", { row: top, column: left, last_row: bottom, last_column: right });
      this.root.querySelector(".grid").focus();
    };
    const map = new HeatMap(this.whole, { label: `${what} of the whole tensor`, what, onSelect: (row, column) => this.#try(() => choose(row, column)) });
    map.show(grid);
  }

  async #order(name, known = []) {
    const isLatest = this.askTokens();
    const part = await api(this.#address("/tokens", { order: name, offset: known.length }));
    if (!isLatest()) return;
    this.tokens = { name, rows: [...known, ...part.rows], total: part.num_rows };
    this.draw();
  }

  #summary() {
    const found = this.overview;
    const sides = this.pair ? ["baseline", "target"] : ["target"];
    const metrics = this.pair
      ? `max |Δ| ${found.max_abs.text} · rel l2 ${found.rel_l2.text} · cosine ${found.cosine.text}${found.ulp_dtype ? ` · ULP of ${found.ulp_dtype}: ${found.ulp_median.text} median, ${found.ulp_p99.text} p99, ${found.ulp_max.text} max` : ""} · equal ${found.equal.text}`
      : `max |x| ${found.max_abs.text} · rms ${found.rms.text}`;
    const broken = found.num_nonfinite ? ` · ${found.num_nonfinite.toLocaleString("en")} not finite` : "";
    return html`<p class="mono">${metrics}${broken}</p>
      <h3>${found.what} of the whole tensor</h3>${this.whole}
      ${sides.map((name) => bars(`Values${this.pair ? `, ${name}` : ""}`, found.values, name))}
      ${[...sides, ...(this.pair ? ["difference"] : [])].map((name) => bars(`Magnitudes by powers of two${this.pair ? `, ${name === "difference" ? "|Δ|" : name}` : ""}`, found.magnitudes, name))}
      <h3>${found.what} by channel</h3>${strip(found.channels, `${found.what} by channel`)}
      <h3>${found.what} by row</h3>${strip(found.rows, `${found.what} by row`)}
      ${this.tokens ? this.#strip() : nothing}`;
  }

  #strip() {
    const { name, rows, total } = this.tokens;
    const texts = rows.map((each) => `${each.label}: ${each.error.text}`);
    return html`<h3>Tokens</h3>
      <div class="controls">${["position", "error"].map((each) => html`<button type="button" aria-pressed=${each === name} @click=${() => this.#try(() => this.#order(each))}>by ${each === "error" && !this.pair ? "size" : each}</button>`)}</div>
      ${strip(rows.map(({ share }, i) => ({ share, text: texts[i] })), `${rows.length} rows by ${name}`)}
      <p class="dim mono">${texts.slice(0, 8).join("  ·  ")}</p>
      ${more(rows.length, total, "rows", () => this.#try(() => this.#order(name, rows)))}`;
  }
}

/** Describe a visible range: `rows 0 to 19 of 35`. */
function span(noun, first, count, total) {
  return `${noun} ${first.toLocaleString("en")} to ${Math.max(first + count - 1, 0).toLocaleString("en")} of ${total.toLocaleString("en")}`;
}

/** Histogram of one side; all sides share bins and scale. */
function bars(text, bins, side) {
  if (!bins.length) return nothing;
  const most = Math.log1p(Math.max(...bins.flatMap((bin) => [bin.baseline, bin.target, bin.difference])));
  return html`<h3>${text}</h3>${strip(bins.map((bin) => ({ share: Math.log1p(bin[side]) / most, text: bin.text })), text)}
    <p class="dim mono">${bins[0].low.toExponential(2)} … ${bins.at(-1).high.toExponential(2)}, heights on a log scale</p>`;
}
