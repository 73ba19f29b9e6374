// A guard: the answer is given again where a number of it meets a condition. The form, and what came of it.

import { byId, h, percent } from "./dom.js";
import { measure } from "./names.js";

const WAYS = { vision: "toward the image", text: "toward the text" };
const OUTCOMES = {
  quiet: "the condition was not met",
  retry: "the new answer was kept: it meets the condition no more",
  first: "the first answer was kept: the new one meets the condition, too",
  cut: "the first answer was kept: the new one was cut",
  same: "the first answer was kept: a new one could only be the same",
  failed: "the answer could not be given again",
};

/** The guard's part of the form, by what the server says that a guard can be. */
export class GuardForm {
  constructor(changed) {
    this.custom = null;
    this.box = byId("guard");
    this.box.addEventListener("change", () => (this.#show(), changed()));
  }

  /** Draw the form. `interventions` are those of the page, steering is beside them. */
  offer({ guard }, interventions, able) {
    Object.assign(this, { conditions: guard.conditions, interventions, able });
    const pick = (id, label, ...options) =>
      (this[id] = h("select", { id: `guard-${id}`, "aria-label": label }, ...options));
    const option = (value, text, props = {}) => h("option", { value, ...props }, text);
    pick("when", "number", option("", "off"), ...this.conditions.map(({ name, available }) =>
      option(name, measure(name)[0], { disabled: !available }),
    ));
    pick("sign", "comparison", ...guard.signs.map((sign) => option(sign, sign)));
    pick("truth", "truth", option("true", "is raised"), option("false", "is not raised"));
    pick("then", "then", ...this.#ways().map(({ name }) => option(name, name)));
    this.bound = h("input", { id: "guard-bound", type: "number", step: "any", value: "0.5", "aria-label": "bound" });
    const most = guard.max_retries;
    this.retries = h("input", { id: "guard-retries", type: "number", min: 1, max: most, step: 1, value: 1 });
    this.options = h(
      "div",
      { class: "options" },
      h("label", { class: "option", for: "guard-then" }, "give it again with", this.then),
      h("label", { class: "option number", for: "guard-retries" }, "at most, times", this.retries),
    );
    this.box.replaceChildren(
      h("div", { class: "stage wrap" }, h("label", { class: "pick", for: "guard-when" }, h("span", {}, "Guard"), this.when)),
      h("div", { class: "row" }, this.sign, this.bound, this.truth),
      this.options,
    );
    this.#show();
  }

  /** The field of a request, null without a guard. */
  value() {
    const chosen = this.#chosen();
    if (!chosen) return null;
    const when = chosen.type === "boolean" ? this.truth.value === "true" : `${this.sign.value} ${Number(this.bound.value)}`;
    const then = this.#ways().find(({ name }) => name === this.then.value).fields;
    return { when: { [chosen.name]: when }, then, retries: Number(this.retries.value) || 1 };
  }

  /** Fill in the field of a request; of several conditions the first one. */
  set(guard) {
    const [name, given] = Object.entries(guard?.when ?? {})[0] ?? ["", ""];
    this.when.value = this.conditions.some((one) => one.name === name) ? name : "";
    if (typeof given === "boolean") this.truth.value = String(given);
    else {
      const [, sign, bound] = /^\s*([<>=!]+)\s*(\S+)\s*$/.exec(given) ?? [];
      if (sign) Object.assign(this.sign, { value: sign });
      if (bound) this.bound.value = bound;
    }
    this.retries.value = guard?.retries ?? 1;
    if (guard?.then) {
      const same = ({ fields }) => JSON.stringify(fields) === JSON.stringify(guard.then);
      this.custom = this.#ways().some(same) ? null : { name: "as in the link", fields: guard.then };
      const names = this.#ways().map(({ name: way }) => h("option", { value: way }, way));
      this.then.replaceChildren(...names);
      this.then.value = this.#ways().find(same).name;
    }
    this.#show();
  }

  #ways() {
    const steers = Object.entries(WAYS).map(([toward, name]) => ({ name, fields: { steering: { toward } } }));
    return [...(this.able ? steers : []), ...this.interventions.each(), ...(this.custom ? [this.custom] : [])];
  }

  #chosen() {
    return this.conditions?.find(({ name }) => name === this.when.value) ?? null;
  }

  #show() {
    const chosen = this.#chosen();
    this.sign.hidden = this.bound.hidden = chosen?.type !== "number";
    this.truth.hidden = chosen?.type !== "boolean";
    this.options.hidden = !chosen;
  }
}

/** What a guard did: its outcome, every answer with the numbers that the conditions are about, and the cost. */
export function guardReport(guard) {
  const [first, ...others] = guard.answers;
  const extra = others.reduce((sum, answer) => sum + answer.completion_tokens, 0);
  const cost = others.length
    ? `Cost: ${extra} tokens more, ${percent(extra / Math.max(first.completion_tokens, 1))} of the first answer's.`
    : "Cost: nothing.";
  return h(
    "section",
    { class: "guarded", "aria-label": "Guard" },
    h("p", { class: "note" }, h("b", {}, "Guard: "), OUTCOMES[guard.outcome] ?? guard.outcome, guard.failed ? ` (${guard.failed})` : ""),
    h(
      "ol",
      { start: 0 },
      guard.answers.map((answer, i) =>
        h(
          "li",
          { class: i === guard.kept ? "kept" : null },
          h("q", {}, answer.text),
          h(
            "small",
            {},
            [...Object.entries(answer.numbers).map(([name, value]) => numberOf(name, value, answer.raised)),
              `${answer.completion_tokens} tokens`, ...(i === guard.kept ? ["kept"] : [])].join(" · "),
          ),
        ),
      ),
    ),
    h("p", { class: "note soft" }, cost),
  );
}

function numberOf(name, value, raised) {
  const [label, format] = measure(name);
  const said = typeof value === "boolean" ? (value ? "yes" : "no") : value === null ? "–" : format(value);
  return `${label} ${said}${raised.includes(name) ? " (met)" : ""}`;
}
