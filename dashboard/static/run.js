// Run page: heat map, records of a cell, and one tensor.
import { HeatMap } from "./heatmap.js";
import { Levels } from "./levels.js";
import { modules } from "./modules.js";
import { permalink } from "./runs.js";
import { series } from "./series.js";
import { ValueTable } from "./tensor.js";
import { api, box, html, nothing, questions, region, render, select, table } from "./ui.js";

const MANY_SITES = 200;  // above this number the page starts with layers

export async function runPage(root, { title, fail, id }) {
  const address = `/api/runs/${encodeURIComponent(id)}`;
  const view = await api(address);
  const [heat, list, metrics] = [box("heat"), box(), box()];
  const words = new URLSearchParams({ measure: view.measure });
  const [askView, askCell] = [questions(), questions()];
  let shown = view;
  const choose = async (name, value) => {
    if (value) words.set(name, value);
    else words.delete(name);
    const isLatest = askView();
    const found = await api(`${address}?${words}`);
    if (!isLatest()) return;
    shown = found;
    map.what = shown.measure;
    if (!levels.level) map.show(shown.magnitudes, map);
    else await levels.go(name === "rank" ? [] : levels.at, map);
  };
  const level = async (name) => {
    if (name === "layers") await levels.go([], { step: map.step });
    else {
      levels.leave();
      map.show(shown.magnitudes, map);
      drawLevel();
    }
  };
  const heading = box();
  const drawLevel = () => render(html`<h2>${levels.level ? "Layers" : "Sites"} by step</h2><div class="controls">${["sites", "layers"].map((name) => html`<button type="button" aria-pressed=${(name === "layers") === Boolean(levels.level)} @click=${() => level(name).catch(fail)}>${name}</button>`)}</div>${levels.trail()}`, heading);
  const pick = (label, name, options, chosen) => html`<label>${label} ${select(label, options, chosen, (value) => choose(name, value).catch(fail))}</label>`;
  const ranks = [["", "all"], ...view.ranks.map((rank) => [String(rank), String(rank)])];
  const [low, high] = [view.magnitudes.columns[0]?.[0] ?? 0, view.magnitudes.columns.at(-1)?.[1] ?? 0];
  const first = view.first_nonfinite;
  const at = { step: low, rank: view.ranks[0] ?? 0 };
  const graph = modules(
    () => `${address}/modules?${new URLSearchParams(at)}`,
    (node) => (node.site ? html`<a href=${`/tensor/?${new URLSearchParams({ run: id, site: node.site, ...at })}`}>${node.name}</a>` : node.name),
    (read) => {
      const go = (name) => (value) => { at[name] = value; read(); };
      return html`<label>Step <input type="number" min=${low} max=${high} .value=${String(at.step)} @change=${(event) => go("step")(event.target.value || low)}></label><label>Rank ${select("Rank of the module graph", view.ranks.map((each) => [String(each), String(each)]), String(at.rank), go("rank"))}</label>`;
    },
  );
  render(html`${title(view.name)}
    <p><span class=${`state ${view.missing.length ? "bad" : "good"}`}>${view.state}</span> ${view.facts.join(" · ")}</p>
    ${view.missing.map((sentence) => html`<p class="bad">${sentence}</p>`)}
    ${first ? html`<p class="bad">First value that is not finite: <a href=${`/tensor/?${new URLSearchParams({ run: id, site: first.site, step: first.step, rank: first.rank })}`}>${first.site}</a> · step ${first.step} · rank ${first.rank} · ${first.detail}</p>` : nothing}
    <p><a href=${`/live/${id}`}>Steps and metrics</a></p>
    ${heading}
    <div class="controls">${pick("Measure", "measure", view.measures.map((name) => [name, name]), view.measure)}${pick("Rank", "rank", ranks, "")}</div>
    <p class="dim no-print">Enter or a click opens a layer or a module, and lists the records of a site; Backspace goes back. + and - zoom the columns.</p>
    ${view.num_sites > view.magnitudes.rows.length ? html`<p>${view.magnitudes.rows.length} of ${view.num_sites} sites, those that are not finite first</p>` : nothing}
    ${heat}
    <ul class="legend"><li>smallest of the run <span class="scale">${[1, 2, 3, 4, 5, 6, 7, 8, 9].map((i) => html`<i class=${`swatch-${i}`}></i>`)}</span> largest, log scale</li><li><i class="swatch-nan"></i>not finite</li><li><i class="swatch-none"></i>zero, or not recorded</li></ul>
    ${list}${metrics}
    ${graph}
    <details><summary>Report</summary><pre>${view.account}</pre></details>`, root);
  const map = new HeatMap(heat, { label: "sites by step", what: view.measure, empty: "Nothing was recorded.", onSelect: (row, column) => openCell(row, column).catch(fail), finer: (first, last) => (levels.level ? levels.finer(first, last) : api(`${address}/magnitudes?${words}&first=${first}&last=${last}`)), fail });
  const levels = new Levels(map, (rows) => `${address}/level?${words}&at=${rows}`, drawLevel, fail);
  const openCell = async (row, column) => {
    const steps = map.grid.columns[column];
    const { grid, names } = levels.level ?? { grid: shown.magnitudes };
    if (levels.level && (await levels.choose(row)) === null) return;
    await records(id, names?.[row] ?? grid.rows[row].label, steps, list, askCell());
  };
  map.show(view.magnitudes);
  drawLevel();
  if (view.magnitudes.rows.length > MANY_SITES) await level("layers");
  series(metrics, `${address}/series`, "Metrics by step");
}

async function records(id, site, [first, last], list, isLatest) {
  const { step, records: found } = await api(`/api/runs/${id}/cell?${new URLSearchParams({ site, first, last })}`);
  if (!isLatest()) return;
  const rows = found.map(({ rank, record: each }) => {
    const link = `/tensor/?run=${id}&site=${encodeURIComponent(each.site)}&step=${step}&rank=${rank}&key=${encodeURIComponent(each.key)}`;
    return html`<tr class=${each.anomaly ? "bad" : nothing}><td class="left"><a href=${link}>${each.site}</a></td><td>${rank}</td><td>${each.dtype}</td><td>${each.shape}</td><td>${each.facts.map((fact) => fact.text).join("  ")}</td><td class="left">${each.anomaly}</td></tr>`;
  });
  render(html`<h2>Records of step ${step}</h2>
    ${first === last ? nothing : html`<p class="dim">of steps ${first} to ${last}, the one with the largest |x| or values that are not finite</p>`}
    ${region("Records", table(["<site", "rank", "dtype", "shape", "|max|  rms", "<anomaly"], rows))}`, list);
}

export async function tensorPage(root, { title, query }) {
  const id = query.get("run");
  const words = new URLSearchParams({ site: query.get("site"), step: query.get("step"), rank: query.get("rank") || 0, key: query.get("key") || "" });
  const view = await api(`/api/runs/${id}/tensor?${words}`);
  const [values, steps, link] = [box(), box(), box("dim mono")];
  const place = /\[([\d,]+)\]$/.exec(location.hash);
  render(permalink(view.link), link);
  render(html`${title(view.site)}<p class="dim">Run <a href=${`/run/${id}`}>${view.link.slice(0, view.link.indexOf("/"))}</a> · ${view.title}</p>
    ${[...view.facts, ...view.statistics].map((line) => html`<p class="mono">${line}</p>`)}
    ${view.notes.map((line) => html`<p><strong>${line}</strong></p>`)}
    ${view.tile ? html`<h2>Values</h2>${values}` : nothing}
    ${link}${steps}`, root);
  series(steps, `/api/runs/${id}/series?site=${encodeURIComponent(view.site)}`, "Over steps");
  if (!view.tile) return;
  new ValueTable(values, `/api/runs/${id}/table`, words, { place: place?.[1], start: view.around_nonfinite ? null : [0, 0], onMove: (at) => {
    render(permalink(at.link), link);
    history.replaceState(null, "", `${location.pathname}${location.search}#${at.index}`);
  } });
}
