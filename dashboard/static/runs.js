// List of runs with its forms, and the targets of a permalink.
import { shareForm } from "./control.js";
import { api, box, button, copyable, html, more, nothing, questions, region, render, select, table } from "./ui.js";

export async function runsPage(root, { title, fail }) {
  const share = box();
  let [runs, total, updated, problem] = [[], 0, "", ""];
  const ask = questions();
  shareForm(share);

  async function load(known = []) {
    const isLatest = ask();
    const part = await api(`/api/runs?offset=${known.length}`);
    if (!isLatest()) return;
    [runs, total, updated, problem] = [[...known, ...part.runs], part.num_runs, new Date().toLocaleTimeString(), ""];
    draw();
  }

  function again(known) {
    load(known).catch((error) => {
      problem = `The last refresh failed: ${error.message}`;
      draw();
    });
  }

  function draw() {
    const options = runs.map(({ id, name }) => [id, name]);
    const [latest, before] = [...runs.filter((run) => !run.problem), ...runs.filter((run) => run.problem)];
    const pick = (name, run) => select(name, options, run?.id, () => {}, name);
    const compare = (event) => {
      event.preventDefault();
      location.assign(`/diff/?${new URLSearchParams(new FormData(event.target))}`);
    };
    const rows = runs.map((run) => html`<tr><td class="left"><a href=${`/run/${run.id}`}>${run.name}</a>${run.problem ? html` <span class="bad">${run.problem}</span>` : nothing}</td><td class="left">${run.model}</td><td class="left">${run.framework}</td><td class="left">${run.created}</td><td class="left"><a href=${`/live/${run.id}`}>${run.is_open ? "live, recording" : "steps and metrics"}</a></td></tr>`);
    const form = html`<form class="controls" @submit=${compare}><label>Compare ${pick("baseline", before ?? latest)}</label><label>with ${pick("target", latest)}</label><button type="submit">Diff</button></form>`;
    render(html`<div class="top">${title("Runs")}<span class="grow"></span><span class="dim" role="status">last updated ${updated}</span>${button("Refresh", () => again())}</div>
      ${problem ? html`<p class="bad" role="alert">${problem}</p>` : nothing}
      ${runs.length ? form : nothing}
      ${more(runs.length, total, "runs, newest first", () => again(runs))}
      ${runs.length ? region("Runs", table(["<run", "<model", "<framework", "<created", "<steps"], rows)) : html`<p>No run below the given paths. Make one with: <code>tapscope dump MODEL -o RUN</code></p>`}
      <form class="controls no-print" action="/open/"><label>Open a link <input name="link" size="40" spellcheck="false" placeholder="run/site@step.rank[row,col]" required></label><button type="submit">Open</button></form>
      ${share}`, root);
  }

  await load().catch(fail);
}

/** Redirect to the target of a permalink; show a list if several runs have its name. */
export async function openPage(root, { title, query }) {
  const link = query.get("link") || "";
  const places = await api(`/api/link?${new URLSearchParams({ link })}`);
  if (places.length === 1) location.replace(places[0].address);
  else render(html`${title("Open")}<p>${places.length} runs of this name have ${link}:</p><ul>${places.map((each) => html`<li><a href=${each.address}>${each.path}</a></li>`)}</ul>`, root);
}

/** Render a permalink as a link with a copy button. */
export function permalink(text) {
  return copyable(html`<a href=${`/open/?${new URLSearchParams({ link: text })}`}>${text}</a>`);
}
