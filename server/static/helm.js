// The helm: a slider that steers toward the text or the image, about as far as was calibrated, or as far as the server goes.

import { byId, h, short } from "./dom.js";

export const DEFAULT_VECTOR = "modality-preference"; // the server's own

/** What a signed strength is called: + is toward the image. */
export const sideOf = (strength) => (strength > 0 ? "image" : "text");

/** What the server's name of a side, vision or text, is called. */
export const towardOf = (side) => `toward the ${side === "vision" ? "image" : side}`;

/** The helm with its vectors; `changed()` is called when it was moved by hand or by what goes with it. */
export class Helm {
  constructor(changed) {
    Object.assign(this, { changed, vectors: [], vector: null, reason: "", far: false });
    byId("vector").addEventListener("change", () => {
      this.#use();
      changed();
    });
    byId("auto").addEventListener("change", () => this.#auto());
    byId("helm-far").addEventListener("click", () => {
      this.far = !this.far;
      this.#reach();
      changed();
    });
    byId("helm-off").addEventListener("click", () => {
      byId("helm").value = "0";
      byId("helm").focus();
      changed();
    });
  }

  /** Take the vectors of the server that can be used; without `able` its engine cannot steer. */
  offer(model, vectors, able) {
    this.most = model.limits?.strength ?? 4; // in published units
    this.vectors = able ? vectors.filter((one) => one.matches && one.kind === DEFAULT_VECTOR) : [];
    this.reason = this.vectors.length
      ? ""
      : able
        ? "No steering vector of this server matches the model. Build one with “helmsight probe --use”."
        : "The engine of this server does not support steering.";
    byId("vector").replaceChildren(...this.vectors.map(({ name }) => h("option", { value: name }, name)));
    if (this.vectors.some(({ name }) => name === DEFAULT_VECTOR)) byId("vector").value = DEFAULT_VECTOR;
    byId("vector-row").hidden = this.vectors.length < 2;
    const conditions = able ? vectors.filter((one) => one.matches && one.info?.gate) : [];
    const always = h("option", { value: "" }, "always");
    byId("when").replaceChildren(always, ...conditions.map(({ name }) => h("option", { value: name }, name)));
    byId("when-row").hidden = conditions.length === 0;
    this.#use();
  }

  /** Put everything where a form says. */
  set({ strength, auto, vector, when }) {
    const known = [...byId("when").options].some(({ value }) => value === when);
    byId("when").value = known ? when : "";
    if (this.vectors.some(({ name }) => name === vector)) byId("vector").value = vector;
    this.#use();
    if (!this.vector) return;
    this.far ||= Math.abs(strength) > Number(byId("helm").max);
    this.#reach();
    byId("helm").value = String(strength);
    byId("auto").checked = auto;
  }

  /** [least, most] of the strengths that were calibrated; null where none were. */
  get range() {
    return this.vector?.info?.calibration?.range ?? null;
  }

  /** How far to go where nothing else is said: never beyond what was calibrated. */
  get usual() {
    return Math.min(1, this.range?.[1] ?? 1, Number(byId("helm").max));
  }

  #use() {
    const helm = byId("helm");
    this.vector = this.vectors.find(({ name }) => name === byId("vector").value) ?? null;
    helm.disabled = byId("auto").disabled = !this.vector;
    this.#reach();
    byId("helm-sign").textContent = this.vector
      ? "+ is toward the image, − toward the text. In the API “toward” names the side; the sign of a “scale” follows the "  +
        `stored vector: + toward ${{ vision: "the image", text: "the text" }[this.vector.positive] ?? "neither"}.`
      : "";
    if (this.vector) return;
    helm.value = "0";
    byId("auto").checked = false;
  }

  // What is calibrated is most of the helm; what is too much can be seen, too, by whom wants to.
  #reach() {
    const helm = byId("helm");
    const most = (this.most ?? 4) / (this.vector?.published ?? 1);
    const near = Math.min(most, 2 * (this.range?.[1] || most));
    const limit = Math.floor(10 * (this.far ? Math.min(most, 8 * (this.range?.[1] || most)) : near) + 1e-6) / 10;
    Object.assign(helm, { min: String(-limit), max: String(limit) });
    Object.assign(byId("helm-far"), { hidden: !this.vector || near === most, ariaPressed: String(this.far) });
    byId("helm-far").textContent = this.far ? "Nearer" : "Further";
  }

  // Auto needs a strength: a helm at 0 goes where it is usual, and back if it was not moved meanwhile.
  #auto() {
    const helm = byId("helm");
    if (byId("auto").checked && Number(helm.value) === 0) {
      helm.value = String(this.usual);
      helm.dataset.moved = helm.value;
    } else {
      if (!byId("auto").checked && helm.dataset.moved === helm.value) helm.value = "0";
      delete helm.dataset.moved;
    }
    this.changed();
  }

  draw() {
    const helm = byId("helm");
    const strength = Number(helm.value);
    const [low, high] = [Number(helm.min), Number(helm.max)];
    const at = (value) => `${(100 * (value - low)) / (high - low)}%`;
    const calibrated = Math.min(this.range?.[1] ?? 0, high);
    helm.style.setProperty("--from", at(Math.min(0, strength)));
    helm.style.setProperty("--to", at(Math.max(0, strength)));
    helm.style.setProperty("--calibrated-from", at(-calibrated));
    helm.style.setProperty("--calibrated-to", at(calibrated));
    const auto = byId("auto").checked;
    const way = auto ? ", auto" : ` toward the ${sideOf(strength)}`;
    const said = strength === 0 ? "off" : `${Math.abs(strength).toFixed(1)}${way}`;
    byId("helm-value").textContent = said;
    helm.setAttribute("aria-valuetext", said);
    byId("helm-text").className = strength < 0 && !auto ? "on" : "";
    byId("helm-vision").className = strength > 0 && !auto ? "on" : "";
    byId("helm-off").hidden = strength === 0;
    byId("helm-note").textContent = this.reason || this.#note(Math.abs(strength), auto);
  }

  #note(size, auto) {
    if (size === 0) return "At 0 the model answers without steering.";
    if (auto) return "The direction is chosen for each request, which needs an image and a text context.";
    const published = this.vector?.published ? `${short(size * this.vector.published)} in published units. ` : "";
    if (!this.range) return published;
    const known = size <= this.range[1] ? "Calibrated from" : "Beyond what was calibrated:";
    return `${published}${known} ${this.range[0]} to ${this.range[1]}.`;
  }
}
