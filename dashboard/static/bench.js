// Benchmark history: filters, one chart per metric, the commits, and the comparison of two of them.
import { LineChart, MAX_LINES, legend } from "./chart.js";
import { html, nothing, questions, region, render, select, table } from "./ui.js";

const FILTERS = ["model", "hardware", "variant", "load", "workload", "tool"];
const ANY = "\0";
const MARKS = { regression: "▼ regression", improvement: "▲ improvement" };
const CLASSES = { regression: "bad", improvement: "better" };

/** Names of the shown series: the values of the fields in which they differ. */
function names(shown) {
  const differing = FILTERS.filter((name) => new Set(shown.map(({ config }) => config[name])).size > 1);
  return shown.map(({ config }) => differing.map((name) => config[name] || `no ${name}`).join(", ") || config.load || config.model);
}

export class BenchPage {
  /** `compare(baseline, target)` fetches a comparison; null without a server. */
  constructor(root, { compare = null } = {}) {
    Object.assign(this, { root, compare, chosen: {}, charts: new Map(), result: nothing, ask: questions() });
  }

  show(history) {
    this.history = history;
    const { commits, series } = history;
    const has = (commit) => commits.some((each) => each.commit === commit);
    if (!has(this.baseline)) this.baseline = commits.at(-2)?.commit ?? commits.at(-1)?.commit;
    if (!has(this.target)) this.target = commits.at(-1)?.commit;
    this.choices = FILTERS.map((name) => [name, [...new Set(series.map(({ config }) => config[name]))]]).filter(([, values]) => values.length > 1);
    for (const [name, values] of this.choices) if (!values.includes(this.chosen[name])) this.chosen[name] = name === "model" ? values[0] : undefined;
    this.draw();
  }

  draw() {
    const { history } = this;
    if (!history.commits.length) {
      render(html`<p>${history.summary}</p>${history.problems.map((text) => html`<p class="bad" role="alert">${text}</p>`)}<p>No results yet: the page reads the JSON of <code>tapscope bench</code>, and of <code>bench_serving</code> of SGLang and vLLM.</p>`, this.root);
      return;
    }
    const keys = "Arrow keys move over commits; + and - zoom, 0 shows all; drag to zoom, double-click shows all. Shaded: 99 % confidence interval.";
    render(html`<p>${history.summary}</p>${history.problems.map((text) => html`<p class="bad" role="alert">${text}</p>`)}
      <h2>Metrics over commits</h2>
      <div class="controls no-print">${this.choices.map((each) => this.#filter(...each))}</div>
      <p class="dim no-print">${keys}</p>
      <div class="charts">${this.#charts()}</div>
      ${this.compare ? this.#form() : nothing}
      <div>${this.result}</div>
      <h2>Commits</h2>${this.#commits()}`, this.root);
  }

  #filter(name, values) {
    const any = name === "model" ? [] : [[ANY, `any ${name}`]];
    const options = [...any, ...values.map((value) => [value, value || `no ${name}`])];
    return html`<label>${name} ${select(name, options, this.chosen[name] ?? ANY, (value) => { this.chosen[name] = value === ANY ? undefined : value; this.draw(); })}</label>`;
  }

  #charts() {
    const { commits, metrics, series } = this.history;
    const found = series.filter(({ config }) => FILTERS.every((name) => this.chosen[name] === undefined || config[name] === this.chosen[name]));
    if (!found.length) return html`<p>No configuration fits these filters.</p>`;
    const shown = found.slice(0, MAX_LINES);
    const labels = names(shown);
    const at = commits.map((_, i) => i);
    const place = (i) => commits[i].label;
    const charts = metrics.map(({ name, label, unit }) => {
      const lines = shown.map((each, i) => ({ name: labels[i], ...parallel(each.metrics.find(({ metric }) => metric === name), at.length) }));
      if (!lines.some(({ texts }) => texts.some((text) => text !== undefined))) return nothing;
      if (!this.charts.has(name)) this.charts.set(name, new LineChart({ title: label, unit, onZoom: (first, last) => this.charts.forEach((each) => each.at && each.zoom(first, last, { isOwn: false })) }));
      const chart = this.charts.get(name);
      chart.place = place;
      chart.show({ at, places: (i) => commits[i]?.label.slice(0, 12), lines });
      return chart.element;
    });
    const cut = found.length > shown.length ? html`<p role="status">The first ${shown.length} of ${found.length} configurations; choose filters to see the others.</p>` : nothing;
    return html`${cut}${legend(labels)}${charts}`;
  }

  #commits() {
    const link = ({ run, run_url }) => (run_url ? html`<a href=${run_url} rel="noopener noreferrer">${run || "run"}</a>` : run);
    const rows = [...this.history.commits].reverse().map((commit) => html`<tr><td class="left">${commit.label}</td><td class="left">${commit.date}</td><td class="left">${commit.branch}</td><td>${commit.num_results.toLocaleString("en")}</td><td class="left">${link(commit)}</td></tr>`);
    return region("Commits", table(["<commit", "<date", "<branch", "results", "<run"], rows));
  }

  #form() {
    const options = this.history.commits.map(({ commit, label, date }) => [commit, `${label} ${date.slice(0, 10)}`]);
    const pick = (name) => select(name, options, this[name], (value) => { this[name] = value; });
    const submit = (event) => { event.preventDefault(); this.#compare(); };
    return html`<h2>Compare two commits</h2>
      <form class="controls" @submit=${submit}><label>Baseline ${pick("baseline")}</label><label>target ${pick("target")}</label><button type="submit">Compare</button></form>`;
  }

  async #compare() {
    this.result = html`<p>Comparing …</p>`;
    this.draw();
    const isLatest = this.ask();
    const found = await this.compare(this.baseline, this.target).then(comparison, (error) => html`<p class="bad" role="alert">${error.message}</p>`);
    if (!isLatest()) return;
    this.result = found;
    this.draw();
  }
}

/** Expand a series to arrays with one element per commit. */
function parallel(series, num) {
  const empty = () => new Array(num).fill(undefined);
  const found = { values: empty(), low: empty(), high: empty(), texts: empty() };
  series?.commits.forEach((at, i) => {
    for (const name of ["values", "low", "high"]) found[name][at] = series[name][i];
    found.texts[at] = series.counts[i] > 1 ? `${series.formatted[i]} (mean of ${series.counts[i]})` : series.formatted[i];
  });
  return found;
}

function comparison(view) {
  const rows = view.rows.map((row) => html`<tr class=${CLASSES[row.verdict] ?? "pass"}>
    <td class="left">${MARKS[row.verdict] ?? row.verdict}</td>
    <td class="left">${[row.config.model, row.config.hardware, row.config.variant, row.config.load, row.config.workload].filter(Boolean).join(", ")}</td>
    <td class="left">${row.metric.label}</td><td>${row.baseline.text}</td><td>${row.target.text}</td><td class="left">${row.metric.unit}</td>
    <td>${row.change.text}</td><td>${row.band.text}</td><td class="left">${row.noise}</td></tr>`);
  const head = ["<verdict", "<configuration", "<metric", "baseline", "target", "<unit", "change", "noise band", "<noise from"];
  return html`<p><span class=${`state ${view.num_regressions ? "bad" : "good"}`}>${view.num_regressions ? "REGRESSED" : "NO REGRESSION"}</span> ${view.baseline.label} to ${view.target.label}: ${view.summary}</p>
    ${region("Comparison", table(head, rows, "compared"))}`;
}
