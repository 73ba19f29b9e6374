// The readouts of one answer as cards: charts, numbers, and what was applied.

import { lineChart, shareBar } from "./charts.js";
import { definitions, h, percent, rawJson, short } from "./dom.js";
import { acronym, title, words } from "./names.js";

const colourOf = (image) => ((image - 1) % 6) + 1;

const CARDS = {
  focus: (said, { images }) => focusCard(said, images),
  modality: (said, { other }) => modalityCard(said, other?.modality),
  decay: (said, { other }) => decayCard(said, other?.decay),
  residual: (said, { other }) => wide(residualCard(said, other?.residual)),
  flags: (said) => flagsCard(said),
  alarm: (said) => alarmCard(said),
};
const MAPS = ["patches", "tam"]; // laid over the pictures: see look.js
const ABOUT = ["version", "images", "rows", "heatmaps"];

/** The readouts that have a drawing of their own. */
export const DRAWN = [...Object.keys(CARDS), ...MAPS];

/** Cards for the diagnostics of an answer; `other` is the baseline's envelope (dashed beside it) or null. */
export function readoutCards(diagnostics, other, applied) {
  const around = { images: diagnostics?.images, other };
  const cards = Object.entries(diagnostics ?? {})
    .filter(([name, said]) => said !== null && ![...MAPS, ...ABOUT].includes(name))
    .map(([name, said]) => (CARDS[name] ?? plainCard(name))(said, around))
    .filter(Boolean);
  if (applied || diagnostics) cards.push(wide(appliedCard(applied, diagnostics)));
  return cards;
}

/** A readout that has no drawing of its own: its lists of numbers as lines, and its numbers. */
function plainCard(name) {
  return (said) => {
    const parts = Object.entries(typeof said === "object" && !Array.isArray(said) ? said : { [name]: said });
    const lines = parts.filter(([, value]) => Array.isArray(value) && value.every(isNumber));
    const numbers = parts.filter(([, value]) => value === null || typeof value !== "object");
    return card(
      name,
      title(name),
      null,
      lines.map(([key, values]) =>
        lineChart([{ name: words(key), values, colour: 1, strong: true }], { label: `${words(name)}: ${words(key)}` }),
      ),
      numbers.length > 0 &&
        definitions(numbers.map(([key, value]) => [words(key), isNumber(value) ? short(value) : String(value)])),
    );
  };
}

const isNumber = (value) => value === null || typeof value === "number";

function wide(element) {
  element.classList.add("wide");
  return element;
}

function card(id, title, note, ...content) {
  return h(
    "section",
    { class: "panel card", id: `card-${id}`, "aria-labelledby": `title-${id}` },
    h(
      "div",
      { class: "section-head" },
      h("h2", { id: `title-${id}` }, title),
      note && h("span", { class: "value" }, note),
    ),
    ...content,
  );
}

function focusCard(focus, images) {
  const layers = focus.sigma?.length ?? 0;
  if (!layers || !images?.length)
    return card("focus", "Focus by layer", null, h("p", { class: "nothing" }, "There is no image to focus on."));
  const note = focus.image
    ? `image ${focus.image}${typeof focus.share === "number" ? `: ${percent(focus.share)} of the attention on images (sigma) in ${lastOf(focus)}` : ""}`
    : "no focus";
  const series = images.map(({ image }, i) => ({
    name: `image ${image}`,
    values: focus.sigma.map((row) => row[i] ?? null),
    colour: colourOf(image),
    strong: focus.image === image,
  }));
  const marks =
    images.length < 2
      ? []
      : (focus.layer_focused ?? [])
          .map((image, index) => image && { index, colour: colourOf(image), title: `layer ${index}: image ${image}` })
          .filter(Boolean);
  const votes =
    images.length < 2
      ? []
      : ["lnd", "m_lnd", "mc_lnd"]
          .filter((name) => focus[name])
          .map(
            (name) =>
              `${name.replace("_", "-").toUpperCase()} image ${focus[name].image} (n ${short(focus[name].n)})`,
          );
  return card(
    "focus",
    "Focus by layer",
    note,
    lineChart(series, {
      label: `Attention strength sigma by layer, one line per image; focused: ${note}`,
      x: "layer",
      low: 0,
      marks,
    }),
    h(
      "p",
      { class: "soft note" },
      `sigma: attention of the question and the answer to each image. ${votes.length ? `${votes.join(", ")}.` : ""}`,
      focus.correct !== null &&
        focus.correct !== undefined &&
        ` Target image ${focus.target_image}: ${focus.correct ? "right" : "wrong"}.`,
    ),
  );
}

// A map beside it says another share: of all layers, or of one.
const lastOf = ({ m_lnd }) => (m_lnd?.n === 1 ? "the last layer" : `the last ${m_lnd?.n ?? ""} layers`);

/** Null without an image; without a text context there is no ratio, and the image's share of all attention stands alone. */
function modalityCard(modality, other) {
  const ratio = modality?.attention_ratio ?? null;
  const all = modality?.image_share ?? null;
  if (ratio === null && all === null) return null;
  if (ratio === null) {
    return card(
      "modality",
      "Image's attention",
      `${percent(all)} of all`,
      shareBar(
        [
          { name: "image", share: all, colour: 1 },
          { name: "everything else", share: 1 - all, colour: "soft" },
        ],
        `Share of all attention: ${percent(all)} to the image`,
      ),
    );
  }
  const rows = [{ name: "ratio", values: modality.by_layer ?? [], colour: 1, strong: true }];
  if (other?.by_layer) rows.push({ name: "baseline", values: other.by_layer, colour: "soft", dash: true });
  return card(
    "modality",
    "Image or text",
    `${percent(ratio)} image`,
    shareBar(
      [
        { name: "image", share: ratio, colour: 1 },
        { name: "text context", share: 1 - ratio, colour: "soft" },
      ],
      `Attention ratio: ${percent(ratio)} to the image, the rest to the text context`,
    ),
    rows[0].values.length > 0 &&
      lineChart(rows, { label: "Attention ratio by layer", x: "layer", low: 0, high: 1, height: 130 }),
    h(
      "p",
      { class: "soft note" },
      "Attention to an image token over attention to an image and a context token.",
      all !== null && ` The image's share of all attention: ${percent(all)}.`,
      other?.attention_ratio !== undefined &&
        other?.attention_ratio !== null &&
        ` Baseline: ${percent(other.attention_ratio)}.`,
    ),
  );
}

function decayCard(decay, other) {
  const series = [
    { name: "image", values: decay.vision ?? [], colour: 1, strong: true },
    { name: "text", values: decay.user ?? [], colour: "soft" },
    { name: decay.spans === "content" ? "system prompt" : "before the image", values: decay.system ?? [], colour: 4 },
  ].filter((item) => item.colour !== 4 || item.values.some((value) => value > 0));
  if (other?.vision) series.push({ name: "image, baseline", values: other.vision, colour: 1, dash: true });
  const slope =
    decay.slope === null || decay.slope === undefined
      ? null
      : `slope ${decay.slope > 0 ? "+" : ""}${short(decay.slope)} per token`;
  return card(
    "decay",
    "Decay over the answer",
    slope,
    lineChart(series, {
      label: `Share of attention on image, text and the text before the image per generated token${slope ? `; ${slope}` : ""}`,
      x: "token",
      low: 0,
      high: 1,
      names: Array.from({ length: Math.max(...series.map((item) => item.values.length)) }, (_, i) => String(i + 1)),
      format: (value) => (value === null ? "–" : value.toFixed(2)),
    }),
    h("p", { class: "soft note" }, "Share of the attention of each generated token, mean over layers."),
  );
}

const RESIDUAL = [
  ["kl", "KL of attention and FFN"],
  ["mha_cosine", "cosine after attention"],
  ["ffn_cosine", "cosine after FFN"],
  ["mha_change", "change by attention"],
  ["ffn_change", "change by FFN"],
  ["mha_norm", "size of attention's update"],
  ["ffn_norm", "size of FFN's update"],
  ["update_norm", "size of the layer's update"],
  ["gate_ratio", "open FFN gates"],
  ["neuron_ratio", "active FFN neurons"],
];

function residualCard(residual, other) {
  return card(
    "residual",
    "Residual stream",
    null,
    h(
      "div",
      { class: "multiples" },
      RESIDUAL.filter(([name]) => residual[name]).map(([name, title]) => {
        const series = [{ name: title, values: residual[name], colour: 1, strong: true }];
        if (other?.[name]) series.push({ name: "baseline", values: other[name], colour: "soft", dash: true });
        return lineChart(series, {
          label: `${title} by layer`,
          x: "layer",
          height: 104,
          compact: true,
          empty: "This model has no such number.",
        });
      }),
    ),
  );
}

const MEANINGS = {
  perceptual_blindness: [
    "Neither the attention nor the activation map is concentrated anywhere in the image.",
    "The attention, the activation map, or both are concentrated somewhere in the image.",
  ],
  dissociation: [
    "The attention is concentrated, but on other patches than the activation map.",
    "The activation map and the attention agree, or the attention is too spread out to tell.",
  ],
};
const BESIDE_FLAGS = ["concentration", "thresholds", "calibration"];
const UNKNOWN = "The image has no map or too few patches, or the model was not calibrated for this flag.";

function flagItem(name, value, [raised, clear] = ["", ""], unknown = UNKNOWN) {
  const [kind, said, meaning] =
    value === null ? ["unknown", "not known", unknown] : value ? ["raised", "raised", raised] : ["clear", "clear", clear];
  return h("li", { class: kind }, h("b", {}, title(name)), h("span", { class: "chip" }, said), h("small", {}, meaning));
}

function alarmCard(said) {
  const right = percent(said.calibration?.raised.right[0] ?? 0);
  const wrong = percent(said.calibration?.raised.wrong[0] ?? 0);
  const meanings = [
    `The numbers resemble those of wrong answers. The alarm is raised on ${wrong} of wrong answers, and on ${right} of right ones.`,
    `The numbers resemble those of right answers. The alarm is raised on ${wrong} of wrong answers.`,
  ];
  const numbers = [["score", said.score], ["threshold", said.threshold], ...Object.entries(said.numbers ?? {})];
  return card(
    "alarm",
    "Alarm",
    null,
    h("ul", { class: "flags" }, flagItem("alarm", said.alarm, meanings, "The model was not calibrated for the alarm.")),
    definitions(numbers.map(([name, value]) => [words(name), short(value)])),
  );
}

function flagsCard(flags) {
  const numbers = [
    ...Object.entries(flags.concentration ?? {}),
    ...Object.entries(flags.thresholds ?? {}).map(([name, value]) => [`threshold: ${name}`, value]),
  ];
  return card(
    "flags",
    "Flags",
    null,
    h(
      "ul",
      { class: "flags" },
      Object.entries(flags)
        .filter(([name]) => !BESIDE_FLAGS.includes(name))
        .map(([name, value]) => flagItem(name, value, MEANINGS[name])),
    ),
    definitions(numbers.map(([name, value]) => [words(name), short(value)])),
  );
}

// The journal keeps of a long list its statistics or its first items, and of masked patches their number.
const mean = (values) =>
  Array.isArray(values) && values.length
    ? values.reduce((sum, value) => sum + value, 0) / values.length
    : (values?.mean ?? null);
export const listOf = (values) => (Array.isArray(values) ? values : (values?.first ?? []));
const layersOf = (layers) => {
  if (!Array.isArray(layers)) return `${layers?.count ?? "unknown"} layers`;
  return `layer${layers.length === 1 ? "" : "s"} ${layers.join(", ")}`;
};

/** What was applied, in words, line by line: [[name, value], ...]. */
export function appliedLines(applied) {
  const lines = [];
  for (const item of listOf(applied?.steering)) {
    const abstained = item.auto?.abstained;
    const published = item.published == null ? "" : ` (${short(item.published)} in published units)`;
    const toward = item.toward
      ? `toward ${item.toward}, strength ${short(item.strength ?? item.scale)}${published}`
      : `scale ${short(item.scale)}${published}`;
    lines.push([
      item.name,
      abstained
        ? `auto: not steered. ${abstained}`
        : [toward, layersOf(item.layers), `${item.tokens} tokens`, `dose ${short(item.dose)}`].join(", "),
    ]);
    if (item.auto) {
      const { criterion, answer, without_images, without_context, surprise, bound } = item.auto;
      const found =
        criterion === "surprise"
          ? `surprise of the text context ${short(surprise)}, bound ${short(bound)}`
          : `probability ${short(answer)}, without images ${short(without_images)}, without text context ` +
            short(without_context);
      lines.push([`auto, ${criterion ?? "drop"}`, found]);
    }
    if (item.warning) lines.push(["warning", item.warning]);
  }
  for (const { image, from, to } of listOf(applied?.pictures)) {
    lines.push([`image ${image}`, `scaled down from ${from.join(" x ")} to ${to.join(" x ")} pixels to fit`]);
  }
  if (applied?.max_tokens) lines.push(["longest answer", `${applied.max_tokens} tokens, reduced to fit`]);
  for (const [head, said] of Object.entries(applied ?? {}).filter(([head]) => !["steering", "max_tokens", "pictures"].includes(head)))
    if (isGroup(said))
      lines.push(...Object.entries(said).flatMap(([name, one]) => (one ? [lineOf(`${head}.${name}`, name, one)] : [])));
    else if (said) lines.push(lineOf(head, head, said));
  return lines;
}

/** Whether a report holds those of the members of a group, null where one is off. */
const isGroup = (said) => {
  const values = Object.values(said ?? {});
  return values.length > 0 && values.every((one) => one === null || (typeof one === "object" && !Array.isArray(one)));
};

function lineOf(path, name, said) {
  const { kind, ...rest } = said;
  return [kind ? acronym(kind) : title(name), (REPORTS[path] ?? settings)(rest)];
}

/** What was done, in words, by the place of its report. */
const REPORTS = {
  "sage.see": (said) =>
    [
      said.reading,
      `alpha ${short(mean(said.alpha))} on average`,
      `image share ${percent(said.share_before)} to ${percent(said.share_after)}`,
    ].join(", "),
  "sage.think": (said) =>
    `${percent(mean(said.suppressed))} of the updates damped, mean divergence ${short(mean(said.divergence))}`,
  "sage.generate": contrasted,
};

function settings({ changed, ...rest }) {
  const shown = Object.entries(rest)
    .filter(([, value]) => ["number", "string"].includes(typeof value))
    .map(([name, value]) => `${name} ${typeof value === "number" ? short(value) : `“${value}”`}`);
  return [...shown, changedTokens(changed)].filter(Boolean).join(", ");
}

function contrasted(generate) {
  const patches = listOf(generate.masked)
    .map((patches, i) => [i + 1, Array.isArray(patches) ? patches.length : patches])
    .flatMap(([image, count]) => (count ? [`image ${image}: ${count}`] : []));
  return [
    [
      "masked",
      patches.length ? `patches of ${patches.join(", ")}` : "nothing",
      generate.masking && `(${generate.masking})`,
    ]
      .filter(Boolean)
      .join(" "),
    changedTokens(generate.changed),
  ]
    .filter(Boolean)
    .join(", ");
}

const changedTokens = (count) =>
  count === null || count === undefined ? "" : `changed ${count} token${count === 1 ? "" : "s"}`;

function appliedCard(applied, diagnostics) {
  const lines = appliedLines(applied);
  return card(
    "applied",
    "Applied to this answer",
    null,
    lines.length
      ? h(
          "dl",
          { class: "applied" },
          lines.map(([name, value]) =>
            h("div", { class: name === "warning" ? "warning" : null }, h("dt", {}, name), h("dd", {}, value)),
          ),
        )
      : h("p", { class: "nothing" }, "Nothing: this is the plain model."),
    rawJson({ applied: applied ?? null, diagnostics: diagnostics ?? null }),
  );
}
