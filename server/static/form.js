// The form of the playground: reading it, and marking what the server refuses.

import { byId, h } from "./dom.js";

const CONTRASTS = {
  vcd: [
    ["alpha", 1, 0.1],
    ["beta", 0.1, 0.05],
    ["step", 500, 50],
  ],
  icd: [
    ["alpha", 1, 0.1],
    ["beta", 0.1, 0.05],
  ],
  pai: [
    ["alpha", 0.1, 0.1],
    ["beta", 0.1, 0.05],
    ["amplify", 0.2, 0.1],
  ],
};

/** The form as data; `request.js` makes requests and code of it. */
export function readForm(model, pictures) {
  const kind = byId("contrast").value;
  return {
    model: model?.id ?? "",
    pictures: [...pictures],
    context: plain("context"),
    question: plain("question"),
    strength: Number(byId("helm").value),
    auto: byId("auto").checked,
    vector: byId("vector").value,
    sage: {
      see: byId("see").checked && { alpha: number("see-alpha") },
      think: byId("think").checked && { gamma: number("think-gamma") },
      generate: byId("generate").checked && { lambda: number("generate-lambda"), refresh: number("generate-refresh") },
    },
    contrast: kind
      ? {
          kind,
          ...Object.fromEntries(
            [...byId("contrast-fields").querySelectorAll("input")].map((input) => [input.name, Number(input.value)]),
          ),
        }
      : null,
    maxTokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    baseline: byId("baseline").checked,
    include: [...byId("include").querySelectorAll("input:checked")].map((input) => input.value),
  };
}

/** Show the numbers of the chosen contrast; it takes the place of SAGE's Generate. */
export function showContrast() {
  const kind = byId("contrast").value;
  byId("contrast-fields").replaceChildren(
    ...(CONTRASTS[kind] ?? []).map(([name, value, step]) =>
      h(
        "label",
        { class: "number", for: `contrast-${name}` },
        name,
        h("input", { id: `contrast-${name}`, name, type: "number", value, step }),
      ),
    ),
  );
  byId("generate").disabled = kind !== "";
  if (kind) byId("generate").checked = false;
}

const FIELDS = [
  ["steering", "helm"],
  ["sage.see", "see-alpha"],
  ["sage.think", "think-gamma"],
  ["sage.generate.refresh", "generate-refresh"],
  ["sage.generate", "generate-lambda"],
  ["contrast", "contrast"],
  ["max_tokens", "max-tokens"],
  ["temperature", "temperature"],
  ["seed", "seed"],
  ["question", "question"],
  ["diagnostics", "include"],
];

/** The server's own words beside the form, and a mark on the field that they are about. */
export function showError(error) {
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  const box = byId("error");
  box.hidden = error === null;
  if (error === null) return;
  box.replaceChildren(h("p", {}, error.message), ...(error.param ? [h("code", {}, error.param)] : []));
  const [, id] = FIELDS.find(([name]) => error.param?.startsWith(name)) ?? [];
  if (!id) return;
  byId(id).setAttribute("aria-invalid", "true");
  const hidden = byId(id).closest("details:not([open])");
  if (hidden) hidden.open = true;
}

const number = (id) => {
  const value = byId(id).value.trim();
  return value === "" ? null : Number(value);
};
const plain = (id) => byId(id).value.replaceAll("\u0000", "").trim();
