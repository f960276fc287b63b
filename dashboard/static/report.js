// HTML report: heat map, filter, sorting and theme. Without this script, only the heat map and the controls are missing.
import { copy } from "./copy.js";
import { HeatMap } from "./heatmap.js";
import { themeButton } from "./theme.js";

const data = JSON.parse(document.getElementById("data").textContent);
const table = document.getElementById("findings");
const filter = document.getElementById("filter");

const map = new HeatMap(document.getElementById("heat"), { onSelect: choose, label: "error ÷ floor" });
let level = data.layers.rows.length > 1 ? "layers" : "sites";

function show(name) {
  level = name;
  map.show(data[name], { step: map.step });
  document.getElementById("axis").textContent = data[name].axis;
  for (const button of document.querySelectorAll("[data-level]")) {
    button.setAttribute("aria-pressed", String(button.dataset.level === name));
  }
}

function choose(row) {
  const chosen = data[level].rows[row];
  if (level !== "sites" && data.sites.rows.length) {
    filter.value = chosen.label.startsWith("layer ") ? `.${chosen.label.slice(6)}.` : chosen.label === "(root)" ? "" : chosen.label;
  } else filter.value = chosen.label;
  apply();
  table.closest("section").scrollIntoView({ block: "start" });
}

function apply() {
  const part = filter.value.toLowerCase();
  for (const row of table.tBodies[0].rows) row.hidden = part !== "" && !row.cells[1].textContent.toLowerCase().includes(part);
}

function sort(column, button) {
  const descending = button.dataset.direction !== "down";
  const rows = [...table.tBodies[0].rows];
  const key = (row) => {
    const text = row.cells[column].textContent;
    return column < 2 ? text : text === "inf" ? Infinity : text === "-" ? -Infinity : Number(text);
  };
  rows.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (descending ? -1 : 1));
  button.dataset.direction = descending ? "down" : "up";
  for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
  button.closest("th").setAttribute("aria-sort", descending ? "descending" : "ascending");
  table.tBodies[0].append(...rows);
}

for (const button of document.querySelectorAll("[data-level]")) button.addEventListener("click", () => show(button.dataset.level));
for (const button of table.tHead.querySelectorAll("button")) {
  button.addEventListener("click", () => sort(button.closest("th").cellIndex, button));
}
for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", () => copy(button, button.previousElementSibling));
filter.addEventListener("input", apply);
themeButton();
addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = { "/": () => filter.focus(), n: () => cause(1), N: () => cause(-1), s: () => show(level === "layers" ? "sites" : "layers") };
  if (actions[event.key]) {
    actions[event.key]();
    event.preventDefault();
  }
});

let at = -1;
function cause(direction) {
  const found = [...document.querySelectorAll("article.cause")];
  if (!found.length) return;
  at = (at + direction + found.length) % found.length;
  found[at].tabIndex = -1;
  found[at].focus();
  found[at].scrollIntoView({ block: "center" });
}

show(level);
