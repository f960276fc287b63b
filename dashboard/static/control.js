// Capture control of a live job: shows its state and sends commands to the server's CaptureControl.
import { api, button, facts, html, nothing, post, questions, render } from "./ui.js";

export async function controlPage(root) {
  const ask = questions();
  let found = null;
  let [answer, isBad] = ["", false];
  const field = (name) => root.querySelector(`[name=${name}]`);

  async function refresh() {
    const isLatest = ask();
    const state = await api("/api/control");
    if (!isLatest()) return;
    found = state;
    draw();
  }

  async function send(command) {
    try {
      [answer, isBad] = [(await post("/api/control", { command })).text, false];
      await refresh();
    } catch (error) {
      [answer, isBad] = [error.message, true];
      draw();
    }
  }

  function draw() {
    const state = [
      ["run", found.run], ["capture", found.enabled ? "on" : "off"], ["keep", found.keep], ["steps left to capture", found.capture_steps],
      ["ranks", found.num_ranks], ["changes so far", found.epoch],
    ].map(([label, text]) => ({ label, text }));
    render(html`${facts(state, "short")}${found.hints.map((text) => html`<p>${text}</p>`)}
      <p role="status" class=${isBad ? "mono bad" : "mono"}>${answer}</p>
      <div class="controls">${button("On", () => send("on"))}${button("Off", () => send("off"))}
        <label>the next <input name="steps" type="number" min="1" max="1000000" value="4"> steps</label>${button("Capture", () => send(field("steps").value))}</div>
      <h2>Rules</h2>
      <p class="dim">One rule per line, such as <code>layers.1:out=full</code>: a site pattern and a capture level, which is <code>off</code>, <code>stats</code>, <code>sketch</code> or <code>full</code>.</p>
      <p><textarea name="rules" rows="6" cols="60" spellcheck="false" aria-label="Rules, one per line"></textarea></p>
      <div class="controls">${button("Apply rules", () => send(`rules ${field("rules").value.split("\n").join("; ")}`))}</div>`, root);
  }

  await refresh();
  field("rules").value = found.rules.join("\n");
}

/** Draw a form that creates a read-only link for sharing. */
export function shareForm(root) {
  let link = "";
  const submit = async (event) => {
    event.preventDefault();
    const seconds = Number(new FormData(event.target).get("seconds"));
    link = await post("/api/links", { seconds }).then(({ path }) => `${location.origin}${path}`, (error) => error.message);
    draw();
  };
  const draw = () => render(html`<form class="controls no-print" @submit=${submit}><label>Read-only link, valid for
    <select name="seconds"><option value="3600">1 hour</option><option value="28800">8 hours</option><option value="604800">7 days</option></select></label>
    <button type="submit">Create link</button>${link ? html`<span class="mono" role="status">${link}</span>` : nothing}</form>`, root);
  draw();
}
