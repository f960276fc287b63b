// Dark or light theme: the button of every page. Canvases redraw on `themechange`.

export function themeButton() {
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    dispatchEvent(new Event("themechange"));
  });
}

/** Call `draw` whenever colors change: by theme button, system setting, or printing. */
export function onTheme(draw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", draw);
  addEventListener("afterprint", draw);
  addEventListener("themechange", draw);
}
