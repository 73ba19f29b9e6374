// The playground: form in, streamed answers and their readouts out.

import { ServerError, getJson, storedKey } from "./api.js";
import { asCurl, asPython } from "./code.js";
import { byId, copyButton, h } from "./dom.js";
import { EMPTY, readForm, showError, writeAsked, writeForm } from "./form.js";
import { Compare } from "./compare.js";
import { GuardForm } from "./guard.js";
import { DEFAULT_VECTOR, Helm, towardOf } from "./helm.js";
import { showHistory } from "./history.js";
import { Interventions } from "./interventions.js";
import * as keep from "./keep.js";
import { askForKey, onKey, wantsKey } from "./key.js";
import { words } from "./names.js";
import { Tray, asPicture, listen } from "./pictures.js";
import { DRAWN } from "./readouts.js";
import { bodyOf, fileName, picturesOf } from "./request.js";
import { Results } from "./results.js";
import { markSample, samplePicture, showSamples } from "./samples.js";
import { saveJson } from "./save.js";
import { follow, tellModel, tellProblem } from "./status.js";
import { Turns } from "./turns.js";

const PULL = 3; // the bias of a box that is drawn: times 20 before the softmax is normalised

const state = { model: null, interventions: null, running: null, usual: [], shown: null, ready: false };
const problem = (message, param = null) =>
  showError(message === null ? null : new ServerError(0, { message, param }), state.interventions);
const results = new Results(goOn, lookThere);
const helm = new Helm(update);
const turns = new Turns(update);
const compare = new Compare(update);
const guard = new GuardForm(update);
const tray = new Tray(byId("tray"), { changed: update, refused: problem });

const current = () =>
  readForm({ model: state.model, pictures: tray.pictures, turns: turns.all, interventions: state.interventions, guard });

// ---------------------------------------------------------------------------------------------- the server

async function connect() {
  try {
    const { data } = await getJson("/v1/models");
    const vectors = (await getJson("/v1/steering/vectors")).data;
    const first = state.model === null;
    const form = first ? null : current();
    offer(data[0], vectors);
    await showSamples(pick);
    if (first) await begin();
    else writeAsked(form, { helm, guard, ...state });
    tellModel(state.model);
    update();
  } catch (error) {
    if (wantsKey(error)) askForKey(error);
    tellProblem(error.status === 401 ? "API key needed" : error.message);
  }
}

function offer(model, vectors) {
  state.model = model;
  state.usual = model.readouts.filter((name) => DRAWN.includes(name));
  keep.setUsual(state.usual);
  const [lacking, lackingReadouts] = unsupported(model);
  state.interventions = new Interventions(byId("interventions"), model.interventions, ["steering"], {
    names: lacking.filter((name) => name !== "steering"),
    engine: model.engine,
  });
  const able = model.interventions.some(({ name }) => name === "steering");
  helm.offer(model, vectors, able);
  results.look.drawable = model.interventions.some(({ name }) => name === "look_at");
  compare.offer(helm, state.interventions);
  guard.offer(model, state.interventions, able);
  byId("include").replaceChildren(
    ...model.readouts.map((name) =>
      h(
        "label",
        { class: "check" },
        h("input", { type: "checkbox", value: name, checked: state.usual.includes(name) }),
        h("span", {}, words(name)),
      ),
    ),
    ...lackingReadouts.map((name) =>
      h(
        "label",
        { class: "check off", title: `not supported by ${model.engine}` },
        h("input", { type: "checkbox", value: name, disabled: true }),
        h("span", {}, words(name)),
      ),
    ),
  );
}

/** What the server's engine lacks: interventions, and readouts. */
function unsupported({ unsupported: names = [] }) {
  const prefix = "diagnostics.";
  const readouts = names.filter((name) => name.startsWith(prefix));
  return [names.filter((name) => !readouts.includes(name)), readouts.map((name) => name.slice(prefix.length))];
}

async function pick(sample, pictures) {
  tray.show(pictures.filter(Boolean));
  byId("question").value = sample.question;
  byId("context").value = sample.context ?? "";
  update();
}

// -------------------------------------------------------------------------------------- what was here before

/** Fill the form by the address, where it is a link, else with what was here before. */
async function begin() {
  const draft = keep.keptDraft();
  const linked = keep.fromFragment(location.hash);
  const same = draft && (!linked || draft.fragment === location.hash.slice(1));
  const typed = ["question", "context", "system"].some((id) => byId(id).value) || tray.pictures.length;
  if (same) compare.set(draft.compare);
  if (same && draft.shown && !typed) await goBack(await keep.keptAnswer(draft.shown));
  if (linked && !same) await fill(linked);
  else if (draft && !typed) await fill(draft.form);
  state.ready = true;
}

/** Fill the form; pictures are fetched by what is kept of them, and those that are not to be had are told of. */
async function fill(form) {
  let missing = 0;
  const found = async (references) => {
    const all = await Promise.all(references.map(pictureOf));
    missing += all.filter((picture) => !picture).length;
    return all.filter(Boolean);
  };
  const before = await Promise.all(form.turns.map(async (turn) => ({ ...turn, pictures: await found(turn.pictures) })));
  const pictures = await found(form.pictures);
  showError(null);
  writeForm(form);
  writeAsked(form, { helm, guard, ...state });
  turns.show(before);
  tray.show(pictures);
  if (missing)
    problem(missing === 1 ? "One image is not in the link: add it." : `${missing} images are not in the link: add them.`);
}

async function pictureOf({ key }) {
  if (key === null) return null;
  const sample = keep.sampleName(key);
  if (sample !== null) return samplePicture(sample);
  const kept = await keep.keptPicture(key);
  return kept && asPicture({ ...kept, key });
}

/** Show an answer of before with its request. */
async function goBack(entry) {
  if (!entry) return;
  state.running?.abort();
  await fill({ ...EMPTY, ...entry.form });
  state.shown = entry.time;
  results.show(entry.results, current());
  byId("empty").hidden = true;
  update();
}

/** Ask on: what was asked and answered becomes a turn. */
function goOn(form, answer) {
  const { pictures, context, question } = form;
  turns.show([...form.turns, { pictures, context, question, answer }]);
  for (const id of ["context", "question"]) byId(id).value = "";
  tray.show([]);
  byId("question").focus();
}

/** Ask once more with attention drawn to a box in an image, or with null no more. */
function lookThere(image, box) {
  if (state.running) return;
  const { look_at: before, ...others } = state.interventions.fields();
  const bias = before?.bias ?? PULL;
  state.interventions.set(box ? { ...others, look_at: { ...before, image, box, bias } } : others);
  update();
  sendOne();
}

let timer = null;

/** Have the address say what the form holds, and keep that: soon, as not every letter needs it. */
function remember() {
  clearTimeout(timer);
  timer = setTimeout(() => {
    if (!state.ready) return;
    const fragment = keep.toFragment(current());
    history.replaceState(null, "", location.pathname + location.search + (fragment && `#${fragment}`));
    keepNow();
  }, 200);
}

/** Keep what the form holds. The address stays: a page that is left for a reload is asked for by the one from before. */
function keepNow() {
  if (!state.ready) return;
  const form = current();
  for (const picture of picturesOf(form)) if (keep.sampleName(picture.key) === null) keep.keepPicture(picture);
  keep.keepDraft(form, { shown: state.shown, compare: compare.kept });
}

// ------------------------------------------------------------------------------------------------ the form

function update() {
  const form = current();
  helm.draw();
  markSample(tray.pictures);
  tray.limit = (state.model?.limits?.images ?? Infinity) - (picturesOf(form).length - form.pictures.length);
  for (const id of ["send", "compare"]) byId(id).disabled = !state.model || state.running !== null;
  showCode(form);
  remember();
}

function showCode(form) {
  const [language, protocol] = ["language", "protocol"].map(
    (name) => document.querySelector(`input[name="${name}"]:checked`).value,
  );
  const write = language === "python" ? asPython : asCurl;
  byId("code-text").textContent = write(form, location.origin, storedKey() !== "", protocol);
  const links = picturesOf(form).flatMap((picture, i) => [
    i ? ", " : "",
    h("a", { href: picture.url, download: fileName(picture, i) }, fileName(picture, i)),
  ]);
  byId("code-files").replaceChildren(
    ...(links.length ? ["Reads ", ...links, " from the current folder (click to save)."] : []),
  );
}

// --------------------------------------------------------------------------------------------------- asking

function sendOne() {
  const form = current();
  const { steering, baseline } = bodyOf(form, () => "");
  const steered = steering
    ? [`${steering.toward === "auto" ? "auto" : towardOf(steering.toward)}, ${steering.strength}`]
    : [];
  const chips = [...steered, ...state.interventions.names()];
  const plain = chips.length === 0;
  run(form, [{ key: "answer", title: "Answer", chips, steered: steered.length, plain, form }], Boolean(baseline));
}

function sendAll() {
  const form = current();
  try {
    const all = compare.variants(form);
    run(form, all.map((one, i) => ({ ...one, key: `answer${i + 1}` })), false);
  } catch (error) {
    byId("compare-row").open = true;
    problem(error.message);
  }
}

async function run(form, variants, baseline) {
  if (state.running || !state.model) return;
  showError(null);
  if (!form.question) return problem("Write a question first.", "question");
  const abort = new AbortController();
  state.running = abort;
  const before = { shown: state.shown, results: results.results };
  state.shown = null;
  byId("empty").hidden = true;
  byId("stop").hidden = false;
  byId("send-hint").hidden = true;
  update();
  if (matchMedia("(max-width: 900px)").matches) byId("results").scrollIntoView({ block: "start" });
  const [found, error] = await results.run(form, variants, baseline, abort.signal);
  state.running = null;
  byId("stop").hidden = true;
  byId("send-hint").hidden = false;
  byId("empty").hidden = !byId("answers").hidden;
  if (error) refuse(error, form);
  if (found.length) state.shown = keep.keepAnswer({ form, results: found });
  else if (results.results === before.results) state.shown = before.shown; // it still stands there
  update();
}

/** Tell why there is no answer; a picture that the server cannot read goes away. */
function refuse(error, form) {
  if (wantsKey(error)) return askForKey(error);
  const picture = unreadable(error, form);
  if (!picture) return showError(error, state.interventions);
  const number = picturesOf(form).indexOf(picture) + 1;
  tray.drop(picture);
  const why = error.message.replace(`'${error.param}' `, "");
  problem(`Image ${number} (${picture.name}) cannot be used and was removed: it ${why}`);
}

/** The picture of the form that an error is about; null where it is about something else. */
function unreadable({ param }, form) {
  const found = /^messages\[(\d+)\]\.content\[(\d+)\]\.image_url/.exec(param ?? "");
  const own = Number(found?.[1]) === (form.system ? 1 : 0) + 2 * form.turns.length;
  return own ? (form.pictures[Number(found[2])] ?? null) : null;
}

// ------------------------------------------------------------------------------------------------ listening

listen(tray, { button: byId("add"), input: byId("files"), zone: byId("drop") });
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  sendOne();
});
for (const kind of ["input", "change"]) byId("form").addEventListener(kind, update);
byId("form").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  sendOne();
});
byId("compare").addEventListener("click", sendAll);
byId("stop").addEventListener("click", () => state.running?.abort());
byId("fresh").addEventListener("click", async () => {
  state.running?.abort();
  state.shown = null;
  results.clear();
  byId("empty").hidden = false;
  await fill({ ...EMPTY, vector: DEFAULT_VECTOR });
  byId("question").focus();
});
byId("save-json").addEventListener("click", () => {
  const request = bodyOf(current(), fileName);
  saveJson("helmsight-readouts", { model: state.model?.id, request, answers: results.asJson() });
});
byId("copy-link").append(
  copyButton(() => {
    const form = current();
    const own = picturesOf(form).filter(({ key }) => keep.sampleName(key) === null).length;
    byId("bar-note").textContent = own ? "Your own images are not in the link." : "";
    return `${location.origin}${location.pathname}#${keep.toFragment(form)}`;
  }, "Copy link"),
);
for (const input of document.querySelectorAll("#code input")) input.addEventListener("change", update);
byId("copy-code").append(copyButton(() => byId("code-text").textContent));
addEventListener("hashchange", () => {
  const linked = keep.fromFragment(location.hash);
  if (linked && state.ready) fill(linked);
});
addEventListener("pagehide", keepNow);
showHistory(goBack);
onKey(connect);
update();
follow(connect);
