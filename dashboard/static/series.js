// Charts of values by step.
import { api, fill, h } from "./dom.js";

/** Charts of the server's series below a heading. */
export async function series(root, path, heading) {
  const found = await api(path).catch(() => ({ series: [] }));
  if (found.series.length) fill(root, h("h2", {}, heading), found.series.flatMap((each) => {
    const name = each.rank === null ? each.name : `${each.name}, rank ${each.rank}`;
    return chart(name, each.points.map((point) => ({ step: point.step, values: { [name]: point.value } })), each.text, "h3");
  }));
}

/** A line of `values[name]` of the points, with its range below. */
export function chart(name, points, text = null, heading = "h2") {
  const known = points.filter((point) => Number.isFinite(point.values[name]));
  const values = known.map((point) => point.values[name]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const at = (value, i) => `${known.length > 1 ? (i / (known.length - 1)) * 100 : 50},${high > low ? 28 - ((value - low) / (high - low)) * 26 : 15}`;
  if (!known.length) return [h(heading, {}, name), h("p", { class: "dim mono" }, text ?? "-")];
  return [h(heading, {}, name), h("svg", { svg: true, class: "chart", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${values.at(-1)} in step ${known.at(-1)?.step}` }, h("polyline", { svg: true, points: values.map(at).join(" ") })),
    h("p", { class: "dim mono" }, `step ${known[0].step} to ${known.at(-1).step} · ${text ?? `${low} to ${high} · last ${values.at(-1)}`}`)];
}

