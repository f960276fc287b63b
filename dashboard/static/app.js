// The web page: routes the address to a page. Every number and string comes from the server's view model.
import { BenchPage } from "./bench.js";
import { controlPage } from "./control.js";
import { diffPage } from "./diff.js";
import { LivePage } from "./live.js";
import { runPage, tensorPage } from "./run.js";
import { openPage, runsPage } from "./runs.js";
import { themeButton } from "./theme.js";
import { api, box, button, html, nothing, render, select } from "./ui.js";

const INTERVALS = [["0", "off"], ["10", "10 s"], ["60", "1 min"], ["300", "5 min"]];
const FAILED = { diff: "These runs cannot be compared", run: "This run cannot be shown", tensor: "This tensor cannot be shown", open: "This link cannot be opened" };
const root = document.getElementById("page");
const [, kind, id] = location.pathname.split("/");
const context = { id, query: new URLSearchParams(location.search), title, fail };

function title(text) {
  document.title = `${text} – tapscope`;
  return html`<h1>${text}</h1>`;
}

function fail(error) {
  render(html`${title(FAILED[kind] ?? "Cannot be shown")}<p role="alert" class="bad">${error.message}</p>`, root);
}

async function live() {
  const body = box();
  const draw = (text) => render(html`${title(text)}<p><a href=${`/run/${id}`}>Tensors of this run</a></p>${body}`, root);
  draw("Steps and metrics");
  new LivePage(body, id, (name) => draw(`${name}: steps and metrics`)).start();
}

async function benchmarks() {
  const body = box();
  const shown = new BenchPage(body, { compare: (baseline, target) => api(`/api/benchmarks/compare?${new URLSearchParams({ baseline, target })}`) });
  let [timer, last, updated, problem, isReading] = [null, "", "", "", false];
  const refresh = async () => {
    if (isReading) return;
    isReading = true;
    try {
      const history = await api("/api/benchmarks");
      const text = JSON.stringify({ ...history, updated: "" });
      if (text !== last) shown.show(history);
      [last, updated, problem] = [text, `last updated ${new Date(history.updated).toLocaleTimeString()}`, ""];
    } catch (error) {
      problem = `The last refresh failed: ${error.message}`;
    }
    isReading = false;
    draw();
  };
  const schedule = (seconds) => {
    clearInterval(timer);
    if (seconds !== "0") timer = setInterval(refresh, 1000 * seconds);
  };
  const draw = () => render(html`<div class="controls no-print">${title("Benchmark history")}<span class="grow"></span><span class="dim" role="status">${updated}</span>${button("Refresh", refresh)}<label>every ${select("Refresh interval", INTERVALS, "0", schedule)}</label></div>
    ${problem ? html`<p role="alert" class="bad">${problem}</p>` : nothing}${body}`, root);
  await refresh();
}

function control() {
  const body = box();
  render(html`${title("Capture")}${body}`, root);
  return controlPage(body);
}

themeButton();
root.replaceChildren();
render(html`<p>Loading …</p>`, root);
for (const link of document.querySelectorAll("nav.pages a")) if (link.getAttribute("href").split("/")[1] === kind) link.setAttribute("aria-current", "page");
const pages = { "": runsPage, run: runPage, diff: diffPage, tensor: tensorPage, live, open: openPage, benchmarks, control };
(pages[kind] ?? runsPage)(root, context).catch(fail);
