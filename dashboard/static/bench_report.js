// The benchmark report: charts of the embedded history. The tables are in the page without it.
import { BenchPage } from "./bench.js";
import { themeButton } from "./theme.js";

const root = document.getElementById("history");
root.replaceChildren();
new BenchPage(root).show(JSON.parse(document.getElementById("data").textContent));
themeButton();
