// The form of the playground: reading and filling it, and marking what the server refuses.

import { byId, h } from "./dom.js";

const TEXTS = ["system", "context", "question"];

/** What an empty form holds. */
export const EMPTY = Object.freeze({
  system: "",
  turns: [],
  pictures: [],
  context: "",
  question: "",
  strength: 0,
  auto: false,
  vector: "modality-preference",
  when: "",
  interventions: {},
  guard: null,
  maxTokens: 64,
  temperature: 0,
  seed: null,
  baseline: true,
  include: null, // those that are usual
});

/** The form as data; `request.js` makes requests and code of it. `around` holds model, pictures, turns and interventions. */
export function readForm({ model, pictures, turns, interventions, guard }) {
  return {
    model: model?.id ?? "",
    pictures: [...pictures],
    turns: [...turns],
    ...Object.fromEntries(TEXTS.map((name) => [name, plain(name)])),
    strength: Number(byId("helm").value),
    auto: byId("auto").checked,
    vector: byId("vector").value || EMPTY.vector,
    when: byId("when").value,
    interventions: interventions?.fields() ?? {},
    guard: interventions ? guard.value() : null,
    maxTokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    baseline: byId("baseline").checked,
    include: boxes().flatMap((input) => (input.checked ? [input.value] : [])),
  };
}

/** Fill in what a form says, but for pictures and turns, and for what is drawn from the server's catalogue. */
export function writeForm(form) {
  for (const name of TEXTS) byId(name).value = form[name];
  byId("system-row").open ||= form.system !== "";
  byId("max-tokens").value = form.maxTokens ?? "";
  byId("temperature").value = form.temperature ?? "";
  byId("seed").value = form.seed ?? "";
  byId("baseline").checked = form.baseline;
}

/** Fill in what is drawn from the server's catalogue. */
export function writeAsked(form, { helm, interventions, guard, usual }) {
  helm.set(form);
  interventions.set(form.interventions);
  guard.set(form.guard);
  byId("guard-row").open ||= form.guard !== null;
  for (const input of boxes()) input.checked = (form.include ?? usual).includes(input.value);
}

const boxes = () => [...byId("include").querySelectorAll("input")];

const FIELDS = [
  ["steering", "helm"],
  ["max_tokens", "max-tokens"],
  ["temperature", "temperature"],
  ["seed", "seed"],
  ["question", "question"],
  ["diagnostics", "include"],
  ["guard", "guard-when"],
];

/** The server's own words beside the form, and a mark on the field that they are about. */
export function showError(error, interventions) {
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  const box = byId("error");
  box.hidden = error === null;
  if (error === null) return;
  box.replaceChildren(h("p", {}, error.message), ...(error.param && error.status ? [h("code", {}, error.param)] : []));
  const [, id] = FIELDS.find(([name]) => error.param?.startsWith(name)) ?? [];
  const field = id ? byId(id) : interventions?.find(error.param ?? "");
  if (!field) return;
  field.setAttribute("aria-invalid", "true");
  const hidden = field.closest("details:not([open])");
  if (hidden) hidden.open = true;
  if (!error.status) field.focus(); // the page's own word, at once
}

const number = (id) => {
  const value = byId(id).value.trim();
  return value === "" ? null : Number(value);
};
const plain = (id) => byId(id).value.replaceAll("\u0000", "").trim();
