// Two selections of the journal side by side.

import { h, percent } from "./dom.js";
import { measure, title } from "./names.js";

/** A table of two summaries: counts, medians, and the shares of flags; nothing without a second one. */
export function comparison(first, second) {
  if (!second) return [];
  const count = (summary) => summary.count.toLocaleString("en-US");
  const rate = (part, known) => (known ? percent(part / known) : "–");
  const flag = (summary, name) => rate(summary.flags[name]?.raised, summary.flags[name]?.known);
  const median = (summary, name, format) => (summary.values[name]?.count ? format(summary.values[name].p50) : "–");
  const lines = [
    ["Answers", count(first), count(second)],
    ["Focus on target", percent(first.focus.accuracy), percent(second.focus.accuracy)],
    ...Object.keys(first.flags).map((name) => [title(name), flag(first, name), flag(second, name)]),
    ...Object.keys(first.values)
      .filter((name) => first.values[name].count || second.values[name]?.count)
      .map((name) => {
        const [label, format] = measure(name);
        return [`${label}, median`, median(first, name, format), median(second, name, format)];
      }),
  ];
  const head = ["Figure", "This selection", "Compared"];
  return [
    h(
      "div",
      { class: "table", role: "region", "aria-label": "Two selections", tabindex: 0 },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { scope: "col", class: i ? "n" : null }, name)))),
        h(
          "tbody",
          {},
          lines.map(([name, ...values]) =>
            h("tr", {}, h("th", { scope: "row" }, name), values.map((value) => h("td", { class: "n" }, value))),
          ),
        ),
      ),
    ),
  ];
}
