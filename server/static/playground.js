// The playground: form in, streamed answer and its readouts out.

import { ServerError, getBlob, getJson, storedKey, streamChat } from "./api.js";
import { byId, copyButton, h, seconds, short } from "./dom.js";
import { readForm, showError } from "./form.js";
import { Interventions } from "./interventions.js";
import { askForKey, onKey } from "./key.js";
import { Look, wordBar, wordsOf } from "./look.js";
import { words } from "./names.js";
import { Tray, listen } from "./pictures.js";
import { DRAWN, readoutCards } from "./readouts.js";
import { asCurl, asPython, bodyOf, fileName } from "./request.js";

const DEFAULT_VECTOR = "modality-preference"; // the server's own
const state = { model: null, interventions: null, running: null, choice: null, sent: [] };
const look = new Look();
const tray = new Tray(byId("tray"), {
  changed: update,
  refused: (message) => showError(new ServerError(0, { message })),
});

// ---------------------------------------------------------------------------------------------- the server

async function connect() {
  try {
    const models = await getJson("/v1/models");
    state.model = models.data[0];
    await Promise.all([showModel(state.model), showVectors(), showSamples()]);
    update();
  } catch (error) {
    if (error.status === 401) askForKey(error);
    byId("model").textContent = error.status === 401 ? "API key needed" : error.message;
    byId("model").className = "model off";
    if (error.status === 503 || error.status === 0) setTimeout(connect, 2000);
  }
}

onKey(connect);

function showModel(model) {
  byId("model").replaceChildren(
    h("b", {}, model.id),
    h("span", { class: "wide-only" }, ` ${model.layers} layers, ${model.dtype} on ${model.device}`),
  );
  byId("model").className = "model on";
  tray.limit = model.limits?.images ?? Infinity;
  state.interventions = new Interventions(byId("interventions"), model.interventions, ["steering"]);
  byId("include").replaceChildren(
    ...model.readouts.map((name) =>
      h(
        "label",
        { class: "check" },
        h("input", { type: "checkbox", value: name, checked: DRAWN.includes(name) }),
        h("span", {}, words(name)),
      ),
    ),
  );
}

async function showVectors() {
  const { data } = await getJson("/v1/steering/vectors");
  const usable = (vector) => vector.matches && vector.kind === "modality-preference";
  state.vectors = canSteer() ? data.filter(usable) : [];
  byId("vector").replaceChildren(...state.vectors.map((vector) => h("option", { value: vector.name }, vector.name)));
  if (state.vectors.some((vector) => vector.name === DEFAULT_VECTOR)) byId("vector").value = DEFAULT_VECTOR;
  byId("vector-row").hidden = state.vectors.length < 2;
  useVector();
}

const canSteer = () => state.model.interventions.some(({ name }) => name === "steering");

function useVector() {
  const helm = byId("helm");
  const vector = state.vectors.find((item) => item.name === byId("vector").value);
  const range = vector?.info?.calibration?.range;
  const most = (state.model.limits?.strength ?? 4) / (vector?.published ?? 1); // the limit is in published units
  // As far as the server goes, also what is too much, to see it; but the calibrated part must not become too small to hit.
  const limit = Math.floor(10 * Math.min(most, 8 * (range?.[1] || most)) + 1e-6) / 10;
  helm.disabled = byId("auto").disabled = !vector;
  Object.assign(helm, { min: String(-limit), max: String(limit) });
  if (!vector) {
    helm.value = "0";
    byId("auto").checked = false;
  }
  state.range = range ?? null;
  state.published = vector?.published ?? null;
  byId("helm-note").dataset.reason = vector
    ? ""
    : canSteer()
      ? "No steering vector of this server matches the model. Build one with “helmsight probe”."
      : "The engine of this server does not steer.";
  update();
}

async function showSamples() {
  const { data } = await getJson("/samples");
  byId("samples-section").hidden = data.length === 0;
  const buttons = await Promise.all(
    data.map(async (sample) => {
      const blobs = await Promise.all(sample.images.map((name) => getBlob(`/samples/${encodeURIComponent(name)}`)));
      const button = h(
        "button",
        { type: "button", class: "sample", "aria-pressed": "false" },
        h(
          "span",
          { class: "thumbs" },
          blobs.map((blob) => h("img", { src: URL.createObjectURL(blob), alt: "" })),
        ),
        h("span", {}, sample.title),
      );
      button.addEventListener("click", async () => {
        await tray.set(blobs.map((blob, i) => ({ name: sample.images[i], blob })));
        byId("question").value = sample.question;
        byId("context").value = sample.context ?? "";
        for (const other of byId("samples").children) other.setAttribute("aria-pressed", String(other === button));
        update();
      });
      return button;
    }),
  );
  byId("samples").replaceChildren(...buttons);
}

// ------------------------------------------------------------------------------------------------ the form

function update() {
  const helm = byId("helm");
  const strength = Number(helm.value);
  const [low, high] = [Number(helm.min), Number(helm.max)];
  const at = (value) => `${(100 * (value - low)) / (high - low)}%`;
  helm.style.setProperty("--from", at(Math.min(0, strength)));
  helm.style.setProperty("--to", at(Math.max(0, strength)));
  helm.style.setProperty("--calibrated-from", at(-Math.min(state.range?.[1] ?? 0, high)));
  helm.style.setProperty("--calibrated-to", at(Math.min(state.range?.[1] ?? 0, high)));
  const auto = byId("auto").checked;
  const said =
    strength === 0
      ? "off"
      : `${Math.abs(strength).toFixed(1)}${auto ? ", auto" : ` toward ${strength > 0 ? "vision" : "text"}`}`;
  byId("helm-value").textContent = said;
  helm.setAttribute("aria-valuetext", said);
  byId("helm-text").className = strength < 0 && !auto ? "on" : "";
  byId("helm-vision").className = strength > 0 && !auto ? "on" : "";
  byId("helm-off").hidden = strength === 0;
  const reason = byId("helm-note").dataset.reason;
  const known = state.range && Math.abs(strength) <= state.range[1] ? "Calibrated from" : "Beyond what was calibrated:";
  const published = state.published === null ? "" : `${short(Math.abs(strength) * state.published)} in published units. `;
  byId("helm-note").textContent =
    reason ||
    (strength === 0
      ? "At 0 the answer is the plain model's."
      : auto
        ? "The way is found for each request; it needs a picture and a text context."
        : published + (state.range ? `${known} ${state.range[0]} to ${state.range[1]}.` : ""));
  const form = readForm(state.model, tray.pictures, state.interventions);
  byId("send").disabled = !state.model || state.running !== null;
  showCode(form);
}

function showCode(form) {
  const write = document.querySelector('input[name="language"]:checked').value === "python" ? asPython : asCurl;
  byId("code-text").textContent = write(form, location.origin, storedKey() !== "");
  const note = byId("code-files");
  note.replaceChildren(
    ...(form.pictures.length
      ? [
          "Reads ",
          ...form.pictures.flatMap((picture, i) => [
            i ? ", " : "",
            h("a", { href: picture.url, download: fileName(picture, i) }, fileName(picture, i)),
          ]),
          " from the current folder (click to save).",
        ]
      : []),
  );
}

// ----------------------------------------------------------------------------------------------- an answer

async function sendForm(event) {
  event.preventDefault();
  if (state.running || !state.model) return;
  showError(null);
  const form = readForm(state.model, tray.pictures, state.interventions);
  if (!form.question) return showError(new ServerError(0, { message: "Write a question first.", param: "question" }));
  const abort = new AbortController();
  state.running = abort;
  begin(form);
  const started = performance.now();
  try {
    await stream(form, abort.signal, started);
  } catch (error) {
    byId("answer-meta").textContent = error.name === "AbortError" ? "Stopped." : "Broken off.";
    if (error.status === 401) askForKey(error);
    else if (error.name !== "AbortError") showError(error, state.interventions);
    if (!byId("answer-live").textContent) byId("answers").hidden = true;
    byId("empty").hidden = !byId("answers").hidden;
  } finally {
    state.running = null;
    byId("stop").hidden = true;
    byId("send-hint").hidden = false;
    byId("answers").removeAttribute("aria-busy");
    update();
  }
}

function begin(form) {
  const asked = bodyOf(form, () => "");
  state.sent = form.pictures;
  state.choice = null;
  for (const id of ["empty", "look", "answer-words", "base-words", "send-hint"]) byId(id).hidden = true;
  for (const id of ["answer-live", "base-text", "answer-meta", "base-meta"]) byId(id).textContent = "";
  for (const id of ["answer-live", "base-text", "answers", "stop"]) byId(id).hidden = false;
  byId("answers").setAttribute("aria-busy", "true");
  byId("base").hidden = !asked.baseline;
  byId("base-text").textContent = asked.baseline ? "…" : "";
  byId("readouts").replaceChildren();
  const steered = asked.steering ? [`${asked.steering.toward} ${asked.steering.strength}`] : [];
  const chips = [...steered, ...state.interventions.names()];
  byId("answer-chips").replaceChildren(
    ...(chips.length ? chips : ["plain model"]).map((text) =>
      h("span", { class: chips.length ? "chip accent" : "chip" }, text),
    ),
  );
  byId("send").disabled = true;
  if (matchMedia("(max-width: 900px)").matches) byId("results").scrollIntoView({ block: "start" });
}

async function stream(form, signal, started) {
  const live = byId("answer-live");
  let first = null;
  let usage = null;
  let ended = null;
  for await (const event of streamChat(
    bodyOf(form, (picture) => picture.url),
    signal,
  )) {
    const choice = event.choices[0];
    usage = event.usage ?? usage;
    if (!choice) continue;
    if (choice.delta?.content) {
      first ??= performance.now();
      live.append(choice.delta.content);
    }
    if (choice.finish_reason) ended = choice;
  }
  const total = performance.now() - started;
  const parts = [ended.finish_reason === "length" ? "cut at max tokens" : "complete"];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (first !== null) parts.push(`first after ${seconds((first - started) / 1000)}`);
  byId("answer-meta").textContent = [...parts, `all ${seconds(total / 1000)}`].join(" · ");
  finish({ text: live.textContent, ...ended });
}

function finish(choice) {
  state.choice = choice;
  const base = choice.baseline;
  if (base) {
    byId("base-text").textContent = base.message.content;
    byId("base-meta").textContent = [
      base.finish_reason === "length" ? "cut at max tokens" : "complete",
      base.message.content === choice.text ? "same words" : "other words",
    ].join(" · ");
  }
  const [steered] = choice.applied?.steering ?? [];
  const first = byId("answer-chips").firstElementChild;
  if (steered?.auto) {
    first.textContent = steered.toward ? `auto: ${steered.toward} ${short(steered.strength)}` : "auto: not steered";
    if (steered.auto.abstained) first.title = steered.auto.abstained;
  }
  byId("base").hidden = !base;
  byId("whose").hidden = !base?.diagnostics;
  document.querySelector('input[name="whose"][value="answer"]').checked = true;
  showReadouts();
}

function offerWords(name, text, diagnostics) {
  if (!diagnostics?.tam?.length || !state.sent.length) return;
  const bar = byId(`${name}-words`);
  wordBar(bar, wordsOf(text, diagnostics.tam), look);
  bar.hidden = false;
  byId(name === "answer" ? "answer-live" : "base-text").hidden = true;
}

function showReadouts() {
  const { choice } = state;
  const ofBase = document.querySelector('input[name="whose"]:checked').value === "baseline";
  const shown = ofBase ? choice.baseline.diagnostics : choice.diagnostics;
  look.show(state.sent, shown);
  byId("readouts").replaceChildren(
    ...readoutCards(shown, ofBase ? null : choice.baseline?.diagnostics, ofBase ? null : choice.applied),
  );
  offerWords("answer", choice.text, choice.diagnostics);
  if (choice.baseline) offerWords("base", choice.baseline.message.content, choice.baseline.diagnostics);
}

// ------------------------------------------------------------------------------------------------ listening

listen(tray, { button: byId("add"), input: byId("files"), zone: byId("drop") });
byId("form").addEventListener("submit", sendForm);
byId("form").addEventListener("input", update);
byId("form").addEventListener("change", update);
byId("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) sendForm(event);
});
byId("stop").addEventListener("click", () => state.running?.abort());
byId("vector").addEventListener("change", useVector);
// Auto needs a strength: a helm at 0 goes to 1, where it is seen, and back if it was not moved meanwhile.
byId("auto").addEventListener("change", () => {
  const helm = byId("helm");
  if (byId("auto").checked && Number(helm.value) === 0) {
    helm.value = "1";
    helm.dataset.moved = helm.value;
  } else {
    if (!byId("auto").checked && helm.dataset.moved === helm.value) helm.value = "0";
    delete helm.dataset.moved;
  }
  update();
});
byId("helm-off").addEventListener("click", () => {
  byId("helm").value = "0";
  byId("helm").focus();
  update();
});
for (const input of document.querySelectorAll('input[name="language"]')) input.addEventListener("change", update);
for (const input of document.querySelectorAll('input[name="whose"]')) input.addEventListener("change", showReadouts);
byId("copy-code").append(copyButton(() => byId("code-text").textContent));
update();
connect();
