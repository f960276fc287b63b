// Benchmark history: filters, one chart per metric, the commits, and the comparison of two of them.
import { LineChart, MAX_LINES, legend } from "./chart.js";
import { fill, h, region, table } from "./dom.js";

const FILTERS = ["model", "hardware", "variant", "load", "workload", "tool"];

/** A series' name: what distinguishes it from the others that are shown. */
function names(shown) {
  const differing = FILTERS.filter((name) => new Set(shown.map(({ config }) => config[name])).size > 1);
  return shown.map(({ config }) => differing.map((name) => config[name] || `no ${name}`).join(", ") || config.load || config.model);
}

export class BenchPage {
  /** `compare(baseline, target)` gives a comparison, or is null where there is no server. */
  constructor(root, { compare = null } = {}) {
    this.compare = compare;
    this.chosen = {};
    this.range = null;
    this.summary = h("p", {});
    this.problems = h("div");
    this.controls = h("div", { class: "controls no-print" });
    this.charts = h("div", { class: "charts" });
    this.commits = h("div");
    this.result = h("div");
    this.form = h("div");
    fill(root, this.summary, this.problems, h("h2", {}, "Metrics over commits"), this.controls,
      h("p", { class: "dim", id: "chart-keys" }, "Arrow keys move over commits; + and - zoom, 0 shows all; drag to zoom. Shaded: 99 % confidence interval."),
      this.charts, this.form, this.result, this.commits);
  }

  show(history) {
    this.history = history;
    fill(this.summary, history.summary);
    fill(this.problems, history.problems.map((text) => h("p", { class: "bad", role: "alert" }, text)));
    this.filter();
    this.list();
    if (this.compare) this.ask();
  }

  /** Selections of the fields in which series differ. */
  filter() {
    const { series } = this.history;
    const selects = FILTERS.map((name) => {
      const values = [...new Set(series.map(({ config }) => config[name]))];
      if (values.length < 2) return null;
      if (!values.includes(this.chosen[name])) this.chosen[name] = name === "model" ? values[0] : undefined;
      const any = name === "model" ? [] : [h("option", { value: "\0" }, `any ${name}`)];
      const select = h("select", { "aria-label": name, onchange: () => { this.chosen[name] = select.value === "\0" ? undefined : select.value; this.draw(); } },
        any, values.map((value) => h("option", { value, selected: value === this.chosen[name] }, value || `no ${name}`)));
      return h("label", {}, `${name} `, select);
    });
    fill(this.controls, selects);
    this.draw();
  }

  draw() {
    const fits = ({ config }) => FILTERS.every((name) => this.chosen[name] === undefined || config[name] === this.chosen[name]);
    const found = this.history.series.filter(fits);
    const shown = found.slice(0, MAX_LINES);
    const labels = names(shown);
    const columns = this.history.commits.map(({ label }) => label);
    const charts = [];
    const parts = this.history.metrics.map(({ name, label, unit }) => {
      const lines = shown.map((each, i) => ({ name: labels[i], points: points(each.metrics.find(({ metric }) => metric === name)) }));
      if (!lines.some((line) => line.points.length)) return null;
      const box = h("div");
      charts.push([box, { title: label, unit, columns, lines }]);
      return box;
    });
    fill(this.charts, found.length > shown.length ? h("p", { role: "status" }, `The first ${shown.length} of ${found.length} configurations; choose filters to see the others.`) : null,
      found.length ? legend(labels) : h("p", {}, "No configuration fits these filters."), parts);
    const drawn = charts.map(([box, options]) => new LineChart(box, { ...options, onZoom: (first, last) => { this.range = [first, last]; drawn.forEach((chart) => chart.show(first, last)); } }));
    if (this.range && this.range[1] < columns.length) drawn.forEach((chart) => chart.show(...this.range));
  }

  list() {
    const rows = [...this.history.commits].reverse().map((commit) => h("tr", {},
      h("td", { class: "left" }, commit.label), h("td", { class: "left" }, commit.date), h("td", { class: "left" }, commit.branch),
      h("td", {}, commit.num_results.toLocaleString("en")),
      h("td", { class: "left" }, commit.run_url ? h("a", { href: commit.run_url, rel: "noopener noreferrer" }, commit.run || "run") : commit.run)));
    fill(this.commits, h("h2", {}, "Commits"), region("Commits", table(["commit", "date", "branch", "results", "run"], rows)));
  }

  ask() {
    const { commits } = this.history;
    const pick = (name, index) => {
      const before = this[name]?.value;
      const kept = commits.findIndex(({ commit }) => commit === before);
      const at = kept < 0 ? index : kept;
      this[name] = h("select", { "aria-label": name }, commits.map(({ commit, label, date }, i) => h("option", { value: commit, selected: i === at }, `${label} ${date.slice(0, 10)}`)));
      return this[name];
    };
    fill(this.form, h("h2", {}, "Compare two commits"), h("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); this.run(); } },
      "Baseline", pick("baseline", Math.max(commits.length - 2, 0)), "target", pick("target", commits.length - 1), h("button", { type: "submit" }, "Compare")));
  }

  async run() {
    fill(this.result, h("p", {}, "Comparing …"));
    const found = await this.compare(this.baseline.value, this.target.value).catch((error) => error);
    fill(this.result, found instanceof Error ? h("p", { class: "bad", role: "alert" }, found.message) : comparison(found));
  }
}

function points(series) {
  if (!series) return [];
  return series.commits.map((at, i) => ({ at, value: series.values[i], low: series.low[i], high: series.high[i], text: series.counts[i] > 1 ? `${series.formatted[i]} (mean of ${series.counts[i]})` : series.formatted[i] }));
}

function comparison(view) {
  const mark = { regression: "▼ regression", improvement: "▲ improvement" };
  const rows = view.rows.map((row) => h("tr", { class: { regression: "bad", improvement: "better" }[row.verdict] ?? "pass" },
    h("td", { class: "left" }, mark[row.verdict] ?? row.verdict),
    h("td", { class: "left" }, [row.config.model, row.config.hardware, row.config.variant, row.config.load, row.config.workload].filter(Boolean).join(", ")),
    h("td", { class: "left" }, row.metric.label), h("td", {}, row.baseline.text), h("td", {}, row.target.text), h("td", { class: "left" }, row.metric.unit),
    h("td", {}, row.change.text), h("td", {}, row.band.text), h("td", { class: "left" }, row.noise)));
  return [
    h("p", {}, h("span", { class: `state ${view.num_regressions ? "bad" : "good"}` }, view.num_regressions ? "REGRESSED" : "NO REGRESSION"), ` ${view.baseline.label} to ${view.target.label}: ${view.summary}`),
    region("Comparison", table(["verdict", "configuration", "metric", "baseline", "target", "unit", "change", "noise band", "noise from"], rows, { id: "compared" })),
  ];
}
