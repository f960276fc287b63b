// Levels of a heat map: a layer opens into its modules, a module into its submodules and sites.
import { api, button, html, nothing, questions } from "./ui.js";

/** Shows levels in `map`; `address(rows)` is the URL of the level at a path of row indices. */
export class Levels {
  constructor(map, address, onChange, fail) {
    Object.assign(this, { map, address, onChange, fail, at: [], level: null, ask: questions() });
    map.onBack = () => this.at.length && this.#back(this.at.length - 1).catch(fail);
  }

  /** Reset, because the map shows another grid. */
  leave() {
    this.ask();
    Object.assign(this, { at: [], level: null });
  }

  /** Fetch the columns from `first` to `last` of the current level. */
  async finer(first, last) {
    return (await api(`${this.address(this.at.join("."))}&first=${first}&last=${last}`)).grid;
  }

  /** Show the level below a row; for a site, return its index among all sites. */
  async choose(row) {
    const site = this.level.sites[row];
    if (site === null) await this.go([...this.at, row], { step: this.map.step });
    return site;
  }

  /** Show the level at a path of row indices that starts at the layers. */
  async go(at, place) {
    const isLatest = this.ask();
    const level = await api(this.address(at.join(".")));
    if (!isLatest()) return;
    Object.assign(this, { at, level });
    this.map.show(level.grid, place);
    this.onChange(level);
  }

  #back(num) {
    return this.go(this.at.slice(0, num), { row: this.at[num], step: this.map.step });
  }

  /** Breadcrumbs: the enclosing rows of the level, as buttons. */
  trail() {
    if (!this.at.length) return nothing;
    const around = ["layers", ...this.level.around];
    const label = (text, i) => (i < around.length - 1 ? button(text, () => this.#back(i).catch(this.fail)) : html`<span aria-current="true">${text}</span>`);
    return html`<nav class="trail" aria-label="Level of the heat map">${around.map((text, i) => html`${i ? " › " : nothing}${label(text, i)}`)}</nav>`;
  }
}
