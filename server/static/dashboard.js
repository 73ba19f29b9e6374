// The dashboard: the journal's summary and its latest rows, filtered, refreshed while it is looked at.

import { getBlob, getJson } from "./api.js";
import { dotChart } from "./charts.js";
import { byId, h } from "./dom.js";
import { keepPage } from "./drops.js";
import { askForKey, onKey, wantsKey } from "./key.js";
import { measure } from "./names.js";
import { colourOf, interventionsOf, raised, rowDetail, tableRow, timeOf } from "./rows.js";
import { saveBlob } from "./save.js";
import { charts, tiles } from "./summary.js";
import { comparison } from "./comparison.js";

const EVERY = 4000;
const PAGE = 30;
const MINUTE = 60;
const HOUR = 3600;
const RANGES = { "15m": HOUR / 4, "1h": HOUR, "6h": 6 * HOUR, "24h": 24 * HOUR, "7d": 168 * HOUR, "30d": 720 * HOUR, all: null };
const FILTERS = [...new Set([...byId("filters").elements].map(({ name }) => name))].filter(
  (name) => name && name !== "range",
);
const GROUPS = ["plain", "toward vision", "toward text", "SAGE", "contrast", "other"];

/** `zoom`: [since, until], a part of the time that was chosen in a chart, null without. */
const state = { zoom: null, paused: false, timer: null, running: null, cursors: [], next: null, shown: {}, problem: null };

// ----------------------------------------------------------------------------------------------- the filters

function readFilters() {
  const given = new FormData(byId("filters"));
  return Object.fromEntries(["range", ...FILTERS].map((name) => [name, String(given.get(name) ?? "").trim()]));
}

/** Filters live in the address, so that a view can be kept and shared. */
function toAddress(filters) {
  const query = new URLSearchParams(
    Object.entries(filters).filter(([name, value]) => value && !(name === "range" && value === "24h")),
  );
  if (state.zoom) ["since", "until"].forEach((name, i) => query.set(name, String(state.zoom[i])));
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`);
}

function fromAddress() {
  const query = new URLSearchParams(location.search);
  const range = document.querySelector(`input[name="range"][value="${CSS.escape(query.get("range") ?? "24h")}"]`);
  if (range) range.checked = true;
  const [since, until] = ["since", "until"].map((name) => Number(query.get(name)));
  if (since >= 0 && until > since) state.zoom = [since, until];
  for (const name of FILTERS) {
    const field = byId("filters").elements[name];
    field.value = query.get(name) ?? "";
    if (field.selectedIndex === -1) field.value = "";
  }
}

/** The filters as parameters of the API; `metadata` holds pairs such as "shop=a, run=7". */
function parameters(filters) {
  const named = FILTERS.filter((name) => filters[name] && name !== "metadata");
  const query = new URLSearchParams(named.map((name) => [name, filters[name]]));
  for (const pair of (filters.metadata ?? "").split(",").filter((text) => text.trim())) {
    const [key, ...value] = pair.trim().split("=");
    query.append(`metadata[${key}]`, value.join("="));
  }
  const { from, to } = timeOfView(filters);
  if (from !== null) query.set("since", String(from));
  if (state.zoom) query.set("until", String(to));
  return query;
}

/** {from (null: all time), to} in Unix seconds. */
function timeOfView({ range }) {
  if (state.zoom) return { from: state.zoom[0], to: state.zoom[1] };
  const now = Math.floor(Date.now() / 1000);
  return { from: RANGES[range] ? now - RANGES[range] : null, to: now };
}

const SHIFTS = { week: 7 * 24 * HOUR };

/** The compared selection as parameters of the API, null without one. */
function compared(filters) {
  const given = new FormData(byId("compare"));
  const [preset, metadata, time] = ["preset", "metadata", "time"].map((name) => String(given.get(name) ?? "").trim());
  const { from, to } = timeOfView(filters);
  if (!preset && !metadata && !(time && from !== null)) return null;
  const query = parameters({ ...filters, preset: preset || filters.preset, metadata: metadata || filters.metadata });
  if (time && from !== null) {
    const shift = SHIFTS[time] ?? to - from;
    query.set("since", String(from - shift));
    query.set("until", String(to - shift));
  }
  return query;
}

// ------------------------------------------------------------------------------------------------- refreshing

async function refresh() {
  clearTimeout(state.timer);
  state.running?.abort();
  const abort = (state.running = new AbortController());
  const filters = readFilters();
  const query = parameters(filters);
  const page = new URLSearchParams(query);
  page.set("limit", String(PAGE));
  if (state.cursors.length) page.set("before", state.cursors.at(-1));
  try {
    const other = compared(filters);
    const [summary, rows, second] = await Promise.all([
      getJson(`/v1/diagnostics/summary?${query}`, abort.signal),
      getJson(`/v1/diagnostics?${page}`, abort.signal),
      other && getJson(`/v1/diagnostics/summary?${other}`, abort.signal),
    ]);
    show(filters, summary, rows);
    changed("comparison", [summary, second], () => byId("comparison").replaceChildren(...comparison(summary, second)));
    byId("status").textContent = state.paused ? "Paused" : "Live";
    byId("status").className = state.paused ? "model" : "model on";
    settled("refresh");
  } catch (error) {
    if (error.name === "AbortError") return;
    fail(error, "refresh");
  }
  plan();
}

function plan() {
  clearTimeout(state.timer);
  if (!state.paused && document.visibilityState === "visible" && byId("key-form").hidden)
    state.timer = setTimeout(refresh, EVERY);
}

/** Take away the message of what has gone well now; the message of the other stays. */
function settled(what) {
  if (state.problem === what) byId("problem").hidden = true;
}

function fail(error, what) {
  if (what === "refresh") {
    const refused = error.status >= 400 && error.status < 500 ? "Refused" : "Not reachable";
    const words = error.status === 401 ? "API key needed" : error.code === "journal_off" ? "Journal off" : refused;
    byId("status").textContent = words;
    byId("status").className = "model off";
  }
  if (wantsKey(error)) return askForKey(error);
  if (error.code === "journal_off") {
    state.paused = true;
    showPause();
    byId("pause").hidden = true;
    byId("filters").hidden = true;
    nothing(
      "The journal is off",
      "This server keeps no journal. Start it with --journal FILE or a postgresql:// URL to record every answer.",
    );
    return undefined;
  }
  const box = byId("problem");
  state.problem = what;
  box.hidden = false;
  box.replaceChildren(h("p", {}, error.message), ...(error.param ? [h("code", {}, error.param)] : []));
  return undefined;
}

function nothing(title, text, ...more) {
  byId("content").hidden = true;
  const box = byId("nothing");
  box.hidden = false;
  box.replaceChildren(h("h2", {}, title), h("p", { class: "soft" }, text), ...more);
}

// ---------------------------------------------------------------------------------------------------- drawing

function show(filters, summary, rows) {
  const filtered = FILTERS.some((name) => filters[name]);
  byId("clear").hidden = !filtered;
  byId("unzoom").hidden = state.zoom === null;
  if (summary.count === 0 && summary.refusals.count === 0) {
    state.shown = {};
    if (filtered)
      return nothing(
        "No answer matches these filters",
        "Widen the time range or clear a filter.",
        h("button", { type: "button", on: { click: clearFilters } }, "Clear filters"),
      );
    if (filters.range !== "all" || state.zoom)
      return nothing(
        "No answers in this time",
        "Every answered request adds a row here. Ask something in the playground, or choose a longer time.",
        h(
          "p",
          { class: "row" },
          h("a", { href: "/" }, "Open the playground"),
          h("button", { type: "button", on: { click: showAll } }, "Show all time"),
        ),
      );
    return nothing(
      "The journal is empty",
      "Every answered request adds a row here.",
      h("p", {}, h("a", { href: "/" }, "Open the playground")),
    );
  }
  byId("nothing").hidden = true;
  byId("content").hidden = false;
  changed("tiles", summary, () => byId("tiles").replaceChildren(...tiles(summary)));
  changed("charts", [summary, filters.range, state.zoom], () =>
    byId("charts").replaceChildren(...charts(summary, timeOfView(filters), { zoom, reset })),
  );
  changed("measures", Object.keys(summary.values), () => showMeasures(Object.keys(summary.values)));
  changed("rows", [rows, byId("measure").value], () => showRows(rows));
  return undefined;
}

/** Draw a part only when its data are others than at the last time: nothing flickers, and the focus stays where it is. */
function changed(part, data, draw) {
  const text = JSON.stringify(data, (key, value) => (key === "since" || key === "until" ? undefined : value));
  if (state.shown[part] === text) return;
  state.shown[part] = text;
  draw();
}

/** What the dots can show: every number that the summary knows. */
function showMeasures(names) {
  const chosen = byId("measure").value;
  byId("measure").replaceChildren(...names.map((name) => h("option", { value: name }, measure(name)[0])));
  if (names.includes(chosen)) byId("measure").value = chosen;
}

function showRows({ data, next }) {
  state.next = next;
  const name = byId("measure").value;
  const [title, format] = measure(name);
  const value = (row) => row.diagnostics?.[name] ?? row.latency?.[name] ?? row.usage?.[name];
  const times = [...data].reverse();
  const used = [...new Set(data.map(colourOf))].sort();
  byId("dots").replaceChildren(
    h(
      "div",
      { class: "legend" },
      used.map((colour) =>
        h("span", { class: `key c-${colour}` }, h("i", { class: "swatch square" }), GROUPS[colour - 1]),
      ),
      h("span", { class: "place" }, "oldest left, newest right; ringed: a flag"),
    ),
    dotChart(
      times.map((row) => ({
        value: value(row) ?? null,
        colour: colourOf(row),
        raised: raised(row).length > 0,
        title: `${timeOf(row.created)} ${interventionsOf(row).join(", ") || "plain"}`,
        open: () => openRow(row),
      })),
      { label: `${title} of the answers below`, format },
    ),
  );
  byId("rows").replaceChildren(...data.map((row) => tableRow(row, openRow)));
  byId("page").textContent = `page ${state.cursors.length + 1}`;
  byId("newer").disabled = state.cursors.length === 0;
  byId("older").disabled = !next;
  byId("models").replaceChildren(
    ...[...new Set(data.map((row) => row.model))].map((name) => h("option", { value: name })),
  );
}

// ----------------------------------------------------------------------------------------------------- a row

const openRow = (row) => openAnswer(row.id, row.choice);

/** The dialog with all choices of an answer; the address names it, so that it can be linked to. */
async function openAnswer(id, choice = 0) {
  const dialog = byId("detail");
  let data;
  try {
    ({ data } = await getJson(`/v1/diagnostics/${encodeURIComponent(id)}`));
  } catch (error) {
    history.replaceState(null, "", location.pathname + location.search);
    return fail(error, "row");
  }
  settled("row");
  byId("detail-title").textContent = id;
  const body = byId("detail-body");
  const pick = (row) => body.replaceChildren(...(data.length > 1 ? [choices(data, row, pick)] : []), rowDetail(row));
  pick(data.find((row) => row.choice === choice) ?? data[0]);
  history.replaceState(null, "", `${location.pathname}${location.search}#${id}`);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  return undefined;
}

function choices(data, current, pick) {
  return h(
    "div",
    { class: "chips choices" },
    data.map((row) =>
      h(
        "button",
        { type: "button", class: "small", "aria-pressed": String(row === current), on: { click: () => pick(row) } },
        `choice ${row.choice}`,
      ),
    ),
  );
}

/** Save all rows that match the filters, in a format of the API. */
async function save(format) {
  const query = parameters(readFilters());
  query.set("format", format);
  try {
    saveBlob(`helmsight-answers.${format}`, await getBlob(`/v1/diagnostics?${query}`));
    settled("save");
  } catch (error) {
    fail(error, "save");
  }
}

// -------------------------------------------------------------------------------------------------- listening

function filter() {
  state.cursors = [];
  toAddress(readFilters());
  refresh();
}

/** Look at a part of the time, in whole minutes. */
function zoom(from, to) {
  const [since, until] = [Math.floor(from / MINUTE) * MINUTE, Math.ceil(to / MINUTE) * MINUTE];
  if (until <= since) return;
  state.zoom = [since, until];
  filter();
}

function reset() {
  if (!state.zoom) return;
  state.zoom = null;
  filter();
}

function clearFilters() {
  for (const name of FILTERS) byId("filters").elements[name].value = "";
  filter();
}

function showAll() {
  document.querySelector('input[name="range"][value="all"]').checked = true;
  state.zoom = null;
  filter();
}

function showPause() {
  byId("pause").setAttribute("aria-pressed", String(state.paused));
  byId("pause").textContent = state.paused ? "Resume" : "Pause";
}

byId("measure").addEventListener("change", refresh);
byId("filters").addEventListener("change", ({ target }) => {
  if (target.name === "range") state.zoom = null;
  filter();
});
byId("compare").addEventListener("change", refresh);
byId("compare").addEventListener("submit", (event) => event.preventDefault());
byId("unzoom").addEventListener("click", reset);
for (const button of document.querySelectorAll("[data-format]"))
  button.addEventListener("click", () => save(button.dataset.format));
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("clear").addEventListener("click", clearFilters);
byId("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  showPause();
  refresh();
});
byId("older").addEventListener("click", () => {
  state.cursors.push(state.next);
  refresh();
});
byId("newer").addEventListener("click", () => {
  state.cursors.pop();
  refresh();
});
byId("close").addEventListener("click", () => byId("detail").close());
byId("detail").addEventListener("click", (event) => event.target === byId("detail") && byId("detail").close());
byId("detail").addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
document.addEventListener("visibilitychange", () =>
  document.visibilityState === "visible" && !state.paused ? refresh() : clearTimeout(state.timer),
);
onKey(refresh);
keepPage();
fromAddress();
refresh();
if (location.hash.length > 1) openAnswer(decodeURIComponent(location.hash.slice(1)));
