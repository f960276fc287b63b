// Charts of the server's series: one chart per name, one line per rank.
import { MAX_LINES, LineChart, legend } from "./chart.js";
import { api, box, html, nothing, render } from "./ui.js";

/** Group of charts that can be updated with newer series; cursor and zoom are kept. */
export class SeriesCharts {
  constructor({ heading = "", level = "h3", most = Infinity, noun = "series" } = {}) {
    Object.assign(this, { heading, level, most, noun });
    this.element = box();
    this.charts = new Map();
  }

  show(series) {
    const groups = new Map();
    for (const each of series) groups.set(each.name, [...(groups.get(each.name) ?? []), each]);
    const shown = [...groups].slice(0, this.most);
    const names = shown.map(([name]) => name);
    for (const name of this.charts.keys()) if (!names.includes(name)) this.charts.delete(name);
    const parts = shown.map(([name, lines]) => this.#chart(name, lines));
    const missing = groups.size > shown.length ? html`<p class="dim">${shown.length} of ${groups.size} ${this.noun}</p>` : nothing;
    const title = this.heading && shown.length ? html`<h2>${this.heading}</h2>` : nothing;
    render(html`${title}<div class="charts">${parts}</div>${missing}`, this.element);
  }

  #chart(name, all) {
    const lines = all.slice(0, MAX_LINES);
    const names = lines.map(({ rank }) => (rank === null ? "" : `rank ${rank}`));
    const at = [...new Set(lines.flatMap(({ points }) => points.map(({ step }) => step)))].sort((a, b) => a - b);
    const index = new Map(at.map((step, i) => [step, i]));
    const drawn = lines.map(({ points }, i) => {
      const [values, texts] = [new Array(at.length).fill(undefined), new Array(at.length).fill(undefined)];
      for (const { step, value, text } of points) [values[index.get(step)], texts[index.get(step)]] = [value, text];
      return { name: names[i], values, texts };
    });
    if (!this.charts.has(name)) this.charts.set(name, new LineChart({ title: name, heading: this.level, kind: kindOf(name) }));
    const chart = this.charts.get(name);
    chart.place = (i) => `step ${at[i]}`;
    const note = lines.length === 1 ? lines[0].text : "";
    chart.show({ at, places: (step) => (Number.isInteger(step) ? String(step) : ""), lines: drawn, note });
    const rest = all.length > lines.length ? html`<p class="dim">the first ${lines.length} of ${all.length} ranks</p>` : nothing;
    return html`<div>${chart.element}${lines.length > 1 ? legend(lines.map(({ text }, i) => `${names[i]}: ${text}`)) : nothing}${rest}</div>`;
  }
}

/** Unit of a metric by its name, like value_text of the view model. */
function kindOf(name) {
  if (name.endsWith("_bytes")) return "bytes";
  if (name.endsWith("_usage")) return "share";
  return name.endsWith("_s") && !name.endsWith("_per_s") ? "seconds" : "";
}

/** Draw charts of the series at `path` below a heading; empty if there are none. */
export async function series(root, path, heading) {
  const charts = new SeriesCharts({ heading });
  charts.show((await api(path).catch(() => ({ series: [] }))).series);
  root.replaceChildren(charts.element);
}
