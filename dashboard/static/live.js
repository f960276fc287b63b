// A run while it is recorded: what has come so far, or as it was after an earlier step.
import { api, facts, fill, h } from "./dom.js";
import { chart } from "./series.js";

const POLL_MS = 2000;
const REPLAY_MS = 250;
const MAX_CHARTS = 12;
const STATES = { recording: "recording", closed: "closed", dead: "dead: the recorder ended without closing the run" };

export class LivePage {
  constructor(root, address) {
    Object.assign(this, { address, view: null, step: null, timer: null });
    const button = (text, act) => h("button", { type: "button", onclick: act }, text);
    this.pause = button("Pause", () => this.#show(this.step === null ? this.#steps().at(-1) ?? null : null));
    this.place = h("input", { type: "range", min: 0, max: 0, "aria-label": "Step", oninput: () => this.#show(this.#steps()[this.place.value] ?? null) });
    this.replay = button("Replay", () => this.#play());
    this.shown = h("span", { class: "dim", role: "status" });
    this.body = h("div");
    fill(root, h("div", { class: "controls no-print" }, this.pause, button("Step back", () => this.#move(-1)), this.place, button("Step forward", () => this.#move(1)), this.replay, this.shown), this.body);
  }

  start() {
    const source = new EventSource(this.address);
    source.onmessage = (event) => this.#take(JSON.parse(event.data));
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED && !this.polling) this.polling = setInterval(() => this.#poll(), POLL_MS);
    };
  }

  async #poll() {
    try {
      this.#take(await api(`${this.address}?poll=true`));
    } catch (error) {
      fill(this.shown, error.message);
    }
  }

  #steps() {
    return this.view ? this.view.points.map((point) => point.step) : [];
  }

  #take(view) {
    this.view = view;
    const steps = this.#steps();
    if (this.step !== null && this.step < steps[0]) this.step = steps[0];  // the oldest one that is kept
    if (!steps.length) this.step = null;
    this.#draw();
  }

  #show(step, { playing = false } = {}) {
    if (!playing) {
      clearInterval(this.timer);
      this.timer = null;
    }
    this.step = step;
    this.#draw();
  }

  #move(direction) {
    const steps = this.#steps();
    const at = this.step === null ? steps.length - 1 : steps.indexOf(this.step);
    if (!steps.length || at + direction < 0 || (this.step === null && direction > 0)) return;
    this.#show(steps[at + direction] ?? null);
  }

  #play() {
    const steps = this.#steps();
    if (!steps.length) return;
    this.#show(this.step === null || this.step === steps.at(-1) ? steps[0] : this.step);
    this.timer = setInterval(() => {
      const later = this.#steps().find((step) => step > this.step);
      this.#show(later ?? null, { playing: later !== undefined });
    }, REPLAY_MS);
  }

  #draw() {
    const { view, step } = this;
    if (!view) return;
    const steps = this.#steps();
    const at = step === null ? steps.length - 1 : steps.indexOf(step);
    const points = view.points.slice(0, at + 1);
    const now = step === null ? { ...view, step: view.last_step } : points.at(-1);
    this.pause.textContent = step === null ? "Pause" : "Continue";
    [this.place.max, this.place.value] = [Math.max(steps.length - 1, 0), Math.max(at, 0)];
    this.place.setAttribute("aria-valuetext", steps.length ? `step ${steps[at]}` : "no step");
    this.shown.textContent = step === null ? "" : `${this.timer ? "replay" : "paused"} at step ${step}`;
    const text = (number) => number.toLocaleString("en");
    const gone = points.slice(1).map((point, i) => ({ step: point.step, values: { "records by step": point.num_records - points[i].num_records, "dropped by step": point.num_dropped - points[i].num_dropped } }));
    const own = view.num_dropped ? ["records by step", "dropped by step"] : ["records by step"];
    const names = [...new Set(points.flatMap((point) => Object.keys(point.values)))];
    const anomalies = view.anomalies.filter((each) => step === null || each.step <= step).reverse();
    fill(this.body, h("p", {}, h("span", { class: `state ${view.state === "dead" ? "bad" : "good"}` }, STATES[view.state])),
      facts([
        { label: "finished steps", text: text(now.num_steps) }, { label: "last step", text: now.step === null ? "-" : String(now.step) },
        { label: "records", text: text(now.num_records) }, { label: "records/s", text: step === null ? view.records_per_s.toFixed(0) : "-" },
        { label: "dropped", text: text(now.num_dropped) }, { label: "not finite", text: text(now.num_nonfinite) },
        { label: "bytes to read", text: text(view.bytes_unread) },
      ]),
      anomalies.length ? [h("h2", {}, "Not finite, the latest first"), h("ul", { class: "mono bad" }, anomalies.map((each) => h("li", {}, each.text)))] : "",
      own.flatMap((name) => chart(name, gone)), names.slice(0, MAX_CHARTS).flatMap((name) => chart(name, points)),
      names.length > MAX_CHARTS ? h("p", { class: "dim" }, `${MAX_CHARTS} of ${names.length} metrics`) : "",
    );
  }
}
