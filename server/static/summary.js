// The journal's summary as figures and charts.

import { boxStrip } from "./charts.js";
import { h, percent, seconds, short } from "./dom.js";
import { groupOf, measure, title, words } from "./names.js";
import { forget, timeChart } from "./periods.js";

const DAY = 86_400;
const MOST = 1000;
const KINDS = 12;

/** The figures on top: elements for a definition list. */
export function tiles(summary) {
  const { values, flags, finish_reasons: ends, focus, ivm } = summary;
  const failed = (ends.error ?? 0) + (ends.cancelled ?? 0) + (ends.shutdown ?? 0);
  const rate = (flag) => (flag.known ? percent(flag.raised / flag.known) : "–");
  const of = (part, known) =>
    known ? `${part.toLocaleString("en-US")} of ${known.toLocaleString("en-US")}` : "not known";
  return [
    tile("Answers", summary.count.toLocaleString("en-US"), failed ? `${failed} incomplete` : summary.count ? "all complete" : "none in this time"),
    tile("Refused", summary.refusals.count.toLocaleString("en-US"), "requests without an answer"),
    tile("Attention ratio", short(values.attention_ratio?.p50), "median, image over text"),
    tile("Focus on target", percent(focus.accuracy), of(focus.correct, focus.known)),
    tile("Right, focus wrong", percent(ivm.rate), ivm.known ? `IVM, ${of(ivm.implicit, ivm.known)}` : "IVM, not known"),
    ...Object.entries(flags).map(([name, flag]) => tile(title(name), rate(flag), of(flag.raised, flag.known))),
    ...guardTile(summary.guards ?? {}),
    tile("Total time of an answer", seconds(values.total?.p50), values.total?.count ? `90 % within ${seconds(values.total.p90)}` : "not known"),
  ];
}

const tile = (name, value, note) =>
  h("div", { class: "panel tile" }, h("dt", {}, name), h("dd", {}, h("b", {}, value), h("small", {}, note)));

/** How often guards acted, where there are any. */
function guardTile(guards) {
  const all = Object.values(guards).reduce((sum, count) => sum + count, 0);
  if (!all) return [];
  const acted = all - (guards.quiet ?? 0);
  const kept = (guards.retry ?? 0).toLocaleString("en-US");
  return [tile("Guards acted", percent(acted / all), `${acted} of ${all} answers; ${kept} replaced`)];
}

function card(id, title, ...content) {
  return h(
    "section",
    { class: "panel", id: `chart-${id}`, "aria-labelledby": `chart-title-${id}` },
    h("div", { class: "section-head" }, h("h2", { id: `chart-title-${id}` }, title)),
    ...content,
  );
}

/** The charts of a summary over `time`, {from (null: the first row's), to} in Unix seconds; `zoom(from, to)` and `reset()`
 * are called when a part is chosen in one of them, and when all is to be seen again. */
export function charts(summary, time, { zoom, reset }) {
  forget();
  const { by_time: told, refusals } = summary;
  const { bucket } = told;
  const starts = everyStart([...told.rows, ...refusals.by_time.rows], bucket, time);
  const at = new Map(told.rows.map((one) => [one.start, one]));
  const refused = new Map(refusals.by_time.rows.map((one) => [one.start, one]));
  const of = (value) => starts.map((start) => (at.has(start) ? (value(at.get(start)) ?? null) : null));
  const per = `per ${lasting(bucket)}${bucket % DAY ? "" : " (UTC)"}`;
  const over = (id, name, series, options) =>
    card(id, name, timeChart(series, { starts, bucket, zoom, reset, label: name.endsWith(per) ? name : `${name}, ${per}`, ...options }));
  const mean = (id, name, key, options = {}) =>
    over(id, name, [{ name: `mean ${per}`, values: of((one) => one[key]), colour: 1 }], {
      empty: "No answer in this period has this number.",
      ...options,
    });
  const times = (id, name, key) =>
    over(
      id,
      name,
      [
        { name: "median", values: of((one) => one[key].p50), colour: 1 },
        { name: "90 %", values: of((one) => one[key].p90), colour: 2 },
      ],
      { format: seconds, empty: "No answer in this period has this time." },
    );
  const turnedAway = (start) => refused.get(start)?.count ?? 0;
  const share = (count) =>
    starts.map((start) => {
      const all = (at.get(start)?.count ?? 0) + turnedAway(start);
      return all ? count(start) / all : null;
    });
  const failures = [
    { name: "refused", values: share(turnedAway), colour: 2 },
    { name: "failed", values: share((start) => at.get(start)?.errors ?? 0), colour: "danger" },
    { name: "cancelled", values: share((start) => at.get(start)?.cancelled ?? 0), colour: 5 },
  ];
  const flags = Object.keys(summary.flags).map((name, i) => ({
    name: words(name),
    values: of((one) => one.flags[name] ?? 0),
    colour: 2 + ((2 * i) % 5),
  }));
  const requests = [
    { name: "answers", values: of((one) => one.count), colour: 1 },
    { name: "refused", values: starts.map(turnedAway), colour: 2 },
  ];
  return [
    over("requests", `Requests ${per}`, requests, { bars: true }),
    times("first", "Time to the first token", "first_token"),
    times("total", "Total time of an answer", "total"),
    over("failures", "Share of requests that fail", failures, { low: 0, format: percent }),
    mean("attention", "Attention ratio", "attention_ratio", { low: 0, high: 1 }),
    mean("focus", "Focus share", "focus_share", { low: 0, high: 1 }),
    mean("decay", "Decay slope", "decay_slope"),
    over("flags", `Flags ${per}`, flags, { bars: true, empty: "No flag was raised in this time." }),
    card(
      "spread",
      "Spread",
      h(
        "dl",
        { class: "spread" },
        Object.entries(summary.values)
          .filter(([, value]) => value.count)
          .map(([name, value]) => {
            const [label, format] = measure(name);
            return h(
              "div",
              {},
              h("dt", {}, label, h("b", {}, format(value.p50))),
              h("dd", {}, boxStrip(value, { format, label })),
            );
          }),
      ),
    ),
    interventionTable(summary),
    ...(refusals.count ? [refusalTable(refusals)] : []),
  ];
}

/** The starts of all periods of a time, with or without rows. */
function everyStart(found, bucket, { from, to }) {
  const whole = (time) => Math.floor(time / bucket) * bucket;
  const known = found.map(({ start }) => start);
  const end = Math.max(whole(to - 1), ...known);
  const first = from === null ? Math.min(end - 5 * bucket, ...known) : Math.min(whole(from), end);
  const start = Math.max(first, end - (MOST - 1) * bucket);
  return Array.from({ length: (end - start) / bucket + 1 }, (_, i) => start + i * bucket);
}

/** 900: "15 min". */
function lasting(seconds) {
  const [size, unit] = [[DAY, "day"], [3600, "hour"], [60, "min"]].find(([size]) => seconds >= size);
  const count = seconds / size;
  return count === 1 ? { min: "minute" }[unit] ?? unit : `${count} ${unit}${unit === "min" ? "" : "s"}`;
}

function interventionTable(summary) {
  const most = Math.max(...summary.by_intervention.map((item) => item.count));
  const section = card(
    "interventions",
    "By intervention",
    h(
      "div",
      { class: "table", role: "region", "aria-label": "Means by intervention", tabindex: 0 },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["Intervention", "Answers", "Attention ratio", "Focus share", "Decay slope", "Focus on target"].map(
              (name, i) => h("th", { scope: "col", class: i ? "n" : null }, name),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          summary.by_intervention.map((item) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, groupOf(item.intervention)),
              h(
                "td",
                { class: "n amount", vars: { "--share": `${(100 * item.count) / most}%` } },
                item.count.toLocaleString("en-US"),
              ),
              h("td", { class: "n" }, short(item.attention_ratio)),
              h("td", { class: "n" }, percent(item.focus_share)),
              h("td", { class: "n" }, short(item.decay_slope)),
              h("td", { class: "n" }, percent(item.accuracy)),
            ),
          ),
        ),
      ),
    ),
  );
  section.classList.add("interventions");
  return section;
}

function refusalTable({ by_code: kinds }) {
  const head = ["Code", "Requests", "Status", "Route"];
  const lines = kinds.slice(0, KINDS).map(({ code, status, route, count }) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, words(code)),
      h("td", { class: "n" }, count.toLocaleString("en-US")),
      h("td", {}, String(status)),
      h("td", {}, route),
    ),
  );
  const others = kinds.slice(KINDS);
  const rest = others.reduce((sum, { count }) => sum + count, 0).toLocaleString("en-US");
  const section = card(
    "refusals",
    "Refused requests",
    h("p", { class: "note soft" }, "Of this period, without those of the journal itself; filters do not apply: refused requests leave no row."),
    h(
      "div",
      { class: "table", role: "region", "aria-label": "Refused requests by code", tabindex: 0 },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { scope: "col", class: i === 1 ? "n" : null }, name)))),
        h("tbody", {}, lines),
      ),
    ),
    ...(others.length ? [h("p", { class: "note soft" }, `and ${others.length} more kinds: ${rest} requests`)] : []),
  );
  section.classList.add("interventions");
  return section;
}
