// A row of the journal: in words, as a line of the table, and in full.

import { h, percent, pretty, rawJson, seconds, short } from "./dom.js";
import { labelOf, measure, words } from "./names.js";
import { appliedLines, listOf } from "./readouts.js";
import { isCut, replay } from "./replay.js";

/** What is true or false of an answer without being a failure. */
const NO_FLAGS = ["correct"];
const RAISED = { perceptual_blindness: "blind", dissociation: "dissociated" };
const SHARES = ["focus_share"];
const clock = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hour12: false,
});
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });

/** A time of today as a clock, an earlier one with its day. */
export function timeOf(unix) {
  const date = new Date(1000 * unix);
  return date.toDateString() === new Date().toDateString()
    ? clock.format(date)
    : `${day.format(date)} ${clock.format(date)}`;
}

/** Which way one vector steered: as asked, or, where that was to be found, as applied; null where nothing was steered. */
function wayOf(row) {
  const toward = row.asked.steering.toward ?? "vision";
  return toward === "auto" ? (listOf(row.applied?.steering)[0]?.toward ?? null) : toward;
}

/** What was asked for beyond a plain answer: ["toward vision 1", "See", ...]. */
export function interventionsOf(row) {
  const { steering } = row.asked ?? {};
  const found = [];
  if (steering?.vectors)
    found.push(...listOf(steering.vectors).map((item) => `${item.name} ${short(item.scale ?? item.strength ?? item.coefficient ?? 1)}`));
  else if (steering) {
    const way = wayOf(row);
    const said = way === null ? "not steered" : `${way} ${short(steering.strength ?? 1)}`;
    found.push(steering.toward === "auto" ? `auto: ${said}` : said);
  }
  return [...found, ...othersOf(row).map((path) => labelOf(path, kindOf(row, path)))];
}

const othersOf = (row) =>
  (row.interventions ?? []).filter((name) => name !== "steering").map((name) => name.split("."));

/** The end of a name is a kind where several share a place, and else where it stands. */
function kindOf(row, path) {
  const place = path.slice(0, -1).reduce((at, name) => at?.[name], row.asked);
  return place?.kind === path.at(-1) ? place.kind : "";
}

/** 1 plain, 2 toward vision, 3 toward text, 4 SAGE, 5 a contrast, 6 anything else: the colours of dots. */
export function colourOf(row) {
  const { steering } = row.asked ?? {};
  if (steering?.vectors) return 6;
  const way = steering && wayOf(row);
  if (way) return way === "text" ? 3 : 2;
  const heads = othersOf(row).map(([head]) => head);
  return heads.length === 0 ? 1 : heads.includes("contrast") ? 5 : heads.includes("sage") ? 4 : 6;
}

export const raised = (row) =>
  Object.entries(row.diagnostics ?? {})
    .filter(([name, value]) => value === true && !NO_FLAGS.includes(name))
    .map(([name]) => RAISED[name] ?? words(name));

/** A line of the table; `open(row)` shows it in full. */
export function tableRow(row, open) {
  const said = row.diagnostics ?? {};
  const asked = interventionsOf(row);
  const focus = said.focused_image
    ? [`image ${said.focused_image}`, said.focus_share === null ? "" : ` ${percent(said.focus_share)}`].join("")
    : "–";
  const right =
    said.correct === null || said.correct === undefined
      ? null
      : h("span", { class: said.correct ? "chip" : "chip bad" }, said.correct ? "right" : "wrong");
  const show = () => open(row);
  return h(
    "tr",
    { on: { click: show } },
    h(
      "td",
      {},
      h(
        "button",
        {
          type: "button",
          class: "row-open",
          "aria-label": `Open the answer of ${timeOf(row.created)}`,
          on: { click: (event) => (event.stopPropagation(), show()) },
        },
        timeOf(row.created),
      ),
    ),
    h(
      "td",
      {},
      h(
        "span",
        { class: "chips" },
        (asked.length ? asked : ["plain"]).map((text) =>
          h("span", { class: asked.length ? "chip accent" : "chip" }, text),
        ),
        row.guard && h("span", { class: "chip" }, `guard: ${row.guard}`),
      ),
    ),
    h("td", { class: ["error", "cancelled", "shutdown"].includes(row.finish_reason) ? "bad" : null }, row.finish_reason),
    h("td", { class: "n" }, short(row.images)),
    h("td", { class: "n" }, short(said.attention_ratio)),
    h("td", {}, focus, " ", right),
    h("td", { class: "n" }, short(said.decay_slope)),
    h(
      "td",
      {},
      h(
        "span",
        { class: "chips" },
        raised(row).map((word) => h("span", { class: "chip bad" }, word)),
      ),
    ),
    h("td", { class: "n" }, short(row.usage?.completion_tokens)),
    h("td", { class: "n" }, seconds(row.latency?.first_token)),
    h("td", { class: "n" }, seconds(row.latency?.total)),
  );
}

/** Everything that a row holds. */
export function rowDetail(row) {
  const said = row.diagnostics ?? {};
  const yes = (value) => (value === null || value === undefined ? "–" : value ? "yes" : "no");
  const shown = (name, value) =>
    typeof value === "boolean" ? yes(value) : SHARES.includes(name) ? percent(value) : short(value);
  const numbers = Object.entries(said).map(([name, value]) => [measure(name)[0], shown(name, value)]);
  const facts = [
    ["model", row.model],
    ["time", new Date(1000 * row.created).toLocaleString()],
    ...(row.key_name ? [["key", row.key_name]] : []),
    ...(row.preset ? [["preset", row.preset]] : []),
    ...(row.request_id ? [["request", row.request_id]] : []),
    ["finish", row.finish_reason],
    ["streamed", yes(row.streamed)],
    ["images", short(row.images)],
    ["prompt tokens", short(row.usage?.prompt_tokens)],
    ["answer tokens", short(row.usage?.completion_tokens)],
    ["first token", seconds(row.latency?.first_token)],
    ["total", seconds(row.latency?.total)],
    ...Object.entries(row.sampling ?? {})
      .filter(([, value]) => value !== null)
      .map(([name, value]) => [words(name), String(value)]),
  ];
  const applied = appliedLines(row.applied);
  const { href, lacks } = replay(row);
  const asked = Object.fromEntries(
    Object.entries(row.asked ?? {}).filter(([, value]) => value !== null && value !== false),
  );
  return h(
    "div",
    { class: "detail" },
    h(
      "p",
      {},
      h("a", { href }, "Open in the playground"),
      lacks.length > 0 && h("span", { class: "soft" }, ` without ${lacks.join(", and without ")}`),
    ),
    row.texts &&
      part(
        "Texts",
        h("h4", {}, isCut(row.texts.prompt) ? "The end of the prompt" : "Prompt"),
        h("p", { class: "said" }, row.texts.prompt ?? "–"),
        h("h4", {}, "Answer"),
        h("p", { class: "said" }, row.texts.answer ?? "–"),
      ),
    part("Diagnostics", list(numbers)),
    applied.length > 0 &&
      part(
        "Applied",
        h(
          "dl",
          { class: "applied" },
          applied.map(([name, value]) =>
            h("div", { class: name === "warning" ? "warning" : null }, h("dt", {}, name), h("dd", {}, value)),
          ),
        ),
      ),
    part("Request", list(facts)),
    row.metadata && part("Metadata", list(Object.entries(row.metadata).map(([name, value]) => [name, String(value)]))),
    Object.keys(asked).length > 0 &&
      part("Requested options", h("pre", { tabindex: 0, "aria-label": "Requested options" }, pretty(asked))),
    rawJson(row),
  );
}

const part = (title, ...content) => h("section", {}, h("h3", {}, title), ...content);
const list = (rows) =>
  h(
    "dl",
    { class: "numbers" },
    rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
