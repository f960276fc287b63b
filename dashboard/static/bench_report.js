// The benchmark report: charts of the embedded history. The tables are in the page without it.
import { BenchPage } from "./bench.js";

new BenchPage(document.getElementById("history")).show(JSON.parse(document.getElementById("data").textContent));
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
