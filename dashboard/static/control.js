// Capture of a live job: its state, and the commands of the server's CaptureControl.
import { api, facts, fill, h } from "./dom.js";

export async function controlPage(root) {
  const state = h("div");
  const said = h("p", { role: "status", class: "mono" });
  const rules = h("textarea", { rows: 6, cols: 60, spellcheck: "false", "aria-label": "Rules, one per line" });
  const steps = h("input", { type: "number", min: 1, max: 1000000, value: 4, "aria-label": "Steps" });

  async function refresh() {
    const found = await api("/api/control");
    fill(state, facts([
      { label: "run", text: found.run }, { label: "capture", text: found.enabled ? "on" : "off" }, { label: "keep", text: found.keep },
      { label: "steps left to capture", text: String(found.capture_steps) }, { label: "ranks", text: String(found.num_ranks) }, { label: "epoch", text: String(found.epoch) },
    ]), found.hints.map((text) => h("p", {}, text)));
    return found;
  }

  async function send(command) {
    try {
      const { text } = await api("/api/control", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ command }) });
      fill(said, text);
      await refresh();
    } catch (error) {
      fill(said, h("span", { class: "bad" }, error.message));
    }
  }

  const button = (text, command) => h("button", { type: "button", onclick: () => send(command()) }, text);
  fill(root, state, said,
    h("div", { class: "controls" }, button("On", () => "on"), button("Off", () => "off"), h("label", {}, "steps ", steps), button("Capture", () => steps.value)),
    h("h2", {}, "Rules"), h("p", {}, rules), h("div", { class: "controls" }, button("Apply rules", () => `rules ${rules.value.split("\n").join("; ")}`)));
  rules.value = (await refresh()).rules.join("\n");
}

/** A form that makes a link for sharing. */
export function shareForm() {
  const seconds = h("select", { "aria-label": "Valid for" }, [["3600", "1 hour"], ["28800", "8 hours"], ["604800", "7 days"]].map(([value, text]) => h("option", { value }, text)));
  const link = h("span", { class: "mono", role: "status" });
  return h("form", { class: "controls no-print", onsubmit: async (event) => {
    event.preventDefault();
    try {
      const found = await api("/api/links", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ seconds: Number(seconds.value) }) });
      fill(link, `${location.origin}${found.path}`);
    } catch (error) {
      fill(link, error.message);
    }
  } }, "Read-only link, valid for", seconds, h("button", { type: "submit" }, "Create link"), link);
}
