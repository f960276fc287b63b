// Module graph: modules in execution order with class, shape and error, and lines for the data flow between them.
import { INFERRED, flowGutter, flowLanes, visibleModules } from "./flow.js";
import { colourOf } from "./heatmap.js";
import { api, box, button, html, more, nothing, region, render, table } from "./ui.js";

const PART = 500;
const BAD = ["differs", "nonfinite", "shape"];

/** Section that fetches the graph at `address()` when opened. `link(node)` renders a module's site; `controls(read)`
    renders further inputs, which call `read` to fetch again. */
export function modules(address, link, controls = () => nothing) {
  const body = box("modules");
  let [graph, num, current, folded, parents] = [null, PART, -1, new Set(), new Set()];

  const open = (event) => event.target.open && !graph && read();

  async function read() {
    if (!graph) render(html`<p>Reading …</p>`, body);
    const from = address();
    const found = await api(from).catch((error) => ({ error }));
    if (from !== address()) return;  // the address changed meanwhile
    [graph, num, current] = [found, PART, -1];
    if (graph.error || !graph.nodes.some((node) => node.site)) {
      const why = graph.error ? html`<p class="bad" role="alert">${graph.error.message}</p>` : html`<p role="status">No module was recorded here.</p>`;
      render(html`<div class="controls no-print">${controls(read)}</div>${why}`, body);
      return;
    }
    folded = new Set(graph.folded);
    parents = new Set(graph.nodes.map(({ parent }) => parent));
    draw();
  }

  function draw() {
    const { nodes, flows } = graph;
    const places = visibleModules(nodes, folded);
    const total = places.visible.length;
    const visible = places.visible.slice(0, num);
    const isShown = ({ producer, consumer }) => Math.max(places.rowOf[producer], places.rowOf[consumer]) < visible.length;
    const lanes = flowLanes({ nodes, flows: flows.filter(isShown) }, places);
    const between = new Map();  // "producer consumer" -> functions proven by values; "" for equal bytes
    for (const { producer, consumer, through } of flows) {
      const key = `${places.rowOf[producer]} ${places.rowOf[consumer]}`;
      if (through !== INFERRED) between.set(key, (between.get(key) ?? new Set()).add(through));
    }
    const named = (row, producer, consumer, inferred) => {
      const through = between.get(`${producer} ${consumer}`) ?? new Set();
      const how = inferred ? " (through a function?)" : through.has("") ? "" : ` (${[...through].join(" and ")})`;
      return nodes[visible[row]].path + how;
    };
    const gutter = flowGutter(lanes, ({ producer, consumers }) => {
      const isHere = current === visible[producer] || [...consumers].some((row) => visible[row] === current);
      return `${BAD.includes(nodes[visible[producer]].verdict) ? "bad" : ""} ${isHere ? "here" : ""}`;
    });
    const row = (i, at) => {
      const node = nodes[i];
      const [from, to] = [[], []];
      for (const { producer, consumers, inferred } of lanes) {
        if (consumers.has(at)) from.push(named(producer, producer, at, inferred));
        if (producer === at) for (const each of consumers) to.push(named(each, at, each, inferred));
      }
      const hides = folded.has(i) && BAD.includes(node.worst_inside) && !BAD.includes(node.verdict);
      const fold = parents.has(i) ? html`<button type="button" class="fold" data-fold=${i} aria-expanded=${!folded.has(i)} aria-label=${`submodules of ${node.name}`} @click=${() => toggle(i)}>${folded.has(i) ? "▸" : "▾"}</button>` : html`<span class="fold"></span>`;
      return html`<tr class=${`${node.is_cause ? "producer" : ""} ${i === current ? "chosen" : ""}`} data-at=${i}>
        <td class="flow"><div>${gutter.draw(at)}<i class=${`swatch-${colourOf(node.glyph)}`}></i></div></td>
        <td class="left" .style=${`padding-left: ${0.25 + node.depth}em`}>${fold}${link(node)}</td>
        <td class="left">${node.cls}</td><td class="left">${node.shape}</td><td class="left">${node.dtype}</td><td class="left">${hides ? `${node.worst_inside} inside` : node.verdict}</td><td>${node.ratio.text}</td><td class="left">${from.join(", ")}</td><td class="left">${to.join(", ")}</td></tr>`;
    };
    const head = ["<flow", "<module", "<class", "<shape", "<dtype", "<verdict", "÷ floor", "<input from", "<output to"];
    const all = [...parents].filter((i) => i !== null);
    render(html`<div class="controls no-print">${controls(read)}${button("Unfold all", () => { folded = new Set(); draw(); })}${button("Fold again", () => { folded = new Set(graph.folded); draw(); })}<span class="dim">Lines lead from a module to those that received its output. Solid: the recorded values show it, by equal bytes or by the function named on the right. Dashed: inferred from the order, through a function that was not recorded. ↑ ↓ move, ← → fold and unfold.</span></div>
      <div @keydown=${key} @focusin=${choose}>${region("Modules table", table(head, visible.map(row), "module-graph"))}</div>
      ${gutter.left ? html`<p role="status">${gutter.left.toLocaleString("en")} more lines would not fit next to the table; the last columns name their modules.</p>` : nothing}
      ${more(visible.length, total, "modules", () => { num += PART; draw(); })}${all.length ? nothing : html`<p>No module has submodules.</p>`}`, body);
  }

  function toggle(i) {
    if (!folded.delete(i)) folded.add(i);
    draw();
    body.querySelector(`[data-fold="${i}"]`)?.focus();
  }

  function choose(event) {
    const at = Number(event.target.closest("tr")?.dataset.at ?? -1);
    if (at === current) return;
    current = at;
    draw();
  }

  function key(event) {
    const row = event.target.closest("tr[data-at]");
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Number(row.dataset.at);
    const go = (to) => to?.querySelector("a, td button:not(.fold), button")?.focus();
    const fold = (isFolded) => parents.has(at) && folded.has(at) !== isFolded;
    if (event.key === "ArrowDown") go(row.nextElementSibling);
    else if (event.key === "ArrowUp") go(row.previousElementSibling);
    else if (event.key === "ArrowLeft" && fold(true)) toggle(at);
    else if (event.key === "ArrowRight" && fold(false)) toggle(at);
    else if (event.key === "ArrowLeft") go(body.querySelector(`tr[data-at="${graph.nodes[at].parent}"]`));
    else return;
    event.preventDefault();
  }

  return html`<details @toggle=${open}><summary>Module graph</summary>${body}</details>`;
}
