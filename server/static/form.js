// The form of the playground: reading it, and marking what the server refuses.

import { byId, h } from "./dom.js";

/** The form as data; `request.js` makes requests and code of it. */
export function readForm(model, pictures, interventions) {
  return {
    model: model?.id ?? "",
    pictures: [...pictures],
    context: plain("context"),
    question: plain("question"),
    strength: Number(byId("helm").value),
    auto: byId("auto").checked,
    vector: byId("vector").value,
    interventions: interventions?.fields() ?? {},
    maxTokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    baseline: byId("baseline").checked,
    include: [...byId("include").querySelectorAll("input:checked")].map((input) => input.value),
  };
}

const FIELDS = [
  ["steering", "helm"],
  ["max_tokens", "max-tokens"],
  ["temperature", "temperature"],
  ["seed", "seed"],
  ["question", "question"],
  ["diagnostics", "include"],
];

/** The server's own words beside the form, and a mark on the field that they are about. */
export function showError(error, interventions) {
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  const box = byId("error");
  box.hidden = error === null;
  if (error === null) return;
  box.replaceChildren(h("p", {}, error.message), ...(error.param ? [h("code", {}, error.param)] : []));
  const [, id] = FIELDS.find(([name]) => error.param?.startsWith(name)) ?? [];
  const field = id ? byId(id) : interventions?.find(error.param ?? "");
  if (!field) return;
  field.setAttribute("aria-invalid", "true");
  const hidden = field.closest("details:not([open])");
  if (hidden) hidden.open = true;
}

const number = (id) => {
  const value = byId(id).value.trim();
  return value === "" ? null : Number(value);
};
const plain = (id) => byId(id).value.replaceAll("\u0000", "").trim();
