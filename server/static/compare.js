// What one click on Compare asks for: the same question with several strengths, or with one intervention after another.

import { byId, h } from "./dom.js";
import { sideOf } from "./helm.js";

const MOST = 8;

/** The part of the form that says what is compared; `changed()` is called when it was changed from here. */
export class Compare {
  constructor(changed) {
    this.changed = changed;
    for (const radio of this.#modes()) radio.addEventListener("change", () => this.draw());
  }

  #modes() {
    return [...document.querySelectorAll('input[name="compare"]')];
  }

  /** Take what the server can do. Strengths that are offered are within what was calibrated. */
  offer(helm, interventions) {
    Object.assign(this, { helm, interventions });
    const [least, most] = helm.range ?? [helm.usual / 2, helm.usual];
    const round = (value) => Number(value.toFixed(2));
    const up = [least, (least + most) / 2, most].map(round);
    const sets = {
      "both sides": [-most, -least, 0, least, most].map(round),
      "toward the image": [0, ...up],
      "toward the text": [0, ...up.map((value) => -value)],
    };
    const use = (values) => () => {
      byId("strengths").value = values.join(", ");
      this.changed();
    };
    byId("strength-sets").replaceChildren(
      ...Object.entries(sets).map(([name, values]) =>
        h("button", { type: "button", class: "small", on: { click: use(values) } }, name),
      ),
    );
    const before = this.standard;
    this.standard = sets["both sides"].join(", ");
    if ([before, ""].includes(byId("strengths").value)) byId("strengths").value = this.standard;
    const usable = interventions.each().filter(({ vectors }) => helm.vector || !vectors);
    const known = [...(helm.vector ? ["toward the image", "toward the text"] : []), ...usable.map(({ name }) => name)];
    byId("compared").replaceChildren(
      ...known.map((name) =>
        h("label", { class: "check" }, h("input", { type: "checkbox", value: name, checked: true }), h("span", {}, name)),
      ),
    );
    const [strengths, each] = this.#modes();
    strengths.disabled = !helm.vector;
    if (!helm.vector) each.checked = true;
    this.draw();
  }

  get mode() {
    return this.#modes().find(({ checked }) => checked).value;
  }

  /** What is chosen, to be kept. */
  get kept() {
    const off = [...byId("compared").querySelectorAll("input:not(:checked)")].map(({ value }) => value);
    const strengths = byId("strengths").value;
    return { mode: this.mode, strengths: strengths === this.standard ? null : strengths, off };
  }

  set(kept) {
    if (!kept) return;
    const radio = this.#modes().find(({ value, disabled }) => value === kept.mode && !disabled);
    if (radio) radio.checked = true;
    byId("strengths").value = kept.strengths || byId("strengths").value;
    for (const input of byId("compared").querySelectorAll("input")) input.checked = !kept.off?.includes(input.value);
    this.draw();
  }

  draw() {
    byId("compare-strengths").hidden = this.mode !== "strengths";
    byId("compare-interventions").hidden = this.mode !== "interventions";
  }

  /** The forms to send: [{title, chips, steered, plain, form}]; raises an Error, in words, where there is nothing to compare. */
  variants(form) {
    const found = this.mode === "strengths" ? this.#strengths(form) : this.#interventions(form);
    if (found.length < 2) throw new Error("There is nothing to compare: choose at least two.");
    return found.map(({ title, chips, steered = 0, plain = false, ...changed }) => ({
      title,
      chips,
      steered,
      plain,
      form: { ...form, auto: false, baseline: false, ...changed },
    }));
  }

  #strengths() {
    const words = byId("strengths").value.split(/[\s,;]+/).filter(Boolean);
    const values = [...new Set(words.map((word) => Number(word.replace("−", "-"))))];
    const wrong = words.find((word) => !Number.isFinite(Number(word.replace("−", "-"))));
    if (wrong !== undefined) throw new Error(`Write strengths as numbers separated by commas; “${wrong}” is not a number.`);
    if (values.length > MOST) throw new Error(`At most ${MOST} strengths are compared at once.`);
    const others = this.interventions.names();
    return values.map((strength) => ({
      title: strength === 0 ? "Not steered" : `${Math.abs(strength)} toward the ${sideOf(strength)}`,
      chips: others,
      plain: strength === 0 && others.length === 0,
      strength,
    }));
  }

  #interventions({ strength }) {
    const on = new Set([...byId("compared").querySelectorAll("input:checked")].map(({ value }) => value));
    const size = Math.abs(strength) || this.helm.usual;
    const sides = [size, -size].map((value) => ({
      title: `toward the ${sideOf(value)}`,
      chips: [`strength ${size}`],
      steered: 1,
      strength: value,
      interventions: {},
    }));
    const each = this.interventions
      .each()
      .map(({ name, fields }) => ({ title: name, chips: [], strength: 0, interventions: fields }));
    const chosen = [...(this.helm.vector ? sides : []), ...each].filter(({ title }) => on.has(title));
    return [{ title: "Plain", chips: [], plain: true, strength: 0, interventions: {} }, ...chosen];
  }
}
