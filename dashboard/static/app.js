// The web page: shows what the address asks for. Every number and text comes from the server's view model.
import { BenchPage } from "./bench.js";
import { series } from "./series.js";
import { LivePage } from "./live.js";
import { api, facts, fill, h, more, region, table } from "./dom.js";
import { controlPage, shareForm } from "./control.js";
import { HeatMap } from "./heatmap.js";
import { ValueTable } from "./tensor.js";

const page = document.getElementById("page");
const query = new URLSearchParams(location.search);

function title(text) {
  document.title = `${text} – tapscope`;
  return h("h1", {}, text);
}

function fail(error) {
  fill(page, h("h1", {}, "tapscope"), h("p", { role: "alert", class: "bad" }, error.message));
}

async function runs(known = []) {
  const part = await api(`/api/runs?offset=${known.length}`);
  const found = [...known, ...part.runs];
  const pick = (name) => h("select", { name, "aria-label": name }, found.map((run) => h("option", { value: run.id }, `${run.name}`)));
  const baseline = pick("baseline");
  const target = pick("target");
  if (found.length > 1) target.selectedIndex = 1;
  const updated = h("span", { class: "dim" }, `last updated ${new Date().toLocaleTimeString()}`);
  const rows = found.map((run) =>
    h("tr", {}, h("td", { class: "left" }, h("a", { href: `/run/${run.id}` }, run.name)), h("td", { class: "left" }, run.model), h("td", { class: "left" }, run.framework), h("td", { class: "left" }, run.created), h("td", { class: "left" }, run.is_open ? h("a", { href: `/live/${run.id}` }, "recording") : h("a", { href: `/live/${run.id}` }, "steps"))),
  );
  fill(page, title("Runs"),
    h("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); location.assign(`/diff/?baseline=${baseline.value}&target=${target.value}`); } },
      "Compare", baseline, "with", target, h("button", { type: "submit" }, "Diff"), h("span", { class: "grow" }), updated,
      h("button", { type: "button", onclick: () => runs().catch(fail) }, "Refresh")),
    more(found.length, part.num_runs, "runs, newest first", () => runs(found).catch(fail)),
    found.length ? region("Runs", table(["run", "model", "framework", "created", "live"], rows)) : h("p", {}, "No run below the given paths. Make one with: tapscope dump MODEL -o RUN"),
    linkForm(),
    shareForm(),
  );
}

/** A form for a permalink, such as those of reports and bookmarks. */
function linkForm() {
  const link = h("input", { name: "link", size: 48, spellcheck: "false", "aria-label": "Link", placeholder: "run/site@step.rank[row,col]", required: true });
  return h("form", { class: "controls no-print", action: "/open/" }, "Open a link", link, h("button", { type: "submit" }, "Open"));
}

/** The place of a permalink; a list where several runs have that name. */
async function open() {
  const link = query.get("link") || "";
  const places = await api(`/api/link?${new URLSearchParams({ link })}`);
  if (places.length === 1) location.replace(places[0].address);
  else fill(page, title("Open"), h("p", {}, `${places.length} runs of this name have ${link}:`), h("ul", {}, places.map((each) => h("li", {}, h("a", { href: each.address }, each.path)))));
}

function permalink(text) {
  return [text, " ", h("a", { class: "no-print", href: `/open/?${new URLSearchParams({ link: text })}` }, "link")];
}

async function run(id) {
  const view = await api(`/api/runs/${encodeURIComponent(id)}`);
  const root = h("div", { class: "heat" });
  const list = h("div");
  const metrics = h("div");
  let shown = view;
  const choices = (label, names) => h("select", { "aria-label": label, onchange: () => choose().catch(fail) }, names.map(([value, text]) => h("option", { value }, text)));
  const measures = choices("Measure", view.measures.map((name) => [name, name]));
  const ranks = choices("Rank", [["", "all"], ...view.ranks.map((rank) => [rank, String(rank)])]);
  const choose = async () => {
    const words = new URLSearchParams({ measure: measures.value });
    if (ranks.value) words.set("rank", ranks.value);
    shown = await api(`/api/runs/${encodeURIComponent(id)}?${words}`);
    map.what = shown.measure;
    map.show(shown.magnitudes);
  };
  fill(page, title(view.name),
    h("p", {}, h("span", { class: `state ${view.missing.length ? "bad" : "good"}` }, view.state), " ", view.facts.join(" · ")),
    view.missing.map((sentence) => h("p", { class: "bad" }, sentence)),
    h("p", {}, h("a", { href: `/live/${id}` }, "Steps and metrics")),
    h("h2", {}, "Sites by step"),
    h("div", { class: "controls" }, h("label", {}, "Measure ", measures), h("label", {}, "Rank ", ranks)),
    h("p", { class: "dim" }, "1 to 9: from the run's smallest to its largest, log scale; % not finite; ∅ zero. Enter or a click lists the records."),
    view.num_sites > view.magnitudes.rows.length ? h("p", {}, `${view.magnitudes.rows.length} of ${view.num_sites} sites, those that are not finite first`) : null,
    root, list, metrics,
    h("details", {}, h("summary", {}, "Report"), h("pre", {}, view.account)),
  );
  const map = new HeatMap(root, { label: "sites by step", what: view.measure, onSelect: (row, column) => records(id, shown, row, column, list).catch(fail) });
  map.show(view.magnitudes);
  series(metrics, `/api/runs/${id}/series`, "Metrics by step");
}

async function records(id, view, row, column, list) {
  const site = view.magnitudes.rows[row].label;
  const [first, last] = view.magnitudes.columns[column];
  const { step, records: found } = await api(`/api/runs/${id}/cell?${new URLSearchParams({ site, first, last })}`);
  const rows = found.map(({ rank, record: each }) => {
    const link = `/tensor/?run=${id}&site=${encodeURIComponent(each.site)}&step=${step}&rank=${rank}&key=${encodeURIComponent(each.key)}`;
    return h("tr", { class: each.anomaly ? "bad" : null }, h("td", { class: "left" }, h("a", { href: link }, each.site)), h("td", {}, rank), h("td", {}, each.dtype), h("td", {}, each.shape), h("td", {}, each.facts.map((fact) => fact.text).join("  ")), h("td", { class: "left" }, each.anomaly));
  });
  fill(list, h("h2", {}, `Records of step ${step}`), first === last ? null : h("p", { class: "dim" }, `of steps ${first} to ${last}, the one with the largest |x| or values that are not finite`), region("Records", table(["site", "rank", "dtype", "shape", "|max|  rms", "anomaly"], rows)));
}

async function tensor() {
  const id = query.get("run");
  const words = new URLSearchParams({ site: query.get("site"), step: query.get("step"), rank: query.get("rank") || 0, key: query.get("key") || "" });
  const view = await api(`/api/runs/${id}/tensor?${words}`);
  const values = h("div");
  const steps = h("div");
  const place = /\[([\d,]+)\]$/.exec(location.hash);
  const link = h("p", { class: "dim mono" }, permalink(view.link));
  fill(page, title(view.site), h("p", { class: "dim" }, view.title),
    [...view.facts, ...view.statistics].map((line) => h("p", { class: "mono" }, line)),
    view.notes.map((line) => h("p", {}, h("strong", {}, line))),
    view.tile ? [h("h2", {}, "Values"), values] : null,
    link, steps,
  );
  series(steps, `/api/runs/${id}/series?site=${encodeURIComponent(view.site)}`, "Over steps");
  if (!view.tile) return;
  const shown = new ValueTable(values, `/api/runs/${id}/table`, words, { start: [0, 0], onMove: (at) => {
    fill(link, permalink(at.link));
    history.replaceState(null, "", `${location.pathname}${location.search}#${at.index}`);
  } });
  if (place) shown.ready.then(() => shown.place(place[1]));
}

async function diff() {
  const words = new URLSearchParams();
  for (const name of ["baseline", "target", "rtol", "atol"]) if (query.get(name)) words.set(name, query.get(name));
  let job = await api(`/api/diffs?${words}`, { method: "POST" });
  const bar = h("progress", { "aria-label": "Comparing" });
  fill(page, title("Comparing"), h("p", {}, bar));
  while (job.state === "running") {
    if (job.total) [bar.max, bar.value] = [job.total, job.done];
    await new Promise((done) => setTimeout(done, 200));
    job = await api(`/api/diffs/${job.id}`);
  }
  if (job.state === "failed") throw new Error(job.error);
  showDiff(job.id, await api(`/api/diffs/${job.id}/view`));
}

function showDiff(id, { view, layers, sites, orders }) {
  const root = h("div", { class: "heat" });
  const pair = h("section", { "aria-label": "Values" });
  const filter = h("input", { type: "search", spellcheck: "false", oninput: () => list() });
  const body = h("tbody");
  const rest = h("div");
  let most = 500;
  const heading = h("h2", {}, "Error ÷ floor, by step");
  const good = view.state === "AGREES";
  const rank = (f) => (f.role === "producer" ? 0 : !f.is_bad ? 3 : f.role === "downstream" ? 2 : 1);
  const ranked = (found) => [...found].sort((a, b) => rank(a) - rank(b) || a.order - b.order);
  let findings = ranked(view.findings);
  let offset = 0;
  const everything = h("input", { type: "checkbox", onchange: () => list() });
  everything.checked = !view.causes.length;
  let level = layers.rows.length > 1 ? "layers" : "sites";
  const grids = { layers, sites };
  const names = ["layers", "sites", "ranks", "tokens"];
  const buttons = names.map((name) => h("button", { type: "button", onclick: () => show(name).catch(fail) }, name));
  const measured = h("span", { class: "dim", role: "status" });

  function list() {
    const part = filter.value.toLowerCase();
    const shown = findings.filter((f) => (everything.checked || f.is_bad) && f.site.toLowerCase().includes(part));
    fill(rest, more(Math.min(most, shown.length), shown.length, "findings that match", () => { most += 500; list(); }),
      more(findings.length, view.num_findings, "findings, the worst ones", () => load().catch(fail)));
    fill(body, shown.slice(0, most).map((f) =>
      h("tr", { class: f.role || (f.is_bad ? "bad" : "pass"), id: `finding-${f.order}` },
        h("td", { class: "left" }, `${f.glyph} ${f.verdict}`),
        h("td", { class: "left" }, h("button", { type: "button", onclick: () => open(f) }, f.site)),
        h("td", {}, f.ratio.text), h("td", {}, f.max_abs.text), h("td", {}, f.rel_l2.text), h("td", { class: "left" }, f.where), h("td", { class: "left" }, f.role))));
  }

  async function load() {
    const known = new Map(findings.map((f) => [f.order, f]));
    do {
      const part = await api(`/api/diffs/${id}/findings?offset=${offset}`);
      offset += part.findings.length;
      part.findings.forEach((f) => known.has(f.order) || known.set(f.order, f));
      if (!part.findings.length) break;
    } while (known.size === findings.length && offset < view.num_findings);
    findings = ranked(known.values());
    list();
  }

  async function open(finding, steps) {
    history.replaceState(null, "", `${location.pathname}${location.search}#${finding.order}`);
    fill(pair, h("h2", {}, finding.site), h("p", {}, "Reading …"));
    const found = await api(`/api/diffs/${id}/pairs/${finding.order}${steps ? `?first=${steps[0]}&last=${steps[1]}` : ""}`).catch((error) => ({ error }));
    const parts = [h("h2", {}, finding.site), finding.notes.map((note) => h("p", {}, note))];
    if (!found || found.error) parts.push(h("p", {}, found ? found.error.message : "No values to read: they are equal, or were not kept."));
    else {
      parts.push(h("div", { class: "values" }));
    }
    const link = h("p", { class: "dim mono" }, permalink(finding.link));
    const charts = h("div");
    fill(pair, parts, link, charts);
    series(charts, `/api/diffs/${id}/pairs/${finding.order}/series`, "Over steps");
    const root = pair.querySelector("div.values");
    if (root) new ValueTable(root, `/api/diffs/${id}/pairs/${finding.order}/table`, "", { pair: true, start: [found.worst_row, found.worst_column], onMove: (at) => { fill(link, permalink(at.link)); } });
    pair.scrollIntoView({ block: "nearest" });
  }

  async function show(name) {
    if (!grids[name]) {
      measured.textContent = "Measuring ranks and tokens …";
      for (const each of (await api(`/api/diffs/${id}/places`)).layers) grids[`${each.axis}s`] = each;
      measured.textContent = grids[name] ? "" : name === "ranks" ? "The target has one rank." : "There are no token rows.";
    }
    if (!grids[name]) return;
    level = name;
    heading.textContent = `Error ÷ floor, by ${grids[name].axis}`;
    map.show(grids[name]);
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === name)));
  }

  function choose(row, column) {
    if (level === "sites") {
      open(view.findings.find((f) => f.order === orders[row]), sites.columns[column]);
      return;
    }
    const label = grids[level].rows[row].label;
    filter.value = label.startsWith("layer ") ? `.${label.slice(6)}.` : label === "(root)" ? "" : label;
    list();
  }

  const causes = view.causes.map((cause) =>
    h("article", { class: "cause", tabindex: "-1" },
      h("h3", {}, h("span", { class: "bad" }, `${cause.number}. `), cause.headline),
      facts([{ label: "where", text: cause.where }, ...(cause.cause ? [{ label: "cause", text: cause.cause }] : []), { label: "evidence", text: `${cause.is_certain ? "" : "not certain: "}${cause.evidence}` }, { label: "link", text: permalink(cause.link) }]),
      h("p", { class: "dim" }, `${cause.downstream.length.toLocaleString("en")} downstream `, h("button", { type: "button", onclick: () => open(view.findings.find((f) => f.order === cause.order)) }, "Values"))));
  fill(page, h("div", { class: "top" }, title(view.title), h("span", { class: `state ${good ? "good" : "bad"}` }, view.state), h("span", { class: "dim" }, view.counts.map((each) => `${each.glyph} ${each.count} ${each.verdict}`).join(" · "))),
    h("section", { class: `answer ${good ? "good" : ""}`, "aria-label": "Answer" }, facts(view.answer)),
    h("section", { "aria-label": "Heat map" }, heading, h("div", { class: "controls" }, buttons, measured), root),
    causes.length ? h("section", { "aria-label": "Causes" }, h("h2", {}, causes.length === 1 ? "1 cause" : `${causes.length} independent causes`), causes) : null,
    pair,
    h("section", { "aria-label": "Findings" }, h("h2", {}, "Findings"),
      h("div", { class: "controls" }, h("label", {}, "Filter sites ", filter), h("label", {}, everything, " also what agrees")),
      region("Findings table", h("table", { id: "findings" }, h("thead", {}, h("tr", {}, ["verdict", "site", "÷ floor", "max |Δ|", "rel l2", "worst at", "role"].map((text) => h("th", { scope: "col" }, text)))), body)), rest),
    h("section", { "aria-label": "Coverage" }, h("h2", {}, "Coverage and options"), facts(view.account), facts(view.options), h("p", {}, h("code", {}, view.command))),
  );
  const map = new HeatMap(root, { onSelect: choose, label: "error ÷ floor" });
  show(level);
  list();
  let at = -1;
  addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "n" || event.key === "N") {
      at = (at + (event.key === "n" ? 1 : -1) + causes.length) % causes.length;
      causes[at]?.focus();
    } else if (event.key === "/") filter.focus();
    else if (event.key === "s") show(level === "layers" ? "sites" : "layers");
    else if (event.key === "a") show({ ranks: "tokens", tokens: "layers" }[level] || "ranks").catch(fail);
    else return;
    event.preventDefault();
  });
  const wanted = view.findings.find((f) => String(f.order) === location.hash.slice(1));
  if (wanted) open(wanted);
}

async function live(id) {
  const root = h("div");
  fill(page, title("Live"), h("p", {}, h("a", { href: `/run/${id}` }, "Tensors of this run")), root);
  new LivePage(root, `/api/runs/${encodeURIComponent(id)}/live`).start();
}

async function benchmarks() {
  const updated = h("span", { class: "dim", role: "status" });
  const problem = h("div", { role: "alert", class: "bad" });
  const interval = h("select", { "aria-label": "Refresh interval", onchange: () => schedule() }, [["0", "off"], ["10", "10 s"], ["60", "1 min"], ["300", "5 min"]].map(([value, text]) => h("option", { value }, text)));
  const root = h("div");
  fill(page, h("div", { class: "controls no-print" }, title("Benchmark history"), h("span", { class: "grow" }), updated, h("button", { type: "button", onclick: () => refresh() }, "Refresh"), h("label", {}, "every ", interval)), problem, root);
  const shown = new BenchPage(root, { compare: (baseline, target) => api(`/api/benchmarks/compare?${new URLSearchParams({ baseline, target })}`) });
  let timer, last;
  const refresh = async () => {
    try {
      const history = await api("/api/benchmarks");
      const text = JSON.stringify({ ...history, updated: "" });
      if (text !== last) shown.show(history);  // else the cursor and the focus stay
      last = text;
      fill(updated, `last updated ${new Date(history.updated).toLocaleTimeString()}`);
      fill(problem);
    } catch (error) {
      fill(problem, `The last refresh failed: ${error.message}`);
    }
  };
  const schedule = () => {
    clearInterval(timer);
    if (interval.value !== "0") timer = setInterval(refresh, 1000 * interval.value);
  };
  await refresh();
}

function control() {
  const root = h("div");
  fill(page, title("Capture"), root);
  return controlPage(root);
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  dispatchEvent(new Event("themechange"));
});

const [, kind, id] = location.pathname.split("/");
const pages = { "": runs, run: () => run(id), diff, tensor, live: () => live(id), open, benchmarks, control };
(pages[kind] || runs)().catch(fail);
