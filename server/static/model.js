// The page of the model: what it is, what was checked and measured of it, what may be asked of it and how much.

import { getJson } from "./api.js";
import { byId, definitions, h, percent, short } from "./dom.js";
import { keepPage } from "./drops.js";
import { optionsOf } from "./interventions.js";
import { askForKey, onKey, wantsKey } from "./key.js";
import { labelOf, words } from "./names.js";
import { follow, tellModel, tellProblem } from "./status.js";

async function connect() {
  try {
    const [model, ...presets] = (await getJson("/v1/models")).data;
    const about = await getJson("/about");
    tellModel(model);
    show(model, presets, about);
  } catch (error) {
    if (wantsKey(error)) askForKey(error);
    tellProblem(error.status === 401 ? "API key needed" : error.message);
  }
}

function show(model, presets, about) {
  byId("name").textContent = model.id;
  byId("summary").textContent =
    `${about.architecture ?? "A model"}${about.family ? `, family ${about.family}` : ""}: ${model.layers} layers of ` +
    `${model.hidden_size}, ${short(model.context_length)} tokens of context, ${model.quantization ?? model.dtype} on ${model.device}.`;
  byId("about").hidden = false;
  byId("about").replaceChildren(
    card("Structure", definitions(structure(model, about))),
    card("Self-check", ...check(about.self_check, about.families)),
    card("Calibration", ...calibration(about.calibration ?? {})),
    card("Limits of a request", definitions(Object.entries(model.limits).map(([name, value]) => [words(name), shown(name, value)]))),
    card(
      "Presets",
      h(
        "p",
        { class: "soft note" },
        `For clients that can only name a model: “${model.id}@sage” adds the fields beside “@sage” to the request. ` +
          "Fields that do not apply, such as without an image, are skipped.",
      ),
      table(
        "Presets and their fields",
        ["name", "asks for", "from"],
        // With blanks, at which a narrow page breaks the line.
        presets.map(({ preset, fields, origin }) => [`@${preset}`, h("code", {}, JSON.stringify(fields, null, 1)), whole(origin)]),
      ),
    ),
    card(
      "Readouts",
      h("p", { class: "soft note" }, "Cheap readouts cost next to nothing; the others cost time and memory."),
      definitions([
        ["cheap", model.readout_schemas.filter(({ cheap }) => cheap).map(({ name }) => words(name)).join(", ")],
        ["others", model.readout_schemas.filter(({ cheap }) => !cheap).map(({ name }) => words(name)).join(", ")],
      ]),
    ),
    card(
      "Interventions",
      h(
        "p",
        { class: "soft note" },
        "Options with their defaults and ranges. A name with true, such as “sage”: true, "  +
          "switches on all of its members with their defaults.",
      ),
      table(
        "Options of the interventions",
        ["", "option", "default", "range"],
        model.interventions.flatMap((item) => options(item)),
      ),
    ),
  );
}

const card = (name, ...content) => {
  const id = `title-${name.toLowerCase().replaceAll(" ", "-")}`;
  return h("section", { class: "panel", "aria-labelledby": id }, h("h2", { id }, name), ...content);
};

const table = (label, heads, rows) =>
  h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, heads.map((head) => (head ? h("th", { scope: "col" }, head) : h("td", {}))))),
      h("tbody", {}, rows.map(([head, ...cells]) => h("tr", {}, head ? h("th", { scope: "row" }, head) : h("td", {}), cells.map((cell) => h("td", {}, cell))))),
    ),
  );

/** The name of a class, which may break before its words. */
const breakable = (name) => {
  const parts = name.split(/(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])/);
  return h("span", {}, parts.flatMap((part, i) => (i ? [h("wbr", {}), part] : [part])));
};

/** What stays on one line, a range only on a wide page. */
const whole = (text, kind = "whole") => h("span", { class: kind }, text);

const structure = (model, about) => [
  ["architecture", breakable(about.architecture ?? "unknown")],
  ["family", about.family ?? "unknown"],
  ["layers", short(model.layers)],
  ["hidden size", short(model.hidden_size)],
  ["vocabulary", short(about.vocabulary)],
  ["context length", `${short(model.context_length)} tokens`],
  [
    "images",
    model.image_size
      ? `resized to ${model.image_size.join(" × ")}`
      : model.image_pixels
        ? `resized to ${model.image_pixels.map((one) => one.toLocaleString("en")).join(" to ")} pixels`
        : "not resized",
  ],
  ["focus is read from", `the last ${about.focus_layers ?? "?"} layers`],
  ["steering vectors", model.vectors.join(", ") || "none"],
  ...Object.entries(about.generation_defaults ?? {}).map(([name, value]) => [`default ${words(name)}`, String(value)]),
  ["engine", model.engine === "own" ? "Helmsight's own" : model.engine],
  ...(model.unsupported.length ? [["not supported by it", model.unsupported.join(", ")]] : []),
  ["fingerprint", model.fingerprint.slice(0, 16)],
];

function check(said, families) {
  if (!said) return [h("p", { class: "nothing" }, "This engine reports no self-check.")];
  const bound = said.tolerance
    ? `equal within ${said.tolerance} of the largest logit`
    : `at most ${said.margin} times as far from a float32 run as the plain model is`;
  return [
    h("p", {}, h("span", { class: "chip accent" }, "passed"), " when the model was loaded; a model that fails is not served."),
    h(
      "p",
      { class: "soft note" },
      `Prefill and ${said.steps} decode steps of two prompts with an image, compared with the plain model on eager attention: ${bound}. `,
      "No code is specific to a family: this check shows that the numbers on these pages are the model's own.",
    ),
    h("p", { class: "soft note" }, `Families in the test suite: ${families.join(", ")}. Other families are served if they pass.`),
  ];
}

const COMMANDS = {
  think: ["SAGE's Think", "probe --calibrate-sage"],
  sinks: ["attention sinks", "probe --calibrate-sinks"],
  flags: ["flags", "probe --calibrate-flags"],
  alarm: ["alarm", "eval alarm --keep"],
  surprise: ["surprise of text contexts", "probe --calibrate-surprise"],
};

function calibration(found) {
  const rows = Object.entries(COMMANDS).map(([name, [said, command]]) => [
    said,
    found[name] ? measured(name, found[name]) : `not measured: helmsight ${command}`,
  ]);
  const raised = Object.entries({ ...found.flags?.raised, ...(found.alarm && { alarm: found.alarm.raised }) }).map(([name, rates]) => [
    `${words(name)} raised on`,
    `${percent(rates.right?.[0])} of right and ${percent(rates.wrong?.[0])} of wrong answers`,
  ]);
  return [
    h("p", { class: "soft note" }, "Numbers that are measured once per model and kept beside its vectors or in its folder."),
    definitions([...rows, ...raised]),
  ];
}

function measured(name, said) {
  if (name === "think") return `${short(said.tokens)} tokens of ${short(said.samples)} prompts`;
  if (name === "sinks") return `${short(said.images)} images`;
  if (name === "surprise") return `bound ${short(said.bound)} nats, ${short(said.contexts)} contexts`;
  if (name === "alarm") return `${short(said.answers)} answers; raised above ${short(said.threshold)}`;
  return `${short(said.answers)} answers; thresholds: attention ${short(said.attention)}, activation ${short(said.activation)}, agreement ${short(said.agreement)}`;
}

function options(item) {
  const { path, kind } = item;
  const label = labelOf(path, kind);
  const head = path.length > 1 ? `${path[0].toUpperCase()} ${label}` : label;
  const all = optionsOf(item);
  if (!all.length) return [[head, "none", "", ""]];
  return all.map(([name, one], i) => {
    const spec = one.anyOf?.find(({ type }) => type !== "null") ?? one;
    const standard = one.default === null || one.default === undefined ? "auto" : plain(one.default);
    return [i ? "" : head, words(name), standard, rangeOf(spec)];
  });
}

const plain = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

function rangeOf(spec) {
  if (spec.enum) return spec.enum.join(", ");
  const { minimum, maximum, exclusiveMinimum: above, exclusiveMaximum: below } = spec;
  const said = (word, bound) => bound !== undefined && Math.abs(bound) < 1e30 && `${word} ${bound.toLocaleString("en-US")}`;
  const low = said("from", minimum) || said("above", above);
  const high = said("to", maximum) || said("below", below);
  return whole([low, high].filter(Boolean).join(" "), "range");
}

function shown(name, value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (name.endsWith("bytes")) return `${short(value / 2 ** 20)} MiB`;
  if (name.endsWith("pixels")) return `${short(value / 1e6)} million`;
  return typeof value === "number" ? short(value) : String(value);
}

keepPage();
onKey(connect);
follow(connect);
