// Data flow of a folded module tree: lines next to the rows, from each producer to the receivers of its output.
import { nothing, svg } from "./ui.js";

const WIDE = 12;
const TALL = 28;
const MAX_LANES = 12;

/** `through` of a flow that is inferred and not proven by values. */
export const INFERRED = "function";

/** Indices of the modules outside all folded ones, and the row of every module or of its visible ancestor. */
export function visibleModules(nodes, folded) {
  const [visible, rowOf] = [[], []];
  let hidden = Infinity;  // depth of the folded module that hides the following deeper nodes
  nodes.forEach((node, i) => {
    if (node.depth > hidden) {
      rowOf.push(rowOf[node.parent]);
      return;
    }
    hidden = folded.has(i) ? node.depth : Infinity;
    rowOf.push(visible.length);
    visible.push(i);
  });
  return { visible, rowOf };
}

/** Lay out lines {producer, consumers, inferred, first, last, lane}, like flow_lanes of the view model. */
export function flowLanes({ nodes, flows }, { visible, rowOf }) {
  const around = (row) => {
    const found = new Set();
    for (let at = nodes[visible[row]].parent; at !== null; at = nodes[at].parent) found.add(rowOf[at]);
    return found;
  };
  const pairs = new Map();  // "producer consumer" -> whether the flow is inferred
  for (const { producer, consumer, through } of flows) {
    const key = `${rowOf[producer]} ${rowOf[consumer]}`;
    pairs.set(key, (pairs.get(key) ?? true) && through === INFERRED);
  }
  const found = [...pairs].map(([key, inferred]) => [...key.split(" ").map(Number), inferred]);
  const repeated = new Map();
  for (const [producer, consumer, inferred] of found) {
    for (const above of around(consumer)) repeated.set(`${producer} ${above}`, (repeated.get(`${producer} ${above}`) ?? true) && inferred);
  }
  const lines = new Map();
  for (const [producer, consumer, inferred] of found) {
    const again = repeated.get(`${producer} ${consumer}`);
    if (producer === consumer || again === false || (again && inferred) || around(consumer).has(producer) || around(producer).has(consumer)) continue;
    const key = `${producer} ${inferred}`;
    if (!lines.has(key)) lines.set(key, { producer, inferred, consumers: new Set() });
    lines.get(key).consumers.add(consumer);
  }
  const lanes = [...lines.values()].map((each) => ({ ...each, first: Math.min(each.producer, ...each.consumers), last: Math.max(each.producer, ...each.consumers) }));
  lanes.sort((a, b) => a.last - a.first - (b.last - b.first) || a.producer - b.producer || a.inferred - b.inferred);
  const taken = [];
  for (const each of lanes) {
    let lane = taken.findIndex((others) => others.every(({ first, last }) => each.first >= last || first >= each.last));
    if (lane < 0) lane = taken.push([]) - 1;
    taken[lane].push(each);
    each.lane = lane;
  }
  return lanes;
}

/** Return `draw(row)` for the lines next to a row, and `left`, the number of omitted lines; `classOf(lane)` styles a line. */
export function flowGutter(lanes, classOf) {
  const drawn = lanes.filter(({ lane }) => lane < MAX_LANES);
  const width = 10 + WIDE * (1 + Math.max(-1, ...drawn.map(({ lane }) => lane)));
  const [end, mid] = [width - 2, TALL / 2];
  const line = (each, row) => {
    const x = width - 10 - WIDE * (each.lane + 0.5);
    const [above, below, takes] = [row > each.first, row < each.last, each.consumers.has(row)];
    const joins = takes || row === each.producer;
    const turn = (from) => `M${x} ${from}Q${x} ${mid} ${x + WIDE / 2} ${mid}H${end}`;
    const path = `${above && below ? `M${x} 0V${TALL}` : ""}${joins && (above || !below) ? turn(0) : ""}${joins && below && (!above || row === each.producer) ? turn(TALL) : ""}`;
    const style = `${each.inferred ? "inferred" : ""} ${classOf(each)}`;
    return svg`<path class=${style} d=${path}></path>${takes ? svg`<path class=${`tip ${style}`} d=${`M${end - 6} ${mid - 4}L${end} ${mid}L${end - 6} ${mid + 4}Z`}></path>` : nothing}`;
  };
  const draw = (row) => svg`<svg class="flow" viewBox=${`0 0 ${width} ${TALL}`} width=${width} height=${TALL} aria-hidden="true">${drawn.filter(({ first, last }) => first <= row && row <= last).map((each) => line(each, row))}</svg>`;
  return { draw, left: lanes.length - drawn.length };
}
