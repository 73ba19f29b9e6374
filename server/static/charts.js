// Charts as SVG, drawn at the width they have. Values under the pointer (or arrow keys) are read in the legend.

import { h, short, svg } from "./dom.js";

const PAD = { top: 10, right: 12, bottom: 26, left: 44 };

/** Call `draw(width)` now and whenever the width of `element` changes. */
export function atWidth(element, draw) {
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width > 0 && width !== last) draw((last = width));
  }).observe(element);
}

/** Round steps that cover low..high with about `count` lines: [{value, text}]. */
export function ticks(low, high, count = 4) {
  const rough = (high - low || 1) / count;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * base).find((value) => value >= rough * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step)
    found.push(Number(value.toPrecision(12)));
  const decimals = Math.max(0, ...found.map((value) => (String(value).split(".")[1] ?? "").length));
  return found.map((value) => ({
    value,
    text:
      value !== 0 && Math.abs(value) < 1e-4
        ? value.toExponential(0)
        : decimals
          ? value.toFixed(decimals)
          : value.toLocaleString("en-US"),
  }));
}

/** The ends of an axis for these numbers, a little above the highest; one apart where all numbers are equal. */
export function extent(values, { low, high }) {
  const bottom = low ?? Math.min(0, ...values);
  let top = high ?? Math.max(...values, bottom);
  if (!(top > bottom)) top = bottom + (Math.abs(bottom) || 1);
  return { bottom, top: high ?? bottom + (top - bottom) * 1.06 };
}

/** Lines over an index. series: [{name, values, colour (1..6 or "soft"), dash, strong}]. Options: label (spoken), x (name
 * of the index), names (of the indices), low, high, height, format, compact, empty (text where there is no number), marks
 * ([{index, colour, title}] under the axis). */
export function lineChart(series, options = {}) {
  const { label, x = "", height = 190, format = short, compact = false, marks = [] } = options;
  const count = Math.max(0, ...series.map((item) => item.values.length));
  const names = options.names ?? Array.from({ length: count }, (_, i) => String(i));
  const numbers = series.flatMap((item) => item.values).filter((value) => value !== null && Number.isFinite(value));
  const { bottom, top } = extent(numbers, options);
  const figure = h("figure", { class: compact ? "chart compact" : "chart" });
  const readings = series.map(() => h("b", {}));
  const place = h("span", { class: "place" });
  const legend = h(
    "figcaption",
    { class: "legend" },
    series.map((item, i) =>
      h(
        "span",
        { class: `key c-${item.colour}` },
        h("i", { class: item.dash ? "swatch dash" : "swatch" }),
        item.name,
        " ",
        readings[i],
      ),
    ),
    place,
  );
  const plot = h("div", { class: "plot", vars: { "--height": `${height}px` } });
  figure.append(legend, plot);
  if (!numbers.length || count === 0) {
    plot.append(h("p", { class: "nothing" }, options.empty ?? "No numbers for this."));
    return figure;
  }

  let at = null;
  let draw = () => {};
  const read = (index) => {
    at = index;
    series.forEach((item, i) => (readings[i].textContent = index === null ? "" : format(item.values[index] ?? null)));
    place.textContent = index === null ? "" : `${x} ${names[index]}`;
    draw();
  };
  atWidth(plot, (width) => {
    const pad = compact
      ? { top: 6, right: 6, bottom: 18, left: 38 }
      : { ...PAD, bottom: PAD.bottom + (marks.length ? 12 : 0) };
    const [inner, tall] = [width - pad.left - pad.right, height - pad.top - pad.bottom];
    const px = (i) => pad.left + (count === 1 ? inner / 2 : (inner * i) / (count - 1));
    const py = (value) => pad.top + tall * (1 - (value - bottom) / (top - bottom));
    const rule = svg("line", { class: "rule", y1: pad.top, y2: pad.top + tall, visibility: "hidden" });
    const every = Math.ceil(
      count / Math.max(2, Math.floor(inner / Math.max(26, 7 * Math.max(...names.map((name) => name.length)) + 10))),
    );
    const root = svg(
      "svg",
      { width, height, role: "img", tabindex: 0, "aria-label": label },
      ticks(bottom, top, compact ? 2 : 4)
        .map(({ value, text }) => [
          svg("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: py(value), y2: py(value) }),
          svg("text", { class: "tick", x: pad.left - 6, y: py(value) + 3.5, "text-anchor": "end" }, text),
        ])
        .flat(),
      names.map(
        (name, i) =>
          i % every === 0 &&
          svg("text", { class: "tick", x: px(i), y: pad.top + tall + 14, "text-anchor": "middle" }, name),
      ),
      marks.map((mark) =>
        svg(
          "rect",
          { class: `mark c-${mark.colour}`, x: px(mark.index) - 5, y: height - 13, width: 10, height: 6, rx: 2 },
          svg("title", {}, mark.title),
        ),
      ),
      rule,
      series.map((item) => line(item, px, py)),
    );
    const nearest = (event) => {
      const inside = event.clientX - root.getBoundingClientRect().left - pad.left;
      return Math.min(count - 1, Math.max(0, Math.round((inside / inner) * (count - 1))));
    };
    root.addEventListener("pointermove", (event) => read(nearest(event)));
    root.addEventListener("pointerleave", () => read(null));
    root.addEventListener("focus", () => root.matches(":focus-visible") && read(at ?? 0));
    root.addEventListener("blur", () => read(null));
    root.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      read(Math.min(count - 1, Math.max(0, (at ?? (step > 0 ? -1 : count)) + step)));
    });
    draw = () => {
      rule.setAttribute("visibility", at === null ? "hidden" : "visible");
      if (at !== null) for (const end of ["x1", "x2"]) rule.setAttribute(end, px(at));
    };
    draw();
    plot.replaceChildren(root);
  });
  return figure;
}

function line(item, px, py) {
  let path = "";
  let pen = false;
  const points = [];
  item.values.forEach((value, i) => {
    if (value === null || !Number.isFinite(value)) {
      pen = false;
      return;
    }
    path += `${pen ? "L" : "M"}${px(i).toFixed(1)},${py(value).toFixed(1)}`;
    pen = true;
    points.push([px(i), py(value)]);
  });
  const dots = item.strong || points.length < 3 ? points.map(([x, y]) => svg("circle", { cx: x, cy: y, r: 2.6 })) : [];
  return svg(
    "g",
    {
      class: `line c-${item.colour}${item.strong ? " strong" : ""}${item.dash ? " dash" : ""}`,
      "data-name": item.name,
    },
    svg("path", { d: path }),
    dots,
  );
}

/** A horizontal bar of shares: parts [{name, share 0..1, colour}], with the names beside it. */
export function shareBar(parts, label) {
  return h(
    "div",
    { class: "shares" },
    h(
      "div",
      { class: "share-bar", role: "img", "aria-label": label },
      parts.map((part) => h("span", { class: `c-${part.colour}`, vars: { "--share": String(part.share) } })),
    ),
    h(
      "div",
      { class: "legend" },
      parts.map((part) =>
        h(
          "span",
          { class: `key c-${part.colour}` },
          h("i", { class: "swatch square" }),
          part.name,
          " ",
          h("b", {}, `${(100 * part.share).toFixed(1)} %`),
        ),
      ),
    ),
  );
}

/** min, 10 %, median, 90 % and max of a value as one strip. */
export function boxStrip({ min, p10, p50, p90, max }, { format = short, label } = {}) {
  const span = max - min || 1;
  const at = (value) => `${(100 * (value - min)) / span}%`;
  return h(
    "div",
    {
      class: "box",
      role: "img",
      "aria-label": [
        `${label}: from ${format(min)} to ${format(max)}, median ${format(p50)}`,
        `the middle 80 % from ${format(p10)} to ${format(p90)}`,
      ].join(", "),
    },
    h(
      "div",
      { class: "box-track" },
      h("span", { class: "box-range", vars: { "--from": at(p10), "--to": `${100 - (100 * (p90 - min)) / span}%` } }),
      h("span", { class: "box-median", vars: { "--from": at(p50) } }),
    ),
    h("div", { class: "box-ends" }, h("span", {}, format(min)), h("span", {}, format(max))),
  );
}

/** One dot for each row in the order of time. points: [{value or null, colour, raised, title, open}]. */
export function dotChart(points, { label, height = 130, format = short, empty } = {}) {
  const plot = h("div", { class: "plot", vars: { "--height": `${height}px` } });
  const figure = h("figure", { class: "chart" }, plot);
  const known = points.map((point) => point.value).filter((value) => value !== null && Number.isFinite(value));
  if (!known.length) {
    plot.append(h("p", { class: "nothing" }, empty ?? "None of these rows has this number."));
    return figure;
  }
  const { bottom, top } = extent(known, {});
  atWidth(plot, (width) => {
    const pad = { ...PAD, bottom: 10 };
    const [inner, tall] = [width - pad.left - pad.right, height - pad.top - pad.bottom];
    const px = (i) => pad.left + (inner * (i + 0.5)) / points.length;
    const py = (value) => pad.top + tall * (1 - (value - bottom) / (top - bottom));
    plot.replaceChildren(
      svg(
        "svg",
        { width, height, role: "img", "aria-label": label },
        ticks(bottom, top, 3)
          .map(({ value, text }) => [
            svg("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: py(value), y2: py(value) }),
            svg("text", { class: "tick", x: pad.left - 6, y: py(value) + 3.5, "text-anchor": "end" }, text),
          ])
          .flat(),
        points.map(
          (point, i) =>
            point.value !== null &&
            svg(
              "circle",
              {
                class: `dot c-${point.colour}${point.raised ? " raised" : ""}`,
                cx: px(i),
                cy: py(point.value),
                r: points.length > 60 ? 3.5 : 5,
                on: { click: point.open },
              },
              svg("title", {}, `${point.title}: ${format(point.value)}`),
            ),
        ),
      ),
    );
  });
  return figure;
}
