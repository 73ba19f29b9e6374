// The page of the steering vectors: each with how it was made and what its strengths do, upload and deletion.

import { getJson, send } from "./api.js";
import { lineChart } from "./charts.js";
import { byId, definitions, h, percent, rawJson, short } from "./dom.js";
import { keepPage } from "./drops.js";
import { askForKey, onKey, wantsKey } from "./key.js";
import { saveBlob } from "./save.js";
import { follow, tellModel, tellProblem } from "./status.js";

const PATH = "/v1/steering/vectors";
const pathOf = (name) => `${PATH}/${encodeURIComponent(name)}`;
let model = null;

async function connect() {
  try {
    [model] = (await getJson("/v1/models")).data;
    tellModel(model);
    await show();
  } catch (error) {
    if (wantsKey(error)) askForKey(error);
    tellProblem(error.status === 401 ? "API key needed" : error.message);
  }
}

async function show() {
  const { data } = await getJson(PATH);
  const { uploads } = model.limits;
  byId("upload").hidden = !uploads;
  byId("upload-note").textContent = uploads
    ? "A safetensors file, such as “helmsight vectors” writes or the downloads above."
    : "Uploading is off. Start the server with --allow-uploads to allow it.";
  const none = h("p", { class: "panel nothing" }, "This server has no steering vectors yet: build one.");
  byId("vectors").replaceChildren(...(data.length ? data.map((vector) => card(vector, uploads)) : [none]));
}

/** Run something that the server may refuse, and say so. */
async function attempt(work) {
  byId("problem").hidden = true;
  try {
    await work();
  } catch (error) {
    if (wantsKey(error)) return askForKey(error);
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
    byId("problem").scrollIntoView({ block: "nearest" });
  }
}

function card(vector, uploads) {
  const { name, error, info = {} } = vector;
  const chip = (text, accent) => h("span", { class: accent ? "chip accent" : "chip" }, text);
  const head = h(
    "div",
    { class: "section-head" },
    h("h2", { id: `title-${name}` }, name),
    error ? chip("damaged") : vector.matches ? chip("of this model", true) : chip("of another model"),
    h("button", { type: "button", class: "small", on: { click: () => attempt(() => download(name)) } }, "Download"),
    uploads && h("button", { type: "button", class: "small", on: { click: () => attempt(() => remove(name)) } }, "Delete"),
  );
  const section = (...content) => h("section", { class: "panel", "aria-labelledby": `title-${name}` }, head, ...content);
  if (error) return section(h("p", { class: "error-text" }, error));
  const { calibration, samples, reliable } = info;
  const range = calibration?.range;
  return section(
    definitions([
      ["kind", vector.kind],
      ["+ is toward", { text: "the text", vision: "the image" }[vector.positive] ?? info.sides?.[0] ?? "no side"],
      ...(info.sides ? [["− is toward", info.sides[1]]] : []),
      ["layers", vector.layers.join(", ") || "none"],
      ["strength 1 in published units", vector.published === null ? "unknown" : short(vector.published)],
      ...(info.gate ? gateLines(info.gate) : []),
      ["calibrated", range ? `from ${range[0]} to ${range[1]}` : "no"],
      ["made from", Number.isInteger(samples) ? `${samples} ${info.sides ? "pairs" : "samples"}` : "not told"],
      ...(typeof reliable === "boolean" ? [["pairs agree", reliable ? "yes" : "no"]] : []),
    ]),
    calibration?.curve?.length ? curve(calibration, info.sides) : null,
    rawJson(vector),
  );
}

/** A condition: where it holds, and what it was worth on examples that it was not chosen on. */
function gateLines({ layer, threshold, measure = "cosine", auroc, open_when: open, open_not: wrong }) {
  const spread = ([value, low, high]) => `${percent(value)} (${percent(low)} to ${percent(high)})`;
  return [
    ["as a condition", `${measure} above ${short(threshold)} at layer ${layer}`],
    ...(auroc ? [["AUROC", `${short(auroc[0])} (${short(auroc[1])} to ${short(auroc[2])})`]] : []),
    ...(open ? [["holds where it should", spread(open)]] : []),
    ...(wrong ? [["holds where it should not", spread(wrong)]] : []),
  ];
}

/** What each strength does, from the calibration in the vector's file: the steered shares, and what it costs. `sides` are the
 * names of those of a vector from pairs. */
function curve({ baseline, curve: points, range }, sides) {
  const sorted = [...points].sort((a, b) => a.strength - b.strength);
  const names = ["0", ...sorted.map(({ strength }) => String(strength))];
  const line = (name, plain, read, colour, dash) => ({ name, values: [plain ?? null, ...sorted.map(read)], colour, dash });
  const plain = baseline?.plain ?? {};
  const marks = sorted.flatMap(({ strength }, i) =>
    strength >= range?.[0] && strength <= range?.[1]
      ? [{ index: i + 1, colour: 1, title: `strength ${strength}: within the calibrated range` }]
      : [],
  );
  const format = (value) => (value === null ? "–" : percent(value));
  const common = { x: "strength", names, format, low: 0, high: 1, marks };
  const effect = sides
    ? [
        line(`steered toward ${sides[0]}, answers that are`, plain.toward, (p) => p.toward?.toward ?? null, 1),
        line(`toward ${sides[1]}, answers that are`, plain.away, (p) => p.away?.away ?? null, 2),
      ]
    : [
        line("steered toward the image, answers follow it", plain.s_vision, (p) => p.vision?.s_vision ?? null, 1),
        line("toward the text, answers follow it", plain.s_text, (p) => p.text?.s_text ?? null, 2),
      ];
  const worse = (p) => (p.toward && p.away ? Math.max(p.toward.others, p.away.others) : null);
  const cost = sides
    ? [
        line("answers of neither side", plain.others, worse, 1, true),
        line("repetition in the answers", baseline?.repetition, (p) => p.repetition ?? null, 2, true),
      ]
    : [
        line("right with the image alone", baseline?.image_accuracy, (p) => p.image_accuracy, 1, true),
        line("right with the text alone", baseline?.context_accuracy, (p) => p.context_accuracy, 2, true),
      ];
  const whose = sides ? "of" : "to conflicts that follow";
  const spoilt = sides ? "Answers that are spoilt" : "Right answers where nothing conflicts";
  const n = (sorted[0].vision ?? sorted[0].toward)?.n ?? plain.n;
  const asked = n ? `, ${n} questions each` : "";
  return h(
    "div",
    {},
    h(
      "div",
      { class: "spread" },
      lineChart(effect, { ...common, label: `Share of answers ${whose} the side that is steered toward, by strength` }),
      lineChart(cost, { ...common, label: `${spoilt}, by strength: what steering costs` }),
    ),
    h(
      "p",
      { class: "soft note" },
      sides
        ? `Solid: the effect of a strength on the answers; dashed: its cost${asked}; `
        : `Solid: the effect of a strength where image and text conflict; dashed: its cost where they do not${asked}; `,
      "the marks are strengths within the budget.",
    ),
  );
}

async function download(name) {
  saveBlob(`${name}.safetensors`, await (await send(`${pathOf(name)}/file`)).blob());
}

async function remove(name) {
  if (!confirm(`Delete the steering vector ${name}? Other people may use it.`)) return;
  await send(pathOf(name), { method: "DELETE" });
  await show();
}

byId("upload").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("uploaded").textContent = "";
  attempt(async () => {
    const query = new URLSearchParams({ replace: String(byId("replace").checked) });
    if (byId("name").value.trim()) query.set("name", byId("name").value.trim());
    const headers = { "Content-Type": "application/octet-stream" };
    const response = await send(`${PATH}?${query}`, { method: "POST", headers, body: byId("file").files[0] });
    byId("uploaded").textContent = `${(await response.json()).name} is there.`;
    await show();
  });
});
keepPage();
onKey(connect);
follow(connect);
