// The answers of one click, side by side, with where they looked and the readouts of the one that is chosen.

import { Card } from "./answers.js";
import { ask } from "./ask.js";
import { byId, h, short } from "./dom.js";
import { towardOf } from "./helm.js";
import { Look } from "./look.js";
import { readoutCards } from "./readouts.js";
import { picturesOf } from "./request.js";

const AT_ONCE = 5; // of the six connections that a browser has for one server

export class Results {
  /** `goOn(form, answer)` is called when a person asks on from an answer, `boxed(image, box)` when a box was drawn. */
  constructor(goOn, boxed) {
    Object.assign(this, { goOn, cards: [], results: [] });
    this.look = new Look((index) => this.#card()?.point(index), boxed);
    byId("whose").addEventListener("change", () => this.#choose());
  }

  clear() {
    Object.assign(this, { cards: [], results: [] });
    for (const id of ["answers", "look", "save-json"]) byId(id).hidden = true;
    byId("readouts").replaceChildren();
  }

  /** Send `variants` [{key, title, chips, steered, plain, form}] of a form and show what comes, with the plain model's answer
   * where the first one has a `baseline`; the answers before where nothing comes. The first `steered` chips tell of steering.
   * Returns what was answered, and why there is nothing where nothing was. Where others are shown meanwhile, they stay. */
  async run(form, variants, baseline, signal) {
    const [earlier, ofForm] = [this.results, this.form];
    this.clear();
    const plan = baseline ? [...variants, { key: "base", title: "Baseline", chips: [], plain: true }] : variants;
    this.#lay(plan);
    const { cards } = this;
    byId("answers").setAttribute("aria-busy", "true");
    if (baseline) this.cards.at(-1).live.textContent = "…";
    const found = new Array(variants.length).fill(null);
    const problems = [];
    const left = variants.map((variant, i) => [variant, i]);
    const worker = async () => {
      for (let next = left.shift(); next; next = left.shift()) {
        const [variant, i] = next;
        try {
          found[i] = await this.#one(variant, cards[i], signal);
        } catch (error) {
          problems.push(error);
        }
      }
    };
    await Promise.all(Array.from({ length: Math.min(AT_ONCE, variants.length) }, worker));
    byId("answers").removeAttribute("aria-busy");
    if (this.cards !== cards) return [[], null];
    const all = found.filter(Boolean);
    const base = all[0]?.baseline;
    for (const one of all) delete one.baseline;
    if (base) all.push(asBase(base));
    if (all.length) this.#finish(all, form);
    else if (!this.cards.some(({ live }) => live.textContent.replace("…", ""))) {
      if (earlier.length) this.show(earlier, ofForm);
      else byId("answers").hidden = true;
    }
    const [error] = problems.filter(({ name }) => name !== "AbortError");
    return [all, all.length ? null : (error ?? null)];
  }

  async #one({ form, ...variant }, card, signal) {
    try {
      const result = await ask(form, {
        signal,
        said: (text) => card.live.append(text),
        waiting: (text) => (card.meta.textContent = text),
      });
      const [steered] = result.applied?.steering ?? [];
      const auto = steered?.auto && (steered.toward ? `auto: ${towardOf(steered.toward)}, ${short(steered.strength)}` : "auto: not steered");
      const closed = steered?.gate && !steered.gate.open ? ["condition not met: not steered"] : null;
      const chips = auto || closed ? [...(closed ?? [auto]), ...variant.chips.slice(variant.steered)] : variant.chips;
      return { ...variant, chips, why: steered?.auto?.abstained ?? null, ...result };
    } catch (error) {
      // Of several answers one may break off; of a single one the form says why.
      const why = this.cards.length > 2 ? `: ${error.message}` : ".";
      card.meta.textContent = error.name === "AbortError" ? "Stopped." : `Broken off${why}`;
      throw error;
    }
  }

  /** Show answers to a form that there were before. */
  show(results, form) {
    this.clear();
    this.#lay(results);
    this.#finish(results, form);
  }

  #lay(plan) {
    const alone = plan.length < 3;
    this.cards = plan.map((one) => new Card({ ...one, alone }));
    byId("answers").replaceChildren(...this.cards.map(({ element }) => element));
    byId("answers").classList.toggle("many", !alone);
    byId("answers").hidden = false;
  }

  #finish(results, form) {
    Object.assign(this, { results, pictures: picturesOf(form), form });
    // The plain model's answer is what others are compared with; where none was asked for, the first one is.
    this.reference = results.find(({ plain }) => plain) ?? results[0];
    const chosen = results.find(({ diagnostics }) => diagnostics) ?? results[0];
    byId("whose").replaceChildren(
      h("legend", { class: "hidden" }, "Readouts of"),
      ...results.map(({ key, title }) =>
        h(
          "label",
          {},
          h("input", { type: "radio", name: "whose", value: key === "base" ? "baseline" : key, checked: key === chosen.key }),
          h("span", {}, title),
        ),
      ),
    );
    byId("whose").hidden = results.filter(({ diagnostics }) => diagnostics).length < 2;
    byId("save-json").hidden = false;
    this.#choose();
    for (const result of results) {
      const card = this.cards.find(({ key }) => key === result.key);
      card.tell(result.chips);
      if (result.why) card.chips.firstElementChild.title = result.why;
      card.finish(result, this.#other(result)?.text ?? null, this.look, () => this.goOn(form, result.text));
    }
  }

  /** The answer that one is set against: of two the other one, of more the plain model's. */
  #other(result) {
    if (result !== this.reference) return this.reference;
    return this.results.length === 2 ? this.results.find((one) => one !== result) : null;
  }

  #chosen() {
    const value = byId("whose").querySelector("input:checked")?.value;
    return this.results.find(({ key }) => key === (value === "baseline" ? "base" : value)) ?? this.results[0];
  }

  #card() {
    return this.cards.find(({ key }) => key === this.#chosen()?.key);
  }

  #choose() {
    const chosen = this.#chosen();
    const other = chosen === this.reference || !this.reference.plain ? null : this.reference.diagnostics;
    for (const card of this.cards) card.point(null);
    this.look.show(this.pictures, chosen, lookOf(this.form));
    const cards = readoutCards(chosen.diagnostics, other, chosen.applied);
    byId("readouts").replaceChildren(...cards, ...(chosen.diagnostics ? [meanings()] : []));
  }

  /** What there is to save. */
  asJson() {
    return this.results.map(({ title, text, finish_reason, applied, diagnostics, guard }) => ({
      title,
      text,
      finish_reason,
      applied,
      diagnostics,
      ...(guard ? { guard } : {}),
    }));
  }
}

/** Where the numbers are explained. */
const meanings = () =>
  h(
    "p",
    { class: "soft note wide" },
    "Fields: ",
    h("a", { href: "/docs#schema-Envelope" }, "API, Envelope"),
    ". How each number is computed: docs/readouts.md; the words: docs/glossary.md.",
  );

/** What the form asks to look at, as an object; null for nothing. */
const lookOf = ({ interventions }) => (interventions?.look_at === true ? {} : interventions?.look_at || null);

const asBase = ({ message, finish_reason, diagnostics = null }) => ({
  key: "base",
  title: "Baseline",
  chips: [],
  plain: true,
  text: message.content,
  meta: finish_reason === "length" ? "cut at max tokens" : "complete",
  finish_reason,
  diagnostics,
  applied: null,
});
