// The journal's summary as figures and charts.

import { barChart, boxStrip, lineChart } from "./charts.js";
import { h, percent, seconds, short } from "./dom.js";
import { measure, title, words } from "./names.js";

const DAY = 86_400;
const MOST = 1000;

/** The figures on top: elements for a definition list. */
export function tiles(summary) {
  const { values, flags, finish_reasons: ends, focus, ivm } = summary;
  const failed = (ends.error ?? 0) + (ends.cancelled ?? 0);
  const rate = (flag) => (flag.known ? percent(flag.raised / flag.known) : "–");
  const of = (part, known) =>
    known ? `${part.toLocaleString("en-US")} of ${known.toLocaleString("en-US")}` : "not known";
  return [
    tile("Answers", summary.count.toLocaleString("en-US"), failed ? `${failed} broken off` : "none broken off"),
    tile("Attention ratio", short(values.attention_ratio?.p50), "median, image over text"),
    tile("Focus on target", percent(focus.accuracy), of(focus.correct, focus.known)),
    tile("Right, focus wrong", percent(ivm.rate), ivm.known ? `IVM, ${of(ivm.implicit, ivm.known)}` : "IVM, not known"),
    ...Object.entries(flags).map(([name, flag]) => tile(title(name), rate(flag), of(flag.raised, flag.known))),
    tile("Time of an answer", seconds(values.total?.p50), `90 % within ${seconds(values.total?.p90)}`),
  ];
}

const tile = (name, value, note) =>
  h("div", { class: "panel tile" }, h("dt", {}, name), h("dd", {}, h("b", {}, value), h("small", {}, note)));

function card(id, title, ...content) {
  return h(
    "section",
    { class: "panel", id: `chart-${id}`, "aria-labelledby": `chart-title-${id}` },
    h("div", { class: "section-head" }, h("h2", { id: `chart-title-${id}` }, title)),
    ...content,
  );
}

/** The charts of a summary; `span` is the time range in seconds, null for all time. */
export function charts(summary, span) {
  const { bucket, rows } = summary.by_time;
  const periods = everyPeriod(rows, bucket, span);
  const names = periods.map(({ start }) => shortTime(start, bucket * periods.length));
  const titles = periods.map(({ start }) => longTime(start));
  const per = `per ${lasting(bucket)}`;
  const over = (id, title, name, options = {}) =>
    card(
      id,
      title,
      lineChart(
        [{ name: `mean ${per}`, values: periods.map((one) => one[name] ?? null), colour: 1, strong: rows.length < 80 }],
        { label: `${title}, mean ${per}`, names, height: 150, empty: "No answer of this time has this number.", ...options },
      ),
    );
  const bars = (parts) =>
    periods.map((one, i) => ({
      name: names[i],
      title: titles[i],
      parts: parts.map(([value, name, colour]) => ({ name, colour, value: value(one) ?? 0 })),
    }));
  const flags = Object.keys(summary.flags).map((name, i) => [(one) => one.flags?.[name], words(name), 2 + ((2 * i) % 5)]);
  return [
    card(
      "requests",
      `Answers ${per}`,
      barChart(bars([[(one) => one.count, "answers", 1]]), { label: `Answers ${per}` }),
    ),
    over("attention", "Attention ratio", "attention_ratio", { low: 0, high: 1 }),
    over("focus", "Focus share", "focus_share", { low: 0, high: 1 }),
    over("decay", "Decay slope", "decay_slope"),
    card(
      "flags",
      `Flags ${per}`,
      barChart(bars(flags), { label: `Flags raised ${per}`, empty: "No flag was raised in this time." }),
    ),
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
  ];
}

/** The periods of the range without gaps, ending now; those without rows have a count of 0 and no means. */
function everyPeriod(found, bucket, span) {
  const now = Math.floor(Date.now() / 1000 / bucket) * bucket;
  const end = Math.max(now, found.at(-1)?.start ?? now);
  const first = span ? Math.floor((Date.now() / 1000 - span) / bucket) * bucket : Math.min(found[0]?.start ?? now, now - 5 * bucket);
  const at = new Map(found.map((one) => [one.start, one]));
  const periods = [];
  for (let time = Math.max(first, end - (MOST - 1) * bucket); time <= end; time += bucket)
    periods.push(at.get(time) ?? { start: time, count: 0 });
  return periods;
}

const clock = { hour: "2-digit", minute: "2-digit", hour12: false };
const date = { month: "short", day: "numeric" };
const longTime = (start) => new Date(1000 * start).toLocaleString(undefined, { ...date, ...clock });
const shortTime = (start, span) =>
  span > 2 * DAY
    ? new Date(1000 * start).toLocaleDateString(undefined, date)
    : new Date(1000 * start).toLocaleTimeString(undefined, clock);

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
              h(
                "th",
                { scope: "row" },
                { none: "plain", sage: "SAGE" }[item.intervention] ?? item.intervention.replace(":", ": "),
              ),
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
