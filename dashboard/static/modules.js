// The module graph: modules in execution order with class, shape and error, and the modules that their inputs came from.
import { colourOf } from "./heatmap.js";
import { api, box, html, more, nothing, region, render, table } from "./ui.js";

const PART = 500;

/** A section that reads the graph at `path` when it is opened; `link(node)` shows the site of a module. */
export function modules(path, link, heading = "Modules") {
  const body = box();
  let [graph, num] = [null, PART];

  async function open(event) {
    if (!event.target.open || graph) return;
    render(html`<p>Reading …</p>`, body);
    graph = await api(path).catch((error) => ({ error }));
    draw();
  }

  function draw() {
    if (graph.error) {
      render(html`<p class="bad" role="alert">${graph.error.message}</p>`, body);
      return;
    }
    const { nodes, flows } = graph;
    const producers = new Map();
    for (const { producer, consumer } of flows) producers.set(consumer, [...(producers.get(consumer) ?? []), nodes[producer].path]);
    const row = (node, i) => html`<tr class=${node.is_cause ? "producer" : nothing}>
      <td class="left" .style=${`padding-left: ${0.5 + node.depth}em`}>${node.glyph === "·" ? nothing : html`<i class=${`swatch-${colourOf(node.glyph)}`}></i> `}${link(node)}</td>
      <td class="left">${node.cls}</td><td class="left">${node.dtype}</td><td class="left">${node.shape}</td><td class="left">${node.verdict}</td><td>${node.ratio.text}</td><td class="left">${(producers.get(i) ?? []).join(", ")}</td></tr>`;
    render(html`${region("Modules table", table(["<module", "<class", "<dtype", "<shape", "<verdict", "÷ floor", "<input from"], nodes.slice(0, num).map(row)))}
      ${more(Math.min(num, nodes.length), nodes.length, "modules", () => { num += PART; draw(); })}`, body);
  }

  return html`<details @toggle=${open}><summary>${heading}</summary>${body}</details>`;
}
