// Live run page: the run while it is recorded, in its current state or as of an earlier step.
import { SeriesCharts } from "./series.js";
import { api, button, facts, html, nothing, region, render } from "./ui.js";

const POLL_MS = 2000;
const REPLAY_MS = 250;
const MAX_CHARTS = 16;

export class LivePage {
  constructor(root, id, onName = () => {}) {
    Object.assign(this, { root, id, address: `/api/runs/${encodeURIComponent(id)}/live`, onName, latest: null, shown: null, step: null, timer: null, problem: "" });
    this.charts = new SeriesCharts({ heading: "By step", most: MAX_CHARTS });
  }

  start() {
    const source = new EventSource(this.address);
    source.onmessage = (event) => this.#take(JSON.parse(event.data));
    source.onerror = () => {
      this.problem = "The connection is lost; trying again.";
      this.#draw();
      if (source.readyState === EventSource.CLOSED && !this.polling) this.polling = setInterval(() => this.#poll(), POLL_MS);
    };
  }

  async #poll() {
    if (this.isPolling) return;
    this.isPolling = true;
    try {
      this.#take(await this.#get());
    } catch (error) {
      this.problem = error.message;
      this.#draw();
    } finally {
      this.isPolling = false;
    }
  }

  #get(step = null) {
    return api(`${this.address}?poll=true${step === null ? "" : `&step=${step}`}`);
  }

  #take(page) {
    if (page.name !== this.latest?.name) this.onName(page.name);
    [this.latest, this.problem] = [page, ""];
    if (!page.steps.length) this.step = null;
    else if (this.step !== null && this.step < page.steps[0]) this.#show(page.steps[0]);  // the oldest kept step
    if (this.step === null) this.shown = page;
    this.#draw();
  }

  /** Show the state as of a step; null follows the latest state. */
  async #show(step, { playing = false } = {}) {
    if (!playing) this.#stop();
    this.step = step;
    if (step === null) this.shown = this.latest;
    else {
      const found = await this.#get(step).catch((error) => { this.problem = error.message; });
      if (found && this.step === step) this.shown = found;
    }
    this.#draw();
  }

  #stop() {
    clearInterval(this.timer);
    this.timer = null;
  }

  #move(direction) {
    const { steps } = this.latest;
    const at = this.step === null ? steps.length - 1 : steps.indexOf(this.step);
    if (!steps.length || at + direction < 0 || (this.step === null && direction > 0)) return;
    this.#show(steps[at + direction] ?? null);
  }

  #play() {
    const { steps } = this.latest;
    if (!steps.length) return;
    this.#show(this.step === null || this.step === steps.at(-1) ? steps[0] : this.step);
    this.timer = setInterval(() => {
      const later = this.latest.steps.find((step) => step > this.step);
      this.#show(later ?? null, { playing: later !== undefined });
    }, REPLAY_MS);
  }

  #anomaly({ site, step, rank }) {
    return html`<li><a href=${`/tensor/?${new URLSearchParams({ run: this.id, site, step, rank })}`}>${site}</a> step ${step} rank ${rank}</li>`;
  }

  #draw() {
    const { latest, shown, step } = this;
    if (!latest || !shown) {
      render(html`<p role="status">${this.problem}</p>`, this.root);
      return;
    }
    const { steps } = latest;
    const at = step === null ? steps.length - 1 : steps.indexOf(step);
    const status = step === null ? "" : `${this.timer ? "replay" : "paused"} at step ${step}`;
    this.charts.show(shown.series);
    render(html`<div class="controls no-print">
        ${button(step === null ? "Pause" : "Continue", () => this.#show(step === null ? steps.at(-1) ?? null : null))}
        ${button("Step back", () => this.#move(-1))}
        <input type="range" min="0" max=${Math.max(steps.length - 1, 0)} .value=${String(Math.max(at, 0))} aria-label="Step" aria-valuetext=${steps.length ? `step ${steps[at]}` : "no step"} @input=${(event) => this.#show(steps[event.target.value] ?? null)}>
        ${button("Step forward", () => this.#move(1))}${button("Replay", () => this.#play())}
        <span class="dim" role="status">${this.problem || status}</span></div>
      <p><span class=${`state ${latest.view.state === "dead" ? "bad" : "good"}`}>${latest.state}</span></p>
      ${facts(shown.facts, "short")}
      ${this.charts.element}
      ${shown.view.anomalies.length ? html`<h2>Not finite, the latest first</h2>${region("Records that are not finite", html`<ul class="mono">${[...shown.view.anomalies].reverse().map((each) => this.#anomaly(each))}</ul>`)}` : nothing}`, this.root);
  }
}
