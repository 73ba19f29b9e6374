// Numbers over time, drawn by uPlot: bars and lines, read under the pointer or with the arrow keys, zoomed by dragging.

import { atWidth, extent } from "./charts.js";
import { h, short } from "./dom.js";
import uPlot from "./vendor/uplot.js";

const drawn = new Set();
const clock = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false };
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((size) => [size, 2 * size, 5 * size]);
const date = { year: "numeric", month: "short", day: "numeric", timeZone: "UTC" };
const DAY = 86_400;

/** The server's periods begin at round times of UTC: whole days are named by its dates, moments by the clock of here. */
const inDays = (bucket) => bucket % DAY === 0;
const moment = (start, bucket) =>
  inDays(bucket)
    ? `${new Date(1000 * start).toLocaleDateString(undefined, date)} UTC`
    : new Date(1000 * start).toLocaleString(undefined, clock);

/** Let go of all charts, before others take their places. */
export function forget() {
  for (const chart of drawn) chart.destroy();
  drawn.clear();
}

// The canvas knows no style sheet: it is told colours again when they change.
const again = () => drawn.forEach((chart) => chart.redraw());
new MutationObserver(again).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);

/** Bars (stacked) or lines over periods. series: [{name, values, colour (of c-1 to c-6, or "danger")}]. Options: starts (Unix
 * times of the periods), bucket (seconds), label (spoken), bars, low, high, format, empty, zoom(from, to), reset(). */
export function timeChart(series, { starts, bucket, label, bars, low, high, format = short, empty, zoom, reset }) {
  const swatches = series.map(({ colour }) => h("i", { class: `swatch square c-${colour}` }));
  const legend = h(
    "figcaption",
    { class: "legend" },
    series.map(({ name }, i) => h("span", { class: "key" }, swatches[i], name)),
  );
  const plot = h("div", { class: "plot", tabindex: 0, role: "img", "aria-label": label, vars: { "--height": "150px" } });
  const tip = h("p", { class: "tip", role: "status", hidden: true });
  const figure = h("figure", { class: "chart timed" }, legend, plot, tip);
  const known = series.flatMap(({ values }) => values).filter((value) => value !== null && (!bars || value > 0));
  if (!known.length) {
    for (const name of ["tabindex", "role", "aria-label"]) plot.removeAttribute(name);
    plot.append(h("p", { class: "nothing" }, empty ?? "Nothing yet."));
    return figure;
  }
  const heights = bars ? stacked(series) : series.map(({ values }) => values);
  const all = heights.flat().filter((value) => value !== null);
  const { bottom, top } = extent(all, { low, high });
  const colour = (i) => () => getComputedStyle(swatches[i]).backgroundColor;
  const axis = { stroke: () => getComputedStyle(legend).color, font: "11px system-ui, sans-serif", ticks: { show: false } };
  const scale = bars ? { incrs: WHOLE } : format === short ? {} : { values: (_, splits) => splits.map(format) };
  const faint = () => getComputedStyle(figure).borderTopColor;
  let chart = null;

  const show = ({ cursor }) => {
    const { idx } = cursor;
    tip.hidden = idx === null || idx === undefined || cursor.left < 0;
    if (tip.hidden) return;
    const said = series.map(({ name, values }) => h("span", {}, name, " ", h("b", {}, format(values[idx] ?? null))));
    tip.replaceChildren(h("span", { class: "soft" }, moment(starts[idx], bucket)), ...said);
    const left = plot.offsetLeft + chart.valToPos(starts[idx] + bucket / 2, "x") + chart.over.offsetLeft;
    tip.style.left = `${Math.max(0, Math.min(left - tip.offsetWidth / 2, figure.clientWidth - tip.offsetWidth))}px`;
  };
  const select = ({ select: { left, width } }) => {
    if (width < 8) return;
    zoom?.(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
  };
  atWidth(plot, (width) => {
    if (chart) return chart.setSize({ width, height: 150 });
    chart = new uPlot(
      {
        width,
        height: 150,
        tzDate: inDays(bucket) ? (at) => uPlot.tzDate(new Date(1000 * at), "UTC") : undefined,
        legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { show: !bars } },
        scales: { x: { range: () => [starts[0], starts.at(-1) + bucket] }, y: { range: () => [bottom, top] } },
        axes: [
          { ...axis, size: 26, grid: { show: false }, values: (_, splits) => splits.map((at) => named(at, starts, bucket)) },
          { ...axis, ...scale, size: 48, space: 34, grid: { stroke: faint, width: 1 } },
        ],
        series: [
          {},
          ...series.map(({ name }, i) => ({
            label: name,
            stroke: colour(i),
            width: bars ? 0 : 1.75,
            fill: bars ? colour(i) : undefined,
            paths: bars ? uPlot.paths.bars({ size: [0.8], align: 1 }) : undefined,
            points: { show: !bars && starts.length < 80, filter: bars ? undefined : alone, size: 5, fill: colour(i) },
          })),
        ],
        hooks: { setCursor: [show], setSelect: [select] },
      },
      [starts, ...heights],
      plot,
    );
    drawn.add(chart);
    return undefined;
  });

  const last = starts.length - 1;
  const at = () => (tip.hidden ? null : chart.cursor.idx);
  const moves = {
    ArrowLeft: () => Math.max(0, (at() ?? last + 1) - 1),
    ArrowRight: () => Math.min(last, (at() ?? -1) + 1),
    Home: () => 0,
    End: () => last,
  };
  plot.addEventListener("keydown", (event) => {
    if (!chart || !(event.key in moves)) return;
    event.preventDefault();
    const index = moves[event.key]();
    chart.setCursor({ left: chart.valToPos(starts[index], "x") + 0.01, top: 10 });
  });
  plot.addEventListener("blur", () => chart?.setCursor({ left: -10, top: -10 }));
  plot.addEventListener("dblclick", () => reset?.());
  return figure;
}

/** A place on the axis of time: a clock, over more than two days a date. */
function named(at, starts, bucket) {
  const { month, day, ...time } = clock;
  const long = starts.length * bucket > 2 * DAY;
  const timeZone = inDays(bucket) ? "UTC" : undefined;
  return new Date(1000 * at).toLocaleString(undefined, long ? { month, day, timeZone } : time);
}

/** Where not every number has its point, those do that no line reaches, because their neighbours are not known. */
function alone({ data }, series, all) {
  const values = data[series];
  const known = (i) => (values[i] ?? null) !== null;
  return all ? null : [...values.keys()].filter((i) => known(i) && !known(i - 1) && !known(i + 1));
}

/** What each part reaches up to, the parts before it in the list lying upon those after it: the tallest is drawn first. */
function stacked(series) {
  const sums = new Array(series[0].values.length).fill(0);
  return [...series]
    .reverse()
    .map(({ values }) => values.map((value, i) => (sums[i] += value ?? 0)))
    .reverse();
}
