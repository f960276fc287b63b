// The benchmark report: draws charts of the embedded history. The page has the tables without this script.
import { BenchPage } from "./bench.js";
import { themeButton } from "./theme.js";

const root = document.getElementById("history");
root.replaceChildren();
new BenchPage(root).show(JSON.parse(document.getElementById("data").textContent));
themeButton();
