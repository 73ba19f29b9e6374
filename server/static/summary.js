// The journal's summary as figures and charts.

import { barChart, boxStrip, lineChart } from "./charts.js";
import { h, percent, seconds, short } from "./dom.js";
import { measure, title, words } from "./names.js";

const HOUR = 3600;
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
  const hours = everyHour(summary.by_hour, span);
  const names = hours.map((hour) => hourName(hour.start, hours.length));
  const titles = hours.map((hour) =>
    new Date(1000 * hour.start).toLocaleString(undefined, {
      month: "short",
      day: "numeric",
      hour: "2-digit",
      minute: "2-digit",
      hour12: false,
    }),
  );
  const over = (id, title, name, options = {}) =>
    card(
      id,
      title,
      lineChart(
        [
          {
            name: "mean of the hour",
            values: hours.map((hour) => hour[name] ?? null),
            colour: 1,
            strong: hours.length < 80,
          },
        ],
        {
          label: `${title}, mean per hour`,
          names,
          height: 150,
          empty: "No answer of this time has this number.",
          ...options,
        },
      ),
    );
  const flags = Object.keys(summary.flags);
  const bars = grouped(hours, ["count", ...flags]);
  const barsOf = (parts) =>
    bars.map((bar) => ({
      name: bar.name,
      title: bar.title,
      parts: parts.map(([key, name, colour]) => ({ name, colour, value: bar[key] ?? 0 })),
    }));
  const per = bars.length < hours.length ? "day" : "hour";
  return [
    card(
      "requests",
      `Answers per ${per}`,
      barChart(barsOf([["count", "answers", 1]]), { label: `Answers per ${per}` }),
    ),
    over("attention", "Attention ratio", "attention_ratio", { low: 0, high: 1, titles }),
    over("focus", "Focus share", "focus_share", { low: 0, high: 1 }),
    over("decay", "Decay slope", "decay_slope"),
    card(
      "flags",
      `Flags per ${per}`,
      barChart(
        barsOf(flags.map((name, i) => [name, words(name), 2 + 2 * i])),
        { label: `Flags raised per ${per}`, empty: "No flag was raised in this time." },
      ),
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

/** The hours of the range without gaps, ending now; hours without rows have a count of 0 and no means. */
function everyHour(found, span) {
  const now = Math.floor(Date.now() / 1000 / HOUR) * HOUR;
  const first = Math.max(span ? now - span : (found[0]?.start ?? now), now - 1000 * HOUR);
  const at = new Map(found.map((hour) => [hour.start, hour]));
  const start = Math.min(first, (found.at(-1)?.start ?? now) - 5 * HOUR);
  const hours = [];
  for (let time = start; time <= Math.max(now, found.at(-1)?.start ?? now); time += HOUR)
    hours.push(at.get(time) ?? { start: time, count: 0 });
  return hours;
}

function hourName(start, count) {
  const date = new Date(1000 * start);
  if (count > 48) return date.toLocaleDateString(undefined, { month: "short", day: "numeric" });
  return `${String(date.getHours()).padStart(2, "0")}:00`;
}

/** Bars of hours with their sums of `counts`; of days where there are more than ten of them. */
function grouped(hours, counts) {
  const daily = hours.length > 240;
  const bars = new Map();
  for (const hour of hours) {
    const date = new Date(1000 * hour.start);
    const key = daily ? date.toDateString() : hour.start;
    const bar = bars.get(key) ?? {
      name: hourName(hour.start, hours.length),
      title: daily ? "" : date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", hour12: false }),
      ...Object.fromEntries(counts.map((name) => [name, 0])),
    };
    if (!bar.title || hours.length > 48)
      bar.title = [
        date.toLocaleDateString(undefined, { month: "short", day: "numeric" }),
        daily ? "" : bar.title.split(" ").pop(),
      ]
        .join(" ")
        .trim();
    for (const name of counts) bar[name] += hour[name] ?? 0;
    bars.set(key, bar);
  }
  return [...bars.values()];
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
