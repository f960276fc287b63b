// Comparison page: the progress of the server's job, then answer, heat maps, causes, findings and values.
import { HeatMap } from "./heatmap.js";
import { Levels } from "./levels.js";
import { modules } from "./modules.js";
import { permalink } from "./runs.js";
import { series } from "./series.js";
import { ValueTable } from "./tensor.js";
import { ERROR_LEGEND, api, box, button, colours, copyable, facts, html, isForField, more, nothing, questions, region, render } from "./ui.js";

const LEVELS = ["layers", "sites", "ranks", "tokens"];
const PART = 500;

export async function diffPage(root, { title, fail, query }) {
  const words = new URLSearchParams();
  for (const name of ["baseline", "target", "rtol", "atol"]) if (query.get(name)) words.set(name, query.get(name));
  let job = await api(`/api/diffs?${words}`, { method: "POST" });
  while (job.state === "running") {
    const { done, total } = job;
    render(html`${title("Comparing")}<p>${total ? html`<progress aria-label="Comparing" max=${total} value=${done}></progress> ${done.toLocaleString("en")} of ${total.toLocaleString("en")} sites` : html`<progress aria-label="Comparing"></progress>`}</p>`, root);
    await new Promise((done) => setTimeout(done, 200));
    job = await api(`/api/diffs/${job.id}`);
  }
  if (job.state === "failed") throw new Error(job.error);
  const { view, layers, sites, orders } = await api(`/api/diffs/${job.id}/view`);
  new DiffPage(root, job.id, view, { layers, sites }, orders, { title, fail, query }).start();
}

function ranked(findings) {
  const rank = (f) => (f.role === "producer" ? 0 : !f.is_bad ? 3 : f.role === "downstream" ? 2 : 1);
  return [...findings].sort((a, b) => rank(a) - rank(b) || a.order - b.order);
}

const size = ({ value, text }) => value ?? (text === "-" ? -Infinity : Infinity);
const SORTED_BY = { site: (f) => -f.order, "÷ floor": (f) => size(f.ratio), "max |Δ|": (f) => size(f.max_abs), "rel l2": (f) => size(f.rel_l2) };

class DiffPage {
  constructor(root, id, view, grids, orders, { title, fail, query }) {
    Object.assign(this, { root, id, view, grids, orders, title, fail, query, heat: box("heat"), pair: box(), measured: "", most: PART, offset: 0, filter: "", at: -1, opened: -1, sort: "", order: "" });
    Object.assign(this, { wanted: "", askPair: questions(), askPart: questions() });
    this.findings = ranked(view.findings);
    this.modules = modules(() => `/api/diffs/${id}/modules`, (node) => this.#moduleLink(node));
    this.showsAll = !view.causes.length;
    this.level = grids.layers.rows.length > 1 ? "layers" : "sites";
    this.map = new HeatMap(this.heat, { onSelect: (row, column) => this.#choose(row, column).catch(fail), label: "error ÷ floor", finer: (first, last) => this.#finer(first, last), fail });
    this.levels = new Levels(this.map, (rows) => `/api/diffs/${id}/level?axis=${this.grids[this.level].axis}&at=${rows}`, (found) => this.#filterBy(found), fail);
  }

  start() {
    this.draw();
    this.#show(this.level);
    addEventListener("keydown", (event) => this.#key(event));
    const wanted = this.view.findings.find((f) => String(f.order) === location.hash.slice(1));
    if (wanted) this.#open(wanted);
  }

  draw() {
    const { view } = this;
    const good = view.state === "AGREES";
    render(html`<div class="top">${this.title(view.title)}<span class=${`state ${good ? "good" : "bad"}`}>${view.state}</span><span class="dim">${view.counts.map((each) => `${each.glyph} ${each.count} ${each.verdict}`).join(" · ")}</span></div>
      <p>${["baseline", "target"].map((name, i) => html`${i ? " · " : nothing}<a href=${`/run/${this.query.get(name)}`}>${name} run</a>`)}</p>
      <section class=${`answer ${good ? "good" : ""}`} aria-label="Answer">${facts(view.answer.map(({ label, text }) => ({ label, text: label === "next" ? copyable(text) : text })))}</section>
      <section aria-label="Heat map"><h2>Error ÷ floor, by ${this.grids[this.level].axis}</h2>
        <div class="controls">${LEVELS.map((name) => html`<button type="button" aria-pressed=${name === this.level} @click=${() => this.#show(name).catch(this.fail)}>${name}</button>`)}<span class="dim" role="status">${this.measured}</span></div>${this.levels.trail()}
        <p class="dim no-print">Enter or a click opens a layer or a module, and shows the values of a site; Backspace goes back. + and - zoom the columns.</p>
        ${this.heat}${colours(ERROR_LEGEND)}</section>
      ${view.causes.length ? html`<section aria-label="Causes"><h2>${view.causes.length === 1 ? "1 cause" : `${view.causes.length} independent causes`}</h2>${view.causes.map((each) => this.#cause(each))}</section>` : nothing}
      <section aria-label="Values">${this.pair}</section>
      ${this.#list()}
      <section aria-label="Modules">${this.modules}</section>
      <section aria-label="Coverage"><h2>Coverage and options</h2>${facts(view.account)}${facts(view.options)}<p>${copyable(view.command)}</p></section>`, this.root);
  }

  #cause(cause) {
    const found = [
      { label: "where", text: cause.where }, ...(cause.cause ? [{ label: "cause", text: cause.cause }] : []),
      { label: "evidence", text: `${cause.is_certain ? "" : "not certain: "}${cause.evidence}` }, { label: "link", text: permalink(cause.link) },
    ];
    return html`<article class="cause" tabindex="-1"><h3><span class="bad">${cause.number}. </span>${cause.headline}</h3>${facts(found)}
      <p class="dim">${cause.downstream.length.toLocaleString("en")} downstream ${button("Values", () => this.#open(this.view.findings.find((f) => f.order === cause.order)))}</p></article>`;
  }

  #list() {
    const part = this.filter.toLowerCase();
    const shown = this.findings.filter((f) => (this.showsAll || f.is_bad) && f.site.toLowerCase().includes(part));
    const key = SORTED_BY[this.sort];
    if (key) shown.sort((a, b) => (key(a) < key(b) ? 1 : key(a) > key(b) ? -1 : 0) * (this.order === "descending" ? 1 : -1));
    const row = (f) => html`<tr class=${f.role || (f.is_bad ? "bad" : "pass")} id=${`finding-${f.order}`}><td class="left">${f.glyph} ${f.verdict}</td><td class="left"><button type="button" @click=${() => this.#open(f)}>${f.site}</button></td><td>${f.ratio.text}</td><td>${f.max_abs.text}</td><td>${f.rel_l2.text}</td><td class="left">${f.where}</td><td class="left">${f.role}</td></tr>`;
    const left = ["verdict", "site", "worst at", "role"];
    const head = ["verdict", "site", "÷ floor", "max |Δ|", "rel l2", "worst at", "role"].map((text) => html`<th scope="col" class=${left.includes(text) ? "left" : nothing} aria-sort=${text === this.sort ? this.order : nothing}>${text in SORTED_BY ? html`<button type="button" @click=${() => this.#sortBy(text)}>${text}</button>` : text}</th>`);
    return html`<section aria-label="Findings"><h2>Findings</h2>
      <div class="controls"><label>Filter sites <input type="search" spellcheck="false" .value=${this.filter} @input=${(event) => { this.filter = event.target.value; this.draw(); }}></label>
        <label><input type="checkbox" .checked=${this.showsAll} @change=${(event) => { this.showsAll = event.target.checked; this.draw(); }}> also what agrees</label></div>
      ${region("Findings table", html`<table id="findings"><thead><tr>${head}</tr></thead><tbody>${shown.slice(0, this.most).map(row)}</tbody></table>`)}
      ${more(Math.min(this.most, shown.length), shown.length, "findings that match", () => { this.most += PART; this.draw(); })}
      ${more(this.findings.length, this.view.num_findings, "findings, the worst ones", () => this.#load().catch(this.fail))}</section>`;
  }

  /** Cycle the sort of a column: descending, ascending, then causes first. Sites sort by execution order. */
  #sortBy(column) {
    this.order = column !== this.sort ? "descending" : this.order === "descending" ? "ascending" : "";
    this.sort = this.order ? column : "";
    this.draw();
  }

  #moduleLink(node) {
    const finding = this.findings.find((f) => f.site === node.site);
    return finding ? button(node.name, () => this.#open(finding)) : node.name;
  }

  async #load() {
    const isLatest = this.askPart();
    const known = new Map(this.findings.map((f) => [f.order, f]));
    const before = known.size;
    let { offset } = this;
    while (known.size === before && offset < this.view.num_findings) {
      const part = await api(`/api/diffs/${this.id}/findings?offset=${offset}`);
      if (!isLatest()) return;
      if (!part.findings.length) break;
      offset += part.findings.length;
      for (const each of part.findings) if (!known.has(each.order)) known.set(each.order, each);
    }
    [this.findings, this.offset] = [ranked(known.values()), offset];
    this.draw();
  }

  async #open(finding, steps) {
    const isLatest = this.askPair();
    this.opened = finding.order;
    history.replaceState(null, "", `${location.pathname}${location.search}#${finding.order}`);
    const address = `/api/diffs/${this.id}/pairs/${finding.order}`;
    render(html`<h2>${finding.site}</h2><p>Reading …</p>`, this.pair);
    const found = await api(`${address}${steps ? `?first=${steps[0]}&last=${steps[1]}` : ""}`).catch((error) => ({ error }));
    if (!isLatest()) return;
    const [values, link, charts] = [box("values"), box("dim mono"), box()];
    const problem = found?.error ? found.error.message : "No values to read: they are equal, or were not kept.";
    const readable = found && !found.error;
    render(permalink(finding.link), link);
    render(html`<h2>${finding.site}</h2>${finding.notes.map((note) => html`<p>${note}</p>`)}${readable ? values : html`<p>${problem}</p>`}${link}${charts}`, this.pair);
    series(charts, `${address}/series`, "Over steps");
    if (readable) new ValueTable(values, `${address}/table`, "", { pair: true, start: [found.worst_row, found.worst_column], onMove: (at) => render(permalink(at.link), link) });
    this.pair.scrollIntoView({ block: "nearest" });
  }

  async #show(name) {
    const { grids } = this;
    this.wanted = name;
    if (!grids[name]) {
      this.measured = "Measuring ranks and tokens …";
      this.draw();
      for (const each of (await api(`/api/diffs/${this.id}/places`)).layers) grids[`${each.axis}s`] = each;
      this.measured = grids[name] || this.wanted !== name ? "" : name === "ranks" ? "The target has one rank." : "There are no token rows.";
    }
    if (grids[name] && this.wanted === name) {
      this.level = name;
      if (this.levels.level) this.filter = "";
      this.levels.leave();
      this.map.show(grids[name], { step: this.map.step });
    }
    this.draw();
  }

  #finer(first, last) {
    return this.level === "sites" ? api(`/api/diffs/${this.id}/sites?first=${first}&last=${last}`) : this.levels.finer(first, last);
  }

  async #choose(row, column) {
    const { level, orders, levels, map } = this;
    const steps = map.grid.columns[column];
    if (level === "sites") {
      this.#open(this.findings.find((f) => f.order === orders[row]), steps);
      return;
    }
    if (!levels.level) {
      await levels.go([row], { step: map.step });
      return;
    }
    const site = await levels.choose(row);
    if (site === null) return;
    const isLatest = this.askPair();
    const found = this.findings.find((f) => f.order === site) ?? (await api(`/api/diffs/${this.id}/findings?offset=${site}&limit=1`)).findings[0];
    if (isLatest()) this.#open(found, level === "layers" ? steps : undefined);
  }

  /** Filter the list of findings to the modules in the heat map. */
  #filterBy({ path }) {
    this.filter = /\d$/.test(path) ? `${path}.` : path;
    this.draw();
  }

  #key(event) {
    if (isForField(event)) return;
    const causes = [...this.root.querySelectorAll("article.cause")];
    const go = (by) => {
      this.at = (this.at + by + causes.length) % causes.length;
      causes[this.at]?.focus();
    };
    const bad = (by) => {
      const found = this.findings.filter((f) => f.is_bad && (f.order - this.opened) * by > 0).sort((a, b) => (a.order - b.order) * by);
      if (found.length) this.#open(found[0]);
    };
    const acts = {
      b: () => bad(1), B: () => bad(-1), d: () => { this.showsAll = !this.showsAll; this.draw(); },
      n: () => go(1), N: () => go(-1), "/": () => this.root.querySelector("input[type=search]").focus(),
      s: () => this.#show(this.level === "layers" ? "sites" : "layers"),
      a: () => this.#show({ ranks: "tokens", tokens: "layers" }[this.level] || "ranks").catch(this.fail),
    };
    if (!acts[event.key]) return;
    acts[event.key]();
    event.preventDefault();
  }
}
